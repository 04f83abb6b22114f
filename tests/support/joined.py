"""Schedules whose neighbours run as pairs wherever no rank then waits for ever, and experts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from megatron_zb.schedules import Schedule
from megatron_zb.schedules.passes import PassKind

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.02,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}


def joined(schedule: Schedule) -> Schedule:
    """Join every F with the backward of another unit right behind it, one after the other."""
    for passes in schedule.ranks:
        for p, behind in pairwise(passes):
            if (
                p.kind is PassKind.F
                and behind.kind in (PassKind.B, PassKind.BW)
                and p[1:] != behind[1:]
            ):
                more = replace(schedule, pairs=schedule.pairs | {p})
                schedule = schedule if more.blocked() else more
    return schedule.validate()
