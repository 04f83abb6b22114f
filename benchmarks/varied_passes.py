#!/usr/bin/env python3
"""Steps whose passes vary: `auto` beside named schedules and the fastest order that it finds.

F, B and W of a microbatch take 1, 1.2 and 0.8 on one rank, a message 0.05; every pass takes a
random number of times that, evenly drawn with a standard deviation of 0 to 40 %. Means of many
draws, other ones than those by which `auto` chooses. `fastest` is what `auto` would return if it
looked at equal passes alone.

Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import provenance

from megatron_zb import schedules
from megatron_zb.schedules import auto
from megatron_zb.schedules.request import Limit, Request
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search import varied_passes

NAMED = ("1f1b", "interleaved", "v-half", "v-zb")
_SEED = 1


def with_fastest(request: Request) -> Iterator[tuple[str, Schedule]]:
    """Yield the fastest order that `auto` finds, and the one that it takes."""
    seen: list[tuple[float, Schedule]] = []
    choose = varied_passes.steadiest

    def steadiest(
        found: Sequence[tuple[float, Schedule]], request: Request, most: float = math.inf
    ) -> int:
        seen.extend(found)
        return choose(found, request, most)

    varied_passes.steadiest = steadiest
    try:
        taken = auto.auto(request)
    finally:
        varied_passes.steadiest = choose
    yield "fastest", seen[0][1]
    yield "auto", taken


def rows(p: int, m: int, deviations: list[float], draws: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each schedule: its mean seconds by deviation, in percent."""
    costs = schedules.Costs.uniform(
        pipeline_size=p, forward=1.0, backward=1.2, weight=0.8, p2p=0.05
    )
    request = Request(p, m, costs, Limit())
    named = (
        (name, schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs))
        for name in NAMED
    )
    for name, schedule in (*named, *with_fastest(request)):
        means = [
            varied_passes.mean_seconds(schedule, request, deviation / 100, draws, _SEED)
            if deviation
            else schedules.simulate(schedule, costs).makespan
            for deviation in deviations
        ]
        placement = f"{schedule.placement.name} x{schedule.placement.chunks}"
        yield {"ranks": p, "microbatches": m, "name": name, "placement": placement, "means": means}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", nargs="+", default=["4:8", "8:16"], metavar="P:M", help="ranks, microbatches"
    )
    parser.add_argument(
        "--deviations",
        type=float,
        nargs="+",
        default=[0, 10, 20, 40],
        metavar="X",
        help="standard deviations of the seconds of a pass, in percent (default 0 10 20 40)",
    )
    parser.add_argument("--draws", type=int, default=200, help="of each mean (default 200)")
    return parser


def main() -> int:
    args = parser().parse_args()
    found = []
    for shape in args.shapes:
        p, m = map(int, shape.split(":"))
        for row in rows(p, m, args.deviations, args.draws):
            found.append(row)
            means = "".join(f"{mean:8.2f}" for mean in row["means"])
            print(f"{p} {m:3}  {row['name']:12} {row['placement']:11}{means}", flush=True)
    print(json.dumps({"deviations": args.deviations, "rows": found, **provenance.of_this_run()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
