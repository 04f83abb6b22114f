"""Orders that repeat with every microbatch, for any costs: modulo scheduling.

The block of a microbatch is placed on a circle whose length is the interval between two of them:
each pass takes the first time at which its inputs are there and its rank is free, whichever
microbatch takes the rank at other times. Building blocks (arXiv 2405.15362) are the same for passes
of one length, in closed form.

Source: B. R. Rau, *Iterative modulo scheduling*, MICRO 1994.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.stage_costs import StageCosts

_F, _B, _W, _BW = PassKind.F, PassKind.B, PassKind.W, PassKind.BW
_TOLERANCE = 1e-9  # of an interval, by which passes may overlap
_LONGER = (1.0, 1.01, 1.02, 1.04, 1.07, 1.1, 1.15, 1.2, 1.3)
"""Intervals that are tried, in multiples of what the busiest rank computes."""
_MOST_FOUND = 2


def modulo_orders(
    name: str,
    placement: Placement,
    costs: StageCosts,
    num_microbatches: int,
    *,
    splits_backward: bool,
) -> Iterator[Schedule]:
    """Yield orders of the shortest intervals in which the passes of a microbatch fit, at most two.

    Args:
        name: of the schedules.
        placement: of the stages.
        costs: of the passes, on that placement.
        num_microbatches: of the schedules.
        splits_backward: with B and W, not with BW.
    """
    kinds = (_F, _B, _W) if splits_backward else (_F, _BW)
    busiest = max(
        sum(costs.seconds[kind][stage] for stage in stages for kind in kinds)
        for stages in placement.stages_of
    )
    found = 0
    for longer in _LONGER:
        circle = _Circle(placement, costs, longer * busiest)
        starts = circle.place(splits_backward=splits_backward)
        if starts is None:
            continue
        ranks: list[list[tuple[float, Pass]]] = [[] for _ in placement.stages_of]
        for p, start in starts.items():
            of_rank = ranks[placement.rank_of[p.stage]]
            for microbatch in range(num_microbatches):
                time = start + microbatch * circle.interval
                of_rank.append((time, p._replace(microbatch=microbatch)))
        orders = tuple(tuple(p for _, p in sorted(of_rank)) for of_rank in ranks)
        yield Schedule(name, placement, num_microbatches, orders)
        found += 1
        if found == _MOST_FOUND:
            return


class _Circle:
    """Times of the ranks modulo an interval, and what is taken of them."""

    def __init__(self, placement: Placement, costs: StageCosts, interval: float) -> None:
        self._placement, self._costs, self.interval = placement, costs, interval
        self._taken: list[list[tuple[float, float]]] = [[] for _ in placement.stages_of]

    def place(self, *, splits_backward: bool) -> dict[Pass, float] | None:
        """Return the starts of the passes of microbatch 0, None if some do not fit.

        1. F from the first stage to the last, each as early as it can be.
        2. B, or BW, from the last stage to the first.
        3. W of the stages in that order, each in the first gap behind its B that it fits into.
        """
        stages, back = range(self._placement.num_stages), _B if splits_backward else _BW
        forward = [Pass(_F, stage, 0) for stage in stages]
        backward = [Pass(back, stage, 0) for stage in reversed(stages)]
        starts: dict[Pass, float] = {}
        ready = 0.0
        for p in (*forward, *backward):
            start = self._take(p, ready)
            if start is None:
                return None
            starts[p] = start
            end = start + self._seconds(p)
            is_turn = p.kind is _F and p.stage == stages[-1]
            latency = self._costs.latency.get(p.kind)
            ready = end + (latency[p.stage] if latency and not is_turn else 0.0)
        for b in backward if splits_backward else ():
            w = b._replace(kind=_W)
            start = self._take(w, starts[b] + self._seconds(b))
            if start is None:
                return None
            starts[w] = start
        return starts

    def _seconds(self, p: Pass) -> float:
        return self._costs.seconds[p.kind][p.stage]

    def _take(self, p: Pass, ready: float) -> float | None:
        """Return the first time from ``ready`` on at which a rank is free for a pass, and take it.

        That is ``ready`` itself, or the end of another pass.
        """
        taken, seconds = self._taken[self._placement.rank_of[p.stage]], self._seconds(p)
        offsets = sorted({0.0, *((end - ready) % self.interval for _, end in taken)})
        for offset in offsets:
            if all(self._is_apart(ready + offset, seconds, *other) for other in taken):
                start = ready + offset
                taken.append((start, start + seconds))
                return start
        return None

    def _is_apart(self, start: float, seconds: float, begin: float, end: float) -> bool:
        """Return whether a pass does not overlap another one, in any of their microbatches."""
        tolerance = _TOLERANCE * self.interval
        behind = (start - begin) % self.interval
        if self.interval - behind <= tolerance:
            behind = 0.0
        return behind >= end - begin - tolerance and behind + seconds <= self.interval + tolerance
