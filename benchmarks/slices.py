#!/usr/bin/env python3
"""Schedules of token slices: bubble and memory beside sliced 1F1B and interleaved 1F1B.

Per microbatch and rank F, B and W take 1, 1.2 and 0.8, a message 0.05 / n; attention takes a share
of F and B that grows with the tokens before a slice. For each number of microbatches, of slices,
and share of attention: the fixed orders, and `v-zb` and `auto` within the memory of sliced 1F1B,
`auto` within that of interleaved. Then `auto` under smaller limits, and the seconds to build a
large one. Memory is in microbatches of a rank; gaps are distances to the lower bound of the
schedule's placement. Everything is simulated, and proved free of deadlock.

Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import provenance

from megatron_zb import schedules
from megatron_zb.schedules.features import slices

SHAPES = "2:8:0 2:8:0.5 4:8:0.5 8:4:0.5 8:8:0 8:8:0.5 8:16:0.5 32:8:0.5".split()


def built(
    name: str, p: int, m: int, cut: slices.Slicing, held: float | None = None
) -> dict[str, Any]:
    """A schedule of the slices, holding so many microbatches at most."""
    costs = schedules.Costs.uniform(
        pipeline_size=p, forward=1.0, backward=1.2, weight=0.8, p2p=0.05
    )
    begin = time.process_time()
    schedule = schedules.build(
        name,
        pipeline_size=p,
        num_microbatches=m,
        costs=costs,
        slices=cut,
        memory_limit=None if held is None else held / p,
    )
    seconds = time.process_time() - begin
    timeline = schedules.simulate(schedule.validate(), costs)
    schedules.lower(schedule, timeline)
    assert schedule.report is not None
    return {
        "name": name,
        "bubble": timeline.bubble_rate,
        "makespan": timeline.makespan,
        "held": max(timeline.peak_memory),
        "gap": schedule.report.gap,
        "placement": f"{schedule.placement.name} x{schedule.placement.chunks}",
        "seconds": seconds,
    }


def in_words(found: dict[str, Any]) -> str:
    return f"{found['bubble']:6.1%} in {found['held']:.2f} (gap {found['gap']:5.1%})"


def beside_fixed_orders(p: int, m: int, cut: slices.Slicing) -> list[dict[str, Any]]:
    """Fixed orders, and searches in their memory, which must not be slower."""
    fused, looped = (built(name, p, m, cut) for name in ("1f1b", "interleaved"))
    v, in_fused = (built(name, p, m, cut, fused["held"]) for name in ("v-zb", "auto"))
    in_looped = in_fused
    if looped["held"] > fused["held"]:
        in_looped = built("auto", p, m, cut, looped["held"])
    assert in_fused["makespan"] <= fused["makespan"] * (1 + 1e-9)
    assert in_looped["makespan"] <= looped["makespan"] * (1 + 1e-9)
    return [fused, looped, v, in_fused, in_looped]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="pipeline ranks (default 8)")
    parser.add_argument(
        "--shapes",
        nargs="*",
        default=SHAPES,
        metavar="M:N:X",
        help="microbatches, slices of each, and share of attention",
    )
    parser.add_argument(
        "--held",
        type=float,
        nargs="*",
        default=[1.0, 1.03125, 1.125, 1.25, 1.5, 1.875],
        metavar="X",
        help="limits in microbatches of a rank, for 8 microbatches of 16 slices",
    )
    parser.add_argument(
        "--large", type=int, default=32, help="ranks and microbatches of the large one; 0 for none"
    )
    return parser


def main() -> int:
    args = parser().parse_args()
    rows = []
    names = ("1f1b", "interleaved", "v-zb", "auto", "auto, memory of interleaved")
    for shape in args.shapes:
        m, n, attention = shape.split(":")
        cut = slices.Slicing.equal(int(n), attention=float(attention))
        found = beside_fixed_orders(args.ranks, int(m), cut)
        rows.append({"shape": shape, "found": found})
        print(f"m {m}, n {n}, attention {attention}")
        for name, it in zip(names, found, strict=True):
            print(f"  {name:28} {in_words(it)}  {it['placement']}", flush=True)
    limits = []
    for held in args.held:
        cut = slices.Slicing.equal(16, attention=0.5)
        limits.append({"limit": held, **built("auto", args.ranks, 8, cut, held)})
        print(f"auto, m 8, n 16, limit {held:.2f}: {in_words(limits[-1])}", flush=True)
    large = {}
    if args.large:
        cut = slices.Slicing.equal(8, attention=0.5)
        large = built("auto", args.large, args.large, cut, (args.large + 7) / 8)
        print(f"auto, p = m = {args.large}, n 8: {in_words(large)}, {large['seconds']:.1f} s")
    results = {"ranks": args.ranks, "rows": rows, "limits": limits, "large": large}
    print(json.dumps({**results, **provenance.of_this_run()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
