"""Recomputation and offload in schedules of slices, to keep a memory limit.

Orders come from builders that keep every activation, with as much memory as the limit or more. Each
R stands right before its B: it needs nothing of other ranks, and fills the wait for the gradient.
Keys and values of a recomputed or offloaded slice remain, since later slices attend to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megatron_zb.schedules.features.offload import place_offload
from megatron_zb.schedules.features.slices import STAYS
from megatron_zb.schedules.memory import Interval, keep, walk
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.request import keeps
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.place_w import split_all
from megatron_zb.schedules.simulator import Timeline, simulate
from megatron_zb.schedules.stage_costs import Priced, StageCosts

_BACKWARD = (PassKind.B, PassKind.BW)
_ROUNDING = 1 + 1e-9


def fitted(orders: Iterable[Schedule], costs: Priced, limit: Sequence[float]) -> list[Timeline]:
    """Return what fits of orders, as they are, with R, or with D and H.

    Args:
        orders: schedules of slices that keep every activation, whatever they hold.
        costs: those in which activations can be recomputed or offloaded.
        limit: memory of each rank, in units of activation.
    """
    found: list[Timeline] = []
    tried: list[Schedule | None] = []
    for order in orders:
        timeline = simulate(order, costs)
        if keeps(timeline.peak_memory, limit):
            found.append(timeline)
            continue
        early = _with_early_weights(order)
        for each in (order, early) if early.ranks != order.ranks else (order,):
            if "kept_input" in timeline.costs.memory:
                tried.append(with_recomputation(each, costs, limit))
            if timeline.costs.copies is not None:
                tried.append(place_offload(split_all(each), costs, limit))
    found += [simulate(each, costs) for each in tried if each is not None]
    return [it for it in found if keeps(it.peak_memory, limit)]


def _with_early_weights(order: Schedule) -> Schedule:
    """Return an order with every W right behind its B, which holds the least for them."""
    ranks = []
    for passes in order.ranks:
        weights = {p for p in passes if p.kind is PassKind.W}
        line: list[Pass] = []
        for p in passes:
            if p.kind is not PassKind.W:
                line.append(p)
            if p.kind is PassKind.B and (w := p._replace(kind=PassKind.W)) in weights:
                line.append(w)
        ranks.append(tuple(line))
    return replace(order, ranks=tuple(ranks))


def least_with_recomputation(order: Schedule, costs: Priced) -> list[float]:
    """Return the memory of each rank that recomputes or offloads every slice that it can."""
    timeline = simulate(_with_early_weights(order), costs)
    return [max(_SlicedRank(timeline, rank).held, default=0.0) for rank in range(len(order.ranks))]


def with_recomputation(
    schedule: Schedule, costs: Priced, limit: Sequence[float]
) -> Schedule | None:
    """Return an order with the R that keep the limit, None where no number of R does."""
    timeline, ranks = simulate(schedule, costs), []
    for rank, most in enumerate(limit):
        line = _SlicedRank(timeline, rank)
        if max(line.held, default=0.0) > most * _ROUNDING:
            return None
        line.keep(most * _ROUNDING)
        ranks.append(tuple(line.passes()))
    return replace(schedule, ranks=tuple(ranks))


def _with_least(costs: StageCosts) -> StageCosts:
    """Return the costs with what stays of a slice that can only be offloaded: keys and values."""
    if "kept_input" in costs.memory:
        return costs
    none = (0.0,) * len(costs.memory["activation"])
    rows = {id(row): _with_least(row) for row in costs.microbatches}
    return replace(
        costs,
        memory={**costs.memory, "kept_input": costs.memory.get(STAYS, none)},
        microbatches=tuple(rows[id(row)] for row in costs.microbatches),
    )


class _SlicedRank:
    """The passes of a rank, with an R for every slice that may be recomputed, and what is held."""

    def __init__(self, timeline: Timeline, rank: int) -> None:
        schedule, self._costs = timeline.schedule, _with_least(timeline.costs)
        times = zip(schedule.ranks[rank], timeline.start[rank], timeline.end[rank], strict=True)
        self._line: list[Pass] = []
        self._forward: dict[tuple[int, int], tuple[int, float]] = {}
        self._lives: list[tuple[float, tuple[int, int]]] = []
        self._again: dict[tuple[int, int], int] = {}
        for p, start, end in times:
            unit = p.stage, p.microbatch
            if p.kind is PassKind.F:
                self._forward[unit] = len(self._line), end
            elif p.kind in _BACKWARD:
                self._lives.append((start - self._forward[unit][1], unit))
                self._again[unit] = len(self._line)
                self._line.append(p._replace(kind=PassKind.R))
            self._line.append(p)
        self.held = self._held_at_most(schedule)
        """The most that is held during each pass."""

    def _held_at_most(self, schedule: Schedule) -> npt.NDArray[np.float64]:
        def change(p: Pass) -> float:
            recomputed = (p.stage, p.microbatch) in self._again
            return schedule.rules.memory_change(p, self._costs, recomputed=recomputed)

        return np.array([held.within for held in walk(map(change, self._line))])

    def keep(self, limit: float) -> None:
        """Drop no slice that there is room for, those of the shortest lives first."""
        units = ((unit, self._span(unit)) for _, unit in sorted(self._lives))
        for unit in keep(self.held, units, limit):
            del self._again[unit]

    def _span(self, unit: tuple[int, int]) -> Interval:
        memory = self._costs.of(unit[1]).memory
        more = memory["activation"][unit[0]] - memory["kept_input"][unit[0]]
        return Interval(self._forward[unit][0], self._again[unit], more)

    def passes(self) -> Iterator[Pass]:
        """Yield the passes, with the R of recomputed slices."""
        for p in self._line:
            if p.kind is not PassKind.R or (p.stage, p.microbatch) in self._again:
                yield p
