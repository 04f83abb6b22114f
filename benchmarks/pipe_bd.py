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

There are two measurements. In the first, blocks sleep for the times that are given: any machine
does, because sleeping ranks need no cores. The times given by default are those of transformer
layers of hidden size 4096 on 4096 tokens (200 million weights), at 400 TFLOP/s, with gradients in
fp32 summed over links of 50 GB/s: 4 ms for the teacher's forward, three times that for a student of
the same size, 16 ms for its gradients to pass a link. In the second measurement they are
transformer layers in fp32, each rank on one core, with the times of the blocks measured first;
students have half the MLP. There the students must come out the same in all ways: how far they
differ is printed, as a share of how far they have come.

The time of a step is that of many in a row, fill and drain included: from a barrier before the
first to the end of the last rank in the last, and the median over the repetitions. "predicted" is
the simulator's, or on paper for data-parallel ways. "processor s" is the processor time of the
busiest rank: what a step takes at least, however many others share the cores. Where they do, that
compares the ways better than the clock; it means nothing for blocks that sleep.

Prints tables and, last, one JSON line; --output writes that into a file as well.

Examples:
  benchmarks/pipe_bd.py
  benchmarks/pipe_bd.py --blocks 6 --teacher 4 --student 4 --skip-real
  benchmarks/pipe_bd.py --skip-sleeping --real-blocks 8 --hidden 256
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distilled_blocks import (
    Blocks,
    RealBlocks,
    Sizes,
    SleepingBlocks,
    measured_costs,
    synthetic_costs,
)
from rich.console import Console
from rich.table import Table
from ways_to_distil import (
    Run,
    WithoutRelay,
    all_blocks_at_once,
    block_by_block,
    pipelined,
    seconds_all_at_once,
    seconds_block_by_block,
    unrelayed,
)

from megatron_zb.schedules import simulate
from megatron_zb_distill.schedule.distribution import (
    BlockCosts,
    Distribution,
    RelayCosts,
    distribute,
    evenly,
)
from megatron_zb_distill.schedule.pipe_bd import pipe_bd

PUBLISHED = (2.37, 7.38)
BASELINE = "block by block"
RUN_AHEAD = 1
_OfRank = Callable[[argparse.Namespace], list[dict[str, Any]]]


def main() -> None:
    args = _arguments()
    result: dict[str, Any] = {"published": PUBLISHED, "machine": _machine()}
    if not args.skip_sleeping:
        result["sleeping"] = _on_ranks(_sleeping_rank, args.ranks, args)
    if not args.skip_real:
        result["real"] = _on_ranks(_real_rank, args.real_ranks, args)
    result["machine"]["load_after"] = round(os.getloadavg()[0], 2)
    _report(result, args)
    line = json.dumps(result)
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(line, flush=True)


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
        default=[12.0, 4.0],
        help="forward, loss and backward: of students as large as the teacher, and of students of "
        "a third of its size (default 12 4)",
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
                case = _Case(costs, partial(SleepingBlocks, costs), args)
                cases.append({"blocks": number, "times": profile, "student_ms": student})
                cases[-1] |= case.measure()
    return cases


def _real_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    sizes = Sizes(args.hidden, args.heads, args.seq_length, args.micro_batch)
    cases = []
    for number in args.real_blocks:
        costs = measured_costs(RealBlocks(number, sizes), number)
        case = _Case(costs, partial(RealBlocks, number, sizes, costs), args)
        measured = {
            name: [round(1000 * seconds, 3) for seconds in getattr(costs, name)]
            for name in ("teacher", "student", "update", "reduce")
        }
        cases.append({"blocks": number, "block_ms": measured} | case.measure())
    return cases


@dataclass(frozen=True)
class _Way:
    """One way to distil: how it runs, how long a step should take, and which rank has a block."""

    blocks: Blocks
    run: Run
    predicted: float
    distribution: Distribution | None


class _Taken(NamedTuple):
    """A step: seconds on the clock of the slowest rank, and of processor of the busiest."""

    seconds: float
    busiest: float


class _Case:
    """Blocks of certain costs, distilled in all ways. Collective over all ranks."""

    def __init__(
        self, costs: BlockCosts, new_blocks: Callable[[], Blocks], args: argparse.Namespace
    ) -> None:
        self._costs, self._new_blocks = costs, new_blocks
        self._m, self._steps, self._repetitions = args.microbatches, args.steps, args.repetitions
        self._ranks = dist.get_world_size()

    def measure(self) -> dict[str, Any]:
        ways = self._ways()
        taken: dict[str, list[_Taken]] = {name: [] for name in ways}
        for _ in range(self._repetitions):
            for name, way in ways.items():
                taken[name].append(self._taken(way.run))
        return {
            "difference": self._difference(ways),
            "ways": {name: self._summary(way, taken[name]) for name, way in ways.items()},
        }

    def _ways(self) -> dict[str, _Way]:
        m, ranks, costs = self._m, self._ranks, self._costs
        best = distribute(costs, ranks, m)
        even = evenly(costs.num_blocks, ranks)
        new = self._new_blocks
        by_block, at_once, apart = new(), new(), new()
        return {
            BASELINE: _Way(
                by_block,
                block_by_block(by_block, m),
                seconds_block_by_block(costs, ranks, m),
                None,
            ),
            "all blocks at once": _Way(
                at_once,
                all_blocks_at_once(at_once, m),
                seconds_all_at_once(costs, ranks, m),
                None,
            ),
            "pipe-bd": self._pipelined(best, RUN_AHEAD),
            "- relaying": _Way(
                apart,
                unrelayed(apart, best, m),
                WithoutRelay.like(costs).slowest(best, m),
                best,
            ),
            "- decoupled update": self._pipelined(best, 0),
            "- distribution": self._pipelined(even, RUN_AHEAD),
        }

    def _pipelined(self, distribution: Distribution, run_ahead: int) -> _Way:
        blocks = self._new_blocks()
        schedule = pipe_bd(distribution, self._m, self._steps, run_ahead)
        timeline = simulate(schedule, RelayCosts(self._costs, distribution))
        run = pipelined(blocks, distribution, self._m, run_ahead)
        return _Way(blocks, run, timeline.makespan / self._steps, distribution)

    def _taken(self, run: Run) -> _Taken:
        """Per step, of the slowest rank and of the busiest."""
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        run(self._steps)
        taken = [time.perf_counter() - began, time.process_time() - busy]
        most = torch.tensor(taken, dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return _Taken(*(most / self._steps).tolist())

    def _difference(self, ways: dict[str, _Way]) -> float:
        """By how much weights of students differ between any way and the first, as a norm.

        As a share of what training has changed: all ways have trained on the same data, equally
        long.
        """
        found = [self._trained(way) for way in ways.values()]
        fresh = self._new_blocks()
        began = torch.cat([fresh.weights(block) for block in range(self._costs.num_blocks)])
        way_gone = (found[0] - began).norm().clamp_min(1e-30)
        return max(((other - found[0]).norm() / way_gone).item() for other in found[1:])

    def _trained(self, way: _Way) -> torch.Tensor:
        """Weights of all students, each from the first rank that has it."""
        whole = []
        for block in range(self._costs.num_blocks):
            owner = 0
            if way.distribution is not None:
                ranges = way.distribution.ranges
                owner = next(ranks[0] for blocks, ranks in ranges if block in blocks)
            weights = way.blocks.weights(block).clone()
            dist.broadcast(weights, owner)
            whole.append(weights)
        return torch.cat(whole)

    def _summary(self, way: _Way, taken: list[_Taken]) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "seconds": round(statistics.median(one.seconds for one in taken), 5),
            "all": [round(one.seconds, 5) for one in taken],
            "busiest": round(statistics.median(one.busiest for one in taken), 5),
            "predicted": round(way.predicted, 5),
        }
        if way.distribution is not None:
            summary["distribution"] = way.distribution.spec
        return summary


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
    machine = result["machine"]
    console.print(
        f"published, on 4 GPUs and 6 blocks: {low} to {high} times the data-parallel practice. "
        f"Here: {machine['cores']} cores, load {machine['load_before']} before and "
        f"{machine['load_after']} after."
    )


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
