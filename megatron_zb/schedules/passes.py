"""The passes a pipeline is made of."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class PassKind(str, Enum):
    """What a pass computes for one stage and one microbatch.

    ``F`` forward, ``B`` input gradient, ``W`` weight gradient, ``BW`` both gradients at once
    (*Zero Bubble Pipeline Parallelism*, arXiv 2401.10241, section 2).
    """

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"

    def __str__(self) -> str:
        return self.value


class Pass(NamedTuple):
    """One unit of work: its kind, the stage (0 to S-1) and the microbatch (0 to m-1)."""

    kind: PassKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"
