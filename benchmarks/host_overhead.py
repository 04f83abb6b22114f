#!/usr/bin/env python3
"""What a pipeline runtime costs the host: microseconds of processor time per pass.

The same tiny GPT (Megatron's layers, one for each stage, on CPU ranks over gloo) takes steps under
our runtime, under Megatron's own schedules, and under the runtime of torch.distributed.pipelining.
All take turns, there and back, so that a machine that gets slower is slower for all of them.

  1f1b, v-zb, ...       one of our schedules
  megatron-1f1b         Megatron's own, its messages batched as Megatron-LM sets it
  megatron-interleaved  Megatron's own, its messages overlapping with passes as Megatron-LM sets it
  torch-1f1b, torch-interleaved, torch-zbv, torch-dualpipe-v
                        torch's own, in torch's runtime
  zbv-table, dualpipe-v-table
                        torch's orders in our runtime: pass for pass the work of torch-zbv, ...

The clock is time.thread_time() of the thread that trains. It stands still while that thread sleeps,
so that waiting for a message does not count, but going to sleep and waking up do. It leaves out
gloo's threads, which a GPU does not have and which time.process_time() would count. Autograd runs
the backward of CPU tensors in the thread that calls it, and torch computes with one thread here, so
that no part of a pass escapes this clock.

A pass is an F, a B, a W or a BW of one stage and one microbatch: one each, whoever runs it. Times
and passes are summed over the ranks; every figure is the median of the turns, with the quartiles.

  whole    all of a step
  added    what is left without the layers alone: the same stages in the same turn without a
           pipeline, F and a whole backward of one microbatch after another. So it has messages,
           bookkeeping and the split of the backward. The difference of large numbers: noisy
  outside  the time outside of the model's forward, of autograd's engine and of the weight gradients
           of W: the runtime by itself, without what splitting makes slower inside of the layers.
           In W, torch's autograd.grad and our WeightGradQueue.run are left out

A split backward has more passes than a whole one: "per microbatch" is the whole time for one
microbatch on one stage. torch splits the backward of any layer, by running the backward of a linear
layer in B and again in W; that is in the whole and the added time of torch-zbv.

The ratios compare equal work, each the median over the turns: our 1f1b and interleaved with
Megatron's own ("over_megatron"), torch's orders in our runtime with the same in torch's
("over_torch"), both for whole steps, and for the time outside ("outside_over_megatron", ...).

The bar: all four ratios are at most 1.00. Prints a table and, last, one JSON line; what is at its
top is of the last number of ranks, "by_ranks" has all, every step of every rank included. Ends with
1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import one_device
import provenance
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from megatron_zb import schedules
from megatron_zb.train.synthetic_steps import join

MOST = 1.0
"""What we may take of the time of Megatron or torch, in each of the ratios."""
WARM_UP = 3
_RATIOS = ("over_megatron", "over_torch", "outside_over_megatron", "outside_over_torch")
TABLES = {"zbv-table": "torch-zbv", "dualpipe-v-table": "torch-dualpipe-v"}
COUNTERPARTS = {"1f1b": "megatron-1f1b", "interleaved": "megatron-interleaved"}
OTHERS = (*COUNTERPARTS.values(), "torch-1f1b", "torch-interleaved", *TABLES.values())
# Those that are compared stand side by side.
DEFAULT = (
    *("1f1b", "megatron-1f1b", "torch-1f1b", "zb-h1"),
    *("interleaved", "megatron-interleaved", "torch-interleaved"),
    *("v-zb", "zbv-table", "torch-zbv", "v-half"),
    *("dualpipe-v", "dualpipe-v-table", "torch-dualpipe-v"),
)


def main() -> None:
    args = _arguments()
    by_ranks = {}
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result"
            mp.start_processes(
                _rank,
                args=(args, ranks, str(Path(folder) / "rendezvous"), str(result)),
                nprocs=ranks,
                start_method="fork",  # without importing torch again
            )
            found = summary(json.loads(result.read_text(encoding="utf-8")))
        by_ranks[ranks] = found
        _show(found, args, ranks)
    sys.exit(_report(by_ranks, args))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = one_device.at_least_one
    parser.add_argument(
        "--ranks", type=number, nargs="+", default=[2, 4], help="pipeline ranks (default 2 4)"
    )
    parser.add_argument(
        "--microbatches",
        type=number,
        default=16,
        help="of a step; torch's dualpipe-v needs two for each rank (default 16)",
    )
    parser.add_argument("--turns", type=number, default=25, help="steps of each (default 25)")
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=list(DEFAULT),
        metavar="NAME",
        help=f"names of the list above (default {' '.join(DEFAULT)})",
    )
    parser.add_argument(
        "--wrapped",
        action="store_true",
        help="put the layers into Megatron's data parallelism, as training does; torch's runtime, "
        "whose split backward brings Megatron no gradients then, is left out",
    )
    args = parser.parse_args()
    unknown = set(args.schedules) - {*schedules.names(), *TABLES, *OTHERS}
    if unknown:
        parser.error(
            f"{min(unknown)} is none of {', '.join((*schedules.names(), *TABLES, *OTHERS))}"
        )
    if args.wrapped:
        args.schedules = [name for name in args.schedules if not name.startswith("torch-")]
    if min(args.ranks) < 2:
        parser.error("--ranks 1 is no pipeline: give 2 or more")
    return args


def _rank(rank: int, args: argparse.Namespace, ranks: int, meeting_point: str, result: str) -> None:
    from megatron_zb.cpu_ranks import run_on_cpu

    join(rank, ranks, meeting_point)
    run_on_cpu()
    import host_contenders as hosts  # imports Megatron

    sizes = hosts.Sizes(ranks, args.microbatches, wrapped=args.wrapped)
    computing = hosts.start(sizes)
    contenders = {name: hosts.contender(name, sizes, computing) for name in args.schedules}
    for found in list(contenders.values()):
        if found.layers not in contenders:
            contenders[found.layers] = hosts.LayersAlone(sizes, found.placement, computing)
    times = _take_turns(list(contenders.items()), computing, args.turns)
    mine = {
        name: {"layers": c.layers, "passes": dict(c.passes), **times[name]}
        for name, c in contenders.items()
    }
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, mine)
    if rank == 0:
        Path(result).write_text(json.dumps(gathered), encoding="utf-8")
    for found in contenders.values():
        found.close()
    dist.destroy_process_group()


def _take_turns(
    contenders: list[tuple[str, Any]], computing: Any, turns: int
) -> dict[str, dict[str, list[float]]]:
    """The seconds that this rank's thread ran in every step, and those outside of computing."""
    times: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "outside": []} for name, _ in contenders
    }
    for turn in range(-WARM_UP, turns):
        if turn == 0:
            gc.collect()
            gc.freeze()  # what was built is not searched for garbage in the middle of a step
        for name, contender in contenders if turn % 2 else contenders[::-1]:
            contender.zero_gradients()
            dist.barrier()
            computing.seconds = 0.0
            begin = time.thread_time()
            contender.step()
            seconds = time.thread_time() - begin
            if turn >= 0:
                times[name]["seconds"].append(seconds)
                times[name]["outside"].append(seconds - computing.seconds)
    return times


def summary(gathered: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of every contender, and the ratios, from what the ranks have measured."""
    names = gathered[0]
    totals, outside = (
        {name: [sum(t) for t in zip(*(r[name][key] for r in gathered), strict=True)]
         for name in names}
        for key in ("seconds", "outside")
    )  # fmt: skip
    of_each = {}
    for name in names:
        alone = totals[names[name]["layers"]]
        added = [s - a for s, a in zip(totals[name], alone, strict=True)]
        passes = [rank[name]["passes"] for rank in gathered]
        of_each[name] = _figures(passes, whole=totals[name], added=added, outside=outside[name])
    return {
        "contenders": of_each,
        "over_megatron": _ratios(totals, COUNTERPARTS),
        "over_torch": _ratios(totals, TABLES),
        "outside_over_megatron": _ratios(outside, COUNTERPARTS),
        "outside_over_torch": _ratios(outside, TABLES),
        "seconds_of_ranks": {name: [r[name]["seconds"] for r in gathered] for name in names},
        "outside_of_ranks": {name: [r[name]["outside"] for r in gathered] for name in names},
    }


def _figures(passes: list[dict[str, int]], **seconds: list[float]) -> dict[str, Any]:
    """Microseconds per pass: the median, with the quartiles around it."""
    count = sum(sum(rank.values()) for rank in passes)
    found: dict[str, Any] = {"passes_of_ranks": passes}
    for key, values in seconds.items():
        low, median, high = _quartiles([1e6 * value / count for value in values])
        found[key] = {"us_per_pass": median, "quartiles": [low, high]}
    per_microbatch = found["whole"]["us_per_pass"] * count / sum(rank["F"] for rank in passes)
    return {**found, "us_per_microbatch": round(per_microbatch, 2)}


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        values = values * 2
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return round(low, 2), round(median, 2), round(high, 2)


def _ratios(totals: dict[str, list[float]], pairs: dict[str, str]) -> dict[str, float]:
    """The median of the ratios of steps in the same turn, where both have run."""
    return {
        ours: round(
            statistics.median(a / b for a, b in zip(totals[ours], totals[other], strict=True)), 4
        )
        for ours, other in pairs.items()
        if ours in totals and other in totals
    }


def _show(found: dict[str, Any], args: argparse.Namespace, ranks: int) -> None:
    title = f"{ranks} ranks, {args.microbatches} microbatches, {args.turns} turns: µs per pass"
    table = Table(title=title)
    for heading in ("", "passes", "whole", "added", "outside", "per microbatch", *_RATIOS):
        table.add_column(heading.replace("_", " "), justify="right" if heading else "left")
    for name, figures in found["contenders"].items():
        kinds = {kind for rank in figures["passes_of_ranks"] for kind, n in rank.items() if n}
        table.add_row(
            name,
            " ".join(kind for kind in ("F", "B", "W", "BW") if kind in kinds),
            *(_cell(figures[key]) for key in ("whole", "added", "outside")),
            f"{figures['us_per_microbatch']:.0f}",
            *(str(found[ratio].get(name, "")) for ratio in _RATIOS),
        )
    Console(width=140).print(table)


def _cell(figures: dict[str, Any]) -> str:
    low, high = figures["quartiles"]
    return f"{figures['us_per_pass']:.0f} ({low:.0f} to {high:.0f})"


def _report(by_ranks: dict[int, dict[str, Any]], args: argparse.Namespace) -> int:
    """Print the bars that are missed, and the JSON line."""
    missed = [
        f"{ranks} ranks: {key} of {name} is {ratio}, not at most {MOST}"
        for ranks, found in by_ranks.items()
        for key in _RATIOS
        for name, ratio in found[key].items()
        if ratio > MOST
    ]
    for line in missed:
        print(f"missed: {line}")
    last = by_ranks[args.ranks[-1]]
    print(
        json.dumps(
            {
                "benchmark": "host_overhead",
                "us_per_pass": {
                    n: f["whole"]["us_per_pass"] for n, f in last["contenders"].items()
                },
                **{key: last[key] for key in _RATIOS},
                "ranks": args.ranks[-1],
                "clock": "time.thread_time of the training thread, summed over the ranks",
                "bars": dict.fromkeys(_RATIOS, MOST),
                "missed": missed,
                "microbatches": args.microbatches,
                "turns": args.turns,
                "wrapped": args.wrapped,
                **provenance.of_this_run(),
                "by_ranks": by_ranks,
            }
        ),
        flush=True,
    )
    return int(bool(missed))


if __name__ == "__main__":
    one_device.run(main)
