"""Zero-bubble schedules with one chunk per rank (arXiv 2401.10241, section 3)."""

from __future__ import annotations

from megatron_zb.schedules import one_f_one_b
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.squeeze import place_weight_gradients


def zb_h1(pipeline_size: int, num_microbatches: int, costs: Costs, slots: int) -> Schedule:
    """1F1B's order of F and B, with W where the ranks would wait and 1F1B's peak memory."""
    block = one_f_one_b.building_block(pipeline_size)
    order = block.repeat(num_microbatches)
    return place_weight_gradients("zb-h1", block.placement, order, num_microbatches, costs, slots)
