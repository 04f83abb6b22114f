"""Offload: the host holds the activation of a unit between its F and its B.

As in *PipeOffload* (arXiv 2503.01328). Which units go to the host is a part of the search: see
:mod:`search.place_offload`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import (
    Costs,
    Feature,
    Scale,
    by_slice,
    check_table,
    filled,
    resampled,
    times,
)
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.stage_costs import HostCopies, StageCosts


@dataclass(frozen=True)
class Offload(Feature):
    """The choice to offload activations, and to reload them before B.

    Args:
        seconds: what copying an activation one way takes, of each slice, or one number for a
            microbatch on one whole rank; longer where ranks share a link to the host.
        full_duplex: whether the copies of both directions run at once without slowing down.
        host_limit: memory of the host for each rank, in the unit of activation.
    """

    name: ClassVar[str] = "offload"
    drops: ClassVar[bool] = True

    seconds: float | Sequence[float]
    full_duplex: bool = True
    host_limit: float = math.inf

    def completed(self, costs: Costs) -> Offload:
        """Return the feature with the seconds of each slice.

        Raises:
            UsageError: a value is negative or not finite, or there is not one for each slice.
        """
        if not self.host_limit >= 0:
            raise UsageError(f"costs: host_limit is {self.host_limit}: give memory of 0 or more")
        seconds = by_slice(costs, self.seconds)
        check_table("copy", seconds, len(costs.seconds[PassKind.F]))
        return replace(self, seconds=seconds)

    def scaled(self, scale: Scale) -> Offload:
        return replace(self, seconds=times(filled(self.seconds), scale.tokens))

    def placed(self, costs: Costs, placement: Placement, table: StageCosts) -> StageCosts:
        seconds = resampled(filled(self.seconds), placement.num_stages)
        copies = HostCopies(seconds, self.full_duplex, self.host_limit)
        return replace(table, copies=copies)
