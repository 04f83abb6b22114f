"""Costs with some of their tables changed, by the names that ``Costs.of_slices`` has for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.passes import PassKind

_KINDS = {
    "forward": PassKind.F,
    "backward": PassKind.B,
    "weight": PassKind.W,
    "whole": PassKind.BW,
}


def changed(costs: Costs, **tables: Sequence[float]) -> Costs:
    """Return the costs with other numbers for each slice."""
    seconds = {_KINDS[name]: tuple(of) for name, of in tables.items() if name in _KINDS}
    memory = {name: tuple(of) for name, of in tables.items() if name not in _KINDS}
    return replace(costs, seconds={**costs.seconds, **seconds}, memory={**costs.memory, **memory})
