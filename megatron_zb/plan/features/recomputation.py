"""Recomputation of activations by the schedule, as ``auto`` chooses it."""

from __future__ import annotations

import argparse
from typing import ClassVar

from megatron_zb.parsing import flag_of
from megatron_zb.plan.features.feature import CutWorkload, FreedActivations
from megatron_zb.plan.operators import modules_of
from megatron_zb.plan.rows import Prediction
from megatron_zb.plan.strategy import Strategy
from megatron_zb.plan.work import Workload
from megatron_zb.schedules import Costs
from megatron_zb.schedules.features.recomputation import Recomputation

# Flags of Megatron's own recomputation.
_RECOMPUTE = {
    "none": [],
    "selective": ["--recompute-granularity selective"],  # of the attention scores
    "full": [
        "--recompute-granularity full",
        "--recompute-method uniform",
        "--recompute-num-layers 1",
    ],
}


class PlanRecomputation(FreedActivations):
    """Recomputation from the input of a stage, beside that of Megatron's modules."""

    changes_work: ClassVar[bool] = True
    freed: ClassVar[str] = "recomputed"
    argument: ClassVar[str] = "pipeline_recompute"
    flag: ClassVar[str] = "--pipeline-recompute auto"
    mark: ClassVar[str] = "dropped"

    def read(self, given: argparse.Namespace) -> dict[str, tuple[str, str]]:
        granularity = getattr(given, "recompute_granularity", None)
        if granularity is None and not hasattr(given, "recompute_activations"):
            return {}
        modules = getattr(given, "recompute_modules", None) if granularity == "selective" else None
        if modules:
            return {"recompute": ("+".join(modules), flag_of("recompute_modules"))}
        of = "recompute_granularity" if granularity else "recompute_activations"
        return {"recompute": (granularity or "selective", flag_of(of))}

    def strategy_flags(self, strategy: Strategy) -> list[str]:
        if strategy.recompute in _RECOMPUTE:
            return _RECOMPUTE[strategy.recompute]
        modules = f"--recompute-modules {' '.join(modules_of(strategy.recompute))}"
        return [*_RECOMPUTE["selective"], modules]

    def is_possible(self, load: Workload) -> bool:
        return not load.strategy.drops_all

    def costs(self, cut: CutWorkload, costs: Costs) -> Costs:
        message = cut.load.message() / cut.load.largest_slice  # of a whole microbatch
        return costs.having(Recomputation(kept_input=message))

    def done(self, row: Prediction) -> str:
        return f"recomputes {self.share(row):.0%} of its activations"
