"""The example of CONTRIBUTING.md: a kind of pass as one file, with its handler.

N checkpoints what F has made: it takes a rank's time and memory, and changes no gradient.
"""

from __future__ import annotations

from typing import Any

from megatron_zb.runtime.executor import TRAINING
from megatron_zb.schedules.features.part import Part
from megatron_zb.schedules.kinds import At, Due, Kind, Need
from megatron_zb.schedules.passes import PassKind

N = PassKind.add("N", "checkpoint", ("#5B5B00", "#B8B800"))

PART = Part(
    Kind(N, needs=(Need(PassKind.F, At.SAME),), due=Due.ALWAYS),
    seconds=0.25,
    memory=0.1,
    until=PassKind.B,
)

RAN: list[tuple[int, int]] = []


def checkpoint(stage: Any, microbatch: int) -> None:
    """Run N: what it would write is of no concern here."""
    RAN.append((id(stage), microbatch))


HANDLERS = {**TRAINING, N: checkpoint}
