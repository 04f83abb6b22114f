"""V-Min, V-Half and V-ZB: two chunks per rank in a V (arXiv 2405.15362, section 4).

A building block is told by four offsets per rank i, in unit passes: F of the descending chunk
(stage i), F of the ascending chunk (stage 2p-1-i), and their two backwards in the order they run,
ascending chunk first. The interval is six units: the work of one microbatch on one rank.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_zb.schedules.building_block import BuildingBlock
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.placement import v_shape
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.squeeze import place_weight_gradients

_INTERVAL = 6

Offsets = tuple[int, int, int, int]


def v_min_offsets(p: int, i: int) -> Offsets:
    """Both chunks go from rank to rank in one unit: a third of 1F1B's activations."""
    shift = 2 if p % 3 == 0 else 0
    return i, 2 * p - i - 1, 2 * p + shift + i, 4 * p + shift - i - 1


def v_half_offsets(p: int, i: int) -> Offsets:
    """Two units down, one up: half of 1F1B's activations."""
    shift = 3 if p % 2 == 0 else 0
    return 2 * i, 3 * p - i - 2, 3 * p + shift + 2 * i - 1, 6 * p + shift - i - 2


def v_zb_offsets(p: int, i: int) -> Offsets:
    """Four units down, two up: 1F1B's activations and no bubble in the steady state.

    4i and -2i are equal modulo 6, so the four passes keep their distance on every rank.
    """
    return 4 * i, 6 * p - 5 - 2 * i, 6 * p - 4 + 4 * i, 12 * p - 9 - 2 * i


def building_block(pipeline_size: int, offsets: Callable[[int, int], Offsets]) -> BuildingBlock:
    """The block of all 2p stages from the offsets of each rank."""
    per_rank = [offsets(pipeline_size, i) for i in range(pipeline_size)]
    return BuildingBlock(
        v_shape(pipeline_size),
        forward=tuple(o[0] for o in per_rank) + tuple(o[1] for o in reversed(per_rank)),
        backward=tuple(o[3] for o in per_rank) + tuple(o[2] for o in reversed(per_rank)),
        interval=_INTERVAL,
    )


def _build(
    name: str, offsets: Callable[[int, int], Offsets], p: int, m: int, costs: Costs, slots: int
) -> Schedule:
    block = building_block(p, offsets)
    return place_weight_gradients(name, block.placement, block.repeat(m), m, costs, slots)


def v_min(pipeline_size: int, num_microbatches: int, costs: Costs, slots: int) -> Schedule:
    """The least memory the V can have at the full interval."""
    return _build("v-min", v_min_offsets, pipeline_size, num_microbatches, costs, slots)


def v_half(pipeline_size: int, num_microbatches: int, costs: Costs, slots: int) -> Schedule:
    """Half the memory of 1F1B with half its bubble."""
    return _build("v-half", v_half_offsets, pipeline_size, num_microbatches, costs, slots)


def v_zb(pipeline_size: int, num_microbatches: int, costs: Costs, slots: int) -> Schedule:
    """The memory of 1F1B with almost no bubble."""
    return _build("v-zb", v_zb_offsets, pipeline_size, num_microbatches, costs, slots)
