"""Costs of a model's layers on any placement: one interface for counted and for measured costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_zb.schedules import Costs
from megatron_zb.schedules.layout import Layout
from megatron_zb.schedules.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a schedule runs the layers of a model, as far as it changes their costs.

    Attributes:
        blocking: a rank cannot compute while its messages travel.
        cuts_vocabulary: vocabulary parallelism over all pipeline ranks.
        overlaps_exchange: overlapped forward-backward pairs hide the expert all-to-all.
    """

    blocking: bool = False
    cuts_vocabulary: bool = False
    overlaps_exchange: bool = False


class CostModel(Protocol):
    """Source of costs: a model counted for a device, or the profile of a run."""

    def layouts(self, placement: Placement, variant: Variant) -> Sequence[Layout]:
        """Return the layouts worth comparing, the even one first; none if layers are too few."""

    def costs(self, placement: Placement, counts: Layout, variant: Variant) -> Costs:
        """Return the costs with ``counts[s]`` layers on stage s."""
