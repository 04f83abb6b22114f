"""Features of a plan, in the order in which tables and flags have them."""

from __future__ import annotations

from megatron_zb.plan.features.feature import PlanFeature
from megatron_zb.plan.features.offload import PlanOffload
from megatron_zb.plan.features.recomputation import PlanRecomputation

FEATURES: tuple[PlanFeature, ...] = (PlanRecomputation(), PlanOffload())


def asking(*features: PlanFeature) -> tuple[PlanFeature, ...]:
    """Return all features with some of them in place of the usual ones."""
    asked = {type(it): it for it in features}
    return tuple(asked.get(type(it), it) for it in FEATURES)
