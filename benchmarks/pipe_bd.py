#!/usr/bin/env python3
"""What Pipe-BD gains over data-parallel blockwise distillation, and which part of it gains it.

Blockwise distillation trains the student of a block on what the teacher's block reads and makes.
On the same ranks and the same microbatches, a step is carried out in these ways:

  block by block       data-parallel, as published work does it: for every block the data and the
                       teacher's blocks before it once more; summing gradients is overlapped
  all blocks at once   data-parallel with the teacher run once: every rank holds all blocks, all
                       students and their optimizers, which published work avoids
  pipe-bd              ranks relay the teacher's activation, update without a barrier, and share
                       blocks as the solver finds best for the times of the blocks
  - relaying           the same blocks on the same ranks, but every stage runs the teacher from the
                       data on
  - decoupled update   the same, but a step begins when all ranks have ended the one before
  - distribution       the same, but every rank has as many blocks as any other

There are three measurements. In the first, blocks sleep for the times that are given: any machine
does, because sleeping ranks need no cores. The times given by default are those of transformer
layers of hidden size 4096 on 4096 tokens (200 million weights), at 400 TFLOP/s, with gradients in
fp32 summed over links of 50 GB/s: 4 ms for the teacher's forward, three times that for a student of
the same size, 16 ms for its gradients to pass a link. In the second measurement they are
transformer layers in fp32, each rank on one core, with the times of the blocks measured first;
students have half the MLP. There the students must come out the same in all ways: how far they
differ is printed, as a share of how far they have come. In the third, the batch of a step is equal
instead of the microbatch, as in published work: a data-parallel rank has its share in one go, a
pipelined rank the whole batch ("pipe-bd, shares" has the microbatches of data-parallel ranks).

The time of a step is that of many in a row, fill and drain included: from a barrier before the
first to the end of the last rank in the last, and the median over the repetitions. "predicted" is
the simulator's, or on paper for data-parallel ways. "processor s" is the processor time of the
busiest rank: what a step takes at least, however many others share the cores. Where they do, that
compares the ways better than the clock; it means nothing for blocks that sleep.

Prints tables and, last, one JSON line; --output writes that into a file as well, in which what is
skipped stays as it is.

Examples:
  benchmarks/pipe_bd.py
  benchmarks/pipe_bd.py --blocks 6 --teacher 4 --student 4 --skip-real
  benchmarks/pipe_bd.py --skip-sleeping --real-blocks 8 --hidden 256
  benchmarks/pipe_bd.py --skip-sleeping --skip-real --batch 16 --tokens 64
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equal_batches
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distilled_blocks import (
    Blocks,
    RealBlocks,
    Sizes,
    SleepingBlocks,
    measured_costs,
    milliseconds,
    synthetic_costs,
)
from equal_batches import BASELINE
from rich.console import Console
from rich.table import Table
from timed_ways import Way, every_block_at_once, in_a_pipeline, one_block_at_a_time, timed
from ways_to_distil import WithoutRelay, unrelayed

from megatron_zb.distill.schedule.distribution import (
    BlockCosts,
    Distribution,
    distribute,
    evenly,
)

PUBLISHED = (2.37, 7.38)
RUN_AHEAD = 1
_OfRank = Callable[[argparse.Namespace], list[dict[str, Any]]]


def main() -> None:
    args = _arguments()
    result: dict[str, Any] = {"published": PUBLISHED, "machine": {}}
    if not args.skip_sleeping:
        _measure(result, "sleeping", _sleeping_rank, args.ranks, args)
    if not args.skip_real:
        _measure(result, "real", _real_rank, args.real_ranks, args)
    if not args.skip_batches:
        _measure(result, "batches", equal_batches.of_rank, args.real_ranks, args)
    _report(result, args)
    if args.output is not None:
        _write(args.output, result)
    print(json.dumps(result), flush=True)


def _measure(
    result: dict[str, Any], part: str, of_rank: _OfRank, ranks: int, args: argparse.Namespace
) -> None:
    machine = _machine()
    result[part] = _on_ranks(of_rank, ranks, args)
    result["machine"][part] = machine | {"load_after": round(os.getloadavg()[0], 2)}


def _write(path: Path, result: dict[str, Any]) -> None:
    """Write the parts that were measured; the others stay as the file has them."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    machine = kept.get("machine", {}) | result["machine"]
    written = kept | result | {"machine": machine}
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", type=int, default=8, help="per step (default 8)")
    parser.add_argument("--steps", type=int, default=4, help="in a row (default 4)")
    parser.add_argument("--repetitions", type=int, default=3, help="of all that (default 3)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there, too")
    sleeping = parser.add_argument_group("blocks that sleep, times in milliseconds per block")
    sleeping.add_argument("--skip-sleeping", action="store_true")
    sleeping.add_argument("--ranks", type=int, default=4, help="(default 4)")
    sleeping.add_argument(
        "--blocks", type=int, nargs="+", default=[4, 6, 8, 12, 16], help="(default 4 6 8 12 16)"
    )
    sleeping.add_argument("--teacher", type=float, default=4.0, help="forward (default 4)")
    sleeping.add_argument(
        "--student",
        type=float,
        nargs="+",
        default=[12.0, 4.0, 1.33],
        help="forward, loss and backward: of students as large as the teacher, of a third of its "
        "size, and of a ninth, as a depthwise-separable convolution has of one of 3 x 3 (default "
        "12 4 1.33)",
    )
    sleeping.add_argument("--update", type=float, default=2.0, help="a step (default 2)")
    sleeping.add_argument(
        "--reduce", type=float, default=16.0, help="gradients over a link (default 16)"
    )
    real = parser.add_argument_group("blocks that compute")
    real.add_argument("--skip-real", action="store_true")
    real.add_argument("--real-ranks", type=int, default=2, help="of one core each (default 2)")
    real.add_argument("--real-blocks", type=int, nargs="+", default=[4, 8], help="(default 4 8)")
    real.add_argument("--hidden", type=int, default=192, help="(default 192)")
    real.add_argument("--heads", type=int, default=4, help="(default 4)")
    real.add_argument("--seq-length", type=int, default=64, help="(default 64)")
    real.add_argument("--micro-batch", type=int, default=4, help="sequences (default 4)")
    equal_batches.add_arguments(parser)
    return parser.parse_args()


def _machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
    }


def _on_ranks(of_rank: _OfRank, ranks: int, args: argparse.Namespace) -> Any:
    """What rank 0 has written when all have ended."""
    with tempfile.TemporaryDirectory() as folder:
        given = (of_rank, ranks, args, folder)
        mp.start_processes(_rank, given, ranks, start_method="fork")  # torch is imported already
        return json.loads((Path(folder) / "result.json").read_text())


def _rank(
    rank: int,
    of_rank: _OfRank,
    ranks: int,
    args: argparse.Namespace,
    folder: str,
) -> None:
    torch.set_num_threads(1)
    meeting_point = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=ranks)
    cases = of_rank(args)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(cases))
    dist.barrier()
    dist.destroy_process_group()


def _sleeping_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    cases = []
    for student in args.student:
        for uneven in (False, True):
            for number in args.blocks:
                costs = synthetic_costs(
                    number,
                    (args.teacher / 1000, student / 1000),
                    uneven=uneven,
                    update=args.update / 1000,
                    reduce=args.reduce / 1000,
                )
                profile = "uneven" if uneven else "equal"
                cases.append({"blocks": number, "times": profile, "student_ms": student})
                cases[-1] |= _measured(costs, partial(SleepingBlocks, costs), args)
    return cases


def _real_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    sizes = Sizes(args.hidden, args.heads, args.seq_length, args.micro_batch)
    cases = []
    for number in args.real_blocks:
        costs = measured_costs(RealBlocks(number, sizes), number)
        names = ("teacher", "student", "update", "reduce")
        block_ms = {name: milliseconds(getattr(costs, name)) for name in names}
        found = _measured(costs, partial(RealBlocks, number, sizes, costs), args)
        cases.append({"blocks": number, "block_ms": block_ms} | found)
    return cases


def _measured(
    costs: BlockCosts, new_blocks: Callable[[], Blocks], args: argparse.Namespace
) -> dict[str, Any]:
    """Time blocks of certain costs in all ways. Collective over all ranks."""
    ways = _ways(costs, new_blocks, args)
    return timed(ways, new_blocks(), args.steps, args.repetitions)


def _ways(
    costs: BlockCosts, new_blocks: Callable[[], Blocks], args: argparse.Namespace
) -> dict[str, Way]:
    m, ranks = args.microbatches, dist.get_world_size()
    best = distribute(costs, ranks, m)
    apart = new_blocks()

    def piped(distribution: Distribution, run_ahead: int) -> Way:
        return in_a_pipeline(
            costs,
            new_blocks(),
            distribution,
            microbatches=m,
            steps=args.steps,
            run_ahead=run_ahead,
        )

    without_relay = WithoutRelay.like(costs).slowest(best, m)
    run, close = unrelayed(apart, best, m)
    return {
        BASELINE: one_block_at_a_time(costs, new_blocks(), m),
        "all blocks at once": every_block_at_once(costs, new_blocks(), m),
        "pipe-bd": piped(best, RUN_AHEAD),
        "- relaying": Way(apart, run, without_relay, best, close),
        "- decoupled update": piped(best, 0),
        "- distribution": piped(evenly(costs.num_blocks, ranks), RUN_AHEAD),
    }


def _report(result: dict[str, Any], args: argparse.Namespace) -> None:
    console = Console(width=120)
    low, high = PUBLISHED
    for case in result.get("sleeping", []):
        title = (
            f"{case['blocks']} blocks that sleep, times {case['times']}: teacher "
            f"{args.teacher:g} ms, students {case['student_ms']:g} ms on average; "
            f"{args.ranks} ranks, {args.microbatches} microbatches"
        )
        console.print(_table(title, case))
    for case in result.get("real", []):
        title = (
            f"{case['blocks']} transformer layers, hidden {args.hidden}, fp32; {args.real_ranks} "
            f"ranks of one core, {args.microbatches} microbatches; students differ by "
            f"{case['difference']:.1e}"
        )
        console.print(_table(title, case))
    for case in result.get("batches", []):
        title = (
            f"{case['blocks']} layers, hidden {args.hidden}, and steps of {case['batch']} samples "
            f"of {case['tokens']} tokens, on {args.real_ranks} ranks of one core; students differ "
            f"by {case['difference']:.1e}"
        )
        console.print(_table(title, case))
    console.print(
        f"published, on 4 GPUs and 6 blocks: {low} to {high} times the data-parallel practice"
    )
    for part, machine in result["machine"].items():
        loads = f"load {machine['load_before']} before and {machine['load_after']} after"
        console.print(f"{part}: {machine['cores']} cores, {loads}")


def _table(title: str, case: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left")
    headings = (
        "way",
        "s per step",
        "predicted",
        "slowest run",
        "times faster",
        "processor s",
        "times less",
        "blocks:ranks",
    )
    for heading in headings:
        table.add_column(
            heading, justify="left" if heading in (headings[0], headings[-1]) else "right"
        )
    baseline = case["ways"][BASELINE]
    for name, way in case["ways"].items():
        table.add_row(
            name,
            f"{way['seconds']:.4f}",
            f"{way['predicted']:.4f}",
            f"{max(way['all']):.4f}",
            f"{baseline['seconds'] / way['seconds']:.2f}",
            f"{way['busiest']:.4f}",
            f"{baseline['busiest'] / way['busiest']:.2f}",
            way.get("distribution", "all on each"),
        )
    return table


if __name__ == "__main__":
    main()
