#!/usr/bin/env python3
"""How much the runtime adds to a step: measured time over the simulator's, with synthetic stages.

Every stage sleeps for its T_F, T_B and T_W and passes a small tensor on, through the same executor
and channels that train. Runs on any machine: sleeping ranks need no cores. What a message takes is
measured first, on the links of these ranks, and told to the simulator and to the schedules that are
built for it, as a profile would. Prints a table and, last, one JSON line {"ratio": {NAME: median
over the repetitions}, ...} with every step. Ends with 1 where a ratio is above its bar.

With --exchange, F and B also exchange tokens between experts: they sleep for that in a thread of
its own. Schedules are built with pairs then, whose one side computes while the other exchanges, and
every order also runs without its pairs.

With --memory-limit, --recompute and --offload, schedules recompute activations, or
move them to the host: threads sleep for the copies.

With --adapters, several adapters share the pipeline: C of them, each with M microbatches in a step
and S steps. A frozen base has a short W, such as --milliseconds 20 20 0.4.

With --encoder, an encoder runs on every rank for its part of the microbatches, and with --reference
the layers of a frozen teacher lie on all ranks. Either is given by the forward of a microbatch, as
a share of F on each rank.

With --update-delay, four consecutive steps run, and the pipeline is not drained between them.

With --watchdog it compares something else: steps that a watchdog and its progress observer look at
with steps that nobody looks at, in pairs, one after the other. The ratio of a pair is what they
cost; the JSON line has the median, the quartiles around it, and what a look into the store and a
pass that is told cost by themselves:
{"watchdog": {NAME: {...}}}. Ends with 1 where the median costs more than 0.5 % of the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import provenance
import torch.distributed as dist
import torch.multiprocessing as mp
from overlapped_stages import OverlappedSteps, seconds_of_link
from rich.console import Console
from rich.table import Table

from megatron_zb import schedules
from megatron_zb.runtime.progress import RankProgress
from megatron_zb.runtime.watchdog import Inquiry, Watchdog, WatchedRank
from megatron_zb.schedules.features.adapters import Adapters
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.second_model import SecondModel, SecondRole
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.units import Updates
from megatron_zb.train.synthetic_steps import SyntheticSteps, join

MOST = 1.005
"""What a step with a watchdog may take, of one without."""
MOST_OF_ANY, MOST_OF_MEDIAN = 1.04, 1.02
"""What a step may take of the simulated one: under any schedule, and in the median of them."""
_TIMEOUT = 540.0  # seconds: the default of --pipeline-timeout
_CALLS = 20_000  # to time one by itself
_UPDATE = 0.0005  # seconds of an update on a rank


def main() -> int:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        meeting_point, result = Path(folder) / "rendezvous", Path(folder) / "result"
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # as torchrun has one for its ranks
        arguments = (args, str(meeting_point), store.port, str(result))
        mp.spawn(_rank, args=arguments, nprocs=args.ranks)
        return int(result.read_text(encoding="utf-8"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="pipeline ranks (default 8)")
    parser.add_argument("--microbatches", type=int, default=16, help="per step (default 16)")
    parser.add_argument("--repetitions", type=int, default=5, help="steps measured (default 5)")
    parser.add_argument(
        "--milliseconds",
        type=float,
        nargs=3,
        default=[48.0, 56.0, 40.0],
        metavar=("F", "B", "W"),
        help="times of one microbatch on one rank; one of four chunks takes a quarter "
        "(default 48 56 40)",
    )
    parser.add_argument(
        "--exchange",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="seconds of the exchange of F, and of B, beside what they compute, as a share of F's "
        "(default 0)",
    )
    parser.add_argument(
        "--memory-limit", type=float, metavar="X", help="as a fraction of 1F1B's (default: none)"
    )
    parser.add_argument(
        "--recompute",
        type=float,
        metavar="X",
        help="let it recompute: X is a stage's input",
    )
    parser.add_argument(
        "--offload",
        type=float,
        metavar="SHARE",
        help="let it offload activations, each way in a share of F, B and W",
    )
    parser.add_argument(
        "--adapters",
        metavar="CxMxS",
        help="in place of --microbatches: C adapters, M microbatches of a step, S steps, and an "
        "update of half a millisecond",
    )
    parser.add_argument(
        "--update-delay",
        action="store_true",
        help="four consecutive steps whose updates come one step late, each of half a millisecond",
    )
    second = parser.add_mutually_exclusive_group()
    second.add_argument(
        "--encoder", type=float, metavar="SHARE", help="of F; its backward takes twice as long"
    )
    second.add_argument("--reference", type=float, metavar="SHARE", help="of F")
    parser.add_argument("--schedules", nargs="*", default=schedules.names(), metavar="NAME")
    parser.add_argument(
        "--watchdog", action="store_true", help="what watching costs; repetitions are pairs then"
    )
    args = parser.parse_args()
    if args.adapters:
        args.microbatches = _adapters(args).num_units
    return args


def _adapters(args: argparse.Namespace) -> Adapters:
    count, microbatches, steps = map(int, args.adapters.split("x"))
    return Adapters.equal(count, microbatches=microbatches, steps=steps, update=_UPDATE)


def _second_model(args: argparse.Namespace) -> SecondModel | None:
    forward = args.milliseconds[0] / 1000
    if args.encoder is not None:
        share = args.encoder * forward
        return SecondModel(SecondRole.ENCODER, share, backward=2 * share, copies=True)
    if args.reference is not None:
        return SecondModel(SecondRole.TEACHER, args.reference * forward)
    return None


def _rank(rank: int, args: argparse.Namespace, meeting_point: str, port: int, result: str) -> None:
    join(rank, args.ranks, meeting_point)
    forward, backward, weight = (ms / 1000 for ms in args.milliseconds)
    link = seconds_of_link(rank, args.ranks)
    costs = schedules.Costs.uniform(
        pipeline_size=args.ranks, forward=forward, backward=backward, weight=weight, p2p=link
    )
    if args.exchange:
        exchange = args.exchange * forward
        costs = costs.having(Communication(forward=exchange, backward=exchange))
    if args.recompute is not None:
        costs = costs.having(Recomputation(kept_input=args.recompute))
    if args.update_delay:
        costs = costs.having(Updates(_UPDATE))
    if args.offload is not None:
        costs = costs.having(Offload(seconds=args.offload * (forward + backward + weight)))
    results: dict[str, Any] = {}
    orders = {name: _built_once(rank, name, args, costs) for name in args.schedules}
    for name, built in tuple(orders.items()):
        if built.pairs:
            orders[f"{name}, no pairs"] = built.without_pairs()
    for name, schedule in orders.items():
        steps = OverlappedSteps(rank, schedule, costs)
        if args.watchdog:
            results[name] = _watched(steps, port, args.repetitions)
        else:
            predicted = schedules.simulate(schedule, costs).makespan
            results[name] = (predicted, [steps.seconds() for _ in range(args.repetitions)])
        steps.channels.close()
    if rank == 0:
        code = _report_watched(results, args) if args.watchdog else _report(results, args, link)
        Path(result).write_text(str(code), encoding="utf-8")
    dist.destroy_process_group()


def _built_once(
    rank: int, name: str, args: argparse.Namespace, costs: schedules.Costs
) -> schedules.Schedule:
    """Search on one rank for all, as a job does."""
    found: list[Any] = [None]
    if rank == 0:
        found[0] = schedules.build(
            name,
            pipeline_size=args.ranks,
            num_microbatches=args.microbatches,
            costs=costs,
            memory_limit=args.memory_limit,
            adapters=_adapters(args) if args.adapters else None,
            second_model=_second_model(args),
            update_delay=int(args.update_delay),
            updates=Updates(_UPDATE if args.update_delay else 0.0),
        )
    dist.broadcast_object_list(found)
    schedule: schedules.Schedule = found[0]
    return schedule


def _watched(steps: SyntheticSteps, port: int, pairs: int) -> dict[str, Any]:
    """Ratios of steps with a watchdog to steps without; which comes first changes."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    ranks = tuple(range(steps.size))
    ratios, alone = [], []
    for pair in range(pairs):
        taken = {}
        for is_watched in (pair % 2 == 0, pair % 2 == 1):
            if not is_watched:
                taken[False] = steps.seconds()
                continue
            progress = RankProgress()
            watchdog = Watchdog(progress, WatchedRank(steps.rank, ranks), store, _TIMEOUT)
            taken[True] = steps.seconds(progress)
            watchdog.stop()
        ratios.append(taken[True] / taken[False])
        alone.append(taken[False])
    told = len(steps.program.ranks[steps.rank])
    return {"ratios": ratios, "seconds": statistics.median(alone), **_by_itself(store, told)}


def _by_itself(store: dist.Store, told: int) -> dict[str, float]:
    """Microseconds of a pass that is told, and of a look into the store; passes told in a step."""
    progress, work = RankProgress(), Pass(PassKind.F, 0, 0)
    start = time.perf_counter()
    for _ in range(_CALLS):
        with progress.running(work):
            pass
    observed = (time.perf_counter() - start) / _CALLS
    inquiry = Inquiry(store, 0, (0,), patience=5.0)
    start = time.perf_counter()
    for _ in range(_CALLS // 100):
        inquiry.is_asked()
    look = (time.perf_counter() - start) / (_CALLS // 100)
    return {"pass_us": 1e6 * observed, "look_us": 1e6 * look, "instructions": told}


def _report(
    results: dict[str, tuple[float, list[float]]], args: argparse.Namespace, link: float
) -> int:
    table = Table(
        title=f"{args.ranks} ranks, {args.microbatches} microbatches, synthetic stages, "
        f"{1e6 * link:.0f} µs a message"
    )
    for heading in ("schedule", "simulated s", "measured s (median)", "ratio", "worst ratio"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    ratios = {}
    for name, (predicted, seconds) in results.items():
        median = statistics.median(seconds)
        ratios[name] = round(median / predicted, 4)
        worst = max(seconds) / predicted
        table.add_row(name, f"{predicted:.3f}", f"{median:.3f}", f"{ratios[name]}", f"{worst:.4f}")
    Console().print(table)
    median = statistics.median(ratios.values())
    missed = [f"{name}: {ratio}" for name, ratio in ratios.items() if ratio > MOST_OF_ANY]
    missed += [f"the median: {median}"] if median > MOST_OF_MEDIAN else []
    for line in missed:
        print(f"missed: {line}")
    print(
        json.dumps(
            {
                "benchmark": "runtime_overhead",
                "ratio": ratios,
                "median": median,
                "bars": {"any": MOST_OF_ANY, "median": MOST_OF_MEDIAN},
                "simulated_seconds": {name: predicted for name, (predicted, _) in results.items()},
                "measured_seconds": {name: seconds for name, (_, seconds) in results.items()},
                "message_seconds": link,
                "milliseconds": args.milliseconds,
                "exchange": args.exchange,
                "memory_limit": args.memory_limit,
                "recompute": args.recompute,
                "offload": args.offload,
                "adapters": args.adapters,
                "encoder": args.encoder,
                "reference": args.reference,
                "update_delay": args.update_delay,
                "ranks": args.ranks,
                "microbatches": args.microbatches,
                **provenance.of_this_run(),
            }
        ),
        flush=True,
    )
    return int(bool(missed))


def _report_watched(results: dict[str, dict[str, Any]], args: argparse.Namespace) -> int:
    table = Table(title=f"{args.ranks} ranks, {args.repetitions} pairs of steps, synthetic stages")
    for heading in ("schedule", "step s", "with / without", "quartiles", "a pass µs", "a look µs"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    summary = {}
    for name, found in results.items():
        low, median, high = statistics.quantiles(found["ratios"], n=4, method="inclusive")
        summary[name] = {
            "ratio": round(median, 5),
            "quartiles": [round(low, 5), round(high, 5)],
            "step_seconds": round(found["seconds"], 3),
            **{key: round(found[key], 1) for key in ("pass_us", "look_us", "instructions")},
        }
        cells = f"{found['seconds']:.3f}", f"{median:.5f}", f"{low:.5f} to {high:.5f}"
        table.add_row(name, *cells, f"{found['pass_us']:.1f}", f"{found['look_us']:.0f}")
    Console().print(table)
    print(json.dumps({"watchdog": summary}))
    sys.stdout.flush()
    return int(any(found["ratio"] > MOST for found in summary.values()))


if __name__ == "__main__":
    sys.exit(main())
