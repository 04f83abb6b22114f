"""Kernels that wait for a message beside what a GPU computes.

With NCCL, a send or a receive is a kernel that occupies thread blocks until the other side is
there. This replays a program with the times of its passes, and counts how many of them wait on a
rank while it computes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_zb.schedules.lowering import (
    PostReceive,
    Program,
    Run,
    RunPair,
    Send,
    WaitReceive,
)
from megatron_zb.schedules.passes import LAUNCH_LITTLE, Channel, Message, Pair, Pass
from megatron_zb.schedules.stage_costs import StageCosts

RUN_AHEAD = 3
"""Largest number of passes that the host has enqueued and the GPU has not ended.

Those that launch little are not counted: behind three of them, the GPU would have nothing to do.
"""


@dataclass(frozen=True)
class Waiting:
    """Kernels that wait on a rank while it computes: the ``mean`` number and the ``peak``."""

    mean: float
    peak: int
    end: float
    """When the rank has computed all of its passes, in seconds."""


def waiting_kernels(program: Program, costs: StageCosts, *, gated: bool = True) -> list[Waiting]:
    """Replay a program, and return the kernels that wait on each of its ranks.

    Messages take no time: what waits, waits for the other side.

    Args:
        costs: seconds of the passes.
        gated: a receive does not begin before the last pass that was enqueued begins.
    """
    return _Replay(program, costs, gated).run()


@dataclass
class _KernelsOfRank:
    """State of a rank in the replay: times of its host, its passes and its kernels."""

    position: int = 0
    host: float = 0.0
    free: float = 0.0
    """When the computation has done what is enqueued."""
    ready: float = 0.0
    """When the inputs of the next pass are there."""
    begins: float = 0.0
    """When the last pass that is enqueued begins."""
    ends: deque[float] = field(default_factory=deque)
    """Ends of the passes that the host counts as under way."""
    busy: list[tuple[float, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)


class _Replay:
    def __init__(self, program: Program, costs: StageCosts, gated: bool) -> None:
        self._program, self._costs, self._gated = program, costs, gated
        self._ranks = [_KernelsOfRank() for _ in program.ranks]
        self._posted: dict[tuple[int, Message], float] = {}
        self._sent: dict[tuple[int, Message], float] = {}
        self._free_channel: dict[Channel, float] = defaultdict(float)

    def run(self) -> list[Waiting]:
        moved = True
        while moved:
            moved = any(self._advance(number) for number in range(len(self._ranks)))
        return [_counted(rank) for rank in self._ranks]

    def _advance(self, number: int) -> bool:
        """Run a rank until an input is missing; return whether it has moved."""
        rank, instructions = self._ranks[number], self._program.ranks[number]
        start = rank.position
        while rank.position < len(instructions) and self._step(number, instructions[rank.position]):
            rank.position += 1
        return rank.position > start

    def _step(self, number: int, at: object) -> bool:
        rank = self._ranks[number]
        if isinstance(at, Run | RunPair):
            self._compute(rank, at)
        elif isinstance(at, PostReceive):
            begins = max(rank.host, rank.begins) if self._gated else rank.host
            self._posted[number, at.message] = begins
        elif isinstance(at, Send):
            self._sent[at.channel.target, at.message] = rank.free
        elif isinstance(at, WaitReceive):
            if (number, at.message) not in self._sent:
                return False
            rank.ready = max(rank.ready, self._arrival(at))
        return True

    def _arrival(self, at: WaitReceive) -> float:
        """Let both kernels of a message wait for each other; return when it is there."""
        source, target = at.channel
        free = self._free_channel[at.channel]
        posted = max(free, self._posted.pop((target, at.message)))
        sent = max(free, self._sent.pop((target, at.message)))
        arrival = self._free_channel[at.channel] = max(posted, sent)
        self._ranks[target].waits.append((posted, arrival))
        self._ranks[source].waits.append((sent, arrival))
        return arrival

    def _compute(self, rank: _KernelsOfRank, at: Run | RunPair) -> None:
        work = at.work
        seconds = (
            self._costs.duration(work) if isinstance(work, Pass) else self._costs.pair_seconds(work)
        )
        if isinstance(work, Pair) or work.kind not in LAUNCH_LITTLE:
            rank.ends.append(rank.free)
        if len(rank.ends) > RUN_AHEAD:
            rank.host = max(rank.host, rank.ends.popleft())
        rank.begins = max(rank.free, rank.host, rank.ready)
        rank.free = rank.begins + seconds
        rank.busy.append((rank.begins, rank.free))


def _counted(rank: _KernelsOfRank) -> Waiting:
    """Count what waits while the rank computes, from one moment of a change to the next."""
    changes = sorted(_changes(rank))
    busy = waits = peak = 0
    computed = waited = last = 0.0
    for moment, of_busy, of_waits in changes:
        if busy:
            computed += moment - last
            waited += waits * (moment - last)
            peak = max(peak, waits if moment > last else 0)
        busy, waits, last = busy + of_busy, waits + of_waits, moment
    return Waiting(waited / computed if computed else 0.0, peak, rank.free)


def _changes(rank: _KernelsOfRank) -> Iterator[tuple[float, int, int]]:
    for begin, end in rank.busy:
        yield begin, 1, 0
        yield end, -1, 0
    for begin, end in rank.waits:
        if end > begin:
            yield begin, 0, 1
            yield end, 0, -1
