r"""Time steps whose stages sleep, on the ranks that torchrun has started.

    torchrun --nproc-per-node 4 -m megatron_zb.train.sleeping_steps --schedules 1f1b v-half \
        --num-microbatches 8 --milliseconds 16 16 16 --repetitions 3 --log-file steps.jsonl

A rank that sleeps needs no core, so that the bubbles of as many ranks as one likes are seen on any
machine. The programs, the executor and the messages are those of a training.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from megatron_zb import schedules
from megatron_zb.children import end_with_launcher
from megatron_zb.cli.ending import ended
from megatron_zb.parsing import Parser, positive, seconds
from megatron_zb.train.log import Records
from megatron_zb.train.synthetic_steps import SyntheticSteps, join


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps; rank 0 writes a line for each schedule."""
    return ended("sleeping_steps", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> None:
    args = _parser().parse_args(argv)
    end_with_launcher()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join(rank, ranks)
    forward, backward, weight = (time / 1000 for time in args.milliseconds)
    costs = schedules.Costs.uniform(
        pipeline_size=ranks, forward=forward, backward=backward, weight=weight
    )
    records = Records(str(args.log_file), append=True)
    for name in args.schedules:
        sizes = {"pipeline_size": ranks, "num_microbatches": args.num_microbatches}
        schedule = schedules.build(name, **sizes, costs=costs)
        record = _timed(name, rank, schedule, args.repetitions, costs)
        if rank == 0:
            records.write(record)
    dist.destroy_process_group()


def _timed(
    name: str, rank: int, schedule: schedules.Schedule, repetitions: int, costs: schedules.Costs
) -> dict[str, Any]:
    """Return a schedule's predicted and measured seconds of a step of all ranks."""
    steps = SyntheticSteps(rank, schedule, costs)
    measured = median(steps.seconds() for _ in range(repetitions))
    steps.channels.close()
    timeline = schedules.simulate(schedule, costs)
    return {
        "schedule": name,
        "predicted_seconds": timeline.makespan,
        "measured_seconds": measured,
        "predicted_bubble_rate": timeline.bubble_rate,
    }


def _parser() -> Parser:
    parser = Parser(prog="python -m megatron_zb.train.sleeping_steps", description=__doc__)
    parser.add_argument("--schedules", nargs="+", choices=schedules.names(), required=True)
    parser.add_argument("--num-microbatches", type=positive, required=True, metavar="M")
    parser.add_argument(
        "--milliseconds",
        type=seconds,
        nargs=3,
        required=True,
        metavar=("F", "B", "W"),
        help="of one microbatch on one rank",
    )
    parser.add_argument("--repetitions", type=positive, default=3, metavar="N")
    parser.add_argument(
        "--log-file", type=Path, required=True, metavar="FILE", help="lines of JSON"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
