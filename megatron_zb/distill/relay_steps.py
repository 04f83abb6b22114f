"""Consecutive steps of blockwise distillation on one rank, with no barrier between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_zb.distill.schedule.step_by_step import StepByStep
from megatron_zb.runtime.executor import Allocate, Execution, Handler, Transport
from megatron_zb.runtime.observer import Observer
from megatron_zb.schedules.passes import PassKind


class DistillationStage(Protocol):
    """The teacher's blocks of a stage and their students, on one rank.

    Microbatches are counted through all steps: microbatch j of step n is n * m + j, with m
    microbatches per step. A rank sees only its own, in rising order. Source: Pipe-BD,
    arXiv 2301.12443.
    """

    def teach(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        """Run T: the teacher's forward, from the relayed activation to the next stage's.

        The first stage gets None and reads the data itself. What is returned is sent on without a
        copy, and must not be changed afterwards; the last stage's is dropped. What the students
        need is for the stage to keep until :meth:`study`.
        """

    def study(self, microbatch: int) -> None:
        """Run S: forward, loss and backward of the students, on what :meth:`teach` has kept."""

    def update(self, step: int) -> None:
        """Run U: sum the students' gradients over the ranks of the stage, if many, and step.

        All ranks of the stage come to it after the same microbatches, so it may be collective over
        them; it must wait for no other rank.
        """


HANDLERS: Mapping[PassKind, Handler] = {
    PassKind.T: lambda stage, microbatch, received=None: stage.teach(microbatch, received),
    PassKind.S: lambda stage, microbatch: stage.study(microbatch),
    PassKind.U: lambda stage, step: stage.update(step),
}


@dataclass(frozen=True)
class Exchange:
    """How a rank exchanges messages with other ranks, and who observes it."""

    channels: Transport
    allocate: Allocate
    """Function from a message to an empty tensor for it, as for ``run_program``."""
    observer: Observer | None = None


def relay_steps(
    program: StepByStep,
    rank: int,
    stage: DistillationStage,
    exchange: Exchange,
    *,
    first: int,
    until: int,
) -> Iterator[int]:
    """Run the steps ``first`` to ``until - 1``; yield each when its update is done on this rank.

    Other ranks may be in other steps then, at most ``run_ahead`` ahead. Messages for later steps
    are under way between two steps; after the last none is, so what waits for all ranks, such as
    a checkpoint, belongs there. To be exhausted: the end is where the last sends are waited for.

    Args:
        program: from :func:`megatron_zb.distill.schedule.step_by_step.step_by_step`.
        rank: the logical rank.
        stage: the stage of this rank.
        exchange: the messages of this rank.
        first, until: the same on all ranks.
    """
    stages: Mapping[int, DistillationStage] = {program.stage_on(rank): stage}
    channels, allocate, observer = exchange.channels, exchange.allocate, exchange.observer
    execution = Execution(
        program.send_slots, stages, channels, allocate, observer, handlers=HANDLERS
    )
    for step in range(first, until):
        execution.run(program.of_step(rank, step, first, until))
        yield step
    channels.finish()
