"""Copies of activations between a rank's device and its host."""

from __future__ import annotations

from typing import NamedTuple

from megatron_zb.schedules.kinds import Copies, Kind
from megatron_zb.schedules.passes import Pass
from megatron_zb.schedules.stage_costs import StageCosts


class Copy(NamedTuple):
    """A copy of one unit's activation to the host, or from it, in seconds."""

    stage: int
    microbatch: int
    to_host: bool
    start: float
    end: float


class CopyEngines:
    """The two copy engines of a rank, or the one that both directions share.

    Each engine copies what it is given in turn: out of the device in the order of F, into it in the
    order of H. What a pass of a moved unit waits for follows from the passes of its own rank alone.
    """

    def __init__(self, costs: StageCosts) -> None:
        self._costs = costs
        self._free = dict.fromkeys(Copies, 0.0)
        self._ended: dict[tuple[Copies, int, int], float] = {}
        self.copies: list[Copy] = []

    def awaited_by(self, kind: Kind, p: Pass) -> float:
        """Return when the copy ends that a pass of a moved unit waits for, 0 if for none."""
        return 0.0 if kind.awaits is None else self._ended[kind.awaits, p.stage, p.microbatch]

    def follow(self, kind: Kind, p: Pass, end: float) -> None:
        """Start the copy that follows a pass of a moved unit, which has ended."""
        if kind.moves is not None:
            self._copy(p, end, kind.moves)

    def _copy(self, p: Pass, now: float, direction: Copies) -> None:
        costs = self._costs.of(p.microbatch)
        start = max(now, self._free[direction])
        end = start + (costs.copy[p.stage] if costs.copy else 0.0)
        for engine in (direction,) if costs.full_duplex else Copies:
            self._free[engine] = end
        self._ended[direction, p.stage, p.microbatch] = end
        self.copies.append(Copy(p.stage, p.microbatch, direction is Copies.OUT, start, end))
