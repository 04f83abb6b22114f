"""Places for E and G in a finished order: an embedding that is cut along the vocabulary.

Both take next to no time, so they change no other pass's place: E runs so early that what all ranks
have found is there when the first stage's F begins, G when its gradient has long come: nobody waits
for a G, and a rank should not wait in one because a pass of another has taken longer than expected.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.rules import EmbeddingRules, VocabularyRules
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import Timeline, simulate

_TURNS = 3
"""Of the longest pass and of a message: what E is ahead of F by, since a rank runs E only between
passes, the first stage's rank first and then the others."""


def with_embedding(schedule: Schedule, costs: Costs) -> Schedule:
    """Return a schedule of a cut output layer with the passes of a cut embedding."""
    rules = schedule.rules
    assert isinstance(rules, VocabularyRules)
    timeline = simulate(schedule, costs)
    ranks = tuple(
        _merged(schedule.ranks[rank], timeline.start[rank], _additions(timeline, rank))
        for rank in range(len(schedule.ranks))
    )
    return replace(schedule, ranks=ranks, rules=EmbeddingRules(rules.holders))


def _additions(timeline: Timeline, rank: int) -> list[tuple[float, Pass]]:
    """Return E and G of a rank with the seconds at which they are due, in order."""
    schedule, costs = timeline.schedule, timeline.costs
    placement, rules = schedule.placement, schedule.rules
    assert isinstance(rules, VocabularyRules)
    start, shard = placement.rank_of[0], placement.num_stages + rank
    longest = max(costs.duration(p) for order in schedule.ranks for p in order)
    assert costs.shards is not None
    turn = longest + costs.shards.from_first
    found = []
    times = zip(schedule.ranks[start], timeline.start[start], timeline.end[start], strict=True)
    for p, begin, end in times:
        if p.stage != 0:
            continue
        if p.kind is PassKind.F and (rank == start or rank in rules.holders):
            ahead = _TURNS * turn if rank == start else (_TURNS - 1) * turn
            found.append((begin - ahead, Pass(PassKind.E, shard, p.microbatch)))
        elif p.kind in (PassKind.B, PassKind.BW) and rank in rules.holders:
            arrival = end if rank == start else end + costs.shards.from_first + _TURNS * turn
            found.append((arrival, Pass(PassKind.G, shard, p.microbatch)))
    return sorted(found, key=lambda at: at[0])


def _merged(
    order: tuple[Pass, ...], starts: tuple[float, ...], added: list[tuple[float, Pass]]
) -> tuple[Pass, ...]:
    """Return an order with passes added before the first that starts no earlier than they."""
    merged, upcoming = [], iter(added)
    due = next(upcoming, None)
    for p, start in zip(order, starts, strict=True):
        while due is not None and due[0] <= start:
            merged.append(due[1])
            due = next(upcoming, None)
        merged.append(p)
    while due is not None:
        merged.append(due[1])
        due = next(upcoming, None)
    return tuple(merged)
