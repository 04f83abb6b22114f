"""Schedules of slices: whether W is joined, recomputation and offload, and the search of ``auto``.

Named schedules build their own orders of slices (:meth:`SlicedRules.in_units`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from megatron_zb.errors import UsageError
from megatron_zb.schedules.auto import candidates
from megatron_zb.schedules.bounds import lower_bound, period_bound
from megatron_zb.schedules.costs import with_all_kept
from megatron_zb.schedules.families import (
    interleaved,
    one_f_one_b,
    one_f_one_b_block,
    split_interleaved,
    v_block,
    v_half_offsets,
    v_min_offsets,
    v_zb_offsets,
)
from megatron_zb.schedules.features.sliced_memory import fitted, least_with_recomputation
from megatron_zb.schedules.features.slices import SlicedRules, Slicing
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement, looped, v_shape
from megatron_zb.schedules.request import Limit, LimitTooSmall, Request, keeps, least_refused
from megatron_zb.schedules.schedule import Report, Schedule
from megatron_zb.schedules.search.place_w import fuse_for_free, split_all, squeezed_if_it_fits
from megatron_zb.schedules.search.placement_search import PlacementSearch
from megatron_zb.schedules.simulator import Timeline, simulate

Build: TypeAlias = Callable[[Request], Schedule]


def build_sliced(
    name: str, build: Build, request: Request, slicing: Slicing, *, may_join: bool
) -> Schedule:
    """Build a schedule of slices, with its report.

    Where ``slicing`` leaves it open, W of a microbatch are joined if that is faster, which takes
    a ``weight_loss``.

    Args:
        name: of the schedule.
        build: makes it of a request for units, whose activations are all kept.
        request: for whole microbatches.
        slicing: of each of them.
        may_join: whether W of a microbatch may be joined.

    Raises:
        UsageError: a limit is below what the schedule needs.
    """
    forms = [bool(slicing.joins_weight)]
    if slicing.joins_weight is None:
        forms = [True, False] if may_join and slicing.weight_loss > 0 else [False]
    found: list[tuple[float, Schedule]] = []
    refused: list[UsageError] = []
    for joined in forms:
        cut = replace(slicing, joins_weight=joined)
        units = replace(
            request,
            num_microbatches=request.num_microbatches * cut.slices,
            costs=cut.costs(request.costs, request.num_microbatches),
            rules=SlicedRules(cut),
        )
        try:
            schedule = _built(_Sliced(name, build, units))
        except LimitTooSmall as error:
            refused.append(error)
        else:
            assert schedule.report is not None
            found.append((schedule.report.period or schedule.report.makespan, schedule))
    if not found:
        raise least_refused(refused)
    return min(found, key=lambda entry: entry[0])[1]


@dataclass(frozen=True)
class _Sliced:
    """One form of W: the schedule's name, its builder, and the request for units."""

    name: str
    build: Build
    request: Request

    def ordered(self) -> Schedule:
        """Return an order in which every activation is kept."""
        alone = replace(self.request, costs=with_all_kept(self.request.costs))
        schedule = replace(self.build(alone), name=self.name)
        schedule.check_ranks()
        return schedule

    def within(self, limit: Sequence[float]) -> Schedule:
        """Return an order that keeps all activations within a limit for each rank."""
        fixed = self.request.costs.fixed
        whole = tuple(most + of_rank for most, of_rank in zip(limit, fixed, strict=True))
        return replace(self, request=replace(self.request, limit=Limit(bytes=whole))).ordered()

    def bound(self, timeline: Timeline, limit: Sequence[float], *, back_to_back: bool) -> float:
        """Return a lower bound in seconds for any order on the placement of a timeline."""
        bound, m = period_bound if back_to_back else lower_bound, self.request.num_microbatches
        placement = timeline.schedule.placement
        return bound(placement, m, timeline.costs, limit, self.request.rules.grain)


def _built(sliced: _Sliced) -> Schedule:
    """Build one form of W, with its report."""
    request, costs = sliced.request, sliced.request.costs
    schedule = sliced.ordered() if costs.keeps_all else _with_recompute_or_offload(sliced)
    timeline = simulate(schedule, costs)
    users = request.limit.per_rank(costs)
    if users is not None:
        request.check_feasible(sliced.name, schedule.placement, users, timeline.peak_memory)
    allowed = users or timeline.peak_memory
    if not costs.keeps_all:  # memory bounds no time
        allowed = (math.inf,) * request.pipeline_size
    bound = sliced.bound(timeline, allowed, back_to_back=False)
    period = timeline.period if request.back_to_back else None
    return replace(schedule, report=Report(timeline.makespan, bound, period))


# --- recomputation and offload


_MORE = (1.5, 3.0)
"""Memory of further orders that are made to fit, in that of the first one."""
_NEAR = 1.005
"""A step, in its lower bound, that nothing recomputed or offloaded makes much shorter."""


def _with_recompute_or_offload(sliced: _Sliced) -> Schedule:
    """Return the fastest schedule that keeps every activation, recomputes some, or offloads some.

    Without a limit, no rank holds more than the most of the order that keeps all.

    Raises:
        UsageError: nothing keeps the limit.
    """
    request, costs = sliced.request, sliced.request.costs
    limit = request.limit.per_rank(costs)
    if limit is None:
        orders = [sliced.ordered()]
        base = limit = (max(simulate(orders[0], costs).peak_memory),) * request.pipeline_size
    else:
        orders, base = _first_order(limit, sliced)
    for more in _MORE:
        if not _is_near_bound(orders[0], sliced):
            orders.append(sliced.within([more * most for most in base]))
    found = fitted(orders, costs, limit)
    if not found:
        needed = min((least_with_recomputation(order, costs) for order in orders), key=max)
        request.check_feasible(sliced.name, orders[0].placement, limit, needed)
        raise UsageError(f"{sliced.name} with slices: no order fits that offloads activations")
    return fuse_for_free(min(found, key=request.seconds).schedule, costs)


def _first_order(
    limit: tuple[float, ...], sliced: _Sliced
) -> tuple[list[Schedule], tuple[float, ...]]:
    """Return an order that keeps all activations within a limit, or within what that needs."""
    try:
        return [sliced.within(limit)], limit
    except LimitTooSmall as error:
        limit = (error.needed,) * len(limit)
        return [sliced.within(limit)], limit


def _is_near_bound(order: Schedule, sliced: _Sliced) -> bool:
    request = sliced.request
    timeline, free = simulate(order, request.costs), (math.inf,) * request.pipeline_size
    bound = sliced.bound(timeline, free, back_to_back=request.back_to_back)
    return request.seconds(timeline) <= _NEAR * bound


# --- auto


def auto_of_slices(request: Request) -> Schedule:
    """Return the fastest schedule found on all placements, as ``auto`` of whole microbatches.

    Raises:
        UsageError: no placement fits under the limit.
    """
    request = request.within_one_f_one_b()
    best: tuple[float, Schedule] | None = None
    refused: list[UsageError] = []
    for placement in candidates(request):
        is_huge = _passes(placement, request) > _HUGE
        if request.chunks is None and placement.chunks > _MOST_CHUNKS and is_huge:
            continue
        if best is not None and _bound(placement, request) >= best[0]:
            continue
        try:
            found = _on(placement, request)
        except UsageError as error:
            refused.append(error)
            continue
        seconds = request.seconds(simulate(found, request.costs))
        if best is None or seconds < best[0]:
            best = seconds, found
    if best is None:
        raise least_refused(refused)
    return best[1]


def _passes(placement: Placement, request: Request) -> int:
    return 3 * request.num_microbatches * placement.num_stages


def _bound(placement: Placement, request: Request) -> float:
    """Return a lower bound in seconds for any order on a placement."""
    bound, m = period_bound if request.back_to_back else lower_bound, request.num_microbatches
    table, limits = request.costs.for_placement(placement), request.limits(placement, float(m))
    return bound(placement, m, table, limits, request.rules.grain)


def _on(placement: Placement, request: Request) -> Schedule:
    """Return the fastest order found on a placement, of known ones and of a search.

    Raises:
        UsageError: the limit is below what the placement needs.
    """
    p, chunks, most = placement.pipeline_size, placement.chunks, request.num_microbatches
    known: list[Schedule] = []
    orders: list[Sequence[Sequence[Pass]]] = []
    if placement == looped(p):
        known, orders = [one_f_one_b(request)], [one_f_one_b_block(p).repeat(most)]
    elif placement == looped(p, chunks):
        known = [interleaved(replace(request, chunks=chunks))]
        orders = [_without_w(order) for order in split_interleaved(p, most, chunks)]
    elif placement == v_shape(p):
        orders = [v_block(p, offsets).repeat(most) for offsets in _OFFSETS]
    for order in orders:
        ranks = request.rules.in_units(placement, order)
        known += squeezed_if_it_fits("auto", placement, ranks, request, most)
    known = list(map(split_all, known))
    is_v = placement == v_shape(p)
    if _passes(placement, request) > _LARGE and not is_v:
        limits = request.limits(placement, most)
        timelines = [simulate(it, request.costs) for it in known]
        fitting = [it for it in timelines if keeps(it.peak_memory, limits)]
        if fitting:
            return min(fitting, key=request.seconds).schedule
    search = PlacementSearch("auto", placement, request, most, known=known)
    return replace(search, seconds=_SECONDS[is_v]).run()


_OFFSETS = (v_min_offsets, v_half_offsets, v_zb_offsets)
_LARGE = 24_000  # passes: known orders are good as they are, and a search takes long
_MOST_CHUNKS = 4  # of huge problems
_HUGE = 48_000
_SECONDS = (1.0, 3.0)  # of a search on a placement, and on the V


def _without_w(schedule: Schedule) -> list[list[Pass]]:
    return [[p for p in rank if p.kind is not PassKind.W] for rank in schedule.ranks]
