"""Zero-bubble schedules with one chunk per rank (arXiv 2401.10241)."""

from __future__ import annotations

from megatron_zb.schedules.families import one_f_one_b
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import looped
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.place_w import place_weight_gradients, squeezed_if_it_fits
from megatron_zb.schedules.search.placement_search import search_placement


def zb_h1(request: Request) -> Schedule:
    """Build ZB-H1: 1F1B's order of F and B, W where ranks would wait, and 1F1B's peak memory."""
    p = request.pipeline_size
    return place_weight_gradients("zb-h1", looped(p), _h1_order(request), request, p)


def zb_h2(request: Request) -> Schedule:
    """Build ZB-H2: warm-up forwards fill the wait for the first B, at up to 2p-1 microbatches."""
    p = request.pipeline_size
    return place_weight_gradients("zb-h2", looped(p), _h2_order(request), request, 2 * p - 1)


def zb_1p(request: Request) -> Schedule:
    """Build the fastest order found within p microbatches (the paper's automatic schedule)."""
    return _automatic("zb-1p", request, request.pipeline_size)


def zb_2p(request: Request) -> Schedule:
    """Build the fastest order found within 2p microbatches (the paper's automatic schedule)."""
    return _automatic("zb-2p", request, 2 * request.pipeline_size)


def _automatic(name: str, request: Request, peak: int) -> Schedule:
    placement = looped(request.pipeline_size)
    known = [
        schedule
        for order in (_h1_order(request), _h2_order(request))
        for schedule in squeezed_if_it_fits(name, placement, order, request, peak)
    ]
    return search_placement(name, placement, request, peak, known=known)


def _h1_order(request: Request) -> list[list[Pass]]:
    return one_f_one_b.building_block(request.pipeline_size).repeat(request.num_microbatches)


def _h2_order(request: Request) -> list[list[Pass]]:
    p, m = request.pipeline_size, request.num_microbatches
    return [_warmed_up(rank, m, min(m, 2 * (p - 1 - rank) + 1)) for rank in range(p)]


def _warmed_up(stage: int, m: int, warm_up: int) -> list[Pass]:
    passes = [Pass(PassKind.F, stage, i) for i in range(warm_up)]
    for i in range(m):
        passes.append(Pass(PassKind.B, stage, i))
        if warm_up + i < m:
            passes.append(Pass(PassKind.F, stage, warm_up + i))
    return passes
