"""Search for an order of a placement, within a number of microbatches per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_zb.schedules.bounds import earliest_starts, lower_bound, period_bound, usable_limit
from megatron_zb.schedules.costs import Feature
from megatron_zb.schedules.passes import Pass
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Request, keeps
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.hill_climbing import Found, search
from megatron_zb.schedules.search.kernels import available
from megatron_zb.schedules.search.place_w import fuse_for_free
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.runner import RESTARTS, SINGLE, Effort, effort_of
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.stage_costs import StageCosts

NAMED_SECONDS = 0.25
"""Approximate seconds of the search for a named schedule, if it is compiled."""

QUICK = Effort(runs=200, moves=20_000)
_SMALL = 1600  # passes of a problem that can be searched several times
_STEPS_BELOW = 2
_LARGE = 8000  # passes of a problem whose restarts would take too long


@dataclass(frozen=True)
class PlacementSearch:
    """A search for the fastest order in which no rank holds more than a number of microbatches.

    Args:
        name: of the schedule.
        placement: of its stages.
        request: what is asked for.
        peak_microbatches: the most that a rank holds, or less by the request's limit.
        split: whether W is a pass.
        known: schedules of the same placement, which take part if they keep the limit.
        seconds: of the search, estimated.
        thorough: also look below the limit where the problem is small: see :func:`_or_below`.
        restarting: seconds more, estimated like the others, for restarts where the result is far
            from the lower bound.
        most: the largest effort, enough for a small problem in less time.
    """

    name: str
    placement: Placement
    request: Request
    peak_microbatches: float
    split: bool = True
    known: Sequence[Schedule] = ()
    seconds: float = NAMED_SECONDS
    thorough: bool = False
    restarting: float = 0.0
    most: Effort = SINGLE.most

    def run(self) -> Schedule:
        """Return the fastest order found.

        The features of the costs decide first: one that drops activations searches by itself, and
        one that pairs passes goes on from what is found without.

        Raises:
            UsageError: the limit is below one microbatch in each chunk.
        """
        features = [it for it in self.request.costs.features if isinstance(it, SearchFeature)]
        for feature in features:
            if (found := feature.searched(self)) is not None:
                return found
        schedule = self._alone()
        for feature in features:
            schedule = feature.improved(schedule, self)
        return schedule

    def problem(self) -> Problem:
        """Return what is to be put in order, under the limit of the request."""
        request, placement, m = self.request, self.placement, self.request.num_microbatches
        table = request.costs.for_placement(placement)
        limits = request.limits(placement, self.peak_microbatches)
        limit = usable_limit(placement, m, table, limits)
        tail = tail_seconds(placement, table) if request.back_to_back else ()
        return Problem(placement, m, table, limit, self.split, tail, rules=request.rules)

    def _alone(self) -> Schedule:
        """Return the fastest order of F, B and W."""
        request, problem, placement = self.request, self.problem(), self.placement
        smallest = [problem.smallest_limit(rank) for rank in range(placement.pipeline_size)]
        request.check_feasible(self.name, placement, problem.limit, smallest)
        timed = [(s.ranks, simulate(s, request.costs)) for s in self.known]

        def at(limit: tuple[float, ...], tail: tuple[float, ...] = problem.tail_seconds) -> Found:
            limited = replace(problem, limit=limit, tail_seconds=tail)
            fitting = [ranks for ranks, timeline in timed if keeps(timeline.peak_memory, limit)]
            effort = effort_of(limited, self.seconds, SINGLE, self.most)
            further = _restarts(limited, self.restarting)
            return search(limited, effort, bound_of(limited), fitting, further=further)

        def period(found: Found) -> float:
            return simulate(self.schedule(found.ranks), request.costs).period

        found = at(problem.limit)
        if self.thorough and problem.num_passes <= _SMALL:
            found = _or_below(found, problem, at)
        if request.back_to_back:  # a heuristic: it may do better for one iteration
            found = min((found, at(problem.limit, ())), key=period)
        schedule = self.schedule(found.ranks)
        return fuse_for_free(schedule, request.costs) if self.split else schedule

    def schedule(self, ranks: tuple[tuple[Pass, ...], ...]) -> Schedule:
        """Return the schedule of an order."""
        m, rules = self.request.num_microbatches, self.request.rules
        return Schedule(self.name, self.placement, m, ranks, rules=rules)


@dataclass
class LimitedSearch:
    """A search for an order that may recompute or offload activations.

    Args:
        name: of the schedule.
        problem: what is to be put in order, with the limit that has to be kept.
        request: what is asked for.
        bound: a lower bound in seconds.
        orders: schedules of the placement, without pairs, to start from, whatever they hold.
        starts: these, and one that keeps every activation.
        found: schedules that keep the limit, so far.
    """

    name: str
    problem: Problem
    request: Request
    bound: float
    orders: Sequence[Schedule]
    starts: Sequence[Schedule]
    found: list[Schedule]


class SearchFeature(Feature):
    """A feature that takes part in the search for an order on a placement."""

    turn: ClassVar[int] = 0
    """Place among those that look for what to drop: later ones go on from what these found."""

    def searched(self, search: PlacementSearch) -> Schedule | None:
        """Return the result of a search that the feature leads, None if it leads none."""
        return None

    def improved(self, schedule: Schedule, search: PlacementSearch) -> Schedule:
        """Return a schedule that is no slower than the one that was found without the feature."""
        return schedule

    def within_limit(self, search: LimitedSearch) -> Iterable[Schedule]:
        """Return schedules that keep the limit by recomputation or offload."""
        return ()

    def last_resort(self, search: LimitedSearch) -> Iterable[Schedule]:
        """Return schedules for a limit that nothing else has kept."""
        return ()


def tail_seconds(placement: Placement, costs: StageCosts) -> tuple[float, ...]:
    """Return the seconds to count after each rank's last pass, for iterations in a row.

    A rank that starts late may end as late without holding up any.
    """
    starts = earliest_starts(placement, costs)
    return tuple(max(starts) - start for start in starts)


def bound_of(problem: Problem) -> float:
    """Return a lower bound in seconds for any order of a problem, its tail included."""
    sizes = (
        *(problem.placement, problem.num_microbatches, problem.costs, problem.limit),
        problem.rules.grain,
    )
    least = max(lower_bound(*sizes), problem.rules.least_seconds(problem.placement, problem.costs))
    if not problem.tail_seconds:
        return least
    return max(least, max(problem.tail_seconds) + period_bound(*sizes))


def _or_below(found: Found, problem: Problem, at: Callable[[tuple[float, ...]], Found]) -> Found:
    """Return the best of a search and those at the next two smaller limits.

    The search is a heuristic and not monotonic in the limit; without these, more memory would now
    and then give a slower schedule.
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
        if bound_of(replace(problem, limit=limit)) < found.makespan:
            found = min(found, at(limit), key=lambda f: f.makespan)
    return found


def _restarts(problem: Problem, seconds: float) -> Effort:
    """Estimate runs and moves of restarts: none in plain Python, which has no time to polish."""
    if not available() or problem.num_passes > _LARGE:
        return Effort(0, 0)
    return effort_of(problem, seconds, RESTARTS)
