"""Squeezed orders of F and B, with W in the time that is left free."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from megatron_zb.schedules.costs import StageCosts
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.rules import TRAINING
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.fusing import fuse_for_free

_EAGERNESS = (1.0, 0.75, 0.5, 0.25, 0.0)


def place_weight_gradients(
    name: str,
    placement: Placement,
    order: list[list[Pass]],
    request: Request,
    peak_microbatches: float,
) -> Schedule:
    """Start each F and B as early as its order and inputs allow, and fill the waits with W.

    No rank holds more than ``peak_microbatches`` of its own, or the user's limit: where an F would
    exceed that, the oldest W runs first. Several rules for how large a wait must be to take a W are
    tried and the shortest result is kept, so the costs decide where W goes.
    """
    costs = request.costs.for_placement(placement)
    limit = request.limits(placement, peak_microbatches)
    request.check_feasible(name, limit, _needs(order, costs))
    filled = [_Filling(placement, order, costs, limit, eagerness) for eagerness in _EAGERNESS]
    for filling in filled:
        filling.run()
    best = min(filled, key=lambda filling: filling.seconds(back_to_back=request.back_to_back))
    ranks = tuple(map(tuple, best.done))
    schedule = Schedule(name, placement, request.num_microbatches, ranks)
    return fuse_for_free(schedule, request.costs)


def squeezed_if_it_fits(
    name: str,
    placement: Placement,
    order: list[list[Pass]],
    request: Request,
    peak_microbatches: float,
) -> list[Schedule]:
    """Return the squeezed order as the one known schedule, or none if the limit is too low."""
    costs = request.costs.for_placement(placement)
    limit = request.limits(placement, peak_microbatches)
    needs = _needs(order, costs)
    if any(need > most * (1 + 1e-9) for need, most in zip(needs, limit, strict=True)):
        return []
    return [place_weight_gradients(name, placement, order, request, peak_microbatches)]


def _needs(order: list[list[Pass]], costs: StageCosts) -> list[float]:
    """Return the most memory each rank holds if every W runs right behind its B."""
    needs = []
    for passes in order:
        held = most = 0.0
        for p in passes:
            activation = costs.of(p.microbatch).activation[p.stage]
            held += activation if p.kind is PassKind.F else -activation
            most = max(most, held)
        needs.append(most)
    return needs


class _Filling:
    """One left-to-right run of all ranks, in order of time."""

    def __init__(
        self,
        placement: Placement,
        order: list[list[Pass]],
        costs: StageCosts,
        limit: Sequence[float],
        eagerness: float,
    ) -> None:
        self.placement, self.order, self.costs = placement, order, costs
        self.limit, self.eagerness = limit, eagerness
        ranks = range(placement.pipeline_size)
        self.done: list[list[Pass]] = [[] for _ in ranks]
        self.next = [0 for _ in ranks]
        self.held = [0.0 for _ in ranks]
        self.pending: list[deque[Pass]] = [deque() for _ in ranks]
        self.ready: dict[Pass, float] = {}
        self.idle: dict[Pass, int] = {}
        self.events = [(0.0, r) for r in ranks]
        self.first: list[float | None] = [None for _ in ranks]
        self.last = [0.0 for _ in ranks]

    def run(self) -> None:
        """Place every pass; then ``done[r]`` are those of rank r in their order."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            self._step(now, rank)

    def seconds(self, *, back_to_back: bool) -> float:
        """Return :meth:`Timeline.seconds` of the order that has been found."""
        starts = [start or 0.0 for start in self.first]
        if back_to_back:
            return max(end - start for start, end in zip(starts, self.last, strict=True))
        return max(self.last) - min(starts)

    def _step(self, now: float, rank: int) -> None:
        """Choose what a free rank does next: its next F or B, the oldest W, or wait."""
        upcoming = self._upcoming(rank)
        pending = self.pending[rank]
        if upcoming is None:
            while pending:
                now = self._start(now, rank, pending.popleft())
            return
        ready = self._ready(upcoming)
        full = upcoming.kind is PassKind.F and (
            self.held[rank] + TRAINING.memory_change(upcoming, self.costs)
            > self.limit[rank] + 1e-9 * (1 + self.limit[rank])
        )
        wait = float("inf") if ready is None else ready - now
        if pending and (full or (wait > 0 and wait >= self._w_seconds(pending[0]))):
            self._finish_at(self._start(now, rank, pending.popleft()), rank)
        elif ready is None:
            self.idle[upcoming] = rank
        elif wait > 0:
            self._finish_at(ready, rank)
        else:
            self.next[rank] += 1
            self._finish_at(self._start(now, rank, upcoming), rank)

    def _upcoming(self, rank: int) -> Pass | None:
        position = self.next[rank]
        return self.order[rank][position] if position < len(self.order[rank]) else None

    def _w_seconds(self, p: Pass) -> float:
        return self.eagerness * self.costs.duration(p)

    def _ready(self, p: Pass) -> float | None:
        if (p.kind is PassKind.F and p.stage == 0) or (
            p.kind is PassKind.B and p.stage == self.placement.num_stages - 1
        ):
            return 0.0
        return self.ready.get(p)

    def _finish_at(self, time: float, rank: int) -> None:
        heapq.heappush(self.events, (time, rank))

    def _start(self, now: float, rank: int, p: Pass) -> float:
        end = now + self.costs.duration(p)
        self.done[rank].append(p)
        self.last[rank] = end
        if self.first[rank] is None:
            self.first[rank] = now
        self.held[rank] += TRAINING.memory_change(p, self.costs)
        if p.kind is PassKind.B:
            self.pending[rank].append(Pass(PassKind.W, p.stage, p.microbatch))
        if p.kind is not PassKind.W:
            reader = p.stage + (1 if p.kind is PassKind.F else -1)
            ready = end + self.costs.of(p.microbatch).hops[p.kind][p.stage]
            self._deliver(Pass(p.kind, reader, p.microbatch), ready, now)
        return end

    def _deliver(self, consumer: Pass, ready: float, now: float) -> None:
        self.ready[consumer] = ready
        waiter = self.idle.pop(consumer, None)
        if waiter is not None:
            heapq.heappush(self.events, (now, waiter))
