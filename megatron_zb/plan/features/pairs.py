"""Pairs of a forward and a backward, which hide the expert all-to-all of each other."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron_zb.measured.expert_all_to_all import with_all_to_all
from megatron_zb.measured.fit import Fit
from megatron_zb.plan.features.feature import CutWorkload, PlanRequest, Ranking, VariantFeature
from megatron_zb.plan.operators import modules_of
from megatron_zb.plan.rows import Prediction
from megatron_zb.plan.strategy import MEGATRON_OVERLAP, ScheduleCandidate
from megatron_zb.plan.work import Workload
from megatron_zb.schedules import Costs, Schedule, catalog
from megatron_zb.schedules.features.pairs import PAIR_LOSS, Communication
from megatron_zb.schedules.placement import v_shape


@dataclass(frozen=True)
class PlanPairs(VariantFeature):
    """Pairs, in Megatron's interleaved schedule and in orders of this package that have them."""

    choice: str = "auto"

    words: ClassVar[str] = "pairs"
    field: ClassVar[str] = "overlaps_all_to_all"
    flag: ClassVar[str] = "--overlap-moe-expert-parallel-comm"
    mark: ClassVar[str] = "pairs"
    changes_work: ClassVar[bool] = True
    hides: ClassVar[bool] = True
    own: ClassVar[ScheduleCandidate] = ScheduleCandidate(
        MEGATRON_OVERLAP, "interleaved", takes_chunks=True, megatron=True, overlaps_all_to_all=True
    )

    def why_not(self, job: PlanRequest) -> str | None:
        if job.profile is not None and not job.profile.pairs:
            return "the measured model has no all-to-all that pairs hide"
        return "post-validation runs single forwards again" if job.post_validation else None

    def is_possible(self, load: Workload) -> bool:
        """Return whether there is an expert all-to-all; Megatron hides none of a HybridModel."""
        strategy = load.strategy
        again = strategy.drops_all or "moe" in modules_of(strategy.recompute)
        able = load.model.pattern is None and strategy.expert > 1 and not again
        return able and load.all_to_all(load.model.layers - 1) > 0

    def is_able(self, candidate: ScheduleCandidate) -> bool:
        """Return whether its order is searched for: that of a V with two stages a rank."""
        family = catalog.family(candidate.family)
        place = family.placement
        return family.searches and place is not None and place(2, None) == v_shape(2)

    def is_used(self, schedule: Schedule | None) -> bool:
        return schedule is not None and bool(schedule.pairs)

    def hidden(self, load: Workload, layer: int) -> float:
        return load.all_to_all(layer)

    def costs(self, cut: CutWorkload, costs: Costs) -> Costs:
        seconds = [sum(map(cut.load.all_to_all, layers)) for layers in cut.layers_of]
        return costs.having(Communication(forward=seconds, backward=seconds, pair_loss=PAIR_LOSS))

    def costs_of_a_run(self, costs: Costs, fit: Fit) -> Costs:
        return with_all_to_all(costs)

    def take(
        self, ranking: Ranking, found: Iterator[tuple[str, Prediction | None]], floor: float
    ) -> None:
        """Let rows take the place of slower ones, and the fastest that of ``auto``."""
        if (own := ranking.best.get(MEGATRON_OVERLAP)) is not None:
            ranking.take_if_faster("auto", own)  # in this package's order of the same
        for name, row in found:
            if row is not None:
                ranking.take_if_faster(name, row)
                ranking.take_if_faster("auto", row)

    def given(self, args: argparse.Namespace, candidate: ScheduleCandidate) -> ScheduleCandidate:
        if not args.overlap_moe_expert_parallel_comm:
            return candidate
        return self.own if candidate.megatron else self.set_in(candidate)
