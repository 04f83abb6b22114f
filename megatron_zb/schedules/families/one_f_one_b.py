"""GPipe (arXiv 1811.06965) and 1F1B (PipeDream-Flush, arXiv 2006.09503): one chunk, BW alone."""

from __future__ import annotations

from megatron_zb.schedules.families.building_block import BuildingBlock
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import looped
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.fusing import fuse_all


def building_block(pipeline_size: int) -> BuildingBlock:
    """Build 1F1B's block: F down the ranks, B straight back up; one of each every two units."""
    p = pipeline_size
    return BuildingBlock(
        looped(p),
        forward=tuple(range(p)),
        backward=tuple(2 * p - 1 - i for i in range(p)),
        interval=2,
    )


def one_f_one_b(request: Request) -> Schedule:
    """Build 1F1B: rank i holds at most p-i microbatches, whatever the costs."""
    block = building_block(request.pipeline_size)
    ranks = fuse_all(block.repeat(request.num_microbatches))
    return Schedule("1f1b", block.placement, request.num_microbatches, ranks)


def gpipe(request: Request) -> Schedule:
    """Build GPipe: all forwards, then all backwards; every rank holds every microbatch."""
    m = request.num_microbatches
    ranks = tuple(
        tuple(Pass(kind, stage, i) for kind in (PassKind.F, PassKind.BW) for i in range(m))
        for stage in range(request.pipeline_size)
    )
    return Schedule("gpipe", looped(request.pipeline_size), m, ranks)
