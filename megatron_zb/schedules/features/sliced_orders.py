"""Orders of slices, built from those of microbatches.

A fixed order becomes one of slices by more forwards before each backward: all slices of a
microbatch have passed the last stage before its first B. Searches see slices as microbatches whose
B come in turns (:mod:`slices`). The catalog says which of these builders a named schedule has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import truediv
from typing import TypeAlias

from megatron_zb.errors import UsageError
from megatron_zb.schedules.auto import candidates, candidates_with_vocabulary
from megatron_zb.schedules.costs import with_all_kept
from megatron_zb.schedules.families import (
    BuildingBlock,
    interleaved,
    one_f_one_b,
    one_f_one_b_block,
    split_interleaved,
    v_block,
    v_half_offsets,
    v_min_offsets,
    v_zb_offsets,
)
from megatron_zb.schedules.features.sliced_bounds import sliced_bound
from megatron_zb.schedules.features.sliced_memory import fitted, least_with_recomputation
from megatron_zb.schedules.features.slices import SlicedCosts, SlicedRules, Slicing, in_units
from megatron_zb.schedules.features.vocabulary import Vocabulary, fastest_with_vocabulary
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement, looped, v_shape
from megatron_zb.schedules.request import Limit, LimitTooSmall, Request, keeps
from megatron_zb.schedules.schedule import Report, Schedule
from megatron_zb.schedules.search.place_w import (
    fuse_for_free,
    least_memory,
    place_weight_gradients,
    split_all,
)
from megatron_zb.schedules.search.placement_search import PlacementSearch
from megatron_zb.schedules.simulator import simulate


@dataclass(frozen=True)
class SlicedFamily:
    """A named schedule that has slices, as its entry in the catalog describes it.

    Args:
        name: of the schedule.
        order: builds its order.
        peak: of p ranks and m microbatches, in microbatches of a whole rank; None where the limit
            alone decides.
        placement: of p ranks with some chunks; None where the costs decide.
        searches: whether its order is searched for, so that W of a microbatch may be joined.
        splits_backward: whether it has B and W.
    """

    name: str
    order: Callable[[SlicedOrders], Schedule]
    peak: Callable[[int, int], float] | None
    placement: Callable[[int, int | None], Placement] | None
    searches: bool
    splits_backward: bool


def build_sliced(family: SlicedFamily, request: Request, slicing: Slicing) -> Schedule:
    """Build a schedule of slices, with its report.

    Where ``slicing`` leaves it open, W of a microbatch are joined if that is faster, which takes
    a ``weight_loss``.

    Args:
        family: the named schedule.
        request: for whole microbatches.
        slicing: of each of them.

    Raises:
        UsageError: a limit is below what the schedule needs.
    """
    forms = [bool(slicing.joins_weight)]
    if slicing.joins_weight is None:
        may_join = family.searches and slicing.weight_loss > 0
        forms = [True, False] if may_join else [False]
    found: list[tuple[float, Schedule]] = []
    refused: list[LimitTooSmall] = []
    for joined in forms:
        cut = replace(slicing, joins_weight=joined)
        units = replace(
            request,
            num_microbatches=request.num_microbatches * cut.slices,
            costs=cut.costs(request.costs, request.num_microbatches),
            rules=SlicedRules(cut),
        )
        try:
            schedule = _built(family, units, cut)
        except LimitTooSmall as error:
            refused.append(error)
        else:
            assert schedule.report is not None
            found.append((schedule.report.period or schedule.report.makespan, schedule))
    if not found:
        raise min(refused, key=lambda error: error.needed)
    return min(found, key=lambda entry: entry[0])[1]


def _built(family: SlicedFamily, request: Request, slicing: Slicing) -> Schedule:
    """Build one form of W, of a request for units."""
    costs = request.costs
    if not costs.keeps_all:
        schedule = _with_recompute_or_offload(family, request, slicing)
    else:
        schedule = _ordered(family, request, slicing)
    timeline = simulate(schedule, costs)
    users = request.limit.per_rank(costs)
    if users is not None:
        request.check_feasible(family.name, schedule.placement, users, timeline.peak_memory)
    allowed = users or timeline.peak_memory
    if not costs.keeps_all:  # memory bounds no time
        allowed = (math.inf,) * request.pipeline_size
    sizes = (schedule.placement, timeline.costs, allowed, slicing.slices)
    bound = sliced_bound(*sizes, joined=bool(slicing.joins_weight))
    period = timeline.period if request.back_to_back else None
    return replace(schedule, report=Report(timeline.makespan, bound, period))


def _ordered(family: SlicedFamily, request: Request, slicing: Slicing) -> Schedule:
    """Return an order of a request for units, in which every activation is kept."""
    assert isinstance(request.costs, SlicedCosts)
    costs = with_all_kept(request.costs)
    assert isinstance(costs, SlicedCosts)
    orders = SlicedOrders(replace(request, costs=costs), slicing)
    shards = costs.feature(Vocabulary) is not None
    found = orders.with_vocabulary(family) if shards else family.order(orders)
    schedule = replace(found, name=family.name)
    schedule.check_ranks()
    return schedule


_MORE = (1.5, 3.0)
"""Memory of further orders that are made to fit, in that of the first one."""
_NEAR = 1.005
"""A step, in its lower bound, that nothing recomputed or offloaded makes much shorter."""


def _with_recompute_or_offload(
    family: SlicedFamily, request: Request, slicing: Slicing
) -> Schedule:
    """Return the fastest schedule that keeps every activation, recomputes some, or offloads some.

    Without a limit, no rank holds more than the most of the order that keeps all.

    Raises:
        UsageError: nothing keeps the limit.
    """
    costs, limit = request.costs, request.limit.per_rank(request.costs)
    if limit is None:
        orders = [_ordered(family, request, slicing)]
        base = limit = (max(simulate(orders[0], costs).peak_memory),) * request.pipeline_size
    else:
        orders, base = _first_order(limit, family, request, slicing)
    for more in _MORE:
        if not _is_near_bound(orders[0], request, slicing):
            orders.append(_ordered_within([more * most for most in base], family, request, slicing))
    found = fitted(orders, costs, limit)
    if not found:
        needed = min((least_with_recomputation(order, costs) for order in orders), key=max)
        request.check_feasible(family.name, orders[0].placement, limit, needed)
        raise UsageError(f"{family.name} with slices: no order fits that offloads activations")
    return fuse_for_free(min(found, key=request.seconds).schedule, costs)


def _first_order(
    limit: tuple[float, ...], family: SlicedFamily, request: Request, slicing: Slicing
) -> tuple[list[Schedule], tuple[float, ...]]:
    """Return an order that keeps all activations within a limit, or within what that needs."""
    try:
        return [_ordered_within(limit, family, request, slicing)], limit
    except LimitTooSmall as error:
        limit = (error.needed,) * request.pipeline_size
        return [_ordered_within(limit, family, request, slicing)], limit


def _ordered_within(
    limit: Sequence[float], family: SlicedFamily, request: Request, slicing: Slicing
) -> Schedule:
    """Return an order that keeps all activations within a limit for each rank."""
    whole = tuple(most + fixed for most, fixed in zip(limit, request.costs.fixed, strict=True))
    return _ordered(family, replace(request, limit=Limit(bytes=whole)), slicing)


def _is_near_bound(order: Schedule, request: Request, slicing: Slicing) -> bool:
    timeline, free = simulate(order, request.costs), (math.inf,) * request.pipeline_size
    joined, in_a_row = bool(slicing.joins_weight), request.back_to_back
    sizes = (order.placement, timeline.costs, free, slicing.slices)
    bound = sliced_bound(*sizes, joined=joined, back_to_back=in_a_row)
    return request.seconds(timeline) <= _NEAR * bound


_Ranks: TypeAlias = Sequence[Sequence[Pass]]


@dataclass(frozen=True)
class SlicedOrders:
    """Builders of orders of slices, for a request for units."""

    request: Request
    slicing: Slicing

    def fused(self, build: Callable[[Request], Schedule]) -> Schedule:
        """Return a fixed order of F and BW."""
        return self._fused(build(self.request))

    def grouped(self, build: Callable[[Request], Schedule]) -> Schedule:
        """Return a fixed order of F and BW, whose groups have whole microbatches."""
        return self._fused(build(self._grouped()))

    def filled(self, name: str, block: BuildingBlock, peak: float) -> Schedule:
        """Return a block's order of F and B, with W where ranks would wait.

        Args:
            name: of the schedule.
            block: that is repeated.
            peak: in microbatches of a whole rank.
        """
        held = self._peak(peak)
        held += (self.slicing.slices - 1) * bool(self.slicing.joins_weight)
        order = in_units(self._delayed(block.placement, self._repeated(block)), self._rules)
        held = max(held, self._least_peak(block.placement, order))
        return place_weight_gradients(name, block.placement, order, self.request, held)

    def searched(self, name: str, block: BuildingBlock, peak: float) -> Schedule:
        """Return the best that a search finds from a block's own order; see :meth:`filled`."""
        held = self._peak(peak)
        known = self._known(name, block.placement, self._repeated(block), held)
        return PlacementSearch(name, block.placement, self.request, held, known=known).run()

    def with_vocabulary(self, family: SlicedFamily) -> Schedule:
        """Return a searched schedule with the passes of vocabulary parallelism.

        A rank has room for one unit more, as the last stage waits for all ranks between F and B.
        """
        p, m, request = self.request.pipeline_size, self.request.num_microbatches, self.request
        if family.placement is None or family.peak is None:
            request = _within_one_f_one_b(request)
            places, peak = candidates_with_vocabulary(request), float(m)
        else:
            places = [family.placement(p, request.chunks)]
            peak = self._peak(family.peak(p, m))
        return fastest_with_vocabulary(
            family.name, places, request, peak + 1, split=family.splits_backward
        )

    @property
    def _rules(self) -> SlicedRules:
        assert isinstance(self.request.rules, SlicedRules)
        return self.request.rules

    def _grouped(self, chunks: int | None = None) -> Request:
        """Return the request with groups that fill the pipeline and have whole microbatches."""
        n = self.slicing.slices
        group = self.request.group_size or n * -(-self.request.pipeline_size // n)
        return replace(self.request, chunks=chunks or self.request.chunks, group_size=group)

    def _repeated(self, block: BuildingBlock) -> _Ranks:
        return block.repeat(self.request.num_microbatches)

    def _peak(self, microbatches: float) -> float:
        """Return the units of a peak: all slices of a microbatch are held before its first B."""
        return microbatches + self.slicing.slices - 1

    def _fused(self, schedule: Schedule) -> Schedule:
        """Return a fixed order of F and BW in units, with the forwards that slices need."""
        ranks = in_units(self._delayed(schedule.placement, schedule.ranks), self._rules)
        return replace(schedule, ranks=tuple(map(tuple, ranks)), rules=self._rules)

    def _delayed(self, placement: Placement, ranks: _Ranks) -> list[list[Pass]]:
        """Return an order in turns of F and B, or BW, with as many F before B as slices need."""
        n = self.slicing.slices
        fewest = most = n - 1
        while not _runs(placement, found := [_with_lead(rank, most) for rank in ranks], n):
            fewest, most = most + 1, 2 * most + 1
        while fewest < most:
            lead = (fewest + most) // 2
            orders = [_with_lead(rank, lead) for rank in ranks]
            if _runs(placement, orders, n):
                most, found = lead, orders
            else:
                fewest = lead + 1
        return found

    def _least_peak(self, placement: Placement, order: _Ranks) -> float:
        """Return the units that an order holds at the least; unequal slices hold more than most."""
        unlimited = replace(self.request, limit=Limit())
        held = least_memory(order, self.request.costs.for_placement(placement))
        return max(map(truediv, held, unlimited.limits(placement, 1.0)))

    def _known(self, name: str, placement: Placement, ranks: _Ranks, peak: float) -> list[Schedule]:
        """Return a delayed order of F and B with W in its gaps, or nothing if none fits."""
        order = in_units(self._delayed(placement, ranks), self._rules)
        try:
            filled = place_weight_gradients(name, placement, order, self.request, peak)
            return [split_all(filled)]
        except LimitTooSmall:
            return []

    def auto(self) -> Schedule:
        """Return the fastest schedule found on all placements, as ``auto`` of whole microbatches.

        Raises:
            UsageError: no placement fits under the limit.
        """
        request = _within_one_f_one_b(self.request)
        search = replace(self, request=request)
        best: tuple[float, Schedule] | None = None
        refused: list[UsageError] = []
        for placement in candidates(request):
            is_huge = self._passes(placement) > _HUGE
            if request.chunks is None and placement.chunks > _MOST_CHUNKS and is_huge:
                continue
            if best is not None and search._bound(placement) >= best[0]:
                continue
            try:
                found = search._on(placement)
            except UsageError as error:
                refused.append(error)
                continue
            seconds = request.seconds(simulate(found, request.costs))
            if best is None or seconds < best[0]:
                best = seconds, found
        if best is None:
            short = [error for error in refused if isinstance(error, LimitTooSmall)]
            raise min(short, key=lambda error: error.needed, default=refused[0])
        return best[1]

    def _passes(self, placement: Placement) -> int:
        return 3 * self.request.num_microbatches * placement.num_stages

    def _bound(self, placement: Placement) -> float:
        """Return a lower bound in seconds for any order on a placement."""
        costs = self.request.costs
        limit = self.request.limits(placement, float(self.request.num_microbatches))
        return sliced_bound(
            placement,
            costs.for_placement(placement),
            limit,
            self.slicing.slices,
            joined=bool(self.slicing.joins_weight),
            back_to_back=self.request.back_to_back,
        )

    def _on(self, placement: Placement) -> Schedule:
        """Return the fastest order found on a placement, of known ones and of a search.

        Raises:
            UsageError: the limit is below what the placement needs.
        """
        p, chunks, most = placement.pipeline_size, placement.chunks, self.request.num_microbatches
        fused: list[Schedule] = []
        orders: list[_Ranks] = []
        if placement == looped(p):
            fused, orders = [one_f_one_b(self.request)], [self._repeated(one_f_one_b_block(p))]
        elif placement == looped(p, chunks):
            fused = [interleaved(self._grouped(chunks))]
            orders = [_without_w(order) for order in split_interleaved(p, most, chunks)]
        elif placement == v_shape(p):
            orders = [self._repeated(v_block(p, offsets)) for offsets in _OFFSETS]
        known = [split_all(self._fused(order)) for order in fused]
        known += [it for each in orders for it in self._known("auto", placement, each, most)]
        is_v = placement == v_shape(p)
        if self._passes(placement) > _LARGE and not is_v:
            limits = self.request.limits(placement, most)
            timelines = [simulate(it, self.request.costs) for it in known]
            fitting = [it for it in timelines if keeps(it.peak_memory, limits)]
            if fitting:
                return min(fitting, key=self.request.seconds).schedule
        search = PlacementSearch("auto", placement, self.request, most, known=known)
        return replace(search, seconds=_SECONDS[is_v]).run()


def _within_one_f_one_b(request: Request) -> Request:
    """Return the request with 1F1B's memory as the limit where it has none."""
    if request.limit.per_rank(request.costs) is not None:
        return request
    return replace(request, limit=replace(request.limit, share=1.0))


_OFFSETS = (v_min_offsets, v_half_offsets, v_zb_offsets)
_LARGE = 24_000  # passes: known orders are good as they are, and a search takes long
_MOST_CHUNKS = 4  # of huge problems
_HUGE = 48_000
_SECONDS = (1.0, 3.0)  # of a search on a placement, and on the V


def _without_w(schedule: Schedule) -> _Ranks:
    return [[p for p in rank if p.kind is not PassKind.W] for rank in schedule.ranks]


def _with_lead(rank: Sequence[Pass], lead: int) -> list[Pass]:
    """Return an order with so many more F before each B, while there are any."""
    forwards = [p for p in rank if p.kind is PassKind.F]
    found: list[Pass] = []
    count = done = 0
    for p in rank:
        if p.kind is PassKind.F:
            count += 1
        else:
            found += [*forwards[done : count + lead], p]
            done = max(done, min(count + lead, len(forwards)))
    return found + forwards[done:]


def _runs(placement: Placement, ranks: _Ranks, slices: int) -> bool:
    """Return whether no rank waits for ever in an order of F and B in turns."""
    last = placement.num_stages - 1
    there, back = [0] * (last + 1), [0] * (last + 1)  # F and B that have run, by stage
    waiting = [list(reversed(rank)) for rank in ranks]

    def is_ready(p: Pass) -> bool:
        if p.kind is PassKind.F:
            return p.stage == 0 or there[p.stage - 1] > p.microbatch
        if p.stage == last:
            return there[last] > p.microbatch // slices * slices + slices - 1
        return back[p.stage + 1] > p.microbatch

    moved = True
    while moved:
        moved = False
        for rank in waiting:
            while rank and is_ready(rank[-1]):
                p = rank.pop()
                (there if p.kind is PassKind.F else back)[p.stage] += 1
                moved = True
    return not any(waiting)
