"""Recomputation: F of a unit keeps only its input, and R makes its activation again before B.

As in *Training Deep Nets with Sublinear Memory Cost* (arXiv 1604.06174), for a whole stage at once.
Which units are recomputed is a part of the search: see :mod:`search.recompute_search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_zb.schedules.costs import (
    Costs,
    Feature,
    Scale,
    added,
    check_table,
    filled,
    resampled,
    seconds_of,
    times,
)
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.stage_costs import StageCosts


@dataclass(frozen=True)
class Recomputation(Feature):
    """The choice to recompute activations before B.

    Args:
        kept_input: memory of the input of a stage, in the unit of activation.
        seconds: what making activations again takes, of each slice; as long as F if left out,
            beside what it exchanges.
    """

    name: ClassVar[str] = "recomputation"
    drops: ClassVar[bool] = True

    kept_input: float
    seconds: Sequence[float] | None = None

    def completed(self, costs: Costs) -> Recomputation:
        """Return the feature with the seconds of each slice.

        Raises:
            UsageError: a value is negative or not finite, or there is not one for each slice.
        """
        forward = costs.seconds[PassKind.F]
        again = forward if self.seconds is None else tuple(self.seconds)
        check_table("recompute", again, len(forward))
        check_table("kept_input", (self.kept_input,), 1)
        return replace(self, seconds=again)

    def scaled(self, scale: Scale) -> Recomputation:
        seconds = times(filled(self.seconds), scale.forward)
        return replace(self, kept_input=self.kept_input * scale.tokens, seconds=seconds)

    def placed(self, costs: Costs, placement: Placement, table: StageCosts) -> StageCosts:
        again = seconds_of(costs, filled(self.seconds), placement)
        if PassKind.F in table.exchange:  # it is exchanged again, too
            again = added(again, table.exchange[PassKind.F])
        held = resampled(costs.memory["activation"], placement.num_stages)
        kept = tuple(min(self.kept_input, of_stage) for of_stage in held)
        memory = {**table.memory, "kept_input": kept}
        return replace(table.with_seconds({PassKind.R: again}), memory=memory)
