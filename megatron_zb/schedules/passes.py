"""The passes a pipeline is made of."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class PassKind(str, Enum):
    """What a pass computes for one stage and one microbatch.

    ``F`` forward, ``B`` input gradient, ``W`` weight gradient, ``BW`` both gradients at once
    (*Zero Bubble Pipeline Parallelism*, arXiv 2401.10241, section 2).

    Blockwise distillation has other kinds (*Pipe-BD*, arXiv 2301.12443): ``T`` is the teacher's
    forward, from the activation that the stage before relays to the one that the next stage reads;
    ``S`` the student's forward, loss and backward, which reads and makes no message and runs after
    T of the same stage and microbatch, on the same rank; ``U`` the update of the stage's students,
    after the last S of a step.
    """

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"
    T = "T"
    S = "S"
    U = "U"

    def __str__(self) -> str:
        return self.value


class Pass(NamedTuple):
    """One unit of work: its kind, the stage (0 to S-1) and the microbatch (0 to m-1).

    T and S count microbatches through all steps: microbatch j of step n is n * m + j. In U the
    microbatch is the number of the step.
    """

    kind: PassKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"
