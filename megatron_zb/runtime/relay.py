"""Steps of blockwise distillation in a row on one rank, with no barrier between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_zb.distillation.schedule.step_by_step import StepByStep
from megatron_zb.runtime.distillation_stage import DistillationStage
from megatron_zb.runtime.executor import Allocate, Execution, Transport
from megatron_zb.runtime.observer import Observer


def relay_steps(
    program: StepByStep,
    rank: int,
    stage: DistillationStage,
    channels: Transport,
    allocate: Allocate,
    *,
    first: int,
    until: int,
    observer: Observer | None = None,
) -> Iterator[int]:
    """Carry out the steps ``first`` to ``until - 1``; yields each when its update is done here.

    Other ranks may be in other steps then, at most ``run_ahead`` ahead. Messages for later steps
    are under way between two steps; after the last none is, so what waits for all ranks, such as
    a checkpoint, belongs there. To be exhausted: the end is where the last sends are waited for.

    Args:
        program: what :func:`megatron_zb.distillation.schedule.step_by_step.step_by_step` made.
        rank: the logical rank.
        stage: its stage.
        channels: its channels to other ranks.
        allocate: as for :func:`megatron_zb.runtime.executor.run_program`.
        first, until: the same on all ranks.
        observer: is told what the rank does.
    """
    stages: Mapping[int, DistillationStage] = {program.stage_on(rank): stage}
    execution = Execution(program.send_slots, stages, channels, allocate, observer)
    for step in range(first, until):
        execution.run(program.of_step(rank, step, first, until))
        yield step
    channels.finish()
