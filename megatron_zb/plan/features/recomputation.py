"""Recomputation of activations by the schedule, as ``auto`` chooses it."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from megatron_zb.plan.byte_counts import ActivationBytes
from megatron_zb.plan.device import DeviceConfig
from megatron_zb.plan.features.feature import CutWorkload, FreedActivations, RankedRows
from megatron_zb.plan.rows import PlanRow, Prediction
from megatron_zb.plan.work import Workload
from megatron_zb.schedules import Costs, Schedule
from megatron_zb.schedules.features.recomputation import Recomputation


class PlanRecomputation(FreedActivations):
    """Recomputation from the input of a stage, beside that of Megatron's modules."""

    changes_work: ClassVar[bool] = True
    mark: ClassVar[str] = "dropped"

    def is_possible(self, load: Workload) -> bool:
        return load.strategy.recompute != "full"

    def costs(self, cut: CutWorkload, costs: Costs) -> Costs:
        message = cut.load.message() / cut.load.largest_slice  # of a whole microbatch
        return costs.having(Recomputation(kept_input=message))

    def held(self, cut: CutWorkload, held: Sequence[ActivationBytes]) -> Sequence[ActivationBytes]:
        kept = cut.load.message()
        return [replace(it, kept_input=min(kept, it.activation)) for it in held]

    def units(self, schedule: Schedule) -> Collection[tuple[int, int]]:
        return schedule.recomputed

    def flags(self, row: PlanRow) -> list[str]:
        return ["--pipeline-recompute auto"] if self.is_in(row) else []

    def as_json(self, rows: RankedRows, row: Prediction) -> dict[str, Any]:
        return {"recomputed": self.share(row)}

    def done(self, row: Prediction) -> str:
        return f"recomputes {self.share(row):.0%} of its activations"

    def asked(
        self, arguments: argparse.Namespace, device: DeviceConfig | None = None
    ) -> PlanRecomputation:
        return replace(self, choice="auto" if arguments.pipeline_recompute == "auto" else "off")
