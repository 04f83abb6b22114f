#!/usr/bin/env python3
"""Schedules for mixtures of experts: how much of the all-to-all is hidden, at which memory.

Per microbatch and rank F, B and W take 1, 1.2 and 0.8, a message 0.05, and the exchange of tokens
between experts --comm in F and as much in B beside that. For each of these and each memory limit,
`auto` on --chunks chunks in a zig-zag, with and without pairs; beside it the published orders with
pairs at the memory that they take: DualPipeV and Megatron's interleaved with overlap. Bounds are
those of the placement at the limit. Everything is simulated.

Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import provenance

from megatron_zb import schedules
from megatron_zb.schedules.bounds import lower_bound
from megatron_zb.schedules.families import dualpipe_v_order, overlapped
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.placement import wave


@dataclass(frozen=True)
class Job:
    """Ranks, microbatches, chunks of the zig-zag, and whether B computes its forward again."""

    p: int
    m: int
    chunks: int
    recompute: bool = False

    def costs(self, comm: float, *, pairs: bool = True) -> schedules.Costs:
        """Costs with so much communication in F and in B; if not for pairs, as a part of them."""
        back, again = comm * (1 + self.recompute), 1.0 * self.recompute
        costs = schedules.Costs.uniform(
            pipeline_size=self.p,
            forward=1.0 + comm * (not pairs),
            backward=1.2 + again + back * (not pairs),
            weight=0.8,
            p2p=0.05,
        )
        return costs.having(Communication(forward=comm, backward=back)) if pairs else costs


def searched(job: Job, comm: float, limit: float) -> dict[str, Any]:
    """`auto` on a zig-zag with a limit in microbatches of a rank, with and without pairs."""
    p, m = job.p, job.m
    place, begin = wave(p, job.chunks), time.process_time()
    found = {
        pairs: schedules.build(
            "auto",
            pipeline_size=p,
            num_microbatches=m,
            costs=job.costs(comm, pairs=pairs),
            memory_limit=limit / p,
            placement=place,
        )
        for pairs in (False, True)
    }
    costs = job.costs(comm)
    timeline = schedules.simulate(found[True], costs)
    schedules.lower(found[True], timeline)
    bound = lower_bound(place, m, timeline.costs, (limit,) * p)
    return {
        "schedule": "auto",
        "comm": comm,
        "limit": limit,
        "peak": max(timeline.peak_activation),
        "without_pairs": schedules.simulate(found[False], costs).makespan,
        "makespan": timeline.makespan,
        "bound": bound,
        "pairs": len(found[True].pairs),
        "seconds": time.process_time() - begin,
    }


def published(job: Job, comm: float) -> list[dict[str, Any]]:
    """DualPipeV's order and Megatron's interleaved ones, with and without their pairs."""
    p, m, costs = job.p, job.m, job.costs(comm)
    orders = {"dualpipe-v": dualpipe_v_order(p, m)} if m >= 2 * p else {}
    orders |= {f"interleaved x{chunks}": overlapped(p, m, chunks) for chunks in (2, 4)}
    rows = []
    for name, schedule in orders.items():
        timeline = schedules.simulate(schedule.validate(), costs)
        peak = max(timeline.peak_activation)
        rows.append(
            {
                "schedule": name,
                "comm": comm,
                "peak": peak,
                "without_pairs": schedules.simulate(schedule.without_pairs(), costs).makespan,
                "makespan": timeline.makespan,
                "bound": lower_bound(schedule.placement, m, timeline.costs, (peak,) * p),
                "pairs": len(schedule.pairs),
            }
        )
    return rows


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="pipeline ranks (default 8)")
    parser.add_argument("--microbatches", type=int, default=32, help="of a step (default 32)")
    parser.add_argument("--comm", type=float, nargs="+", default=[0.3, 0.5, 0.8], metavar="C")
    parser.add_argument(
        "--limits",
        type=float,
        nargs="+",
        default=[5.0, 6.0, 8.0, 8.5, 10.0],
        metavar="X",
        help="memory in microbatches of a rank (default 5 6 8 8.5 10)",
    )
    parser.add_argument("--chunks", type=int, default=2, help="of the zig-zag (default 2: a V)")
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="B computes its forward again, exchange included (full recomputation)",
    )
    return parser


def main() -> int:
    args = parser().parse_args()
    job = Job(args.ranks, args.microbatches, args.chunks, args.recompute)
    rows = []
    print("comm  schedule        limit   peak  without pairs  with pairs   bound  above it")
    for comm in args.comm:
        found = [searched(job, comm, limit) for limit in args.limits]
        for row in [*published(job, comm), *found]:
            rows.append(row)
            print(
                f"{comm:4g}  {row['schedule']:14}  {row.get('limit', 0) or '':>5}  "
                f"{row['peak']:5g}  {row['without_pairs']:13.2f}  {row['makespan']:10.2f}  "
                f"{row['bound']:6.2f}  {row['makespan'] / row['bound'] - 1:8.1%}",
                flush=True,
            )
    print(json.dumps({**asdict(job), "rows": rows, **provenance.of_this_run()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
