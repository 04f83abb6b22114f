"""Offload: the host holds the activation of a unit between its F and its B.

As in *PipeOffload* (arXiv 2503.01328), units that are held longest are offloaded first. Both ends
of an offload have their place in the order, so that memory is kept whatever a copy takes. Then
passes trade places, and units are offloaded or kept. Every candidate is simulated as a whole, which
is for small problems; the effort is counted only from sizes, so that every rank of a job finds the
same.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import (
    Costs,
    Scale,
    by_slice,
    check_table,
    filled,
    resampled,
    times,
)
from megatron_zb.schedules.features.recompute_or_offload import (
    RecomputeOrOffload,
    drops_last_stage,
    one_at_a_time,
    with_early_weights,
)
from megatron_zb.schedules.memory import Interval, keep
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Limit, Request, keeps
from megatron_zb.schedules.rules import TrainingRules
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.search.place_w import fuse_for_free, split_all
from megatron_zb.schedules.search.placement_search import LimitedSearch, PlacementSearch
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.simulator import Timeline, simulate
from megatron_zb.schedules.stage_costs import HostCopies, Priced, StageCosts

_POLISHED = 2  # orders with offload, the fastest ones
_RECOMPUTED = (0.15, 0.3, 0.45)  # shares of units, where copies of all would take too long
_BUSY = 0.5  # of the makespan: a copy engine that others may wait for


@dataclass(frozen=True)
class Offload(RecomputeOrOffload):
    """The choice to offload activations, and to reload them before B.

    Args:
        seconds: what copying an activation one way takes, of each slice, or one number for a
            microbatch on one whole rank; longer where ranks share a link to the host.
        full_duplex: whether the copies of both directions run at once without slowing down.
        host_limit: memory of the host for each rank, in the unit of activation.
    """

    name: ClassVar[str] = "offload"

    seconds: float | Sequence[float]
    full_duplex: bool = True
    host_limit: float = math.inf

    def completed(self, costs: Costs) -> Offload:
        """Return the feature with the seconds of each slice.

        Raises:
            UsageError: a value is negative or not finite, or there is not one for each slice.
        """
        if not self.host_limit >= 0:
            raise UsageError(f"costs: host_limit is {self.host_limit}: give memory of 0 or more")
        seconds = by_slice(costs, self.seconds)
        check_table("copy", seconds, len(costs.seconds[PassKind.F]))
        return replace(self, seconds=seconds)

    def scaled(self, scale: Scale) -> Offload:
        return replace(self, seconds=times(filled(self.seconds), scale.tokens))

    def placed(self, costs: Costs, placement: Placement, table: StageCosts) -> StageCosts:
        seconds = resampled(filled(self.seconds), placement.num_stages)
        copies = HostCopies(seconds, self.full_duplex, self.host_limit)
        return replace(table, copies=copies)

    def starting_orders(
        self, name: str, placement: Placement, request: Request
    ) -> Iterable[Schedule]:
        """Return orders to offload from, which hold more than the limit, and less.

        Of slices, which are many, one is enough.
        """
        p, free = request.pipeline_size, replace(request, limit=Limit())
        for held in (p, p / 2 + 1, p / 3 + 1) if request.rules.units_at_once == 1 else (p,):
            yield PlacementSearch(name, placement, free, request.peak(held)).run()

    def in_place(self, order: Schedule, request: Request, problem: Problem) -> Iterable[Schedule]:
        """Return the order with the offload that keeps the limit."""
        found = place_offload(split_all(order), request.costs, problem.limit)
        return [] if found is None else [found]

    def within_limit(self, search: LimitedSearch) -> Iterable[Schedule]:
        return _offloaded(search.starts, search)

    def last_resort(self, search: LimitedSearch) -> Iterable[Schedule]:
        return _offloaded([one_at_a_time(search.problem)], search)


def _offloaded(orders: Sequence[Schedule], search: LimitedSearch) -> list[Schedule]:
    """Return known orders that keep the limit with offload; each B is split, its W right behind.

    A W that comes later holds what offload is to free. Where copies take much of the time, some
    units of the fastest order are recomputed instead, if that is allowed.
    """
    request, limit = search.request, search.problem.limit
    split = [split_all(order) for order in orders]
    if request.rules.units_at_once > 1:  # W of slices are many, and may come late
        split += [early for it in split if (early := with_early_weights(it)).ranks != it.ranks]
    offloaded = [place_offload(order, request.costs, limit) for order in split]
    for order, found in zip([*split], [*offloaded], strict=True):
        early = with_early_weights(order)  # what waits for W is not offloaded
        if found is None and early.ranks != order.ranks:
            split.append(early)
            offloaded.append(place_offload(early, request.costs, limit))
    timelines = [(simulate(s, request.costs), i) for i, s in enumerate(offloaded) if s is not None]
    if "kept_input" in search.problem.costs.memory and timelines:
        fastest, at = min(timelines, key=lambda entry: request.seconds(entry[0]))
        if _waits_for_copies(fastest):
            fewer = (with_recomputed(split[at], share) for share in _RECOMPUTED)
            offloaded += [place_offload(order, request.costs, limit) for order in fewer]
    kept = [s for s in split if keeps(simulate(s, request.costs).peak_memory, limit)]
    starts = [*filter(None, offloaded), *kept]
    starts.sort(key=lambda start: request.seconds(simulate(start, request.costs)))
    bound = search.bound
    polished = (polish_offload(s, request.costs, limit, bound) for s in starts[:_POLISHED])
    fitting = [*polished, *starts[_POLISHED:]]
    return [replace(fuse_for_free(s, request.costs), name=search.name) for s in fitting]


def _waits_for_copies(timeline: Timeline) -> bool:
    """Return whether a copy engine of a rank works so long that others may wait for it."""
    busy = [
        sum(copy.end - copy.start for copy in copies if copy.to_host is to_host)
        for copies in timeline.copies
        for to_host in (True, False)
    ]
    return max(busy, default=0.0) > _BUSY * timeline.makespan


# --- places in a known order


_BACKWARD = (PassKind.B, PassKind.BW)
_EARLIER = (0.0, 0.5, 1.0, 2.0)  # than needed, in copies: where a wait would hold up others
_TURNS = 3  # in each, units come back when the timeline of the one before needs them
_ROUNDING = 1 + 1e-9


def place_offload(schedule: Schedule, costs: Priced, limit: Sequence[float]) -> Schedule | None:
    """Return an order with the offload that keeps the limit, in as little time as a few turns find.

    Args:
        schedule: an order in which no activation is offloaded, whatever it holds.
        costs: those with :class:`Offload`.
        limit: memory of each rank, in units of activation.

    None where offload does not keep the limit, or the host cannot hold what it would.
    """
    found = [
        offloaded
        for earlier in _EARLIER
        if (offloaded := _in_turns(schedule, costs, limit, earlier)) is not None
    ]
    best = min(found, key=lambda timeline: timeline.makespan, default=None)
    return best.schedule if best is not None else None


def with_recomputed(schedule: Schedule, share: float) -> Schedule:
    """Return the order with an R right before the B of a share of the units of each stage."""
    last = schedule.placement.num_stages - 1

    def passes(p: Pass) -> Iterator[Pass]:
        recomputed = int((p.microbatch + 1) * share) > int(p.microbatch * share)
        if p.kind in _BACKWARD and p.stage != last and recomputed:
            yield Pass(PassKind.R, *_unit(p))
        yield p

    ranks = tuple(tuple(q for p in rank for q in passes(p)) for rank in schedule.ranks)
    return replace(schedule, ranks=ranks)


def _in_turns(
    schedule: Schedule, costs: Priced, limit: Sequence[float], earlier: float
) -> Timeline | None:
    timeline, best = simulate(schedule, costs), None
    for _ in range(_TURNS):
        placed = [_Line(timeline, rank, most).placed(earlier) for rank, most in enumerate(limit)]
        ranks = [rank for rank in placed if rank is not None]
        if len(ranks) < len(placed):
            break
        timeline = simulate(replace(schedule, ranks=tuple(ranks)), costs)
        if max(timeline.peak_host) > _host_limit(timeline) * _ROUNDING:
            break
        if best is None or timeline.makespan < best.makespan:
            best = timeline
    return best


def _host_limit(timeline: Timeline) -> float:
    copies = timeline.costs.copies
    return float("inf") if copies is None else copies.limit


def _copy_seconds(costs: StageCosts, stage: int) -> float:
    return 0.0 if costs.copies is None else costs.copies.seconds[stage]


def _unit(p: Pass) -> tuple[int, int]:
    return p.stage, p.microbatch


class _Line:
    """Passes of one rank, with the times of a timeline, while moves are put in."""

    def __init__(self, timeline: Timeline, rank: int, limit: float) -> None:
        schedule, costs = timeline.schedule, timeline.costs
        assert isinstance(schedule.rules, TrainingRules)
        drops_all = drops_last_stage(schedule.rules)
        kept = None if drops_all else schedule.placement.num_stages - 1
        times = zip(schedule.ranks[rank], timeline.start[rank], timeline.end[rank], strict=True)
        rest = [it for it in times if it[0].kind not in (PassKind.D, PassKind.H)]
        self._passes = [p for p, _, _ in rest]
        self._ends = [end for _, _, end in rest]
        self._limit = limit * _ROUNDING
        self._change = {p: schedule.memory_change(p, costs) for p in self._passes}
        freed = (Pass(PassKind.D, *_unit(p)) for p in self._passes if p.kind is PassKind.F)
        self._size = {_unit(p): -schedule.memory_change(p, costs) for p in freed}
        self._forward_end = {_unit(p): end for p, _, end in rest if p.kind is PassKind.F}
        self._backwards = [
            (_unit(p), i, start)
            for i, (p, start, _) in enumerate(rest)
            if p.kind in _BACKWARD and p.stage != kept and _unit(p) not in schedule.recomputed
        ]
        self._copy = {u: _copy_seconds(costs.of(u[1]), u[0]) for u, _, _ in self._backwards}

    def placed(self, earlier: float) -> tuple[Pass, ...] | None:
        """Return the passes with D and H of offloaded units, None above the limit."""
        line = self._with_fetches(earlier)
        if line is None:
            return None
        line = self._without_needless(line)
        return tuple(self._with_releases(line))

    def _shortest_lives_first(self) -> list[tuple[int, int]]:
        lives = sorted(
            (start - self._forward_end[unit], unit) for unit, _, start in self._backwards
        )
        return [unit for _, unit in lives]

    def _wanted(self) -> Iterator[tuple[tuple[int, int], int, float]]:
        """Yield every unit, the place of its B, and when its copy should begin: as late as it can.

        In the order of B; no B waits then, as long as there is memory.
        """
        free, wanted = float("inf"), []
        for unit, place, start in reversed(self._backwards):
            free = min(free, start) - self._copy[unit]
            wanted.append((unit, place, free))
        yield from reversed(wanted)

    def _with_fetches(self, earlier: float) -> list[Pass] | None:
        """Return the passes with an H of each unit: when it is wanted, or later, when it fits."""
        wanted, line, held = deque(self._wanted()), list[Pass](), 0.0
        offloaded, ran = {unit for unit, _, _ in self._backwards}, set[tuple[int, int]]()
        for i, p in enumerate(self._passes):
            while wanted and wanted[0][0] in ran:
                unit, place, begin = wanted[0]
                fits = held + self._most(offloaded, i, place) + self._size[unit] <= self._limit
                begin -= earlier * self._copy[unit]
                if place > i and not (fits and begin < self._ends[i]):
                    break
                line.append(Pass(PassKind.H, *unit))
                held += self._size[unit]
                wanted.popleft()
            line.append(p)
            if held + max(0.0, self._change[p]) > self._limit:
                return None
            held += self._after(p, offloaded)
            if p.kind is PassKind.F:
                ran.add(_unit(p))
        return line

    def _after(self, p: Pass, offloaded: set[tuple[int, int]]) -> float:
        """Return what a pass leaves on the device, if the copies of offloaded units have ended."""
        is_offloaded = p.kind is PassKind.F and _unit(p) in offloaded
        return self._change[p] - self._size[_unit(p)] * is_offloaded

    def _most(self, offloaded: set[tuple[int, int]], start: int, stop: int) -> float:
        """Return the most memory that the passes from one place to another add to what is held."""
        held = most = 0.0
        for p in self._passes[start:stop]:
            most = max(most, held + self._change[p])
            held += self._after(p, offloaded)
        return max(most, held)

    def _without_needless(self, line: Sequence[Pass]) -> list[Pass]:
        """Leave out the H of units that can stay on the device, those of the shortest lives first.

        A unit that stays adds its size to what is held from its F to where its H was.
        """
        place = {p: i for i, p in enumerate(line)}

        def span(unit: tuple[int, int]) -> Interval:
            start, fetch = place[Pass(PassKind.F, *unit)], place[Pass(PassKind.H, *unit)]
            return Interval(start + 1, fetch, self._size[unit])

        units = ((unit, span(unit)) for unit in self._shortest_lives_first())
        stay = keep(self._held(line), units, self._limit)
        return [p for p in line if p.kind is not PassKind.H or _unit(p) not in stay]

    def _held(self, line: Sequence[Pass]) -> npt.NDArray[np.float64]:
        """Return what is held at most in each pass, if all copies of what it moves have ended."""
        offloaded, held, most = {_unit(p) for p in line if p.kind is PassKind.H}, 0.0, []
        for p in line:
            if p.kind is PassKind.H:
                during = after = held + self._size[_unit(p)]
            else:
                during, after = held + self._change[p], held + self._after(p, offloaded)
            most.append(max(during, after))
            held = after
        return np.array(most)

    def _with_releases(self, line: Sequence[Pass]) -> Iterator[Pass]:
        """Yield the passes with a D of each offloaded unit right where its memory is needed.

        A unit whose memory nobody needs until it would come back is kept.
        """
        offloaded, held = {_unit(p) for p in line if p.kind is PassKind.H}, 0.0
        on_device: deque[tuple[int, int]] = deque()
        for p in line:
            unit = _unit(p)
            if p.kind is PassKind.H and unit in on_device:
                on_device.remove(unit)
                continue
            change = self._size[unit] if p.kind is PassKind.H else self._change[p]
            while change > 0.0 and held + change > self._limit and on_device:
                yield Pass(PassKind.D, *on_device[0])
                held -= self._size[on_device.popleft()]
            yield p
            held += change
            if p.kind is PassKind.F and unit in offloaded:
                on_device.append(unit)


# --- local search


_PASSES = 800_000  # simulated in all
_LARGEST = 200  # passes of a schedule that is worth it
_THRESHOLD = 0.75  # the loss that is accepted at first in each round, in mean passes
_ROUNDS = 4
_FARTHEST = 8  # places that a pass goes at once
_OFFLOAD_CHANGES = 0.25  # share of candidates in which a unit is offloaded, or no longer
_FURTHER = 0.5  # share of changes that another one follows
_OFFLOAD = (PassKind.D, PassKind.H)


def polish_offload(
    schedule: Schedule, costs: Priced, limit: Sequence[float], bound: float
) -> Schedule:
    """Return an order with offload that keeps the limit in no more time than this one.

    Args:
        schedule: an order with offload that keeps the limit; large ones are returned as they are.
        bound: a makespan at which nothing is left to gain.
    """
    size = sum(map(len, schedule.ranks))
    if size > _LARGEST:
        return schedule
    return _Polish(schedule, costs, limit).run(_PASSES // size, bound)


class _Polish:
    def __init__(self, schedule: Schedule, costs: Priced, limit: Sequence[float]) -> None:
        self._costs, self._limit = costs, limit
        self._rng = random.Random(0)
        self._best = self._now = simulate(schedule, costs)
        self._last = schedule.placement.num_stages - 1

    def run(self, turns: int, bound: float) -> Schedule:
        for turn in range(turns):
            if self._best.makespan <= bound * (1 + 1e-9):
                break
            left = 1 - (turn * _ROUNDS / turns) % 1.0
            threshold = _THRESHOLD * self._mean_pass() * left
            found = self._tried(self._candidate())
            if found is None or found.makespan > self._best.makespan + threshold:
                continue
            self._now = found
            if found.makespan < self._best.makespan - 1e-9:
                self._best = found
        return self._best.schedule

    def _mean_pass(self) -> float:
        passes = sum(map(len, self._best.schedule.ranks))
        busy = sum(self._best.costs.duration(p) for rank in self._best.schedule.ranks for p in rank)
        return busy / passes

    def _tried(self, candidate: Schedule | None) -> Timeline | None:
        """Return the timeline of a candidate that is valid and keeps the limits."""
        if candidate is None:
            return None
        try:
            timeline = simulate(candidate.validate(), self._costs)
        except InvalidSchedule:
            return None
        on_host = [_host_limit(timeline)] * len(self._limit)
        fits = keeps(timeline.peak_memory, self._limit) and keeps(timeline.peak_host, on_host)
        return timeline if fits else None

    def _candidate(self) -> Schedule | None:
        """Return the present order with some changes, None where one breaks a rank's order."""
        lines = [list(rank) for rank in self._now.schedule.ranks]
        while True:
            line = self._rng.choice(lines)
            if self._rng.random() < _OFFLOAD_CHANGES:
                self._change_offload(line)
            elif not self._shift(line):
                return None
            if self._rng.random() >= _FURTHER:
                return replace(self._now.schedule, ranks=tuple(map(tuple, lines)))

    def _shift(self, line: list[Pass]) -> bool:
        """Shift one pass by a few positions; return False if that is illegal."""
        start = self._rng.randrange(len(line))
        stop = start + self._rng.choice((-1, 1)) * self._rng.randint(1, _FARTHEST)
        if not 0 <= stop < len(line):
            return False
        p = line.pop(start)
        line.insert(stop, p)
        passed = line[min(start, stop) : max(start, stop) + 1]
        return not any(q is not p and _in_turn(p, q) for q in passed)

    def _change_offload(self, line: list[Pass]) -> None:
        """Keep an offloaded unit, or offload one that is kept, for any part of its time."""
        backward = (PassKind.B, PassKind.BW)
        b = self._rng.choice([p for p in line if p.kind in backward])
        unit = b[1:]
        moves = [p for p in line if p[1:] == unit and p.kind in _OFFLOAD]
        if moves:
            line[:] = [p for p in line if p not in moves]
        elif b.stage != self._last and Pass(PassKind.R, *unit) not in line:
            first, last = line.index(Pass(PassKind.F, *unit)) + 1, line.index(b)
            out, back = sorted(self._rng.randint(first, last) for _ in range(2))
            line.insert(back, Pass(PassKind.H, *unit))
            line.insert(out, Pass(PassKind.D, *unit))


def _in_turn(p: Pass, q: Pass) -> bool:
    """Return whether one of two passes of a rank has to come before the other."""
    same_unit = p[1:] == q[1:]
    return same_unit or (p.stage == q.stage and p.kind is q.kind and p.kind not in _OFFLOAD)
