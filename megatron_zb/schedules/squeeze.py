"""Squeeze an order of F and B, and put W into what is left free."""

from __future__ import annotations

import heapq
from collections import deque

from megatron_zb.schedules.costs import Costs, StageCosts
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import simulate

_EAGERNESS = (1.0, 0.75, 0.5, 0.25, 0.0)


def place_weight_gradients(
    name: str,
    placement: Placement,
    order: list[list[Pass]],
    num_microbatches: int,
    costs: Costs,
    slots: int,
) -> Schedule:
    """Start each F and B as early as its order and inputs allow, and fill the waits with W.

    A rank never holds more than ``slots`` chunk activations: where an F would exceed that, the
    oldest W runs first. Several rules for how large a wait must be to take a W are tried and the
    shortest result is kept, so the costs decide where W goes.
    """
    candidates = []
    for eagerness in _EAGERNESS:
        filled = _Filling(placement, order, costs.for_placement(placement), slots, eagerness).run()
        ranks = tuple(tuple(_fuse_first_stage(rank)) for rank in filled)
        candidates.append(Schedule(name, placement, num_microbatches, ranks))
    return min(candidates, key=lambda s: simulate(s, costs).makespan)


def _fuse_first_stage(passes: list[Pass]) -> list[Pass]:
    """BW for B and W of stage 0 that stand side by side: no rank waits for that B."""
    fused: list[Pass] = []
    for p in passes:
        last = fused[-1] if fused else None
        if p.kind is PassKind.W and p.stage == 0 and last == Pass(PassKind.B, 0, p.microbatch):
            fused[-1] = Pass(PassKind.BW, 0, p.microbatch)
        else:
            fused.append(p)
    return fused


class _Filling:
    """One left-to-right run of all ranks, in order of time."""

    def __init__(
        self,
        placement: Placement,
        order: list[list[Pass]],
        costs: StageCosts,
        slots: int,
        eagerness: float,
    ) -> None:
        self.placement, self.order, self.costs = placement, order, costs
        self.slots, self.eagerness = slots, eagerness
        ranks = range(placement.pipeline_size)
        self.done: list[list[Pass]] = [[] for _ in ranks]
        self.next = [0 for _ in ranks]
        self.held = [0 for _ in ranks]
        self.pending: list[deque[Pass]] = [deque() for _ in ranks]
        self.ready: dict[Pass, float] = {}
        self.idle: dict[Pass, int] = {}
        self.events = [(0.0, r) for r in ranks]

    def run(self) -> list[list[Pass]]:
        while self.events:
            now, rank = heapq.heappop(self.events)
            self._step(now, rank)
        return self.done

    def _step(self, now: float, rank: int) -> None:
        """Choose what a free rank does next: its next F or B, the oldest W, or wait."""
        upcoming = self._upcoming(rank)
        pending = self.pending[rank]
        if upcoming is None:
            while pending:
                self._start(now, rank, pending.popleft())
            return
        ready = self._ready(upcoming)
        full = upcoming.kind is PassKind.F and self.held[rank] >= self.slots
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
        return self.eagerness * self.costs.weight[p.stage]

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
        if p.kind is PassKind.F:
            self.held[rank] += 1
            self._deliver(
                Pass(p.kind, p.stage + 1, p.microbatch), end + self.costs.forward_hop[p.stage], now
            )
        elif p.kind is PassKind.B:
            self.pending[rank].append(Pass(PassKind.W, p.stage, p.microbatch))
            self._deliver(
                Pass(p.kind, p.stage - 1, p.microbatch), end + self.costs.backward_hop[p.stage], now
            )
        else:
            self.held[rank] -= 1
        return end

    def _deliver(self, consumer: Pass, ready: float, now: float) -> None:
        self.ready[consumer] = ready
        waiter = self.idle.pop(consumer, None)
        if waiter is not None:
            heapq.heappush(self.events, (now, waiter))
