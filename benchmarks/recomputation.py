#!/usr/bin/env python3
"""Recomputation and offload: seconds of a step by memory limit, simulated.

Per microbatch and rank F, B and W take 1, 1.2 and 0.8, a message 0.05; the input of a stage takes
--kept of a microbatch on a rank. For each memory limit, `auto` with every activation kept, and with
recomputation; for each limit of --offload-limits, with offload, each copy in --copy of the time of
its passes. Beside it, 1F1B in which all layers are recomputed, as
Megatron does with --recompute-granularity full: B takes F longer, and a rank holds inputs and one
activation. The loss is what a step takes longer than its passes without recomputation. Bounds are
those of the placement at the limit. Everything is simulated.

Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import provenance

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.recomputation import Recomputation

WORK = 3.0  # seconds of F, B and W of a microbatch on a rank


def costs_of(p: int, *, recomputed: float = 0.0) -> schedules.Costs:
    return schedules.Costs.uniform(
        pipeline_size=p, forward=1.0, backward=1.2 + recomputed, weight=0.8, p2p=0.05
    )


def built(p: int, m: int, limit: float, costs: schedules.Costs) -> dict[str, Any]:
    """`auto` under a limit, as a fraction of 1F1B; empty where nothing fits."""
    begin = time.process_time()
    try:
        found = schedules.build(
            "auto", pipeline_size=p, num_microbatches=m, costs=costs, memory_limit=limit
        )
    except UsageError:
        return {}
    timeline = schedules.simulate(found, costs)
    schedules.lower(found, timeline)
    assert found.report is not None
    return {
        "makespan": timeline.makespan,
        "loss": 1 - m * WORK / timeline.makespan,
        "bound": found.report.lower_bound,
        "peak": max(timeline.peak_memory) / p,
        "placement": found.placement.name,
        "chunks": found.placement.chunks,
        "dropped": len(found.recomputed) / (found.placement.num_stages * m),
        "moved": len(found.offloaded) / (found.placement.num_stages * m),
        "host": max(timeline.peak_host),
        "seconds": time.process_time() - begin,
    }


def upstream_recomputed(p: int, m: int, kept: float) -> dict[str, float]:
    """1F1B with every layer recomputed, and what its first rank holds."""
    costs = costs_of(p, recomputed=1.0)
    order = schedules.build("1f1b", pipeline_size=p, num_microbatches=m, costs=costs)
    makespan = schedules.simulate(order, costs).makespan
    return {"makespan": makespan, "loss": 1 - m * WORK / makespan, "peak": (1 + p * kept) / p}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="pipeline ranks (default 8)")
    parser.add_argument("--microbatches", type=int, default=32, help="of a step (default 32)")
    parser.add_argument("--kept", type=float, default=0.03, help="a stage's input (default 0.03)")
    parser.add_argument(
        "--limits",
        type=float,
        nargs="+",
        default=[0.145, 0.18, 0.25, 0.333, 0.375, 0.5, 1.0],
        metavar="X",
        help="memory as a fraction of 1F1B's (default 0.145 0.18 0.25 0.333 0.375 0.5 1)",
    )
    parser.add_argument(
        "--offload-limits",
        type=float,
        nargs="*",
        default=[0.0625, 0.125, 0.25, 0.5],
        metavar="X",
        help="the same where activations are offloaded (default 0.0625 0.125 0.25 0.5)",
    )
    parser.add_argument(
        "--copy",
        type=float,
        nargs="+",
        default=[0.3, 0.5],
        metavar="X",
        help="time to copy an activation one way, in that of its F, B and W (default 0.3 0.5)",
    )
    return parser


def offloaded(p: int, m: int, limits: list[float], copy: float) -> list[dict[str, Any]]:
    """Print and return `auto` with moves to the host, a row for each limit."""
    rows = []
    costs = costs_of(p).having(Offload(seconds=WORK * copy))
    print(f"\nto the host, {copy:g} of F, B and W each way")
    print("limit  makespan    loss  moved   host  placement   bound")
    for limit in limits:
        moved = built(p, m, limit, costs)
        rows.append({"limit": limit, "copy": copy, **moved})
        if moved:
            print(
                f"{limit:5g}  {moved['makespan']:8.1f}  {moved['loss']:6.1%}  {moved['moved']:5.0%}"
                f"  {moved['host']:5.1f}  {moved['placement']} x{moved['chunks']}  "
                f"{moved['bound']:8.1f}",
                flush=True,
            )
    return rows


def main() -> int:
    args = parser().parse_args()
    p, m = args.ranks, args.microbatches
    mixed = costs_of(p).having(Recomputation(kept_input=args.kept))
    rows = []
    print("limit  all kept    loss  some dropped    loss  dropped  placement   bound")
    for limit in args.limits:
        kept, some = built(p, m, limit, costs_of(p)), built(p, m, limit, mixed)
        rows.append({"limit": limit, "kept": kept, "some": some})
        alone = f"{kept['makespan']:8.1f}  {kept['loss']:6.1%}" if kept else "       -       -"
        if not some:
            print(f"{limit:5g}  {alone}  nothing fits")
            continue
        print(
            f"{limit:5g}  {alone}  {some['makespan']:12.1f}  {some['loss']:6.1%}  "
            f"{some['dropped']:7.0%}  {some['placement']} x{some['chunks']}  {some['bound']:8.1f}",
            flush=True,
        )
    upstream = upstream_recomputed(p, m, args.kept)
    print(
        f"1F1B, everything recomputed: {upstream['makespan']:.1f}, loss {upstream['loss']:.1%}, in "
        f"{upstream['peak']:.2f} of 1F1B's memory"
    )
    moved = [row for copy in args.copy for row in offloaded(p, m, args.offload_limits, copy)]
    found = {"ranks": p, "microbatches": m, "kept": args.kept, "rows": rows, "upstream": upstream}
    found["moved"] = moved
    print(json.dumps({**found, **provenance.of_this_run()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
