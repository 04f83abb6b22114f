"""Lower bounds on the time of any order of token slices.

One microbatch is a grid of stages and slices: F of slice i on stage s depends on F(s - 1, i) and on
F(s, i - 1), and B in reverse. The critical path through the grid bounds the time of a step. Work,
waits and memory bound it as they bound whole microbatches (:mod:`bounds`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_zb.schedules.bounds import shortest
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.stage_costs import StageCosts

_F, _B, _W = PassKind.F, PassKind.B, PassKind.W
_O, _P, _V = PassKind.O, PassKind.P, PassKind.V


class _Microbatch:
    """Slices of one microbatch: ``rows[i]`` are the costs of slice i, shortened as far as any."""

    def __init__(self, rows: Sequence[StageCosts], *, joined: bool) -> None:
        self.rows, self._joined = [shortest(row) for row in rows], joined
        self.there = self._ways([(row.seconds[_F], row.latency[_F]) for row in self.rows])
        """By stage and slice, the seconds from the start of F to that of the first B."""
        self.back = self._ways([(row.seconds[_B], row.latency[_B][1:]) for row in self.rows])
        """By stage and slice, the seconds from the start of the first B to the end of B."""

    def _ways(self, rows: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[list[float]]:
        """Return the longest ways to the last stage and slice, by stage and slice.

        Args:
            rows: seconds of the passes of a slice, and of its messages to each next stage.
        """
        stages = len(rows[0][0])
        found = [[0.0] * len(rows) for _ in range(stages)]
        for s in reversed(range(stages)):
            for i, (seconds, latencies) in reversed([*enumerate(rows)]):
                later = found[s][i + 1] if i + 1 < len(rows) else 0.0
                onward = found[s + 1][i] + latencies[s] if s + 1 < stages else 0.0
                found[s][i] = seconds[s] + max(later, onward)
        return found

    def arrival(self, stage: int) -> float:
        """Return the earliest start of the first F of a stage."""
        first = self.rows[0]
        return sum(first.seconds[_F][s] + first.latency[_F][s] for s in range(stage))

    def first_backward(self, stage: int) -> float:
        """Return the earliest start of the first B of a stage."""
        return self.there[0][0] + self.back[stage][-1] - self.rows[-1].seconds[_B][stage]

    def after_forwards(self, stage: int) -> float:
        """Return the least seconds from the last F of a stage to the end of the step."""
        there = self.there[stage][-1] - self.rows[-1].seconds[_F][stage]
        return there + self.back[0][0] + self.rows[0].seconds[_W][0]

    def memory_time(self, stage: int) -> float:
        """Return the least memory times time of a stage's activations."""
        total, rest = 0.0, 0.0  # seconds from the end of B of a slice to that of the last slice
        for i, row in enumerate(self.rows):
            held = self.there[stage][i] + self.back[stage][i]
            total += row.memory["activation"][stage] * held
            weight = (self.rows[0] if self._joined else row).seconds[_W][stage]
            total += _left(row, stage) * (weight + self._joined * rest)
            rest += row.seconds[_B][stage]
        return total

    def left(self, stage: int) -> list[tuple[float, float]]:
        """Return seconds of B and W of a stage, and the memory that this much work has at least."""
        each = [
            (row.seconds[_B][stage], row.memory["activation"][stage], _left(row, stage))
            for row in self.rows
        ]
        if self._joined:
            return [_least_dense(each[::-1], self.rows[0].seconds[_W][stage])]
        rows = zip(each, self.rows, strict=True)
        return [_least_dense([slice_], row.seconds[_W][stage]) for slice_, row in rows]


def _left(row: StageCosts, stage: int) -> float:
    """Return the memory that a slice holds from B to W."""
    return row.memory["held_for_weight"][stage]


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
        whole = work + sum(count * _shard_work(it, placement, rank) for count, it in all_of)
        if not back_to_back:
            whole += first.arrival(stages[0])
        taken = sum(count * it.memory_time(s) for count, it in all_of for s in stages)
        found = max(found, whole, taken / limit[rank] if limit[rank] > 0 else 0.0)
        if not back_to_back:
            found = max(found, work + _waits(all_of, first, last, stages, limit[rank]))
    return found


_Counted = Sequence[tuple[int, _Microbatch]]


def _work(it: _Microbatch, stages: Sequence[int]) -> float:
    of_stage = ((row.seconds, s) for row in it.rows for s in stages)
    return sum(of[_F][s] + of[_B][s] + of[_W][s] for of, s in of_stage)


def _shard_work(it: _Microbatch, placement: Placement, rank: int) -> float:
    """Return the seconds of a rank's shard of the output layer, which may fill waits."""
    shards, at = [row.seconds for row in it.rows if _O in row.seconds], placement.num_stages + rank
    loss = sum(each[_P][-1] for each in shards) if rank == placement.rank_of[-1] else 0.0
    return loss + sum(each[_O][at] + each[_V][at] for each in shards)


def _waits(
    all_of: _Counted, first: _Microbatch, last: _Microbatch, stages: Sequence[int], limit: float
) -> float:
    """Return the least waits of a rank at both ends, as :mod:`bounds` has them."""
    pieces = [(count, it, s) for count, it in all_of for s in stages]
    forwards = [
        (row.seconds[_F][s], row.memory["activation"][s], count)
        for count, it, s in pieces
        for row in it.rows
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
