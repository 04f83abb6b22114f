"""Features of a plan, in the order in which tables and flags have them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_zb.measured.fit import Variant
from megatron_zb.plan.features.feature import PlanFeature, VariantFeature
from megatron_zb.plan.features.offload import PlanOffload
from megatron_zb.plan.features.pairs import PlanPairs
from megatron_zb.plan.features.recomputation import PlanRecomputation
from megatron_zb.plan.features.vocabulary import PlanVocabulary
from megatron_zb.plan.strategy import ScheduleCandidate

VARIANTS: tuple[VariantFeature, ...] = (PlanVocabulary(), PlanPairs())
FEATURES: tuple[PlanFeature, ...] = (*VARIANTS, PlanRecomputation(), PlanOffload())


def asking(*features: PlanFeature) -> tuple[PlanFeature, ...]:
    """Return all features with some of them in place of the usual ones."""
    asked = {type(it): it for it in features}
    return tuple(asked.get(type(it), it) for it in FEATURES)


def features_of(variant: Variant) -> tuple[PlanFeature, ...]:
    """Return the features that a schedule has by itself."""
    return tuple(it for it in VARIANTS if it.in_variant(variant))


def with_features(
    candidate: ScheduleCandidate, features: Sequence[PlanFeature]
) -> ScheduleCandidate:
    """Return a schedule with the given features, as far as it has them by itself, and no others."""
    kinds = {type(it) for it in features}
    for feature in VARIANTS:
        candidate = feature.set_in(candidate, type(feature) in kinds)
    return candidate
