"""Squeezed orders of F and B, with W in the time that is left free."""

from __future__ import annotations

from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.fusing import fuse_for_free
from megatron_zb.schedules.search.gap_filler import GapFiller
from megatron_zb.schedules.search.kernels import engine
from megatron_zb.schedules.stage_costs import StageCosts

_EAGERNESS = (1.0, 0.75, 0.5, 0.25, 0.0)


def place_weight_gradients(
    name: str,
    placement: Placement,
    order: list[list[Pass]],
    request: Request,
    peak_microbatches: float,
) -> Schedule:
    """Start each F and B as early as its order and inputs allow, and fill the waits with W.

    No rank holds more than ``peak_microbatches`` of its own, or the user's limit: where an F would
    exceed that, the oldest W runs first. Several rules for how large a wait must be to take a W are
    tried and the shortest result is kept, so the costs decide where W goes.
    """
    costs = request.costs.for_placement(placement)
    limit = request.limits(placement, peak_microbatches)
    request.check_feasible(name, limit, _needs(order, costs))
    make = engine(len(_EAGERNESS) * sum(map(len, order)))
    filler = GapFiller(placement, order, costs, limit, make)
    filled = [found for each in _EAGERNESS if (found := filler.fill(each)) is not None]
    best = min(filled, key=lambda found: found.seconds(back_to_back=request.back_to_back))
    ranks = filler.passes_of(best)
    schedule = Schedule(name, placement, request.num_microbatches, ranks)
    return fuse_for_free(schedule, request.costs)


def squeezed_if_it_fits(
    name: str,
    placement: Placement,
    order: list[list[Pass]],
    request: Request,
    peak_microbatches: float,
) -> list[Schedule]:
    """Return the squeezed order as the one known schedule, or none if the limit is too low."""
    costs = request.costs.for_placement(placement)
    limit = request.limits(placement, peak_microbatches)
    needs = _needs(order, costs)
    if any(need > most * (1 + 1e-9) for need, most in zip(needs, limit, strict=True)):
        return []
    return [place_weight_gradients(name, placement, order, request, peak_microbatches)]


def _needs(order: list[list[Pass]], costs: StageCosts) -> list[float]:
    """Return the most memory each rank holds if every W runs right behind its B."""
    needs = []
    for passes in order:
        held = most = 0.0
        for p in passes:
            activation = costs.of(p.microbatch).activation[p.stage]
            held += activation if p.kind is PassKind.F else -activation
            most = max(most, held)
        needs.append(most)
    return needs
