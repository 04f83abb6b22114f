"""Fusion of B and W where it costs nothing: a fused backward is one kernel call and frees memory.

Also the reverse, to measure each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import simulate


def fuse_for_free(schedule: Schedule, costs: Costs) -> Schedule:
    """Join every B and the W right behind it to BW, if no pass of any rank starts later for it.

    A BW lets the previous stage wait until W has ended, too. Where that stage starts its B later
    still, and the whole backward takes no longer than its halves, nothing is late; all of them can
    be joined at once. A B that runs as one with an F stays as it is.
    """
    timeline = simulate(schedule, costs)
    table = timeline.costs
    starts = {
        (p.stage, p.microbatch): start
        for passes, times in zip(schedule.ranks, timeline.start, strict=True)
        for p, start in zip(passes, times, strict=True)
        if p.kind in (PassKind.B, PassKind.BW)
    }
    tolerance = 1e-9 * max(timeline.makespan, 1e-30)

    def costs_nothing(p: Pass, end_of_w: float) -> bool:
        row = table.of(p.microbatch)
        if row.fused[p.stage] > row.backward[p.stage] + row.weight[p.stage] + tolerance:
            return False
        if p.stage == 0:
            return True
        needed = starts[p.stage - 1, p.microbatch]
        return end_of_w + row.backward_hop[p.stage] <= needed + tolerance

    ranks = []
    for passes, ends in zip(schedule.ranks, timeline.end, strict=True):
        joined: list[Pass] = []
        for p, end in zip(passes, ends, strict=True):
            before = joined[-1] if joined else None
            if (
                p.kind is PassKind.W
                and before == Pass(PassKind.B, p.stage, p.microbatch)
                and not (len(joined) > 1 and joined[-2] in schedule.pairs)
                and costs_nothing(p, end)
            ):
                joined[-1] = Pass(PassKind.BW, p.stage, p.microbatch)
            else:
                joined.append(p)
        ranks.append(tuple(joined))
    return replace(schedule, ranks=tuple(ranks))


def fuse_all(ranks: Sequence[Sequence[Pass]]) -> tuple[tuple[Pass, ...], ...]:
    """Replace every B by BW, in orders of F and B whose backward is never split."""
    return tuple(
        tuple(Pass(PassKind.BW, *p[1:]) if p.kind is PassKind.B else p for p in rank)
        for rank in ranks
    )


def join_all(schedule: Schedule) -> Schedule:
    """Replace every B by BW, and drop every W: the same order, each backward whole."""
    kept = [[p for p in rank if p.kind is not PassKind.W] for rank in schedule.ranks]
    return replace(schedule, ranks=fuse_all(kept))


def split_all(schedule: Schedule) -> Schedule:
    """Replace every BW by B and W right behind it: the same order, each pass by itself."""
    return replace(
        schedule,
        ranks=tuple(
            tuple(
                part
                for p in rank
                for part in (
                    (
                        Pass(PassKind.B, p.stage, p.microbatch),
                        Pass(PassKind.W, p.stage, p.microbatch),
                    )
                    if p.kind is PassKind.BW
                    else (p,)
                )
            )
            for rank in schedule.ranks
        ),
    )
