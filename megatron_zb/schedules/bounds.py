"""Lower bounds on the time of any schedule of a placement within a memory limit.

No order of passes can beat them, so the distance to them is the most that is left to gain. They
generalise the bound of *Pipeline Parallelism with Controllable Memory* (arXiv 2405.15362) to
unequal costs, links and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import sub
from typing import NamedTuple, TypeAlias

from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.stage_costs import StageCosts, communicates

_F, _B, _W, _BW, _R = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.R
_O, _P, _V = PassKind.O, PassKind.P, PassKind.V


def lower_bound(
    placement: Placement, num_microbatches: int, costs: StageCosts, limit: Sequence[float]
) -> float:
    """Return a lower bound in seconds for any schedule; ``limit[r]`` is in units of activation.

    For every rank: its work, the wait until its first F or B, and the wait after its last F, when
    only what memory could hold is left to do; its work with that on its shard of an output layer
    that is sharded, which may fill these waits, and the time until its first F; and Little's law,
    by which memory times time cannot be less than what all activations take. Communication that a
    pair can hide counts as work where nothing is there to hide it: before the first B, when all F
    run alone. Where activations can be recomputed, those are whose memory times time costs the
    fewest seconds. Where they can be offloaded, those that hold most for the seconds of their
    copies, as many as the copy engines carry.
    """
    if not costs.keeps_all:
        return _bound_with_recompute_or_offload(placement, num_microbatches, costs, limit)
    usable = usable_limit(placement, num_microbatches, costs, limit)
    rows = _shortest_rows(costs, num_microbatches)
    ends = shortest(costs.of(0)), shortest(costs.of(num_microbatches - 1))
    starts = earliest_starts(placement, costs)
    return max(
        max(
            _waits(placement, rows, ends, usable[rank], rank),
            starts[rank] + _whole_work(placement, _hidden(rows), rank),
            residency,
        )
        for rank, residency in enumerate(_residencies(placement, rows, usable))
    )


def period_bound(
    placement: Placement, num_microbatches: int, costs: StageCosts, limit: Sequence[float]
) -> float:
    """Return a lower bound in seconds for each of many iterations with no barrier between them.

    The work of the busiest rank, and Little's law: waits at the ends of an iteration do not count,
    because the next one fills them.
    """
    usable = usable_limit(placement, num_microbatches, costs, limit)
    rows = _shortest_rows(costs, num_microbatches)
    hiding = _hidden(rows)
    if not costs.keeps_all:
        usable = (math.inf,) * placement.pipeline_size
    work = (_whole_work(placement, hiding, rank) for rank in range(placement.pipeline_size))
    return max(*work, *_residencies(placement, rows, usable))


def _bound_with_recompute_or_offload(
    placement: Placement, num_microbatches: int, costs: StageCosts, limit: Sequence[float]
) -> float:
    """Return a lower bound with recomputation and offload: two knapsacks for every rank.

    Fractional ones: of the seconds that the rank has for R, and of those of its copy engines. The
    waits at both ends are those without a limit, under which there may be more of them.
    """
    rows = _shortest_rows(costs, num_microbatches)
    ends = shortest(costs.of(0)), shortest(costs.of(num_microbatches - 1))
    starts, hiding = earliest_starts(placement, costs), _hidden(rows)
    found = 0.0
    recomputes, offloads = _recompute_savings(placement, rows), _offload_savings(placement, rows)
    for rank, kept in enumerate(_residencies(placement, rows, (1.0,) * placement.pipeline_size)):
        found = max(found, _waits(placement, rows, ends, math.inf, rank))
        seconds = starts[rank] + _whole_work(placement, hiding, rank)  # R may fill other waits

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
    """Return the most that is saved in so many seconds, parts of units included."""
    total = 0.0
    worthwhile = (s for s in savings if s.saved > 0)
    for saving in sorted(worthwhile, key=lambda s: s.seconds / s.saved):
        share = min(1.0, seconds / saving.seconds) if saving.seconds > 0 else 1.0
        total += share * saving.saved
        seconds -= share * saving.seconds
    return total


def _recompute_savings(placement: Placement, rows: _Rows) -> list[list[_Saving]]:
    """Return the memory that R saves on each stage of each rank, and its seconds."""

    def saving(row: StageCosts, stage: int, held: float) -> tuple[float, float]:
        again = row.seconds[_R][stage]
        rest = row.memory["activation"][stage] - row.memory["kept_input"][stage]
        return rest * (held - again - row.seconds[_B][stage]), again

    return _savings(placement, [it for it in rows if "kept_input" in it[1].memory], saving)


def _offload_savings(placement: Placement, rows: _Rows) -> list[list[_Saving]]:
    """Return the memory that offload saves on each stage of each rank, and an engine's seconds."""

    def saving(row: StageCosts, stage: int, held: float) -> tuple[float, float]:
        assert row.copies is not None
        copy = row.copies.seconds[stage]
        there = held - row.seconds[_F][stage] - 2.0 * copy - row.seconds[_B][stage]
        busy = copy if row.copies.full_duplex else 2.0 * copy
        return row.memory["activation"][stage] * there, busy

    return _savings(placement, [it for it in rows if it[1].copies is not None], saving)


def _savings(
    placement: Placement,
    rows: _Rows,
    saving: Callable[[StageCosts, int, float], tuple[float, float]],
) -> list[list[_Saving]]:
    last = placement.num_stages - 1
    found: list[list[_Saving]] = [[] for _ in range(placement.pipeline_size)]
    for count, row in rows:
        for stage, (held, _) in enumerate(_residency(placement, row)[:last]):
            saved, seconds = saving(row, stage, held)
            found[placement.rank_of[stage]].append(_Saving(count * saved, count * seconds))
    return found


_Rows: TypeAlias = Sequence[tuple[int, StageCosts]]
"""Costs that microbatches have, each with the number of those that have it."""


def _shortest_rows(costs: StageCosts, num_microbatches: int) -> _Rows:
    return [(count, shortest(row)) for count, row in costs.rows(num_microbatches)]


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


def _hidden(rows: _Rows) -> _Rows:
    return [(count, hidden(row)) for count, row in rows]


def earliest_starts(placement: Placement, costs: StageCosts) -> tuple[float, ...]:
    """Return the earliest start of the first microbatch on each rank, in seconds."""
    return tuple(_forward_time(costs.of(0), 0, held[0]) for held in placement.stages_of)


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


def _waits(
    placement: Placement, rows: _Rows, ends: tuple[StageCosts, StageCosts], limit: float, rank: int
) -> float:
    """Return the work of a rank and its waits at both ends, for the first and last microbatch.

    What only communicates at the beginning counts as a wait.
    """
    first, last = ends
    hiding = _hidden(rows)
    stages, stop = placement.stages_of[rank], placement.num_stages
    arrival = _forward_time(first, 0, stages[0])
    first_backward = _forward_time(first, 0, stop) + _backward_time(first, stop - 1, stages[-1])
    forwards = _most(
        limit,
        (
            (count, row.seconds[_F][s], row.memory["activation"][s])
            for count, row in hiding
            for s in stages
        ),
    )
    exposed = min(_exposed_share(row, s) for _, row in rows for s in stages)
    before = max(arrival + exposed * (first_backward - arrival), first_backward - forwards)
    back = (
        _forward_time(last, stages[-1] + 1, stop)
        + (last.latency[_F][stages[-1]] if stages[-1] + 1 < stop else 0.0)
        + _backward_time(last, stop - 1, -1)
        + last.seconds[_W][0]
    )
    backwards = _most(
        limit,
        (
            (
                count,
                row.seconds[_B][s] + row.seconds[_W][s],
                min(row.memory["activation"][s], _least(row, s)),
            )
            for count, row in hiding
            for s in stages
        ),
    )
    after = max(0.0, back - backwards)
    holds_all = _all_activations(rows, stages) <= limit
    return _work(hiding, stages) + (max(before, after) if holds_all else before + after)


def _exposed_share(costs: StageCosts, stage: int) -> float:
    """Return the share of F by itself in which it only communicates."""
    if _F not in costs.exchange or costs.seconds[_F][stage] <= 0:
        return 0.0
    return costs.exchange[_F][stage] / costs.seconds[_F][stage]


def _work(rows: _Rows, stages: Sequence[int]) -> float:
    return sum(
        count * sum(row.seconds[_F][s] + row.seconds[_B][s] + row.seconds[_W][s] for s in stages)
        for count, row in rows
    )


def _whole_work(placement: Placement, rows: _Rows, rank: int) -> float:
    """Return the seconds of all passes of a rank, with those of its shard of the vocabulary."""
    total = _work(rows, placement.stages_of[rank])
    stages = placement.num_stages
    for count, row in rows:
        if _O in row.seconds:
            loss = row.seconds[_P][-1] if rank == placement.rank_of[-1] else 0.0
            shard = row.seconds[_O][stages + rank] + row.seconds[_V][stages + rank]
            total += count * (shard + loss)
    return total


def _least(costs: StageCosts, stage: int) -> float:
    """Return the memory per (B+W) second at its densest: an activation, or what is kept after B."""
    backward, weight = costs.seconds[_B][stage], costs.seconds[_W][stage]
    if weight <= 0:
        return costs.memory["activation"][stage]
    return costs.memory["held_for_weight"][stage] * (backward + weight) / weight


def _most(limit: float, items: Iterable[tuple[int, float, float]]) -> float:
    """Return the most time whose memory fits: ``(count, seconds, memory)`` of pieces."""
    total = 0.0
    for count, seconds, memory in sorted(items, key=lambda it: it[2] / it[1] if it[1] else 0.0):
        if memory * count <= limit:
            total += seconds * count
            limit -= memory * count
        elif memory > 0:
            total += seconds * limit / memory
            break
    return total


def _forward_time(costs: StageCosts, start: int, stop: int) -> float:
    """Return the seconds from the start of F on stage ``start`` to its arrival at ``stop``."""
    seconds, latency = costs.seconds[_F], costs.latency[_F]
    last = len(seconds) - 1  # what it sends to shards is no way of a microbatch through the stages
    return sum(seconds[s] + (latency[s] if s < last else 0.0) for s in range(start, stop))


def _backward_time(costs: StageCosts, start: int, stop: int) -> float:
    """Return the seconds from the start of B on stage ``start`` down to its arrival at ``stop``."""
    seconds, latency = costs.seconds[_B], costs.latency[_B]
    return sum(seconds[s] + (latency[s] if s > 0 else 0.0) for s in range(start, stop, -1))


def _residency(placement: Placement, row: StageCosts) -> list[tuple[float, float]]:
    """Return of every stage the seconds from the start of F to the end of B, at least.

    Beside them, memory times time of what is still held for W after that.
    """
    found = []
    there = back = 0.0  # from the end of F on stage s to the start of B on stage s
    for stage in range(placement.num_stages - 1, -1, -1):
        between = there + back
        held = row.seconds[_F][stage] + between + row.seconds[_B][stage]
        found.append((held, row.memory["held_for_weight"][stage] * row.seconds[_W][stage]))
        if stage > 0:
            there += row.seconds[_F][stage] + row.latency[_F][stage - 1]
            back += row.seconds[_B][stage] + row.latency[_B][stage]
    return found[::-1]


def _residencies(placement: Placement, rows: _Rows, limit: Sequence[float]) -> Iterable[float]:
    taken = [0.0] * placement.pipeline_size
    for count, row in rows:
        for stage, (held, after) in reversed(list(enumerate(_residency(placement, row)))):
            taken[placement.rank_of[stage]] += count * (
                row.memory["activation"][stage] * held + after
            )
    for rank, memory_time in enumerate(taken):
        yield memory_time / limit[rank] if limit[rank] > 0 else 0.0
