"""Lower bounds on the time of any schedule of a placement within a memory limit.

No order of passes can beat them, so the distance to them is the most that is left to gain. They
generalise the bound of *Pipeline Parallelism with Controllable Memory* (arXiv 2405.15362) to
unequal costs, links and memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megatron_zb.schedules.costs import StageCosts
from megatron_zb.schedules.placement import Placement


def lower_bound(
    placement: Placement, num_microbatches: int, costs: StageCosts, limit: Sequence[float]
) -> float:
    """Return a lower bound in seconds for any schedule; ``limit[r]`` is in units of activation.

    For every rank: its work, the wait until its first F or B, and the wait after its last F, when
    only what memory could hold is left to do; and Little's law, by which memory times time cannot
    be less than what all activations take.
    """
    costs = costs.shortest()
    usable = usable_limit(placement, num_microbatches, costs, limit)
    return max(
        max(_waits(placement, num_microbatches, costs, usable[rank], rank), residency)
        for rank, residency in enumerate(_residencies(placement, num_microbatches, costs, usable))
    )


def period_bound(
    placement: Placement, num_microbatches: int, costs: StageCosts, limit: Sequence[float]
) -> float:
    """Return a lower bound in seconds for each of many iterations with no barrier between them.

    The work of the busiest rank, and Little's law: waits at the ends of an iteration do not count,
    because the next one fills them.
    """
    costs = costs.shortest()
    usable = usable_limit(placement, num_microbatches, costs, limit)
    work = (_work(num_microbatches, costs, held) for held in placement.stages_of)
    return max(*work, *_residencies(placement, num_microbatches, costs, usable))


def earliest_starts(placement: Placement, costs: StageCosts) -> tuple[float, ...]:
    """Return the earliest start of the first microbatch on each rank, in seconds."""
    return tuple(_forward_time(costs, 0, held[0]) for held in placement.stages_of)


def usable_limit(
    placement: Placement, num_microbatches: int, costs: StageCosts, limit: Sequence[float]
) -> tuple[float, ...]:
    """Return the part of each rank's limit that activations can fill: whole ones, at most all.

    Limits that differ only in what no schedule could use are the same problem.
    """
    return tuple(
        _usable(costs, min(most, num_microbatches * sum(costs.activation[s] for s in held)), held)
        for most, held in zip(limit, placement.stages_of, strict=True)
    )


def _usable(costs: StageCosts, limit: float, stages: Sequence[int]) -> float:
    """Return the part of a limit that whole activations fill, if all are equal and kept whole."""
    sizes = {costs.activation[s] for s in stages} | {costs.held_for_weight[s] for s in stages}
    if len(sizes) > 1 or not (size := sizes.pop()):
        return limit
    return size * math.floor(limit / size * (1 + 1e-9) + 1e-9)


def _waits(placement: Placement, m: int, costs: StageCosts, limit: float, rank: int) -> float:
    stages = placement.stages_of[rank]
    first, last = stages[0], stages[-1]
    work = _work(m, costs, stages)
    arrival = _forward_time(costs, 0, first)
    first_backward = _forward_time(costs, 0, placement.num_stages) + _backward_time(
        costs, placement.num_stages - 1, last
    )
    forwards = _most(m, limit, ((costs.forward[s], costs.activation[s]) for s in stages))
    before = max(arrival, first_backward - forwards)
    back = (
        _forward_time(costs, last + 1, placement.num_stages)
        + (costs.forward_hop[last] if last + 1 < placement.num_stages else 0.0)
        + _backward_time(costs, placement.num_stages - 1, -1)
        + costs.weight[0]
    )
    backwards = _most(
        m,
        limit,
        (
            (costs.backward[s] + costs.weight[s], min(costs.activation[s], _least(costs, s)))
            for s in stages
        ),
    )
    after = max(0.0, back - backwards)
    holds_all = m * sum(costs.activation[s] for s in stages) <= limit
    return work + (max(before, after) if holds_all else before + after)


def _work(m: int, costs: StageCosts, stages: Sequence[int]) -> float:
    return m * sum(costs.forward[s] + costs.backward[s] + costs.weight[s] for s in stages)


def _least(costs: StageCosts, stage: int) -> float:
    """Return the memory per (B+W) second at its densest: an activation, or what is kept after B."""
    backward, weight = costs.backward[stage], costs.weight[stage]
    if weight <= 0:
        return costs.activation[stage]
    return costs.held_for_weight[stage] * (backward + weight) / weight


def _most(m: int, limit: float, items: Iterable[tuple[float, float]]) -> float:
    """Return the most time whose memory fits: ``(seconds, memory)`` of m pieces of each item."""
    total = 0.0
    for seconds, memory in sorted(items, key=lambda item: item[1] / item[0] if item[0] else 0.0):
        if memory * m <= limit:
            total += seconds * m
            limit -= memory * m
        elif memory > 0:
            total += seconds * limit / memory
            break
    return total


def _forward_time(costs: StageCosts, start: int, stop: int) -> float:
    """Return the seconds from the start of F on stage ``start`` to its arrival at ``stop``."""
    return sum(costs.forward[s] + costs.forward_hop[s] for s in range(start, stop))


def _backward_time(costs: StageCosts, start: int, stop: int) -> float:
    """Return the seconds from the start of B on stage ``start`` down to its arrival at ``stop``."""
    return sum(costs.backward[s] + costs.backward_hop[s] for s in range(start, stop, -1))


def _residencies(
    placement: Placement, m: int, costs: StageCosts, limit: Sequence[float]
) -> Iterable[float]:
    last = placement.num_stages - 1
    taken = [0.0] * placement.pipeline_size
    there = back = 0.0  # from the end of F on stage s to the start of B on stage s
    for stage in range(last, -1, -1):
        between = there + back
        held = costs.forward[stage] + between + costs.backward[stage]
        kept = costs.held_for_weight[stage] * costs.weight[stage]
        taken[placement.rank_of[stage]] += m * (costs.activation[stage] * held + kept)
        if stage > 0:
            there += costs.forward[stage] + costs.forward_hop[stage - 1]
            back += costs.backward[stage] + costs.backward_hop[stage]
    for rank, memory_time in enumerate(taken):
        yield memory_time / limit[rank] if limit[rank] > 0 else 0.0
