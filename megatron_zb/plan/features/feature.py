"""What every feature of a plan may do, and a workload cut into stages, which features change."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from megatron_zb.plan.byte_counts import ActivationBytes
from megatron_zb.plan.device import DeviceConfig
from megatron_zb.plan.rows import PlanRow, Prediction
from megatron_zb.plan.work import Workload
from megatron_zb.schedules import Costs, Schedule
from megatron_zb.schedules.layout import Layout
from megatron_zb.schedules.placement import Placement

_Self = TypeVar("_Self", bound="PlanFeature")


@dataclass(frozen=True)
class CutWorkload:
    """A workload cut into the stages of a placement."""

    load: Workload
    placement: Placement
    layout: Layout

    @cached_property
    def layers_of(self) -> tuple[range, ...]:
        """Layers of each stage."""
        out, first = [], 0
        for count in self.layout:
            out.append(range(first, first + count))
            first += count
        return tuple(out)


@dataclass(frozen=True)
class PlanFeature:
    """Something that a schedule may have beside F, B and W: what it does to a plan.

    A subclass stands in a file of this package, and one of it in the list of :mod:`catalog`. It
    overrides only the methods that it needs. The search, the table and the page walk the list.

    Attributes:
        choice: whether schedules have it: where that is faster (auto), all of them (on), none
            (off).
        changes_work: whether ranks run other passes than those of the workload by it.
        mark: word in the setting of a row that has it.
    """

    choice: str = "off"

    changes_work: ClassVar[bool] = False
    mark: ClassVar[str] = ""

    # --- in a setting

    def is_possible(self, load: Workload) -> bool:
        """Return whether a workload can have it."""
        return True

    def costs(self, cut: CutWorkload, costs: Costs) -> Costs:
        """Return the costs of a workload with those of the feature."""
        return costs

    def held(self, cut: CutWorkload, held: Sequence[ActivationBytes]) -> Sequence[ActivationBytes]:
        """Return the bytes of each unit on each stage with those of the feature."""
        return held

    # --- in a row

    def is_in(self, row: PlanRow) -> bool:
        """Return whether the schedule of a row has it."""
        return False

    def flags(self, row: PlanRow) -> list[str]:
        """Return the flags for it, each with its value, if a row has it."""
        return []

    def as_json(self, row: Prediction) -> dict[str, Any]:
        """Return what JSON has of it in a row."""
        return {}

    # --- of the command line

    def asked(self: _Self, arguments: argparse.Namespace, device: DeviceConfig) -> _Self:
        """Return it as the arguments request it.

        Raises:
            UsageError: they do not go with the device.
        """
        return self


class FreedActivations(PlanFeature):
    """A feature by which ``auto`` frees activations of some units between F and B."""

    def units(self, schedule: Schedule) -> Collection[tuple[int, int]]:
        """Return the units whose activations a schedule frees by it."""
        return ()

    def share(self, row: PlanRow) -> float:
        """Return the share of the forwards of a row whose activations it frees."""
        return 0.0 if row.schedule is None else row.share(self.units(row.schedule))

    def is_in(self, row: PlanRow) -> bool:
        return self.share(row) > 0

    def done(self, row: Prediction) -> str:
        """Return what the schedule of a row does, such as "offloads 8% to the host"."""
        return ""
