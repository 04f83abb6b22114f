"""The fastest schedule under a memory limit, of all placements and families.

Every named schedule that keeps the limit takes part, on its own placement: so none of them is
faster for the costs that are given, whatever a search finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from megatron_zb.errors import UsageError
from megatron_zb.schedules import families
from megatron_zb.schedules.bounds import lower_bound, period_bound
from megatron_zb.schedules.costs import with_all_kept
from megatron_zb.schedules.families import wave as wave_schedule
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import with_pairs, without_communication
from megatron_zb.schedules.features.recompute_or_offload import (
    starting_orders,
    with_recompute_or_offload,
)
from megatron_zb.schedules.placement import Placement, looped, wave
from megatron_zb.schedules.request import Limit, Request, keeps, least_refused
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search import varied_passes
from megatron_zb.schedules.search.place_w import fuse_for_free
from megatron_zb.schedules.search.placement_search import QUICK, PlacementSearch
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.stage_costs import communicates

_QUICK_SECONDS = 0.5
_SECONDS = {"v": 12.0, "wave": 3.0, "custom": 3.0, "looped": 0.5, "loop": 0.4}
_SECONDS_OF_SLICES = (1.0, 3.0)  # and on the V: their searches gain less, and are longer
_SECONDS_OF_RESTARTS = 16.0  # estimated with caution: measured, about half
_SECONDS_OF_PAIRS = 24.0
_MOST_CHUNKS = 4
_LARGE = 24_000  # passes: known orders of loops, or of slices, are good, and a search takes long
_STARTS = 3  # known orders that a search starts from, the fastest ones

_Family = Callable[[Request], Schedule]

_SEARCHED_ONE_CHUNK: tuple[_Family, ...] = (families.zb_1p, families.zb_2p)
_FIXED_ONE_CHUNK: tuple[_Family, ...] = (
    families.zb_h1,
    families.zb_h2,
    families.one_f_one_b,
    families.gpipe,
)
_V: dict[_Family, Callable[[int], float]] = {  # with their peaks, by the number of ranks
    families.v_zb: float,
    families.dualpipe_v: families.dualpipe_v_peak,
    families.v_half: families.v_half_peak,
    families.v_min: families.v_min_peak,
    families.one_f_one_b_v: families.one_f_one_b_v_peak,
}


def auto(request: Request) -> Schedule:
    """Search the V, zig-zags, one chunk per rank and loops, with all named schedules beside them.

    A limit of 1F1B's memory is kept where the user gives none. Of orders within 1 % of the fastest,
    but no slower than a known one, the result is the fastest on average where passes vary:
    :mod:`search.varied_passes`. Of slices it is the fastest: such a comparison would take longer
    than the search. ``reason`` of the result says what was chosen and what it was
    compared with. With ``request.quick``, one short search of the
    placement that the request is bound to is all; the result is no slower without it.

    Raises:
        UsageError: no placement fits under the limit, or a quick search has no placement.
    """
    request = request.within_one_f_one_b()
    if request.quick:
        if request.placement is None:
            raise UsageError("auto: a quick search needs the placement of the stages")
        return _quick(request, request.placement)
    best: list[tuple[float, Schedule]] = []  # of each placement
    refused: list[UsageError] = []
    for placement in candidates(request):
        fastest = min((seconds for seconds, _ in best), default=float("inf"))
        try:
            found = _on(placement, request, fastest)
        except UsageError as error:
            refused.append(error)
            continue
        best += found
    if not best:
        raise least_refused(refused)
    best.sort(key=lambda entry: (entry[0], entry[1].placement.chunks))
    if request.rules.units_at_once == 1:
        steadiest = varied_passes.steadiest(best, request, _fastest_known(best, request))
        best.insert(0, best.pop(steadiest))
    return replace(best[0][1], reason=_reason(best))


def _fastest_known(found: Sequence[tuple[float, Schedule]], request: Request) -> float:
    """Return the least seconds of orders that are known without a search of all placements.

    They are the named schedules, and loops with a split backward.
    """
    known = [seconds for seconds, schedule in found if schedule.name != "auto"]
    for placement in {schedule.placement for _, schedule in found if _is_loop(schedule.placement)}:
        loops = _split_loops(request, placement)
        known += [request.seconds(simulate(loop, request.costs)) for loop in loops[:1]]
    return min(known, default=float("inf"))


def _nothing_possible(request: Request) -> UsageError:
    if request.chunks is not None:
        return UsageError(
            f"auto with {request.chunks} chunks: give 1 or more, and at least one layer for each "
            "chunk of every rank"
        )
    return UsageError(
        f"auto: {request.num_layers} layers are too few for {request.pipeline_size} pipeline "
        "ranks: give at least one for each"
    )


def candidates(request: Request) -> list[Placement]:
    """Return the placements to look at, the most promising first.

    Raises:
        UsageError: there are too few layers for any, or for the chunks that are requested.
    """
    found = list(_placements(request))
    if not found:
        raise _nothing_possible(request)
    return found


def candidates_with_vocabulary(request: Request) -> list[Placement]:
    """Return placements of one and two chunks for vocabulary parallelism, or as requested.

    Raises:
        UsageError: as :func:`candidates`.
    """
    places = candidates(request)
    if request.chunks is not None or request.placement is not None:
        return places
    return [place for place in places if place.chunks <= 2] or places[:1]


def _placements(request: Request) -> Iterator[Placement]:
    p, chunks = request.pipeline_size, request.chunks
    if request.placement is not None:
        if chunks in (None, request.placement.chunks):
            yield request.placement
        return
    usual = [wave(p, 2), looped(p), wave(p, 4), wave(p, 8), *(looped(p, c) for c in (4, 8, 2))]
    if chunks is not None and chunks not in (1, 2, 4, 8):
        usual = [looped(p, chunks), *([wave(p, chunks)] if chunks > 0 and chunks % 2 == 0 else [])]
    for placement in usual:
        if chunks in (None, placement.chunks) and _can_hold(placement, request):
            yield placement


def _can_hold(placement: Placement, request: Request) -> bool:
    layers, stages = request.num_layers, placement.num_stages
    if layers is None or layers % stages == 0:
        return True
    return layers % request.pipeline_size != 0 and layers >= stages


def _on(placement: Placement, request: Request, fastest: float) -> list[tuple[float, Schedule]]:
    """Return the named and searched schedules of a placement that fit, with their seconds.

    Empty where no schedule of the placement can be faster than ``fastest``. Where costs have
    communication, only the fastest, after a search for pairs.

    Raises:
        UsageError: the limit is below what the placement needs.
    """
    limits = request.limit.per_rank(request.costs)
    assert limits is not None, "auto always has a limit"
    if not request.costs.keeps_all:
        return _with_recompute_or_offload(placement, request, fastest)
    if _bound(placement, request, limits) >= fastest:
        return []
    alone = replace(request, costs=without_communication(request.costs))
    found = _without_pairs(placement, alone, limits)
    if not communicates(request.costs.for_placement(placement)):
        return found
    best = _paired(placement, request, limits, [schedule for _, schedule in found])
    return [(request.seconds(simulate(best, request.costs)), best)]


def _with_recompute_or_offload(
    placement: Placement, request: Request, fastest: float
) -> list[tuple[float, Schedule]]:
    """Return schedules that keep every activation, and one that does not if it is faster.

    Raises:
        UsageError: the limit is below what the placement needs.
    """
    alone = replace(request, costs=with_all_kept(request.costs))
    refused: UsageError | None = None
    try:
        found = _on(placement, alone, fastest)
    except UsageError as error:
        refused, found = error, []
    limits = request.limit.per_rank(request.costs)
    assert limits is not None, "auto always has a limit"
    if placement.chunks > _MOST_CHUNKS or _bound(placement, request, limits) >= fastest:
        if refused is not None:
            raise refused
        return found
    orders = _starting_orders(placement, request)

    def all_kept() -> Schedule:
        if refused is not None or not found:
            raise refused or UsageError("nothing that keeps every activation is as fast")
        return min(found, key=lambda entry: entry[0])[1]

    search = PlacementSearch("auto", placement, request, _most(request))
    best = with_recompute_or_offload(search, all_kept, orders)
    return [*found, (request.seconds(simulate(best, request.costs)), best)]


def _starting_orders(placement: Placement, request: Request) -> list[Schedule]:
    """Return orders of a placement to start from, whatever they hold."""
    p, m = request.pipeline_size, request.num_microbatches
    if _is_loop(placement):
        whole = replace(request, chunks=placement.chunks, group_size=None)
        free = replace(whole, costs=with_all_kept(request.costs), limit=Limit())
        loop = [families.interleaved(free)] if request.costs.feature(Offload) and m % p == 0 else []
        return [*families.split_loops(free, placement.chunks), *loop]
    if placement == looped(p) and request.costs.feature(Offload):
        return [families.one_f_one_b(replace(request, limit=Limit()))]
    return starting_orders("auto", placement, request)


def _paired(
    placement: Placement, request: Request, limits: Sequence[float], alone: Sequence[Schedule]
) -> Schedule:
    """Return the fastest of known orders, with pairs and without, and of what a search pairs."""
    p, m = request.pipeline_size, request.num_microbatches
    known = [_quick(request, placement), *_named(placement, request)]
    if _is_loop(placement):
        known.append(families.overlapped(p, m, placement.chunks))
    elif placement == wave(p, 2) and m >= 2 * p:
        known.append(families.dualpipe_v_order(p, m))
    fitting = [s for s in known if keeps(simulate(s, request.costs).peak_memory, limits)]
    found = sorted(alone, key=lambda s: request.seconds(simulate(s, request.costs)))
    seconds = _SECONDS_OF_PAIRS if placement.chunks == 2 else _SECONDS_OF_PAIRS / 4
    search = PlacementSearch("auto", placement, request, 2.0 * p, seconds=seconds)
    best = with_pairs([*found[:_STARTS], *fitting], search)
    return replace(best, name="auto")


def _named(placement: Placement, request: Request) -> list[Schedule]:
    """Return the named schedules of a placement that can be built.

    Where a limit makes two of them the same problem, the first is enough.
    """
    p, chunks = request.pipeline_size, placement.chunks
    peaks: dict[_Family, Callable[[int], float]] = {}
    if placement == wave(p, 2):
        peaks = _V
    elif chunks % 2 == 0 and placement == wave(p, chunks):
        peaks = {wave_schedule: float}
    found: dict[tuple[bool, tuple[float, ...]], Schedule] = {}
    for family, peak in peaks.items():
        problem = family is families.one_f_one_b_v, request.limits(placement, peak(p))
        if problem not in found:
            with suppress(UsageError):
                found[problem] = family(replace(request, chunks=chunks, group_size=None))
    return [*found.values()]


def _without_pairs(
    placement: Placement, request: Request, limits: Sequence[float]
) -> list[tuple[float, Schedule]]:
    """Return the named and searched schedules of a placement that fit, with their seconds.

    Raises:
        UsageError: the limit is below what the placement needs.
    """
    bound = _bound(placement, request, limits)
    found: list[tuple[float, Schedule]] = []

    def enter(schedule: Schedule) -> None:
        timeline = simulate(schedule, request.costs)
        if keeps(timeline.peak_memory, limits):
            found.append((request.seconds(timeline), schedule))

    refused: UsageError | None = None
    for build in _builders(placement, is_sliced=request.rules.units_at_once > 1):
        if any(seconds <= bound * (1 + 1e-9) for seconds, _ in found):
            break
        try:
            for schedule in build(request):
                enter(schedule)
        except UsageError as error:
            refused = error
    found.sort(key=lambda entry: entry[0])
    is_searched = placement.chunks <= 4 or _is_loop(placement) or not found
    if is_searched and (not found or found[0][0] > bound * (1 + 1e-9)):
        known = [schedule for _, schedule in found[:_STARTS]]
        try:
            enter(_long(placement, request, known))
        except UsageError as error:
            refused = error
    if not found and refused is not None:
        raise refused
    return found


def _bound(placement: Placement, request: Request, limits: Sequence[float]) -> float:
    """Return a lower bound in seconds for any schedule of a placement."""
    bound = period_bound if request.back_to_back else lower_bound
    table, m = request.costs.for_placement(placement), request.num_microbatches
    least = request.rules.least_seconds(placement, table)
    return max(least, bound(placement, m, table, limits, request.rules.grain))


def _builders(
    placement: Placement, *, is_sliced: bool
) -> list[Callable[[Request], list[Schedule]]]:
    """Return builders of a placement's known orders: named schedules and a quick search.

    Of slices, only fixed orders: a search for each name would take as long as the long one.
    """
    p, chunks = placement.pipeline_size, placement.chunks

    def one(family: _Family) -> Callable[[Request], list[Schedule]]:
        return lambda request: [family(replace(request, chunks=chunks, group_size=None))]

    out: list[Callable[[Request], list[Schedule]]] = []
    if placement == looped(p):
        out += map(one, (*(() if is_sliced else _SEARCHED_ONE_CHUNK), *_FIXED_ONE_CHUNK))
    elif _is_loop(placement):
        out.append(one(families.interleaved))
    elif chunks % 2 == 0 and placement == wave(p, chunks):
        if chunks == 2:
            out += [] if is_sliced else map(one, _V)
            out.append(lambda request: families.squeezed_blocks("auto", request, _most(request)))
        out += [] if is_sliced else [one(wave_schedule)]
    if is_sliced:
        loops = partial(_split_loops, placement=placement)
        return [*out, *([loops] if _is_loop(placement) else [])]
    return [*out, one(partial(_quick, placement=placement))]


def _quick(request: Request, placement: Placement) -> Schedule:
    """Search a placement for half a second.

    Raises:
        UsageError: the limit is below what the placement needs.
    """
    peak = _most(request)
    if not request.costs.keeps_all:
        alone = replace(request, costs=with_all_kept(request.costs))
        orders = _starting_orders(placement, request)
        search = PlacementSearch("auto", placement, request, peak)
        return with_recompute_or_offload(search, lambda: _quick(alone, placement), orders)
    known = _split_loops(request, placement) if _is_loop(placement) else []
    if known and _is_large(placement, request):
        return known[0]
    search = PlacementSearch("auto", placement, request, peak, known=known, most=QUICK)
    return replace(search, seconds=_QUICK_SECONDS).run()


def _split_loops(request: Request, placement: Placement) -> list[Schedule]:
    """Return interleaved orders with a split backward that fit, the fastest first.

    Searches alone are far from them.
    """
    limits = request.limits(placement, _most(request))
    orders = families.split_loops(request, placement.chunks)
    timelines = [simulate(fuse_for_free(order, request.costs), request.costs) for order in orders]
    fitting = [timeline for timeline in timelines if keeps(timeline.peak_memory, limits)]
    return [timeline.schedule for timeline in sorted(fitting, key=request.seconds)]


def _most(request: Request) -> float:
    """Return the most units that a rank holds: memory beyond twice 1F1B's shortens no step.

    Slices are smaller, so only the user's limit counts.
    """
    if request.rules.units_at_once > 1:
        return float(request.num_microbatches)
    return 2.0 * request.pipeline_size


def _is_loop(placement: Placement) -> bool:
    return placement.chunks > 1 and placement == looped(placement.pipeline_size, placement.chunks)


def _is_large(placement: Placement, request: Request) -> bool:
    return 3 * request.num_microbatches * placement.num_stages > _LARGE


def _long(placement: Placement, request: Request, known: Sequence[Schedule]) -> Schedule:
    """Search a placement for longer where that has been seen to pay.

    Raises:
        UsageError: the limit is below what the placement needs.
    """
    kind = "v" if placement == wave(placement.pipeline_size, 2) else placement.name
    is_sliced = request.rules.units_at_once > 1
    is_good = _is_loop(placement) or (is_sliced and kind != "v")
    if known and is_good and _is_large(placement, request):
        return known[0]
    peak = _most(request)
    search = PlacementSearch("auto", placement, request, peak, known=known)
    if is_sliced:
        return replace(search, seconds=_SECONDS_OF_SLICES[kind == "v"]).run()
    return replace(
        search,
        seconds=_SECONDS["loop" if _is_loop(placement) else kind],
        thorough=True,
        restarting=_SECONDS_OF_RESTARTS if kind == "v" else 0.0,
    ).run()


def _reason(found: list[tuple[float, Schedule]]) -> str:
    def said(entry: tuple[float, Schedule]) -> str:
        seconds, schedule = entry
        placement = schedule.placement
        name = schedule.name if schedule.name != "auto" else "searched"
        return f"{name} on {placement.name} with {placement.chunks} chunks ({seconds:.6g} s)"

    best, *others = found
    what = "is the fastest that fits"
    if best[0] > min(seconds for seconds, _ in found) * (1 + 1e-9):
        what = "loses least where passes vary, of those within 1 % of the fastest that fits"
    text = f"{said(best)} {what}"
    return f"{text}; next is {said(others[0])}" if others else text
