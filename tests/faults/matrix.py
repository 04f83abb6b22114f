"""What goes wrong, where and when: the faults that a run is made to suffer."""

from __future__ import annotations

from dataclasses import dataclass

RANKS = 2
ITERATIONS = 6
SAVED = 2
"""A checkpoint every so many iterations: the last good one is that after 4."""
STRUCK = 5
"""The iteration in which a fault strikes, counted from 1."""
TIMEOUT = 6
"""Seconds without progress after which the watchdog ends the job."""


@dataclass(frozen=True)
class Fault:
    """``says`` is a part of what is printed; ``ordinary`` ones are among the ordinary tests."""

    what: str
    phase: str
    rank: int
    says: str
    ordinary: bool = False

    @property
    def iteration(self) -> int:
        """When it strikes; a checkpoint is written after the last one."""
        return ITERATIONS if self.phase == "checkpoint" else STRUCK

    @property
    def name(self) -> str:
        return f"{self.what}, {self.phase}, rank {self.rank}"


_STEP = ("warm-up", "steady state", "cool-down")
_KILLED = "Signal 9 (SIGKILL)"
_HELD_UP = "holds up all others"
# The others wait in a collective of the optimizer or of the checkpoint, not in a step.
_TIMED_OUT = "imed out"


def _signals() -> list[Fault]:
    faults = []
    for rank in range(RANKS):
        for phase in (*_STEP, "optimizer step", "checkpoint"):
            ordinary = (phase, rank) in (("steady state", 1), ("checkpoint", 0))
            faults.append(Fault("SIGKILL", phase, rank, _KILLED, ordinary))
        for phase in _STEP[:2]:
            ordinary = (phase, rank) == ("steady state", 0)
            faults.append(Fault("SIGSTOP", phase, rank, _HELD_UP, ordinary))
        for phase in ("cool-down", "optimizer step", "checkpoint"):
            faults.append(Fault("SIGSTOP", phase, rank, _TIMED_OUT))
    return faults


def _exceptions() -> list[Fault]:
    return [
        Fault(
            "exception",
            place,
            rank,
            f"RuntimeError: broken on purpose: {place}",
            (place, rank) == ("B", 0),
        )
        for rank in range(RANKS)
        for place in ("F", "B", "W", "data")
        if (place, rank) != ("data", 0)  # in a V, the last rank reads all data
    ]


def _storage() -> list[Fault]:
    return [
        Fault("full disk", "checkpoint", 0, "No space left on device", True),
        Fault("full disk", "checkpoint", 1, "No space left on device"),
    ]


FAULTS = (*_signals(), *_exceptions(), *_storage())
