"""The fastest schedule under a memory limit, of all placements and families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_zb.errors import UsageError
from megatron_zb.schedules import interleaved, one_f_one_b, v_shape, zero_bubble
from megatron_zb.schedules.bounds import lower_bound, period_bound
from megatron_zb.schedules.fusing import fuse_for_free
from megatron_zb.schedules.placement import Placement, looped, wave
from megatron_zb.schedules.request import Request, keeps
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.searched import searched
from megatron_zb.schedules.simulator import simulate

_SECONDS = {"v": 12.0, "wave": 3.0, "zb": 0.5, "loop": 0.4}
_LARGE_LOOP = 24_000  # passes: its order is good as it is, and a search takes long
_SECONDS_OF_WALKS = 16.0  # estimated with caution: measured, about half


def auto(request: Request) -> Schedule:
    """Search the V, a zig-zag, one chunk per rank and loops; compare with 1F1B's kin.

    A limit of 1F1B's memory is kept where the user gives none. ``report.reason`` of the result says
    what was chosen and what it was compared with.

    Raises:
        UsageError: no placement fits under the limit.
    """
    if request.limit.per_rank(request.costs) is None:
        request = replace(request, limit=replace(request.limit, fraction=1.0))
    found: list[tuple[float, Schedule]] = []
    refused: list[UsageError] = []
    for place, build in _CANDIDATES:
        if not _possible(place(request.pipeline_size), request):
            continue
        fastest = min((seconds for seconds, _ in found), default=float("inf"))
        try:
            schedule = build(request, fastest)
        except UsageError as error:
            refused.append(error)
            continue
        if schedule is not None:
            found.append((request.seconds(simulate(schedule, request.costs)), schedule))
    if not found and request.placement is not None:
        placed = _search_if_it_can_win(request, request.placement, float("inf"), _SECONDS["wave"])
        assert placed is not None, "anything is faster than never"
        return placed
    if not found:
        raise (
            refused[0]
            if refused
            else UsageError(
                f"auto: {request.num_layers} layers are too few for {request.pipeline_size} "
                "pipeline ranks: give at least one for each"
            )
        )
    found.sort(key=lambda entry: (entry[0], entry[1].placement.chunks))
    return replace(found[0][1], reason=_reason(found))


_Build = Callable[[Request, float], Schedule | None]


def _possible(placement: Placement, request: Request) -> bool:
    if request.placement is not None and placement != request.placement:
        return False
    layers, stages = request.num_layers, placement.num_stages
    if layers is None or layers % stages == 0:
        return True
    return layers % request.pipeline_size != 0 and layers >= stages


def _v(request: Request, fastest: float) -> Schedule | None:
    p = request.pipeline_size
    known = v_shape.squeezed_blocks("auto", request)
    return searched(
        "auto",
        wave(p, 2),
        request,
        2.0 * p,
        known=known,
        seconds=_SECONDS["v"],
        thorough=True,
        walking=_SECONDS_OF_WALKS,
    )


def _wave(request: Request, fastest: float) -> Schedule | None:
    return _search_if_it_can_win(request, wave(request.pipeline_size, 4), fastest, _SECONDS["wave"])


def _one_chunk(request: Request, fastest: float) -> Schedule | None:
    return _search_if_it_can_win(request, looped(request.pipeline_size), fastest, _SECONDS["zb"])


def _split_interleaved(chunks: int) -> _Build:
    """A loop of several chunks, from the interleaved order: searches alone are far from it."""

    def build(request: Request, fastest: float) -> Schedule | None:
        p, m = request.pipeline_size, request.num_microbatches
        placement = looped(p, chunks)
        if not _can_win(request, placement, fastest):
            return None
        limits = request.limits(placement, 2.0 * p)
        timelines = [
            simulate(schedule, request.costs)
            for schedule in interleaved.split_interleaved(p, m, chunks)
        ]
        fitting = [timeline for timeline in timelines if keeps(timeline.peak_memory, limits)]
        if not fitting:
            return None
        if 3 * m * placement.num_stages > _LARGE_LOOP:
            return fuse_for_free(min(fitting, key=request.seconds).schedule, request.costs)
        known = [timeline.schedule for timeline in fitting]
        seconds = _SECONDS["loop"]
        return searched(
            "auto", placement, request, 2.0 * p, known=known, seconds=seconds, thorough=True
        )

    return build


def _search_if_it_can_win(
    request: Request, placement: Placement, fastest: float, seconds: float
) -> Schedule | None:
    if not _can_win(request, placement, fastest):
        return None
    peak = 2.0 * request.pipeline_size
    return searched("auto", placement, request, peak, seconds=seconds, thorough=True)


def _can_win(request: Request, placement: Placement, fastest: float) -> bool:
    """Whether the bound of a placement leaves room below what has been found."""
    limit = request.limits(placement, 2.0 * request.pipeline_size)
    table = request.costs.for_placement(placement)
    bound = period_bound if request.in_a_row else lower_bound
    return bound(placement, request.num_microbatches, table, limit) < fastest


def _fixed(build: Callable[[Request], Schedule]) -> _Build:
    """A family whose order does not depend on the limit: it fits or it does not."""

    def fitting(request: Request, fastest: float) -> Schedule | None:
        schedule = build(request)
        limit = request.limit.per_rank(request.costs)
        assert limit is not None
        peaks = simulate(schedule, request.costs).peak_memory
        request.check_feasible(schedule.name, limit, peaks)
        return schedule

    return fitting


def _interleaved(chunks: int) -> _Build:
    return _fixed(lambda request: interleaved.interleaved(replace(request, chunks=chunks)))


def _zigzag(chunks: int) -> Callable[[int], Placement]:
    return lambda p: wave(p, chunks)


def _loop(chunks: int) -> Callable[[int], Placement]:
    return lambda p: looped(p, chunks)


_CANDIDATES: tuple[tuple[Callable[[int], Placement], _Build], ...] = (
    (_zigzag(2), _v),
    (_loop(1), _one_chunk),
    (_zigzag(4), _wave),
    (_loop(1), _fixed(one_f_one_b.one_f_one_b)),
    (_loop(1), _fixed(one_f_one_b.gpipe)),
    (_loop(1), _fixed(zero_bubble.zb_h1)),
    (_loop(4), _split_interleaved(4)),
    (_loop(8), _split_interleaved(8)),
    (_loop(2), _split_interleaved(2)),
    (_loop(2), _interleaved(2)),
    (_loop(4), _interleaved(4)),
)


def _reason(found: list[tuple[float, Schedule]]) -> str:
    def said(entry: tuple[float, Schedule]) -> str:
        seconds, schedule = entry
        placement = schedule.placement
        name = schedule.name if schedule.name != "auto" else "searched"
        return f"{name} on {placement.name} with {placement.chunks} chunks ({seconds:.6g} s)"

    best, *others = found
    text = f"{said(best)} is the fastest that fits"
    return f"{text}; next is {said(others[0])}" if others else text
