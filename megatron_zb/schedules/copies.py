"""Copies of activations between a rank's device and its host."""

from __future__ import annotations

from typing import NamedTuple

from megatron_zb.schedules.costs import StageCosts
from megatron_zb.schedules.passes import Pass, PassKind


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
        self._free = {True: 0.0, False: 0.0}
        self._ended: dict[tuple[bool, int, int], float] = {}
        self.copies: list[Copy] = []

    def awaited_by(self, p: Pass) -> float:
        """Return when the copy ends that a pass of a moved unit waits for, 0 if for none."""
        if p.kind is PassKind.D:
            return self._ended[True, p.stage, p.microbatch]
        if p.kind in (PassKind.B, PassKind.BW):
            return self._ended[False, p.stage, p.microbatch]
        return 0.0

    def follow(self, p: Pass, end: float) -> None:
        """Begin the copy that follows a pass of a moved unit, which has ended."""
        if p.kind in (PassKind.F, PassKind.H):
            self._copy(p, end, to_host=p.kind is PassKind.F)

    def _copy(self, p: Pass, now: float, *, to_host: bool) -> None:
        costs = self._costs.of(p.microbatch)
        start = max(now, self._free[to_host])
        end = start + (costs.copy[p.stage] if costs.copy else 0.0)
        for engine in (to_host,) if costs.full_duplex else (True, False):
            self._free[engine] = end
        self._ended[to_host, p.stage, p.microbatch] = end
        self.copies.append(Copy(p.stage, p.microbatch, to_host, start, end))
