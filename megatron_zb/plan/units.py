"""The units that passes work on: whole microbatches, or what a feature cuts them into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_zb.plan.byte_counts import ActivationBytes
from megatron_zb.plan.work import Workload
from megatron_zb.schedules import Costs, Pass
from megatron_zb.schedules.features.slices import Slicing


@dataclass(frozen=True)
class WholeUnits:
    """Whole microbatches; a subclass cuts them.

    Attributes:
        count: units of a microbatch.
        cut: what schedules are built with.
    """

    load: Workload

    @property
    def count(self) -> int:
        return 1

    @property
    def cut(self) -> Slicing | int:
        return 1

    def costs(self, costs: Costs, m: int) -> Costs:
        """Return the costs of the units of m microbatches."""
        return costs

    def held(self, held: Sequence[ActivationBytes]) -> Sequence[ActivationBytes]:
        """Return the bytes of each unit on each stage, from those of a microbatch."""
        return held

    def passes(self, passes: Sequence[Pass]) -> Sequence[Pass]:
        """Return passes whose stage is the place of their unit in :meth:`held`."""
        return passes

    def kept(self, layers: int) -> float:
        """Return the bytes that layers with attention keep beside activations."""
        return 0.0
