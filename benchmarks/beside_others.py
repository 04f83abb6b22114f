#!/usr/bin/env python3
"""What others ship, in one simulator, and what `auto` makes of the memory that each of them takes.

  Megatron-LM   1F1B, and the interleaved schedule on 2, 4 and 8 chunks: its own order, with the
                microbatch group size (p and larger) that is the fastest
  torch         the schedules of the installed torch.distributed.pipelining that are for more than
                one chunk or split the backward, from torch's own classes

All are timed by the same rules on the same costs, so that what is compared is the order of passes
alone: no kernel is run, and nothing is said about how well a runtime carries an order out. `auto`
has a memory limit: what the schedule beside it holds at its peak.

Prints a table and, last, one JSON line; --output writes that into a file as well.

Examples:
  benchmarks/beside_others.py
  benchmarks/beside_others.py --pipeline-size 16 --num-microbatches 64
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch_schedules import LOOPED, V_SHAPED, torch_schedules

from megatron_zb import schedules
from megatron_zb.schedules.schedule import Schedule

_CHUNKS = (2, 4, 8)


def main() -> None:
    args = _arguments()
    p, m = args.pipeline_size, args.num_microbatches
    forward, backward, weight, p2p = args.costs
    costs = schedules.Costs.uniform(
        pipeline_size=p, forward=forward, backward=backward, weight=weight, p2p=p2p
    )
    rows = [_row(name, schedule, costs) for name, schedule in _shipped(p, m, costs)]
    rows.sort(key=lambda row: row["bubble"])
    result = {"pipeline_size": p, "num_microbatches": m, "costs": args.costs, "rows": rows}
    _print(result)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipeline-size", type=int, default=8, metavar="P")
    parser.add_argument("--num-microbatches", type=int, default=32, metavar="M")
    parser.add_argument(
        "--costs",
        type=float,
        nargs=4,
        default=[1.0, 1.2, 0.8, 0.05],
        metavar=("F", "B", "W", "P2P"),
        help="of a microbatch on a rank, and of a transfer (default 1 1.2 0.8 0.05)",
    )
    parser.add_argument("--output", type=Path, help="write the JSON there, too")
    return parser.parse_args()


def _shipped(p: int, m: int, costs: schedules.Costs) -> Iterator[tuple[str, Schedule]]:
    """What a user of Megatron-LM or torch can have, by the name that they give it."""
    yield "Megatron-LM 1F1B", schedules.build("1f1b", pipeline_size=p, num_microbatches=m)
    for chunks in _CHUNKS:
        yield f"Megatron-LM interleaved, {chunks} chunks", _interleaved(p, m, chunks, costs)
    offered = torch_schedules(p, m, chunks=_CHUNKS).schedules
    for name, schedule in offered.items():
        kind = name.removeprefix("torch-").split("x")[0]
        if kind in V_SHAPED or (kind in LOOPED and kind != "LoopedBFS"):
            chunks = schedule.placement.chunks
            yield f"torch {kind}" + (f", {chunks} chunks" if kind in LOOPED else ""), schedule


def _interleaved(p: int, m: int, chunks: int, costs: schedules.Costs) -> Schedule:
    """With the group size that is the fastest."""
    found = [
        schedules.build(
            "interleaved", pipeline_size=p, num_microbatches=m, chunks=chunks, group_size=group
        )
        for group in range(p, max(m, p) + 1)
        if m % group == 0
    ]
    return min(found, key=lambda schedule: schedules.simulate(schedule, costs).makespan)


def _row(name: str, theirs: Schedule, costs: schedules.Costs) -> dict[str, Any]:
    p, m = theirs.placement.pipeline_size, theirs.num_microbatches
    their = schedules.simulate(theirs, costs)
    limit = max(their.peak_activation) / p
    auto = schedules.build(
        "auto", pipeline_size=p, num_microbatches=m, costs=costs, memory_limit=limit * (1 + 1e-9)
    )
    our = schedules.simulate(auto, costs)
    return {
        "schedule": name,
        "bubble": their.bubble_rate,
        "peak_of_1f1b": limit,
        "auto_bubble": our.bubble_rate,
        "auto_peak_of_1f1b": max(our.peak_activation) / p,
        "auto_faster": their.makespan / our.makespan - 1,
    }


def _print(result: dict[str, Any]) -> None:
    p, m = result["pipeline_size"], result["num_microbatches"]
    table = Table(title=f"p={p} m={m}, F B W p2p = {' '.join(f'{c:g}' for c in result['costs'])}")
    table.add_column("schedule")
    for heading in ("bubble", "memory of 1F1B's", "auto in it: bubble", "memory", "faster by"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        table.add_row(
            row["schedule"],
            f"{row['bubble']:.1%}",
            f"{row['peak_of_1f1b']:.3f}",
            f"{row['auto_bubble']:.1%}",
            f"{row['auto_peak_of_1f1b']:.3f}",
            f"{row['auto_faster']:.1%}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
