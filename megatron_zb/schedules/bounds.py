"""Lower bounds on the time of any schedule of a placement within a memory limit.

No order of passes can beat them, so the distance to them is the most that is left to gain. They
generalise the bound of *Pipeline Parallelism with Controllable Memory* (arXiv 2405.15362) to
unequal costs, links and memory, and to token slices: a microbatch is a grid of stages and slices, a
whole one has one slice. F of slice i on stage s depends on F(s - 1, i) and on F(s, i - 1), and B in
reverse, so the critical path through the grid bounds the time of a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import sub
from typing import NamedTuple, TypeAlias, TypeVar

from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.stage_costs import StageCosts, Table, communicates

_F, _B, _W, _BW, _R = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.R
_O, _P, _V = PassKind.O, PassKind.P, PassKind.V


class Grain(NamedTuple):
    """How units make microbatches: a number of slices each, with one W for all if ``joined``.

    ``routes`` are the stages that each unit visits, None where all units visit all stages in turn.
    """

    slices: int = 1
    joined: bool = False
    routes: tuple[tuple[int, ...], ...] | None = None


WHOLE = Grain()


def lower_bound(
    placement: Placement,
    num_units: int,
    costs: StageCosts,
    limit: Sequence[float],
    grain: Grain = WHOLE,
) -> float:
    """Return a lower bound in seconds for any schedule; ``limit[r]`` is in units of activation.

    For every rank, the largest of

    1. its work, with the wait until its first F or B, and the wait after its last F, when only what
       memory could hold is left to do;
    2. its work with that on its shard of an output layer that is sharded, which may fill these
       waits, and the time until its first F;
    3. Little's law: memory times time cannot be less than what all activations take.

    Communication that a pair can hide counts as work where nothing is there to hide it: before the
    first B, when all F run alone. Where activations can be recomputed, those are whose memory times
    time costs the fewest seconds. Where they can be offloaded, those that hold most for the seconds
    of their copies, as many as the copy engines carry; of slices, memory bounds no time then.
    """
    step = _Step(placement, costs, num_units, grain)
    if not costs.keeps_all and grain.slices == 1:
        return _bound_with_recompute_or_offload(step, limit)
    usable = _usable_limits(step, limit)
    return max(
        max(step.waits(rank, most), step.arrival(rank) + step.whole_work(rank), residency)
        for rank, (most, residency) in enumerate(zip(usable, step.residencies(usable), strict=True))
    )


def period_bound(
    placement: Placement,
    num_units: int,
    costs: StageCosts,
    limit: Sequence[float],
    grain: Grain = WHOLE,
) -> float:
    """Return a lower bound in seconds for each of many iterations with no barrier between them.

    The work of the busiest rank, and Little's law: waits at the ends of an iteration do not count,
    because the next one fills them.
    """
    step = _Step(placement, costs, num_units, grain)
    usable = _usable_limits(step, limit)
    return max(*map(step.whole_work, range(placement.pipeline_size)), *step.residencies(usable))


def _usable_limits(step: _Step, limit: Sequence[float]) -> Sequence[float]:
    if not step.costs.keeps_all:
        return (math.inf,) * len(limit)
    if step.grain.slices > 1:  # of other sizes, which fill any limit
        return limit
    return usable_limit(step.placement, step.num_units, step.costs, limit)


class _Microbatch:
    """Costs of the slices of one microbatch, shortened as far as any order could.

    Args:
        rows: costs of slice i.
        joined: one W runs for all slices, that of the first row.
        held: stages of each rank, counted along the way of the microbatch.
    """

    def __init__(
        self, rows: Sequence[StageCosts], held: Sequence[Sequence[int]], *, joined: bool = False
    ) -> None:
        self.rows, self.held, self._joined = [shortest(row) for row in rows], held, joined
        self.hiding = [hidden(row) for row in self.rows]

    @cached_property
    def there(self) -> list[list[float]]:
        """By stage and slice, the seconds from the start of F to that of the first B."""
        return self._ways([(row.seconds[_F], row.latency[_F]) for row in self.rows])

    @cached_property
    def back(self) -> list[list[float]]:
        """By stage and slice, the seconds from the start of the first B to the end of B."""
        return self._ways([(row.seconds[_B], row.latency[_B][1:]) for row in self.rows])

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

    def residency(self, stage: int, i: int) -> float:
        """Return the seconds from the start of F of a slice to the end of its B, at least."""
        return self.there[stage][i] + self.back[stage][i]

    def memory_time(self, stage: int) -> float:
        """Return the least memory times time of a stage's activations."""
        total, rest = 0.0, 0.0  # seconds from the end of B of a slice to that of the last slice
        for i, row in enumerate(self.rows):
            total += row.memory["activation"][stage] * self.residency(stage, i)
            weight = (self.rows[0] if self._joined else row).seconds[_W][stage]
            total += _left(row, stage) * (weight + self._joined * rest)
            rest += row.seconds[_B][stage]
        return total

    def forwards(self, stage: int) -> list[tuple[float, float]]:
        """Return seconds of F of a stage, and the memory that it takes."""
        return [(row.seconds[_F][stage], row.memory["activation"][stage]) for row in self.hiding]

    def backwards(self, stage: int) -> list[tuple[float, float]]:
        """Return seconds of B and W of a stage, and the memory that this much work has at least."""
        each = [
            (row.seconds[_B][stage], row.memory["activation"][stage], _left(row, stage))
            for row in self.hiding
        ]
        if self._joined:
            return [_least_dense(each[::-1], self.hiding[0].seconds[_W][stage])]
        rows = zip(each, self.hiding, strict=True)
        return [_least_dense([slice_], row.seconds[_W][stage]) for slice_, row in rows]

    def work(self, stage: int) -> float:
        """Return the seconds of F, B and W of a stage."""
        rows = (row.seconds for row in self.hiding)
        return sum(of[_F][stage] + of[_B][stage] + of[_W][stage] for of in rows)

    def shard_work(self, placement: Placement, rank: int) -> float:
        """Return the seconds of a rank's shard of the output layer."""
        shards = [row.seconds for row in self.rows if _O in row.seconds]
        at, is_end = placement.num_stages + rank, rank == placement.rank_of[-1]
        return sum(of[_O][at] + of[_V][at] + (of[_P][-1] if is_end else 0.0) for of in shards)

    def exposed(self, stages: Sequence[int]) -> float:
        """Return the smallest fraction of exposed communication in an F that is not paired."""
        return min(_exposed_share(row, s) for row in self.rows for s in stages)


class _Step:
    """All microbatches of a step, equal ones counted."""

    def __init__(
        self, placement: Placement, costs: StageCosts, num_units: int, grain: Grain
    ) -> None:
        self.placement, self.costs, self.grain, self.num_units = placement, costs, grain, num_units
        if grain.routes is not None:
            self._on_routes(grain.routes)
            return
        held = placement.stages_of
        if not costs.microbatches:
            one = _Microbatch([costs] * grain.slices, held, joined=grain.joined)
            self.counted, self.firsts, self.lasts = [(num_units // grain.slices, one)], [one], [one]
            return
        rows, n = costs.microbatches, grain.slices
        keys = [tuple(map(id, rows[at : at + n])) for at in range(0, len(rows), n)]
        row_of = {id(row): row for row in rows}
        made = {
            key: _Microbatch([row_of[each] for each in key], held, joined=grain.joined)
            for key in dict.fromkeys(keys)
        }
        self.counted = [(count, made[key]) for key, count in Counter(keys).items()]
        self.firsts, self.lasts = [made[keys[0]]], [made[keys[-1]]]

    def _on_routes(self, routes: Sequence[tuple[int, ...]]) -> None:
        """Count the units of each route and cost; the first and the last of a route bound it."""
        units = [(route, id(self.costs.of(j))) for j, route in enumerate(routes)]
        row_of = {id(row): row for row in (self.costs, *self.costs.microbatches)}
        made = {
            (route, row): _Microbatch(
                [_along(row_of[row], route)], _positions(self.placement, route)
            )
            for route, row in dict.fromkeys(units)
        }
        self.counted = [(count, made[key]) for key, count in Counter(units).items()]
        first = {route: made[route, row] for route, row in reversed(units)}
        last = {route: made[route, row] for route, row in units}
        self.firsts, self.lasts = list(first.values()), list(last.values())

    def arrival(self, rank: int) -> float:
        """Return the earliest start of a rank."""
        starts = (it.arrival(it.held[rank][0]) for it in self.firsts if it.held[rank])
        return min(starts, default=0.0)

    def work(self, rank: int) -> float:
        """Return the seconds of F, B and W of a rank."""
        return sum(count * sum(map(it.work, it.held[rank])) for count, it in self.counted)

    def whole_work(self, rank: int) -> float:
        """Return the seconds of all passes of a rank, with those of its shard."""
        more = (count * it.shard_work(self.placement, rank) for count, it in self.counted)
        return self.work(rank) + sum(more)

    def residencies(self, limit: Sequence[float]) -> list[float]:
        """Return the least seconds of each rank by Little's law."""
        taken = (
            sum(count * it.memory_time(s) for count, it in self.counted for s in it.held[rank])
            for rank in range(self.placement.pipeline_size)
        )
        return [of / most if most > 0 else 0.0 for of, most in zip(taken, limit, strict=True)]

    def waits(self, rank: int, limit: float) -> float:
        """Return the work of a rank and its waits at both ends.

        What only communicates at the beginning counts as a wait.
        """
        pieces = [(count, it, s) for count, it in self.counted for s in it.held[rank]]
        if not pieces:
            return 0.0
        forwards = [(count, *of) for count, it, s in pieces for of in it.forwards(s)]
        backwards = [(count, *of) for count, it, s in pieces for of in it.backwards(s)]
        ends = [[it for it in of if it.held[rank]] for of in (self.firsts, self.lasts)]
        arrival = self.arrival(rank)
        first = min(it.first_backward(it.held[rank][-1]) for it in ends[0])
        rest = min(it.after_forwards(it.held[rank][-1]) for it in ends[1])
        exposed = min(it.exposed(it.held[rank]) for _, it in self.counted)
        before = max(arrival + exposed * (first - arrival), first - _most(limit, forwards))
        after = max(0.0, rest - _most(limit, backwards))
        held = sum(count * memory for count, _, memory in forwards)
        holds_all = held <= limit * (1 + 1e-9)  # the limit may be a sum in another order
        return self.work(rank) + (max(before, after) if holds_all else before + after)


_Name = TypeVar("_Name", PassKind, str)


def _along(costs: StageCosts, route: Sequence[int]) -> StageCosts:
    """Return the costs of the stages of a route, in the order of F."""

    def along(tables: Mapping[_Name, Table]) -> dict[_Name, Table]:
        return {name: tuple(of[s] for s in route) for name, of in tables.items()}

    return replace(
        costs,
        seconds=along(costs.seconds),
        latency=along(costs.latency),
        memory=along(costs.memory),
        exchange=along(costs.exchange),
        microbatches=(),
    )


def _positions(placement: Placement, route: Sequence[int]) -> list[list[int]]:
    """Return the stages of a route that each rank has, counted along the route."""
    held: list[list[int]] = [[] for _ in range(placement.pipeline_size)]
    for position, stage in enumerate(route):
        held[placement.rank_of[stage]].append(position)
    return held


# --- recomputation and offload


def _bound_with_recompute_or_offload(step: _Step, limit: Sequence[float]) -> float:
    """Return a lower bound with recomputation and offload: two knapsacks for every rank.

    Fractional ones: of the seconds that the rank has for R, and of those of its copy engines. The
    waits at both ends are those without a limit, under which there may be more of them.
    """
    found = 0.0
    recomputes, offloads = _recompute_savings(step), _offload_savings(step)
    for rank, kept in enumerate(step.residencies((1.0,) * step.placement.pipeline_size)):
        found = max(found, step.waits(rank, math.inf))
        seconds = step.arrival(rank) + step.whole_work(rank)  # R may fill other waits

        def fits(time: float, rank: int = rank, kept: float = kept, work: float = seconds) -> bool:
            saved = _most_saved(recomputes[rank], time - work) + _most_saved(offloads[rank], time)
            return kept - saved <= limit[rank] * time

        found = max(found, _least_time(seconds, fits))
    return found


def _least_time(least: float, fits: Callable[[float], bool]) -> float:
    """Return a time from ``least`` on that is just too short to fit, or ``least`` if that fits."""
    if fits(least):
        return least
    short = long = least
    while not fits(long):
        if long > _NEVER * least:
            return long
        short, long = long, 2.0 * long
    for _ in range(_HALVINGS):
        middle = (short + long) / 2.0
        short, long = (short, middle) if fits(middle) else (middle, long)
    return short


_NEVER = 1e6  # times the least: nothing fits
_HALVINGS = 50


class _Saving(NamedTuple):
    """Memory times time that units of one stage can do without, and the seconds it takes."""

    saved: float
    seconds: float


def _most_saved(savings: Iterable[_Saving], seconds: float) -> float:
    """Return the most that is saved in the given seconds, parts of units included."""
    total = 0.0
    worthwhile = (s for s in savings if s.saved > 0)
    for saving in sorted(worthwhile, key=lambda s: s.seconds / s.saved):
        share = min(1.0, seconds / saving.seconds) if saving.seconds > 0 else 1.0
        total += share * saving.saved
        seconds -= share * saving.seconds
    return total


def _recompute_savings(step: _Step) -> list[list[_Saving]]:
    """Return the memory that R saves on each stage of each rank, and its seconds."""

    def saving(row: StageCosts, stage: int, held: float) -> tuple[float, float]:
        again = row.seconds[_R][stage]
        rest = row.memory["activation"][stage] - row.memory["kept_input"][stage]
        return rest * (held - again - row.seconds[_B][stage]), again

    return _savings(step, lambda row: "kept_input" in row.memory, saving)


def _offload_savings(step: _Step) -> list[list[_Saving]]:
    """Return the memory that offload saves on each stage of each rank, and an engine's seconds."""

    def saving(row: StageCosts, stage: int, held: float) -> tuple[float, float]:
        assert row.copies is not None
        copy = row.copies.seconds[stage]
        there = held - row.seconds[_F][stage] - 2.0 * copy - row.seconds[_B][stage]
        busy = copy if row.copies.full_duplex else 2.0 * copy
        return row.memory["activation"][stage] * there, busy

    return _savings(step, lambda row: row.copies is not None, saving)


def _savings(
    step: _Step,
    has: Callable[[StageCosts], bool],
    saving: Callable[[StageCosts, int, float], tuple[float, float]],
) -> list[list[_Saving]]:
    found: list[list[_Saving]] = [[] for _ in range(step.placement.pipeline_size)]
    for count, it in step.counted:
        (row,) = it.rows
        for stage in range(step.placement.num_stages - 1) if has(row) else ():
            saved, seconds = saving(row, stage, it.residency(stage, 0))
            found[step.placement.rank_of[stage]].append(_Saving(count * saved, count * seconds))
    return found


# --- costs and limits


def shortest(costs: StageCosts) -> StageCosts:
    """Return the costs with W shortened where a whole backward takes less than its halves."""
    tables = zip(*(costs.seconds[kind] for kind in (_W, _BW, _B)), strict=True)
    return costs.with_seconds(
        {_W: tuple(w if both >= b + w else max(0.0, both - b) for w, both, b in tables)}
    )


def hidden(costs: StageCosts) -> StageCosts:
    """Return the costs if every F and B hid all of its communication."""
    if not communicates(costs):
        return costs
    parts = {_F: costs.exchange[_F], _B: costs.exchange[_B], _BW: costs.exchange[_B]}
    seconds = {
        kind: tuple(map(sub, costs.seconds[kind], exchanged)) for kind, exchanged in parts.items()
    }
    return replace(costs.with_seconds(seconds), exchange={})


def earliest_starts(placement: Placement, costs: StageCosts) -> tuple[float, ...]:
    """Return the earliest start of the first microbatch on each rank, in seconds."""
    first = _Microbatch([costs.of(0)], placement.stages_of)
    return tuple(first.arrival(held[0]) for held in placement.stages_of)


def usable_limit(
    placement: Placement, num_microbatches: int, costs: StageCosts, limit: Sequence[float]
) -> tuple[float, ...]:
    """Return the part of each rank's limit that activations can fill: whole ones, at most all.

    Limits that differ only in what no schedule could use are the same problem.
    """
    if not costs.keeps_all:
        return tuple(limit)
    rows = costs.rows(num_microbatches)
    return tuple(
        _usable(rows, min(most, _all_activations(rows, held)), held)
        for most, held in zip(limit, placement.stages_of, strict=True)
    )


_Rows: TypeAlias = Sequence[tuple[int, StageCosts]]
"""Costs that microbatches have, each with the number of those that have it."""


def _all_activations(rows: _Rows, stages: Sequence[int]) -> float:
    return sum(count * sum(row.memory["activation"][s] for s in stages) for count, row in rows)


def _usable(rows: _Rows, limit: float, stages: Sequence[int]) -> float:
    """Return the part of a limit that whole activations fill, if all are equal and kept whole."""
    sizes = {
        size
        for _, row in rows
        for s in stages
        for size in (row.memory["activation"][s], row.memory["held_for_weight"][s])
    }
    if len(sizes) > 1 or not (size := sizes.pop()):
        return limit
    return size * math.floor(limit / size * (1 + 1e-9) + 1e-9)


def _exposed_share(costs: StageCosts, stage: int) -> float:
    """Return the fraction of exposed communication in an F that is not paired."""
    if _F not in costs.exchange or costs.seconds[_F][stage] <= 0:
        return 0.0
    return costs.exchange[_F][stage] / costs.seconds[_F][stage]


def _left(row: StageCosts, stage: int) -> float:
    """Return the memory that a unit holds from B to W."""
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


def _most(limit: float, items: Iterable[tuple[int, float, float]]) -> float:
    """Return the most seconds whose memory fits: ``(count, seconds, memory)`` of pieces."""
    total = 0.0
    for count, seconds, memory in sorted(items, key=lambda it: it[2] / it[1] if it[1] else 0.0):
        if memory * count <= limit:
            total += seconds * count
            limit -= memory * count
        elif memory > 0:
            total += seconds * limit / memory
            break
    return total
