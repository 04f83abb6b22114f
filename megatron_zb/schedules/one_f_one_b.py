"""1F1B: one chunk per rank, fused backward (PipeDream-Flush, arXiv 2006.09503)."""

from __future__ import annotations

from megatron_zb.schedules.building_block import BuildingBlock
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import looped
from megatron_zb.schedules.schedule import Schedule


def building_block(pipeline_size: int) -> BuildingBlock:
    """F runs down the ranks and B straight back up; one F and one B every two units."""
    p = pipeline_size
    return BuildingBlock(
        looped(p),
        forward=tuple(range(p)),
        backward=tuple(2 * p - 1 - i for i in range(p)),
        interval=2,
    )


def one_f_one_b(pipeline_size: int, num_microbatches: int, costs: Costs, slots: int) -> Schedule:
    """Every backward is a BW; rank i holds at most p-i microbatches, whatever the costs."""
    block = building_block(pipeline_size)
    ranks = tuple(
        tuple(Pass(PassKind.BW, *p[1:]) if p.kind is PassKind.B else p for p in rank)
        for rank in block.repeat(num_microbatches)
    )
    return Schedule("1f1b", block.placement, num_microbatches, ranks)
