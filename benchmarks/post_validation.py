#!/usr/bin/env python3
"""What optimizer post-validation saves: iterations in a row, with synthetic stages.

Every stage sleeps for its T_F, T_B and T_W, through the same executor, channels and state exchange
that train. Between two iterations the ranks either reduce the state of their gradients over the
pipeline before the optimizer steps, and wait for one another, or pass it on, step, and validate in
the next iteration's warm-up. The time per iteration is that of many in a row, from a barrier before
the first to the end of the last rank in the last: an iteration may begin on one rank while another
still finishes the one before. The ideal is the work of one rank, without any bubble. The
schedule is built for iterations in a row, so that no rank takes longer from its first forward to
its last weight gradient than it must.

Prints a table and, last, one JSON line. Any machine does: sleeping ranks need no cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from megatron_zb import schedules
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.executor import run_program
from megatron_zb.runtime.post_validation import StateExchange, run_from_cut
from megatron_zb.schedules.lowering import rollback
from megatron_zb.train.synthetic_steps import SyntheticStage

_STATE = 4  # numbers: held back, squares, zeros, infinite


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(args, str(Path(folder) / "rendezvous")), nprocs=args.ranks)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", default="v-zb", choices=schedules.names(), metavar="NAME")
    parser.add_argument("--ranks", type=int, default=8, help="pipeline ranks (default 8)")
    parser.add_argument("--microbatches", type=int, default=16, help="per step (default 16)")
    parser.add_argument("--iterations", type=int, default=10, help="in a row (default 10)")
    parser.add_argument("--repetitions", type=int, default=3, help="of all that (default 3)")
    parser.add_argument(
        "--milliseconds",
        type=float,
        default=100.0,
        help="of F, B and W each, of one microbatch on one rank (default 100)",
    )
    return parser.parse_args()


def _rank(rank: int, args: argparse.Namespace, meeting_point: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=args.ranks
    )
    pipeline = _Pipeline(rank, args)
    seconds: dict[str, list[float]] = {"synchronous": [], "validated": []}
    for _ in range(args.repetitions):
        seconds["synchronous"].append(pipeline.measure(args.iterations, validated=False))
        seconds["validated"].append(pipeline.measure(args.iterations, validated=True))
    if rank == 0:
        _report(pipeline, seconds, args)
    dist.destroy_process_group()


class _Pipeline:
    """One rank of a pipeline of synthetic stages."""

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        each = args.milliseconds / 1000
        self.ideal = 3 * each * args.microbatches
        costs = schedules.Costs.uniform(
            pipeline_size=args.ranks, forward=each, backward=each, weight=each
        )
        schedule = schedules.build(
            args.schedule,
            pipeline_size=args.ranks,
            num_microbatches=args.microbatches,
            costs=costs,
            back_to_back=True,
        )
        timeline = schedules.simulate(schedule, costs)
        self.simulated = timeline.makespan
        self.period = timeline.period
        placement = schedule.placement
        table = costs.for_placement(placement)
        self._rank = rank
        self._program = schedules.lower(schedule)
        self._cut = rollback(self._program)
        self._channels = Channels(list(range(args.ranks)), placement, "cpu")
        self._exchange = StateExchange(range(args.ranks), _STATE)
        self._stages = {s: SyntheticStage(s, table) for s in placement.stages_of[rank]}

    def measure(self, iterations: int, *, validated: bool) -> float:
        """Seconds per iteration of the slowest rank; one iteration goes ahead of the clock."""
        step = self._validated_step if validated else self._synchronous_step
        self._run()
        dist.barrier()
        start = time.perf_counter()
        for iteration in range(iterations):
            step(is_first=iteration == 0)
        if validated:
            self._exchange.full()
        elapsed = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        return elapsed.item() / iterations

    def _synchronous_step(self, is_first: bool) -> None:
        self._run()
        dist.all_reduce(torch.ones(_STATE, dtype=torch.float64))

    def _validated_step(self, is_first: bool) -> None:
        if is_first:
            self._run()
        else:
            run_from_cut(
                self._program,
                self._cut,
                self._rank,
                self._stages,
                self._channels,
                _empty,
                is_right=self._was_right,
                start_anew=_cannot_be,
            )
        own = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
        self._exchange.pass_on(self._exchange.partial(own))

    def _was_right(self) -> bool:
        return self._exchange.full()[0].item() == 0

    def _run(self) -> None:
        run_program(self._program, self._rank, self._stages, self._channels, _empty)


def _empty(message: object) -> torch.Tensor:
    return torch.empty(64)


def _cannot_be() -> None:
    raise RuntimeError("no rank held its step back")


def _report(pipeline: _Pipeline, seconds: dict[str, list[float]], args: argparse.Namespace) -> None:
    table = Table(
        title=f"{args.schedule}, {args.ranks} ranks, {args.microbatches} microbatches, "
        f"{args.iterations} iterations in a row\nsimulated makespan {pipeline.simulated:.3f} s, "
        f"in a row {pipeline.period:.3f} s"
    )
    headings = ("optimizer step", "s per iteration (median)", "ideal work s", "overhead", "worst")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == headings[0] else "right")
    result: dict[str, float] = {
        "ideal": round(pipeline.ideal, 4),
        "simulated": round(pipeline.simulated, 4),
        "simulated_in_a_row": round(pipeline.period, 4),
    }
    for name, measured in seconds.items():
        median = statistics.median(measured)
        overhead = median / pipeline.ideal - 1
        worst = max(measured) / pipeline.ideal - 1
        table.add_row(
            name,
            f"{median:.4f}",
            f"{pipeline.ideal:.4f}",
            f"{100 * overhead:.2f} %",
            f"{100 * worst:.2f} %",
        )
        result[name] = round(median, 4)
        result[f"{name}_overhead"] = round(overhead, 4)
    Console(width=100).print(table)
    print(json.dumps(result))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
