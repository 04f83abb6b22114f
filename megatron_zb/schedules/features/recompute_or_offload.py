"""The search that recomputation and offload share: which activations stay, and in what order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import with_all_kept
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.placement_search import (
    LimitedSearch,
    PlacementSearch,
    SearchFeature,
    bound_of,
)
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.simulator import simulate

_NEAR = 1.005  # of the lower bound: nothing to gain


class RecomputeOrOffload(SearchFeature):
    """A feature that drops activations from F to B."""

    frees_activations: ClassVar[bool] = True

    def starting_orders(
        self, name: str, placement: Placement, request: Request
    ) -> Iterable[Schedule]:
        """Return orders to start from, whatever they hold, for costs that keep everything."""
        return ()

    def searched(self, search: PlacementSearch) -> Schedule:
        """Return the fastest order that keeps, recomputes or offloads activations.

        Raises:
            UsageError: as :func:`with_recompute_or_offload`.
        """
        alone = replace(search.request, costs=with_all_kept(search.request.costs))
        orders = [*search.known, *starting_orders(search.name, search.placement, search.request)]
        return with_recompute_or_offload(search, replace(search, request=alone).run, orders)


def starting_orders(name: str, placement: Placement, request: Request) -> list[Schedule]:
    """Return orders of a placement that the features of some costs start from."""
    alone = replace(request, costs=with_all_kept(request.costs))
    features = (it for it in request.costs.features if isinstance(it, RecomputeOrOffload))
    return [order for it in features for order in it.starting_orders(name, placement, alone)]


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
    ranks = range(search.placement.pipeline_size)
    smallest = [smallest_limit(problem, rank) for rank in ranks]
    request.check_feasible(search.name, search.placement, problem.limit, smallest)
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


def smallest_limit(problem: Problem, rank: int) -> float:
    """Return the memory that a rank needs to run at all.

    One activation; where nothing can be moved, with one input in each chunk.
    """
    costs, m = problem.costs, problem.num_microbatches
    held = problem.placement.stages_of[rank]
    if costs.copies is not None:
        return max(costs.largest_activation[s] for s in held)
    kept = [max(row.memory["kept_input"][s] for _, row in costs.rows(m)) for s in held]
    whole = [costs.largest_activation[s] for s in held]
    extra = max(a - i for a, i in zip(whole, kept, strict=True))
    return sum(kept) + extra
