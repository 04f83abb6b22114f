"""Search for an order of a placement, within a number of microbatches per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron_zb.errors import UsageError
from megatron_zb.schedules.bounds import earliest_starts, lower_bound, period_bound, usable_limit
from megatron_zb.schedules.costs import with_all_kept
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Limit, Request, keeps
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search import recompute_search
from megatron_zb.schedules.search.hill_climbing import Found, search
from megatron_zb.schedules.search.kernels import available
from megatron_zb.schedules.search.pair_search import search_pairs
from megatron_zb.schedules.search.paired_recompute import search_paired_recompute
from megatron_zb.schedules.search.place_offload import (
    place_offload,
    polish_offload,
    with_recomputed,
)
from megatron_zb.schedules.search.place_w import fuse_for_free, split_all
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.runner import (
    PAIRS,
    RECOMPUTE,
    RESTARTS,
    SINGLE,
    Effort,
    effort_of,
)
from megatron_zb.schedules.simulator import Timeline, simulate
from megatron_zb.schedules.stage_costs import StageCosts, communicates

NAMED_SECONDS = 0.25
"""Approximate seconds of the search for a named schedule, if it is compiled."""

RECOMPUTE_SECONDS = 12.0
"""Approximate seconds of the search for what is recomputed, on one placement."""

_QUICK_RECOMPUTE_SECONDS = 1.5
_POLISHED = 2  # orders with offload, the fastest ones
_RECOMPUTED = (0.15, 0.3, 0.45)  # shares of units, where copies of all would take too long
_BUSY = 0.5  # of the makespan: a copy engine that others may wait for
_NEAR = 1.005  # of the lower bound: nothing to gain by recomputation
_PAIR_SECONDS = 1.0  # at least, where passes may be paired
_SMALL = 1600  # passes of a problem that can be searched several times
_STEPS_BELOW = 2
QUICK = Effort(runs=200, moves=20_000)
_LARGE = 8000  # passes of a problem whose restarts would take too long


def search_placement(
    name: str,
    placement: Placement,
    request: Request,
    peak_microbatches: float,
    *,
    split: bool = True,
    known: Sequence[Schedule] = (),
    seconds: float = NAMED_SECONDS,
    thorough: bool = False,
    restarting: float = 0.0,
    most: Effort = SINGLE.most,
) -> Schedule:
    """Return the fastest order found in which no rank holds more than ``peak_microbatches``.

    ``known`` schedules of the same placement take part if they keep the limit. A ``thorough``
    search of a small problem also looks below the limit: see :func:`_or_below`. ``restarting``
    seconds more, estimated like the others, go into restarts where the result is far from the lower
    bound. ``most`` is the largest effort, enough for a small problem in less time.

    Raises:
        UsageError: the limit is below one microbatch in each chunk.
    """
    if not request.costs.keeps_all:
        alone = replace(request, costs=with_all_kept(request.costs))

        def all_kept() -> Schedule:
            return search_placement(
                name,
                placement,
                alone,
                peak_microbatches,
                split=split,
                known=known,
                seconds=seconds,
                thorough=thorough,
                restarting=restarting,
                most=most,
            )

        orders = [
            *known,
            *(orders_to_offload(name, placement, alone) if request.costs.feature(Offload) else ()),
        ]
        return with_recompute_or_offload(
            name, placement, request, peak_microbatches, all_kept, orders
        )
    table = request.costs.for_placement(placement)
    m = request.num_microbatches
    limit = usable_limit(placement, m, table, request.limits(placement, peak_microbatches))
    tail = tail_seconds(placement, table) if request.back_to_back else ()
    problem = Problem(placement, m, table, limit, split, tail, rules=request.rules)
    ranks = range(placement.pipeline_size)
    request.check_feasible(name, placement, limit, [problem.smallest_limit(r) for r in ranks])
    timed = [(s.ranks, simulate(s, request.costs)) for s in known]

    def at(limit: tuple[float, ...], tail: tuple[float, ...] = tail) -> Found:
        problem = Problem(placement, m, table, limit, split, tail, rules=request.rules)
        fitting = [ranks for ranks, timeline in timed if keeps(timeline.peak_memory, limit)]
        effort, further = effort_of(problem, seconds, SINGLE, most), _restarts(problem, restarting)
        return search(problem, effort, _bound(problem), fitting, further=further)

    def period(found: Found) -> float:
        order = Schedule(name, placement, m, found.ranks, rules=request.rules)
        return simulate(order, request.costs).period

    found = at(limit)
    if thorough and problem.num_passes <= _SMALL:
        found = _or_below(found, problem, at)
    if request.back_to_back:  # the search is luck in part: never worse than what is found for one
        found = min((found, at(limit, ())), key=period)
    schedule = Schedule(name, placement, m, found.ranks, rules=request.rules)
    if split:
        schedule = fuse_for_free(schedule, request.costs)
    if not communicates(table):
        return schedule
    peaks = [timeline.peak_memory for _, timeline in timed]
    fitting = [s for s, peak in zip(known, peaks, strict=True) if keeps(peak, limit)]
    more = max(seconds, _PAIR_SECONDS) + restarting
    return with_pairs([schedule, *fitting], request, peak_microbatches, more, split=split)


def orders_to_offload(name: str, placement: Placement, request: Request) -> list[Schedule]:
    """Return orders to offload from, which hold more than the limit, and less."""
    p, free = request.pipeline_size, replace(request, limit=Limit())
    return [search_placement(name, placement, free, held) for held in (p, p / 2 + 1, p / 3 + 1)]


def with_pairs(
    known: Sequence[Schedule],
    request: Request,
    peak_microbatches: float,
    seconds: float,
    *,
    split: bool = True,
) -> Schedule:
    """Return the fastest of known schedules of a placement that fit, and of what a search pairs.

    It has the name of the first.
    """
    name, placement, m = known[0].name, known[0].placement, request.num_microbatches
    table = request.costs.for_placement(placement)
    limit = usable_limit(placement, m, table, request.limits(placement, peak_microbatches))
    tail = tail_seconds(placement, table) if request.back_to_back else ()
    problem = Problem(placement, m, table, limit, split, tail, rules=request.rules)
    effort = effort_of(problem, seconds, PAIRS)
    found = search_pairs(name, problem, effort, _bound(problem), known)
    if split:
        found = fuse_for_free(found, request.costs)
    entries = [*known, found]
    best = min(entries, key=lambda entry: request.seconds(simulate(entry, request.costs)))
    return replace(best, name=name)


def with_recompute_or_offload(
    name: str,
    placement: Placement,
    request: Request,
    peak_microbatches: float,
    all_kept: Callable[[], Schedule],
    orders: Sequence[Schedule] = (),
) -> Schedule:
    """Return the fastest schedule that keeps every activation, recomputes some, or offloads some.

    ``orders`` are schedules of the placement to start from, whatever they hold.

    Raises:
        UsageError: the limit is below one activation, with one input in each chunk without offload.
    """
    table, m = request.costs.for_placement(placement), request.num_microbatches
    limit = usable_limit(placement, m, table, request.limits(placement, peak_microbatches))
    problem = Problem(placement, m, table, limit, rules=request.rules)
    ranks = range(placement.pipeline_size)
    smallest = [recompute_search.smallest_limit(problem, rank) for rank in ranks]
    request.check_feasible(name, placement, limit, smallest)
    found: list[Schedule] = []
    refused: UsageError | None = None
    try:
        found.append(all_kept())
    except UsageError as error:
        refused = error
    bound = _bound(problem)
    if not (found and request.seconds(simulate(found[0], request.costs)) <= bound * _NEAR):
        known = [*(order.without_pairs() for order in orders), *found]
        found += _offloaded(name, known, request, limit, bound) if table.copies else []
        seconds = _QUICK_RECOMPUTE_SECONDS if request.quick else RECOMPUTE_SECONDS
        effort = effort_of(problem, seconds, RECOMPUTE)
        found_with_r = (
            recompute_search.search_recompute(name, problem, effort, bound, known)
            if "kept_input" in table.memory
            else None
        )
        if found_with_r is not None:
            found.append(fuse_for_free(found_with_r, request.costs))
        if found_with_r is not None and communicates(table):
            effort = effort_of(problem, seconds, PAIRS)
            known = [*(order.without_pairs() for order in orders), *found]
            paired = search_paired_recompute(name, problem, effort, bound, known)
            found += [] if paired is None else [fuse_for_free(paired, request.costs)]
    if not found and table.copies:
        found = _offloaded(name, [_one_at_a_time(name, placement, m)], request, limit, bound)
    if not found:
        raise refused or UsageError(f"{name}: no order fits that offloads activations")
    return min(found, key=lambda entry: request.seconds(simulate(entry, request.costs)))


def _one_at_a_time(name: str, placement: Placement, num_microbatches: int) -> Schedule:
    """Return the order that holds the least: each microbatch when the one before it has ended."""

    def passes(stages: Sequence[int], microbatch: int) -> Iterator[Pass]:
        for stage in stages:
            yield Pass(PassKind.F, stage, microbatch)
        for stage in reversed(stages):
            yield Pass(PassKind.B, stage, microbatch)
            yield Pass(PassKind.W, stage, microbatch)

    ranks = tuple(
        tuple(p for microbatch in range(num_microbatches) for p in passes(stages, microbatch))
        for stages in placement.stages_of
    )
    return Schedule(name, placement, num_microbatches, ranks)


def _offloaded(
    name: str, orders: Sequence[Schedule], request: Request, limit: Sequence[float], bound: float
) -> list[Schedule]:
    """Return known orders that keep the limit with offload; each B is split, its W right behind.

    A W that comes later holds what offload is to free. Where copies take much of the time, some
    units of the fastest order are recomputed instead, if that is allowed.
    """
    split = [split_all(order) for order in orders]
    offloaded = [place_offload(order, request.costs, limit) for order in split]
    timelines = [(simulate(s, request.costs), i) for i, s in enumerate(offloaded) if s is not None]
    if request.costs.feature(Recomputation) and timelines:
        fastest, at = min(timelines, key=lambda entry: request.seconds(entry[0]))
        if _waits_for_copies(fastest):
            fewer = (with_recomputed(split[at], share) for share in _RECOMPUTED)
            offloaded += [place_offload(order, request.costs, limit) for order in fewer]
    kept = [s for s in split if keeps(simulate(s, request.costs).peak_memory, limit)]
    starts = [*filter(None, offloaded), *kept]
    starts.sort(key=lambda start: request.seconds(simulate(start, request.costs)))
    polished = (polish_offload(s, request.costs, limit, bound) for s in starts[:_POLISHED])
    fitting = [*polished, *starts[_POLISHED:]]
    return [replace(fuse_for_free(s, request.costs), name=name) for s in fitting]


def _waits_for_copies(timeline: Timeline) -> bool:
    """Return whether a copy engine of a rank works so long that others may wait for it."""
    busy = [
        sum(copy.end - copy.start for copy in copies if copy.to_host is to_host)
        for copies in timeline.copies
        for to_host in (True, False)
    ]
    return max(busy, default=0.0) > _BUSY * timeline.makespan


def tail_seconds(placement: Placement, costs: StageCosts) -> tuple[float, ...]:
    """Return the seconds to count after each rank's last pass, for iterations in a row.

    A rank that starts late may end as late without holding up any.
    """
    starts = earliest_starts(placement, costs)
    return tuple(max(starts) - start for start in starts)


def _bound(problem: Problem) -> float:
    sizes = (problem.placement, problem.num_microbatches, problem.costs, problem.limit)
    if not problem.tail_seconds:
        return lower_bound(*sizes)
    return max(lower_bound(*sizes), max(problem.tail_seconds) + period_bound(*sizes))


def _or_below(found: Found, problem: Problem, at: Callable[[tuple[float, ...]], Found]) -> Found:
    """Return the best of a search and those at the next smaller limits.

    A search is luck in part, and with less memory it may be luckier; without these, more memory
    would now and then give a slower schedule.
    """
    costs, placement = problem.costs, problem.placement
    limit = problem.limit
    for _ in range(_STEPS_BELOW):
        limit = tuple(
            most - min(costs.largest_activation[s] for s in held)
            for most, held in zip(limit, placement.stages_of, strict=True)
        )
        if any(most < problem.smallest_limit(r) for r, most in enumerate(limit)):
            break
        if _bound(replace(problem, limit=limit)) < found.makespan:
            found = min(found, at(limit), key=lambda f: f.makespan)
    return found


def _restarts(problem: Problem, seconds: float) -> Effort:
    """Estimate runs and moves of restarts: none in plain Python, which has no time to polish."""
    if not available() or problem.num_passes > _LARGE:
        return Effort(0, 0)
    return effort_of(problem, seconds, RESTARTS)
