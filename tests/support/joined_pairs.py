"""Schedules whose neighbours run as pairs, with R before them or not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from megatron_zb.schedules import Schedule
from megatron_zb.schedules.passes import Pass, PassKind


def joined(schedule: Schedule) -> Schedule:
    """Join every F with the backward of another unit right behind it, one after the other."""
    for passes in schedule.ranks:
        for p, behind in pairwise(passes):
            if (
                p.kind is PassKind.F
                and behind.kind in (PassKind.B, PassKind.BW)
                and p[1:] != behind[1:]
            ):
                more = replace(schedule, pairs=schedule.pairs | {p})
                schedule = schedule if more.blocked() else more
    return schedule.validate()


def dropping(schedule: Schedule) -> Schedule:
    """Recompute two of three microbatches, each right before its backward or the pair of this."""
    last = schedule.placement.num_stages - 1
    ranks = []
    for passes in schedule.ranks:
        line: list[Pass] = []
        for place, p in enumerate(passes):
            backward = passes[place + 1] if p in schedule.pairs else p
            is_second = place > 0 and passes[place - 1] in schedule.pairs
            is_due = backward.kind in (PassKind.B, PassKind.BW) and not is_second
            if is_due and backward.microbatch % 3 and backward.stage != last:
                line.append(backward._replace(kind=PassKind.R))
            line.append(p)
        ranks.append(tuple(line))
    return replace(schedule, ranks=tuple(ranks)).validate()
