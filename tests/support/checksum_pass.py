"""A kind of pass that sends a message, in one file: what schedules need, and what a run needs.

C adds the gradients of a stage's weights to what the stage behind it has sent, and sends the sum to
the stage before. So the first stage has the checksum of the whole model after its last C. It
changes no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron_zb.megatron_core.step import Step, StepPart
from megatron_zb.runtime.executor import TRAINING, Allocate
from megatron_zb.schedules.features.part import Part
from megatron_zb.schedules.kinds import At, Kind, Need
from megatron_zb.schedules.passes import Message, PassKind

C = PassKind.add("C", "checksum", ("#3B3B3B", "#9A9A9A"))

PART = Part(Kind(C, needs=(Need(PassKind.W, At.SAME), Need(C, At.NEXT))), seconds=0.1)


class ChecksumPart(StepPart):
    """Checksums of a training step; ``found`` has those of the first stage, by microbatch."""

    def __init__(self) -> None:
        self.found: dict[int, float] = {}
        self.handlers = {C: self.checksum}

    def checksum(
        self, stage: Any, microbatch: int, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run C: from the sum of the stages behind to that with this stage's."""
        total = torch.zeros(1, dtype=torch.float64) if received is None else received
        total = total + gradients_of(stage.parameters())
        if stage.number == 0:
            self.found[microbatch] = float(total)
        return total

    def wrap_stage(self, number: int, stage: Any, step: Step) -> None:
        """Tell a stage its number and its parameters."""
        stage.number = number
        stage.parameters = step.model[stage.chunk].parameters

    def allocation(self, usual: Allocate, step: Step) -> Allocate:
        """Return the function that gives an empty tensor for a message: one number for C's."""

        def allocate(message: Message) -> torch.Tensor:
            if message.made_by is C:
                return torch.empty(1, dtype=torch.float64)
            return usual(message)

        return allocate


def gradients_of(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Return the sum of all gradients, in 64 bits."""
    main: list[Any] = [getattr(p, "main_grad", None) for p in parameters]
    return sum((g.double().sum() for g in main if g is not None), torch.zeros(1).double())


class SumOfStage:
    """The numbers that a stage of toy layers adds, in place of those of gradients."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], float] = {}

    def __call__(
        self, stage: Any, microbatch: int, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run C on toy layers: the number of stages behind, and this one."""
        total = (torch.zeros(1) if received is None else received) + 1.0
        self.found[id(stage), microbatch] = float(total)
        return total


HANDLERS = {**TRAINING, C: SumOfStage()}
