"""Orders of F, B and W with the passes of an output layer that is cut along the vocabulary.

The order of F and B is searched for with O and V counted as parts of other passes of their ranks;
then every O and P runs as soon as its inputs are there, and W and V fill the waits.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from megatron_zb.schedules.bounds import lower_bound, usable_limit
from megatron_zb.schedules.costs import StageCosts
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.fusing import fuse_for_free
from megatron_zb.schedules.search.hill_climbing import search
from megatron_zb.schedules.search.placement_search import NAMED_SECONDS, effort_of
from megatron_zb.schedules.search.runner import Problem
from megatron_zb.schedules.vocabulary import VocabularyRules


class _Choices(NamedTuple):
    """What is tried of each: the fastest result is kept.

    ``folded`` is the part of O's time that is counted as F, the rest as B, while an order of F and
    B is searched for; ``eagerness`` the share of a W, and of a V, that a wait must have to be
    filled with it.
    """

    folded: tuple[float, ...] = (0.25, 0.5, 0.75)
    eagerness: tuple[float, ...] = (1.0, 0.5, 0.0)


_CHOICES = _Choices()
_ROOM = 1
"""Microbatches of which a rank holds its shard's logits, as many as with a whole output layer.

With two, steps of 8 ranks are up to 0.6 % (v-zb) and 1.9 % (v-half) shorter; three bring no more.
"""
_SECONDS = NAMED_SECONDS / 2
"""Approximate seconds of each of the searches, if they are compiled."""


def search_with_vocabulary(
    name: str,
    placement: Placement,
    request: Request,
    peak_microbatches: float,
    *,
    split: bool = True,
) -> Schedule:
    """Return the fastest order found in which no rank holds more than ``peak_microbatches``.

    Raises:
        UsageError: the limit is below one microbatch in each chunk with the logits of one.
    """
    costs = request.costs.for_placement(placement)
    shards = costs.shards
    assert shards is not None, "the costs have no vocabulary"
    limit = request.limits(placement, peak_microbatches)
    smallest = Problem(placement, request.num_microbatches, costs, limit).smallest_limit
    ranks = range(placement.pipeline_size)
    needed = [smallest(rank) + _ROOM * shards.held[rank] for rank in ranks]
    request.check_feasible(name, limit, needed)
    left = [most - _ROOM * held for most, held in zip(limit, shards.held, strict=True)]
    best = min(
        _Placing(placement, order, costs, left, *eagerness).run(request.back_to_back)
        for order in _orders(placement, costs, request, left, split=split)
        for eagerness in product(_CHOICES.eagerness, repeat=2)
    )
    holders = tuple(r for r in ranks if shards.output[r] > 0 or sum(shards.output) == 0)
    rules = VocabularyRules(holders)
    schedule = Schedule(name, placement, request.num_microbatches, best[1], rules=rules)
    return fuse_for_free(schedule, request.costs) if split else schedule


def _orders(
    placement: Placement,
    costs: StageCosts,
    request: Request,
    limit: Sequence[float],
    *,
    split: bool,
) -> Iterator[list[list[Pass]]]:
    """Yield orders of F and B within a limit, found with O and V as parts of other passes."""
    m = request.num_microbatches
    for share in _CHOICES.folded:
        folded = _folded(placement, costs, share)
        within = usable_limit(placement, m, folded, limit)
        problem = Problem(placement, m, folded, within, split, turn=_turn(costs))
        bound = lower_bound(placement, m, folded, within)
        found = search(problem, effort_of(problem, _SECONDS), bound)
        yield [[p for p in rank if p.kind is not PassKind.W] for rank in found.ranks]


def _turn(costs: StageCosts) -> float:
    """Return the seconds from the end of the last stage's F to the start of its B, at best."""
    shards = costs.shards
    assert shards is not None
    slowest = max(o + back for o, back in zip(shards.output, shards.back, strict=True))
    return shards.arrival + slowest + shards.loss


def _folded(placement: Placement, costs: StageCosts, share: float) -> StageCosts:
    """Return the costs with O as a part of F and B of its rank, and V of W."""
    rows = {id(row): _folded(placement, row, share) for row in costs.microbatches}
    shards = costs.shards
    assert shards is not None
    forward, backward, weight = list(costs.forward), list(costs.backward), list(costs.weight)
    whole = list(costs.whole)
    for rank, held in enumerate(placement.stages_of):
        output, later = shards.output[rank] / len(held), shards.weight[rank] / len(held)
        for stage in held:
            forward[stage] += share * output
            backward[stage] += (1 - share) * output
            weight[stage] += later
            if whole:
                whole[stage] += (1 - share) * output + later
    return replace(
        costs,
        forward=tuple(forward),
        backward=tuple(backward),
        weight=tuple(weight),
        whole=tuple(whole),
        microbatches=tuple(rows[id(row)] for row in costs.microbatches),
        shards=None,
    )


class _Placing:
    """One left-to-right run of all ranks, in order of time; F and B keep their order."""

    def __init__(
        self,
        placement: Placement,
        order: list[list[Pass]],
        costs: StageCosts,
        limit: Sequence[float],
        eagerness: float,
        eagerness_of_v: float,
    ) -> None:
        assert costs.shards is not None
        self.placement, self.costs, self.shards = placement, costs, costs.shards
        self.limit = limit
        self.eagerness, self.eagerness_of_v = eagerness, eagerness_of_v
        p = placement.pipeline_size
        self.stages, self.end = placement.num_stages, placement.rank_of[-1]
        none = sum(self.shards.output) == 0
        self.holders = [r for r in range(p) if self.shards.output[r] > 0 or none]
        self.upcoming = [deque(passes) for passes in order]
        self.outputs, self.losses = [0] * p, 0  # the next of each rank, and of the last stage
        self.pending: list[deque[Pass]] = [deque() for _ in range(p)]
        self.of_shards: list[deque[Pass]] = [deque() for _ in range(p)]
        self.shown: list[int] = [0] * p  # microbatches between O and V
        self.held = [0.0] * p
        self.parts: Counter[int] = Counter()  # that have been made of each microbatch
        self.latest: dict[int, float] = {}  # arrival of any of them
        self.ready: dict[Pass, float] = {}
        self.done: list[list[Pass]] = [[] for _ in range(p)]
        self.first: list[float | None] = [None] * p
        self.free = [0.0] * p
        self.events = [(0.0, rank) for rank in range(p)]

    def run(self, back_to_back: bool) -> tuple[float, tuple[tuple[Pass, ...], ...]]:
        """Place every pass; return the seconds, infinite if ranks got stuck, and the order."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now >= self.free[rank] and (chosen := self._choice(now, rank)) is not None:
                self._start(now, rank, chosen)
        stuck = any(self.upcoming) or any(self.pending) or any(self.of_shards) or any(self.shown)
        starts = [start or 0.0 for start in self.first]
        lasting = [end - start for start, end in zip(starts, self.free, strict=True)]
        seconds = max(lasting) if back_to_back else max(self.free) - min(starts)
        return float("inf") if stuck else seconds, tuple(map(tuple, self.done))

    def _choice(self, now: float, rank: int) -> Pass | None:
        """Return the pass to run now: P, O, F or B if one is due, or W or V to fill a wait."""
        wait = float("inf")
        for urgent in self._urgent(rank):
            lead = self.ready.get(urgent, float("inf")) - now
            if lead <= 0:
                return urgent
            wait = min(wait, lead)
        upcoming = self.upcoming[rank][0] if self.upcoming[rank] else None
        full = upcoming is not None and self._exceeds(rank, upcoming)
        if upcoming is not None and not full:
            wait = min(wait, max(0.0, self._ready(upcoming) - now))
        if self._fills(self.pending[rank], wait, self.eagerness, forced=full):
            return self.pending[rank].popleft()
        of_shards = self.of_shards[rank]
        arrived = bool(of_shards) and self.ready[of_shards[0]] <= now
        forced = self.shown[rank] >= _ROOM
        if arrived and self._fills(of_shards, wait, self.eagerness_of_v, forced=forced):
            return of_shards.popleft()
        return self.upcoming[rank].popleft() if wait <= 0 else None

    def _urgent(self, rank: int) -> Iterator[Pass]:
        if rank == self.end:
            yield Pass(PassKind.P, self.stages - 1, self.losses)
        if self.shown[rank] < _ROOM:
            yield Pass(PassKind.O, self.stages + rank, self.outputs[rank])

    def _exceeds(self, rank: int, p: Pass) -> bool:
        if p.kind is not PassKind.F:
            return False
        most = self.limit[rank]
        return self.held[rank] + self._change(p) > most + 1e-9 * (1 + most)

    def _change(self, p: Pass) -> float:
        return VocabularyRules(()).memory_change(p, self.costs)

    def _fills(self, fillers: deque[Pass], wait: float, eagerness: float, *, forced: bool) -> bool:
        if not fillers:
            return False
        return forced or (wait > 0 and wait >= eagerness * self.costs.duration(fillers[0]))

    def _ready(self, p: Pass) -> float:
        if p.kind is PassKind.F and p.stage == 0:
            return 0.0
        return self.ready.get(p, float("inf"))

    def _start(self, now: float, rank: int, p: Pass) -> None:
        kind, stage, j = p
        end = now + self.costs.duration(p)
        self.done[rank].append(p)
        if self.first[rank] is None:
            self.first[rank] = now
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))
        if kind in (PassKind.F, PassKind.B, PassKind.BW, PassKind.W):
            self.held[rank] += self._change(p)
        self._hand_on(kind, stage, j, end, rank)

    def _hand_on(self, kind: PassKind, stage: int, j: int, end: float, rank: int) -> None:
        """Tell the passes that follow from one when their inputs will be there."""
        hop = self.costs.of(j).hops[kind][stage]
        if kind is PassKind.F and stage < self.stages - 1:
            self._deliver(Pass(kind, stage + 1, j), end + hop)
        elif kind is PassKind.F:
            for holder in self.holders:
                arrival = end if holder == self.end else end + hop
                self._deliver(Pass(PassKind.O, self.stages + holder, j), arrival)
        elif kind is PassKind.O:
            self.outputs[rank] += 1
            self.shown[rank] += 1
            self.parts[j] += 1
            self.latest[j] = max(self.latest.get(j, 0.0), end + hop)
            if self.parts[j] == len(self.holders):
                self._deliver(Pass(PassKind.P, self.stages - 1, j), self.latest[j])
        elif kind is PassKind.P:
            self._after_loss(j, end, hop)
        elif kind is PassKind.V:
            self.shown[rank] -= 1
        elif kind is not PassKind.W:
            if kind is PassKind.B:
                self.pending[rank].append(Pass(PassKind.W, stage, j))
            if stage > 0:
                self._deliver(Pass(kind, stage - 1, j), end + hop)

    def _after_loss(self, j: int, end: float, hop: float) -> None:
        self.losses += 1
        for kind in (PassKind.B, PassKind.BW):
            self._deliver(Pass(kind, self.stages - 1, j), end)
        for holder in self.holders:
            weight = Pass(PassKind.V, self.stages + holder, j)
            self.of_shards[holder].append(weight)
            self._deliver(weight, end if holder == self.end else end + hop)

    def _deliver(self, p: Pass, time: float) -> None:
        self.ready[p] = time
        rank = p.stage - self.stages if p.stage >= self.stages else self.placement.rank_of[p.stage]
        heapq.heappush(self.events, (time, rank))
