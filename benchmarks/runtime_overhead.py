#!/usr/bin/env python3
"""How much the runtime adds to a step: measured time over the simulator's, with synthetic stages.

Every stage sleeps for its T_F, T_B and T_W and passes a small tensor on, through the same executor
and channels that train. Runs on any machine: sleeping ranks need no cores. Prints a table and,
last, one JSON line {"ratio": {NAME: median over the repetitions}}.
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
from megatron_zb.runtime.synthetic import SyntheticStage


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = Path(folder) / "rendezvous"
        mp.spawn(_rank, args=(args, str(meeting_point)), nprocs=args.ranks)


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
    parser.add_argument("--schedules", nargs="*", default=schedules.names(), metavar="NAME")
    return parser.parse_args()


def _rank(rank: int, args: argparse.Namespace, meeting_point: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=args.ranks
    )
    forward, backward, weight = (ms / 1000 for ms in args.milliseconds)
    costs = schedules.Costs.uniform(
        pipeline_size=args.ranks, forward=forward, backward=backward, weight=weight
    )
    results = {}
    for name in args.schedules:
        schedule = schedules.build(
            name, pipeline_size=args.ranks, num_microbatches=args.microbatches, costs=costs
        )
        predicted = schedules.simulate(schedule, costs).makespan
        results[name] = (predicted, _measure(rank, schedule, costs, args.repetitions))
    if rank == 0:
        _report(results, args)
    dist.destroy_process_group()


def _measure(
    rank: int, schedule: schedules.Schedule, costs: schedules.Costs, repetitions: int
) -> list[float]:
    """Seconds of each step, from a barrier to the end of the last rank; one warm-up step first."""
    placement = schedule.placement
    table = costs.for_placement(placement)
    program = schedules.lower(schedule)
    channels = Channels(list(range(placement.pipeline_size)), placement, "cpu")
    stages = {s: SyntheticStage(s, table) for s in placement.stages_of[rank]}
    seconds = []
    for _ in range(repetitions + 1):
        dist.barrier()
        start = time.perf_counter()
        run_program(program, rank, stages, channels, lambda message: torch.empty(64))
        elapsed = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        seconds.append(elapsed.item())
    channels.close()
    return seconds[1:]


def _report(results: dict[str, tuple[float, list[float]]], args: argparse.Namespace) -> None:
    table = Table(title=f"{args.ranks} ranks, {args.microbatches} microbatches, synthetic stages")
    for heading in ("schedule", "simulated s", "measured s (median)", "ratio", "worst ratio"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    ratios = {}
    for name, (predicted, seconds) in results.items():
        median = statistics.median(seconds)
        ratios[name] = round(median / predicted, 4)
        worst = max(seconds) / predicted
        table.add_row(name, f"{predicted:.3f}", f"{median:.3f}", f"{ratios[name]}", f"{worst:.4f}")
    Console().print(table)
    print(json.dumps({"ratio": ratios}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
