"""The search that recomputation and offload share: which activations stay, and in what order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import with_all_kept
from megatron_zb.schedules.kinds import Home
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Limit, LimitTooSmall, Request, keeps, least_refused
from megatron_zb.schedules.rules import TrainingRules
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.place_w import fuse_for_free, least_memory
from megatron_zb.schedules.search.placement_search import (
    LimitedSearch,
    PlacementSearch,
    SearchFeature,
    bound_of,
)
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.stage_costs import StageCosts

_NEAR = 1.005  # of the lower bound: nothing to gain
_MORE = (1.5, 3.0)
"""Memory of further orders that activations are dropped from, in that of the limit."""


class RecomputeOrOffload(SearchFeature):
    """A feature that drops activations from F to B."""

    frees_activations: ClassVar[bool] = True

    def starting_orders(
        self, name: str, placement: Placement, request: Request
    ) -> Iterable[Schedule]:
        """Return orders to start from, whatever they hold, for costs that keep everything."""
        return ()

    def in_place(self, order: Schedule, request: Request, problem: Problem) -> Iterable[Schedule]:
        """Return a fixed order with activations dropped where the limit of a problem needs it."""
        return ()

    def searched(self, search: PlacementSearch) -> Schedule:
        """Return the fastest order that keeps, recomputes or offloads activations.

        Raises:
            UsageError: as :func:`with_recompute_or_offload`.
        """
        alone = replace(search.request, costs=with_all_kept(search.request.costs))
        orders = [*search.known, *starting_orders(search.name, search.placement, search.request)]
        if search.request.rules.units_at_once > 1:
            free = replace(search, known=())
            limit = search.problem().limit
            orders += with_more_memory(lambda it: replace(free, request=it).run(), alone, limit)
        return with_recompute_or_offload(search, replace(search, request=alone).run, orders)


def starting_orders(name: str, placement: Placement, request: Request) -> list[Schedule]:
    """Return orders of a placement that the features of some costs start from."""
    alone = replace(request, costs=with_all_kept(request.costs))
    return [
        order
        for feature in _dropping(request)
        for order in feature.starting_orders(name, placement, alone)
    ]


def _dropping(request: Request) -> list[RecomputeOrOffload]:
    return [it for it in request.costs.features if isinstance(it, RecomputeOrOffload)]


def with_recompute_or_offload(
    search: PlacementSearch, all_kept: Callable[[], Schedule], orders: Sequence[Schedule] = ()
) -> Schedule:
    """Return the fastest schedule that keeps every activation, recomputes some, or offloads some.

    Args:
        search: the placement, the request and its limit.
        all_kept: builds a schedule that keeps every activation.
        orders: schedules of the placement to start from, whatever they hold.

    Raises:
        UsageError: the limit is below one activation, with one input in each chunk without offload.
    """
    request, problem = search.request, replace(search, split=True).problem()
    problem = replace(problem, tail_seconds=())
    request.check_feasible(search.name, search.placement, problem.limit, smallest_limits(problem))
    found: list[Schedule] = []
    refused: UsageError | None = None
    try:
        found.append(all_kept())
    except UsageError as error:
        refused = error
    bound, alone = bound_of(problem), [order.without_pairs() for order in orders]
    starts = [*alone, *found]
    limited = LimitedSearch(search.name, problem, request, bound, alone, starts, found)
    features = [it for it in request.costs.features if isinstance(it, SearchFeature)]
    features.sort(key=lambda it: it.turn)
    if not (found and request.seconds(simulate(found[0], request.costs)) <= bound * _NEAR):
        for feature in features:
            found += feature.within_limit(limited)
    for feature in features if not found else ():
        found += feature.last_resort(limited)
    if not found:
        raise refused or UsageError(f"{search.name}: no order fits that offloads activations")
    return min(found, key=lambda entry: request.seconds(simulate(entry, request.costs)))


def in_its_order(build: Callable[[Request], Schedule], request: Request) -> Schedule:
    """Return a schedule with a fixed order, with activations dropped where the limit needs it.

    Args:
        build: the order that keeps every activation, in the request's limit.
        request: the costs and the limit.

    Raises:
        UsageError: nothing keeps the limit.
    """
    limit, kept = request.limit.per_rank(request.costs), with_all_kept(request.costs)
    if limit is None:
        return build(replace(request, costs=kept))
    found: list[Schedule] = []
    refused: list[UsageError] = []
    for order in with_more_memory(build, replace(request, costs=kept), limit):
        try:
            found += dropped_in_place(order, request, limit)
        except UsageError as error:
            refused.append(error)
    if not found:
        raise least_refused(refused)
    best = min(found, key=lambda each: request.seconds(simulate(each, request.costs)))
    return fuse_for_free(best, request.costs)


def dropped_in_place(order: Schedule, request: Request, limit: tuple[float, ...]) -> list[Schedule]:
    """Return an order, as it is if it fits, or with activations dropped in the ways that fit.

    Raises:
        UsageError: none does.
    """
    if keeps(simulate(order, request.costs).peak_memory, limit):
        return [order]
    table, name = request.costs.for_placement(order.placement), order.name
    needed = least_memory(order.ranks, _least_left(table, request.rules), request.rules, drops=True)
    request.check_feasible(name, order.placement, limit, needed)
    m, split = order.num_microbatches, any(p.kind is PassKind.W for r in order.ranks for p in r)
    problem = Problem(order.placement, m, table, limit, split, rules=request.rules)
    early = with_early_weights(order)
    orders = [order] if early.ranks == order.ranks else [order, early]
    ways = ((feature, each) for feature in _dropping(request) for each in orders)
    found = [it for feature, each in ways for it in feature.in_place(each, request, problem)]
    fitting = [it for it in found if keeps(simulate(it, request.costs).peak_memory, limit)]
    if not fitting:
        raise UsageError(f"{name}: no order fits that offloads activations")
    return fitting


def with_early_weights(order: Schedule) -> Schedule:
    """Return an order with every W right behind its B, so that it holds the least for them."""
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


def with_more_memory(
    build: Callable[[Request], Schedule], request: Request, limit: Sequence[float]
) -> Iterator[Schedule]:
    """Yield orders that keep every activation: within a limit, or what they need, and in more."""
    fixed = request.costs.fixed

    def within(most: Sequence[float]) -> Schedule:
        held = tuple(each + of_rank for each, of_rank in zip(most, fixed, strict=True))
        return build(replace(request, limit=Limit(bytes=held)))

    try:
        yield within(limit)
    except LimitTooSmall as error:
        limit = (error.needed,) * len(limit)
        yield within(limit)
    for more in _MORE:
        yield within([more * most for most in limit])


def drops_last_stage(rules: TrainingRules) -> bool:
    """Return whether the last stage may drop activations: its B does not follow F at once."""
    return rules.by_kind[PassKind.R].home is not Home.INNER


# --- limits


def smallest_limits(problem: Problem) -> list[float]:
    """Return the memory that each rank needs to run at all: one microbatch after the other."""
    ranks, rules = one_at_a_time(problem).ranks, problem.rules
    return least_memory(ranks, _least_left(problem.costs, rules), rules, drops=True)


def one_at_a_time(problem: Problem) -> Schedule:
    """Return the order that holds the least: each microbatch when the one before it has ended."""
    m, placement, rules = problem.num_microbatches, problem.placement, problem.rules
    n = rules.units_at_once

    def passes(stages: Sequence[int], first: int) -> Iterator[Pass]:
        for kind, order in ((PassKind.F, stages), (PassKind.BW, stages[::-1])):
            for stage in order:
                yield from (Pass(kind, stage, first + turn) for turn in range(n))

    ranks = [[p for j in range(0, m, n) for p in passes(held, j)] for held in placement.stages_of]
    found = tuple(map(tuple, rules.completed(rules.of_turns(ranks))))
    return Schedule("one at a time", placement, m, found, rules=rules)


def _least_left(costs: StageCosts, rules: TrainingRules) -> StageCosts:
    """Return the costs with what a unit holds at least from F to B, as if it were recomputed.

    Of an offloaded unit, that is what D leaves: nothing, or what other units need of it.
    """
    if costs.copies is None:
        return costs
    left = (*rules.by_kind[PassKind.F].memory, *rules.by_kind[PassKind.D].memory)
    rows = {id(row): _least_left(row, rules) for row in costs.microbatches}
    stages = range(len(costs.memory["activation"]))
    return replace(
        costs,
        memory={**costs.memory, "kept_input": tuple(costs.change(left, s) for s in stages)},
        microbatches=tuple(rows[id(row)] for row in costs.microbatches),
    )
