"""Lower bounds on the time of any order of slices on a placement within a memory limit.

As those of whole microbatches (:mod:`bounds`), with the order of slices: F of a microbatch pass the
stages as through a grid of stages and slices, then B pass it back, and the longest way through the
grid is the least time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.stage_costs import StageCosts


class _Microbatch:
    """Slices of one microbatch: ``rows[i]`` are the costs of slice i, shortened as far as any."""

    def __init__(self, rows: Sequence[StageCosts], *, joined: bool) -> None:
        self.rows, self._joined = [row.shortest() for row in rows], joined
        self.there = self._way_to_end()
        self.back = self._way_back()

    def _way_to_end(self) -> list[list[float]]:
        """Return by stage and slice the seconds from the start of F to that of the first B."""
        rows, stages = self.rows, len(self.rows[0].forward)
        found = [[0.0] * len(rows) for _ in range(stages)]
        for s in reversed(range(stages)):
            for i in reversed(range(len(rows))):
                later = found[s][i + 1] if i + 1 < len(rows) else 0.0
                onward = found[s + 1][i] + rows[i].forward_hop[s] if s + 1 < stages else 0.0
                found[s][i] = rows[i].forward[s] + max(later, onward)
        return found

    def _way_back(self) -> list[list[float]]:
        """Return by stage and slice the seconds from the start of the first B to the end of B."""
        rows, stages = self.rows, len(self.rows[0].backward)
        found = [[0.0] * len(rows) for _ in range(stages)]
        for s in reversed(range(stages)):
            for i in reversed(range(len(rows))):
                later = found[s][i + 1] if i + 1 < len(rows) else 0.0
                before = found[s + 1][i] + rows[i].backward_hop[s + 1] if s + 1 < stages else 0.0
                found[s][i] = rows[i].backward[s] + max(later, before)
        return found

    def arrival(self, stage: int) -> float:
        """Return the earliest start of the first F of a stage."""
        first = self.rows[0]
        return sum(first.forward[s] + first.forward_hop[s] for s in range(stage))

    def first_backward(self, stage: int) -> float:
        """Return the earliest start of the first B of a stage."""
        return self.there[0][0] + self.back[stage][-1] - self.rows[-1].backward[stage]

    def after_forwards(self, stage: int) -> float:
        """Return the least seconds from the last F of a stage to the end of the step."""
        there = self.there[stage][-1] - self.rows[-1].forward[stage]
        return there + self.back[0][0] + self.rows[0].weight[0]

    def memory_time(self, stage: int) -> float:
        """Return the least memory times time of a stage's activations."""
        total, rest = 0.0, 0.0  # seconds from the end of B of a slice to that of the last slice
        for i, row in enumerate(self.rows):
            held = self.there[stage][i] + self.back[stage][i]
            total += row.activation[stage] * held
            weight = self.rows[0] if self._joined else row
            total += row.held_for_weight[stage] * (weight.weight[stage] + self._joined * rest)
            rest += row.backward[stage]
        return total

    def left(self, stage: int) -> list[tuple[float, float]]:
        """Return seconds of B and W of a stage, and the memory that this much work has at least."""
        each = [
            (row.backward[stage], row.activation[stage], row.held_for_weight[stage])
            for row in self.rows
        ]
        if self._joined:
            return [_least_dense(each[::-1], self.rows[0].weight[stage])]
        rows = zip(each, self.rows, strict=True)
        return [_least_dense([slice_], row.weight[stage]) for slice_, row in rows]


def _least_dense(
    slices: Sequence[tuple[float, float, float]], weight: float
) -> tuple[float, float]:
    """Return the seconds of all B and their W, and their memory at its least per second left.

    Args:
        slices: seconds of B, memory before and after, in the order in which B runs.
        weight: seconds of W.
    """
    seconds = sum(backward for backward, _, _ in slices) + weight
    left, memory = seconds, sum(before for _, before, _ in slices)
    least = memory / left if left > 0 else 0.0
    for backward, before, after in slices:
        left, memory = left - backward, memory + after - before
        if left > 1e-9 * seconds:
            least = min(least, memory / left)
    return seconds, least * seconds


def sliced_bound(
    placement: Placement,
    costs: StageCosts,
    limit: Sequence[float],
    slices: int,
    *,
    joined: bool,
    back_to_back: bool = False,
) -> float:
    """Return a lower bound in seconds for any order; ``limit[r]`` is in units of activation.

    Args:
        placement: of the stages.
        costs: by unit, each one of ``slices`` of a microbatch.
        limit: the most memory of every rank.
        slices: of a microbatch.
        joined: one W for a microbatch.
        back_to_back: of one of many steps in a row, whose ends are filled by its neighbours.
    """
    rows = costs.microbatches
    groups = [rows[at : at + slices] for at in range(0, len(rows), slices)]
    counts = Counter(tuple(map(id, group)) for group in groups)
    made = {tuple(map(id, group)): _Microbatch(group, joined=joined) for group in groups}
    all_of = [(counts[key], it) for key, it in made.items()]
    first, last = (made[tuple(map(id, group))] for group in (groups[0], groups[-1]))
    found = 0.0
    for rank, stages in enumerate(placement.stages_of):
        work = sum(count * _work(it, stages) for count, it in all_of)
        taken = sum(count * it.memory_time(s) for count, it in all_of for s in stages)
        found = max(found, work, taken / limit[rank] if limit[rank] > 0 else 0.0)
        if not back_to_back:
            found = max(found, work + _waits(all_of, first, last, stages, limit[rank]))
    return found


_Counted = Sequence[tuple[int, _Microbatch]]


def _work(it: _Microbatch, stages: Sequence[int]) -> float:
    return sum(row.forward[s] + row.backward[s] + row.weight[s] for row in it.rows for s in stages)


def _waits(
    all_of: _Counted, first: _Microbatch, last: _Microbatch, stages: Sequence[int], limit: float
) -> float:
    """Return the least waits of a rank at both ends, as :mod:`bounds` has them."""
    pieces = [(count, it, s) for count, it in all_of for s in stages]
    forwards = [
        (row.forward[s], row.activation[s], count) for count, it, s in pieces for row in it.rows
    ]
    backwards = [(*piece, count) for count, it, s in pieces for piece in it.left(s)]
    before = max(
        first.arrival(stages[0]), first.first_backward(stages[-1]) - _most(limit, forwards)
    )
    after = max(0.0, last.after_forwards(stages[-1]) - _most(limit, backwards))
    holds_all = sum(memory * count for _, memory, count in forwards) <= limit
    return max(before, after) if holds_all else before + after


def _most(limit: float, pieces: Sequence[tuple[float, float, int]]) -> float:
    """Return the most seconds whose memory fits: ``(seconds, memory, count)`` of pieces."""
    total = 0.0
    for seconds, memory, count in sorted(pieces, key=lambda it: it[1] / it[0] if it[0] else 0.0):
        share = min(1.0, limit / (memory * count)) if memory > 0 else 1.0
        total += share * seconds * count
        limit -= share * memory * count
    return total
