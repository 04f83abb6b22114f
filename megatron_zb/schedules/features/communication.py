"""Communication in F and B that a pair hides: the all-to-all of experts.

A forward and a backward of two units run as one pass, a :class:`~passes.Pair`, as in DeepSeek-V3
(arXiv 2412.19437, section 3.2.1). What is paired is a part of the search: see
:mod:`search.pair_search`.
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
    by_slice,
    check_table,
    filled,
    level,
    seconds_of,
    times,
)
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.stage_costs import StageCosts

_F, _B, _W, _BW, _R = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.R

PAIR_LOSS = 0.03
"""How much longer a pair takes because F and backward slow each other down. An assumption."""


@dataclass(frozen=True)
class Communication(Feature):
    """An expert all-to-all that nothing hides unless a pair does.

    Args:
        forward: seconds of it in F, beside what F computes: of each slice, or one number for a
            microbatch on one whole rank.
        backward: the same of B, and of BW.
        pair_loss: the share by which a pair of F and B takes longer because each slows the other
            down.
    """

    name: ClassVar[str] = "communication"

    forward: float | Sequence[float]
    backward: float | Sequence[float]
    pair_loss: float = 0.0

    def said(self) -> dict[str, str]:
        return {self.name: "communication in F and B"} if self.takes_time else {}

    @property
    def takes_time(self) -> bool:
        """Whether there is anything to hide."""
        return any(filled(self.forward)) or any(filled(self.backward))

    def completed(self, costs: Costs) -> Communication:
        """Return the feature with the seconds of each slice.

        Raises:
            UsageError: a value is negative or not finite, or there is not one for each slice.
        """
        forward, backward = by_slice(costs, self.forward), by_slice(costs, self.backward)
        slices = len(costs.seconds[_F])
        check_table("forward_comm", forward, slices)
        check_table("backward_comm", backward, slices)
        check_table("pair_loss", (self.pair_loss,), 1)
        return replace(self, forward=forward, backward=backward)

    def scaled(self, scale: Scale) -> Communication:
        both = times(filled(self.forward), scale.tokens), times(filled(self.backward), scale.tokens)
        return replace(self, forward=both[0], backward=both[1])

    def leveled(self) -> Communication:
        return replace(
            self, forward=level(filled(self.forward)), backward=level(filled(self.backward))
        )

    def placed(self, costs: Costs, placement: Placement, table: StageCosts) -> StageCosts:
        there = seconds_of(costs, filled(self.forward), placement)
        back = seconds_of(costs, filled(self.backward), placement)
        seconds = dict(table.seconds)
        for kind, more in ((_F, there), (_B, back), (_R, there)):
            seconds[kind] = added(seconds[kind], more)
        is_known = _BW in costs.seconds
        seconds[_BW] = added(seconds[_BW if is_known else _B], back if is_known else seconds[_W])
        exchange = {_F: there, _B: back}
        return replace(table, seconds=seconds, exchange=exchange, pair_loss=self.pair_loss)


def without_communication(costs: Costs) -> Costs:
    """Return the costs with the all-to-all as a part of F and B that nothing can hide."""
    found = costs.feature(Communication)
    if found is None:
        return costs
    there, back = filled(found.forward), filled(found.backward)
    more = {_F: there, _B: back, _BW: back}
    seconds = {k: added(of, more[k]) if k in more else of for k, of in costs.seconds.items()}
    features: list[Feature] = []
    for it in costs.features:
        if isinstance(it, Recomputation):
            features.append(replace(it, seconds=added(filled(it.seconds), there)))
        elif it is not found:
            features.append(it)
    rows = tuple(map(without_communication, costs.microbatches))
    return replace(costs, seconds=seconds, features=tuple(features), microbatches=rows)
