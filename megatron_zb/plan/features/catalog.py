"""Features of a plan, in the order in which tables and flags have them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_zb.measured.fit import Variant
from megatron_zb.plan.features.feature import PlanFeature, VariantFeature
from megatron_zb.plan.features.offload import PlanOffload
from megatron_zb.plan.features.pairs import PlanPairs
from megatron_zb.plan.features.recomputation import PlanRecomputation
from megatron_zb.plan.features.slices import PlanSlices
from megatron_zb.plan.features.vocabulary import PlanVocabulary
from megatron_zb.plan.rows import PlanRow
from megatron_zb.plan.strategy import ScheduleCandidate
from megatron_zb.plan.units import WholeUnits
from megatron_zb.plan.work import Workload

VARIANTS: tuple[VariantFeature, ...] = (PlanVocabulary(), PlanPairs())
FEATURES: tuple[PlanFeature, ...] = (
    PlanSlices(),
    *VARIANTS,
    PlanRecomputation(),
    PlanOffload(),
)


def asking(*features: PlanFeature) -> tuple[PlanFeature, ...]:
    """Return all features with some of them in place of the usual ones."""
    asked = {type(it): it for it in features}
    return tuple(asked.get(type(it), it) for it in FEATURES)


def features_of(variant: Variant) -> tuple[PlanFeature, ...]:
    """Return the features that a candidate always has."""
    return tuple(it for it in FEATURES if it.in_variant(variant))


def with_features(
    candidate: ScheduleCandidate, features: Sequence[PlanFeature]
) -> ScheduleCandidate:
    """Return a schedule with those of the given features that it may be tried with, alone."""
    kinds = {type(it) for it in features}
    for feature in VARIANTS:
        candidate = feature.set_in(candidate, type(feature) in kinds)
    return candidate


def units_of(load: Workload) -> WholeUnits:
    """Return the units that passes work on, which a feature may have changed."""
    found = (feature.units(load) for feature in FEATURES)
    return next((units for units in found if units is not None), WholeUnits(load))


def stands_apart(row: PlanRow) -> bool:
    """Return whether passes of a row work on parts of microbatches."""
    return any(it.stands_apart and it.is_in(row) for it in FEATURES)
