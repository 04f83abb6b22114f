"""Offload of activations to the host, as ``auto`` chooses it."""

from __future__ import annotations

import argparse
from typing import Any, ClassVar

from megatron_zb.errors import UsageError
from megatron_zb.parsing import gib
from megatron_zb.plan.features.feature import CutWorkload, Described, FreedActivations, RankedRows
from megatron_zb.plan.rows import Prediction
from megatron_zb.schedules import Costs
from megatron_zb.schedules.features.offload import Offload


class PlanOffload(FreedActivations):
    """Offload over the link of the device's description."""

    freed: ClassVar[str] = "offloaded"
    argument: ClassVar[str] = "pipeline_offload"
    flag: ClassVar[str] = "--pipeline-offload auto"
    mark: ClassVar[str] = "moved"

    def costs(self, cut: CutWorkload, costs: Costs) -> Costs:
        host = cut.load.device.host
        if host is None:
            return costs
        return costs.having(
            Offload(
                seconds=[host.seconds(held) for held in costs.memory["activation"]],
                full_duplex=host.full_duplex,
                host_limit=host.memory_bytes,
            )
        )

    def as_json(self, rows: RankedRows, row: Prediction) -> dict[str, Any]:
        return super().as_json(rows, row) | {"host_bytes": _host_bytes(row)}

    def done(self, row: Prediction) -> str:
        return f"offloads {self.share(row):.0%} to the host ({gib(_host_bytes(row))} of each rank)"

    def asked(self, arguments: argparse.Namespace, of: Described | None = None) -> PlanOffload:
        if arguments.pipeline_offload == "auto" and of is not None and of.device.host is None:
            raise UsageError(
                f"--pipeline-offload auto: the description of {of.device.name} has no host: give "
                "--pipeline-offload off, or a device that has one, such as --device a100_80gb_sxm"
            )
        return super().asked(arguments, of)


def _host_bytes(row: Prediction) -> float:
    """Return the most bytes that the host holds of the activations of any rank."""
    return 0.0 if row.timeline is None else max(row.timeline.peak_host)
