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


WRITING = "checkpoint's files"
"""While a checkpoint is written, with the processes that help."""
LOADING, START = "loading", "start"
"""Phases of faults that strike a run which resumes, before its first step."""


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
        at = {"checkpoint": ITERATIONS, WRITING: ITERATIONS, LOADING: 0, START: 0}
        return at.get(self.phase, STRUCK)

    @property
    def name(self) -> str:
        return f"{self.what}, {self.phase}, rank {self.rank}"


_STEP = ("warm-up", "steady state", "cool-down")
_KILLED = "Signal 9 (SIGKILL)"
_HELD_UP = "holds up all others"


def _signals() -> list[Fault]:
    faults = []
    for rank in range(RANKS):
        for phase in (*_STEP, "optimizer step", "checkpoint", WRITING):
            ordinary = (phase, rank) in (("steady state", 1), (WRITING, 0))
            faults.append(Fault("SIGKILL", phase, rank, _KILLED, ordinary))
        for phase in (*_STEP, "optimizer step", "checkpoint"):
            ordinary = (phase, rank) == ("optimizer step", 0)
            faults.append(Fault("SIGSTOP", phase, rank, _HELD_UP, ordinary))
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


# In a V on 2 ranks, rank 1 has the loss; what is infinite leaves a layer norm as NaN.
_LOSS = "rank 1 found NaN in local forward loss calculation, in iteration"


def _numbers() -> list[Fault]:
    faults = []
    for rank in range(RANKS):
        for what, found in (("NaN", "NaN"), ("infinity", "Inf")):
            bucket = f"rank {rank} found {found} in local grad norm for bucket #0"
            faults.append(Fault(what, "activation", rank, _LOSS))
            faults.append(Fault(what, "gradient", rank, bucket, (what, rank) == ("NaN", 0)))
    return faults


def _files() -> list[Fault]:
    faults = []
    for rank in range(RANKS):
        faults.append(Fault("truncated file", LOADING, rank, "cannot be read (", rank == 0))
        faults.append(Fault("altered table", START, rank, "but a table with the digest", rank == 1))
    return faults


FAULTS = (*_signals(), *_exceptions(), *_storage(), *_numbers())
"""Those that strike in a step or after it."""

AT_THE_START = tuple(_files())
