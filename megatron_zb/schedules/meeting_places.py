"""Places in a program at which all ranks may wait for one another, as for a reduction over them.

Such a place is safe if no instruction before it, on any rank, needs one behind it on another rank.
A message is sent and received on the same side of it, since each may wait for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_zb.schedules.lowering import (
    Instruction,
    PostReceive,
    Program,
    Run,
    Send,
    WaitReceive,
)
from megatron_zb.schedules.passes import Message, PassKind
from megatron_zb.schedules.simulator import Timeline

_TOLERANCE = 1e-9  # seconds that times of one moment may differ by


def before_update(whole: Program, timeline: Timeline, unit: int, last: int) -> list[int]:
    """Return the position at which each rank meets the others before it makes an update.

    1. The first rank that makes the update tells the time.
    2. A rank meets the others in front of the first pass that ends later. So none of them is
       within a pass when the first one is ready for the update.
    3. A rank whose last pass sends something to a rank that is within a pass then, meets the others
       in front of that pass. Where it needs that pass for the update, the reader meets them behind
       its own pass.

    Args:
        whole: program of several steps.
        timeline: of its schedule.
        unit: of the update.
        last: the last unit whose W the update needs.
    """
    starts = [
        start
        for passes, times in zip(whole.schedule.ranks, timeline.start, strict=True)
        for p, start in zip(passes, times, strict=True)
        if p.kind is PassKind.U and p.microbatch == unit
    ]
    until = min(starts) + _TOLERANCE
    positions, floors = [], []
    for instructions, ends in zip(whole.ranks, timeline.end, strict=True):
        positions.append(_first_that_ends_later(instructions, ends, until))
        floors.append(_behind_weights(instructions, unit, last))
    sides = _Sides(whole, positions)
    return sides.retreated(floors) or sides.advanced()


def _first_that_ends_later(
    instructions: Sequence[Instruction], ends: Sequence[float], until: float
) -> int:
    """Return the position of the first pass that ends after a time, and of what it waits for."""
    passes, begin = 0, 0
    for position, at in enumerate(instructions):
        if isinstance(at, Run):
            is_update = at.work.kind is PassKind.U
            if ends[passes] > until or (is_update and ends[passes] >= until - 2 * _TOLERANCE):
                return begin
            passes += 1
        begin = begin if isinstance(at, WaitReceive) else position + 1
    return len(instructions)


def _behind_weights(instructions: Sequence[Instruction], unit: int, last: int) -> int:
    """Return the position behind the last W that an update needs, and behind what it sends."""
    found = 0
    for position, at in enumerate(instructions):
        if isinstance(at, Run):
            is_weight = at.work.kind in (PassKind.W, PassKind.BW)
            follows = is_weight and unit <= at.work.microbatch <= last
        elif not isinstance(at, Send):
            follows = False
        if follows:
            found = position + 1
    return found


class _Transfer(NamedTuple):
    """A message: its ranks, and the positions of its send, its receive, and the pass before it."""

    source: int
    target: int
    sent: int
    received: int
    begun: int


class _Sides:
    """Which instructions of each rank come before a position."""

    def __init__(self, whole: Program, positions: Sequence[int]) -> None:
        self._positions = list(positions)
        received = {
            at.message: position
            for instructions in whole.ranks
            for position, at in enumerate(instructions)
            if isinstance(at, PostReceive)
        }
        self._transfers = [
            transfer
            for instructions in whole.ranks
            for transfer in _sent_by(instructions, received)
        ]

    def retreated(self, floors: Sequence[int]) -> list[int] | None:
        """Return earlier positions that part no message, None if they were before ``floors``."""
        found, moves = list(self._positions), True
        while moves:
            moves = False
            for it in self._transfers:
                if it.sent < found[it.source] and it.received >= found[it.target]:
                    found[it.source], moves = it.begun, True
                elif it.received < found[it.target] and it.sent >= found[it.source]:
                    found[it.target], moves = it.received, True
        fits = all(floor <= place for floor, place in zip(floors, found, strict=True))
        return found if fits else None

    def advanced(self) -> list[int]:
        """Return later positions that part no message."""
        found, moves = list(self._positions), True
        while moves:
            moves = False
            for it in self._transfers:
                if it.sent < found[it.source] and it.received >= found[it.target]:
                    found[it.target], moves = it.received + 1, True
                elif it.received < found[it.target] and it.sent >= found[it.source]:
                    found[it.source], moves = it.sent + 1, True
        return found


def _sent_by(instructions: Sequence[Instruction], received: dict[Message, int]) -> list[_Transfer]:
    found = []
    begin = begun = 0
    for position, at in enumerate(instructions):
        if isinstance(at, Run):
            begun = begin
        elif isinstance(at, Send):
            source, target = at.channel
            found.append(_Transfer(source, target, position, received[at.message], begun))
        begin = begin if isinstance(at, WaitReceive) else position + 1
    return found
