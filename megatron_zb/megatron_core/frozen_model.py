"""Forwards of a frozen model beside training: the teacher or the reference model that a loss needs.

Its layers are cut over the ranks as Megatron cuts them without virtual stages, so the piece of the
last pipeline rank ends where the loss is. Its forwards run in the gaps of the trained model, each
before F of the last stage of the same microbatch, where the user's forward step takes the output.

Example::

    sizes = JobSizes(..., second_model=SecondModel(SecondRole.TEACHER, forward=0.5))
    adapter = PipelineAdapter.create(settings, sizes)
    teacher = adapter.teach_with(FrozenModel(chunk, forward_step=hidden_or_logits))

    def forward_step(data_iterator, model):
        output = model(...)
        return output, partial(loss, teacher.output)  # None but on the last stage

See :mod:`megatron_zb.schedules.features.second_model` for the order of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.data_iterators import TwiceRead
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.stages import MegatronStage
from megatron_zb.megatron_core.step import Step, StepPart, device
from megatron_zb.megatron_core.versions import message_width
from megatron_zb.runtime.executor import Allocate, Handler
from megatron_zb.schedules.features.second_model import SecondModelRules
from megatron_zb.schedules.passes import Message, PassKind


@dataclass
class FrozenModel:
    """A frozen model beside the trained one.

    Args:
        chunk: its layers on this rank, as Megatron builds them for the rank of a pipeline without
            virtual stages. Its ``set_input_tensor`` takes what the rank before has returned.
        forward_step: function of a data iterator and the chunk. It returns a tensor: from the last
            pipeline rank what the loss needs, from the others what the next one takes. It runs
            without gradients.
    """

    chunk: Any
    forward_step: Callable[[Any, Any], torch.Tensor]
    output: torch.Tensor | None = field(default=None, init=False)
    """Its output for the microbatch whose loss is computed; None anywhere else."""


class TeacherStage:
    """The layers of a teacher on a rank in one step."""

    split = None
    """It has no weight gradients."""

    def __init__(self, step: Step, teacher: FrozenModel, iterator: int) -> None:
        self._step, self._teacher, self._iterator = step, teacher, iterator

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        """Run F: from the activation of the rank before, None on the first one."""
        chunk, step = self._teacher.chunk, self._step
        if activation is not None:
            get_attr_wrapped_model(chunk, "set_input_tensor")(activation)
        with torch.no_grad():
            return self._teacher.forward_step(step.data_iterators[self._iterator], chunk)


class TaughtStage(MegatronStage):
    """The last stage of a model whose loss needs the output of a teacher."""

    def __init__(self, *arguments: Any, teacher: FrozenModel) -> None:
        self._teacher = teacher
        super().__init__(*arguments)

    def forward(
        self,
        microbatch: int,
        activation: torch.Tensor | None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        self._teacher.output = output
        try:
            return super().forward(microbatch, activation)
        finally:
            self._teacher.output = None


class FrozenModelPart(StepPart):
    """Runs the forwards of a teacher, and hands its outputs to the loss.

    Args:
        physical: the stages of the ranks.
    """

    fact = "has_teacher"
    reads_on_every_stage = True
    handlers: Mapping[PassKind, Handler] = {
        PassKind.F: lambda stage, microbatch, received=None, *more: stage.forward(
            microbatch, received, *more
        )
    }

    def __init__(self, physical: PhysicalPlacement) -> None:
        self._physical = physical
        self._readings = TwiceRead()
        self.teacher: FrozenModel | None = None

    def before_step(self, step: Step) -> None:
        """Let the teacher read the microbatches beside the first chunk.

        Raises:
            UsageError: there is no teacher, it has weights that train, or a CUDA graph captures the
                step.
        """
        name, teacher = step.program.schedule.name, self.teacher
        if teacher is None:
            raise UsageError(
                f"{name}: the schedule has the passes of a teacher, and there is none: give one to "
                "teach_with before the first step"
            )
        if any(weight.requires_grad for weight in teacher.chunk.parameters()):
            raise UsageError(
                f"{name}: the teacher has weights that train: freeze them, as none of its passes "
                "computes a gradient"
            )
        if step.captured:
            raise UsageError(f"{name}: a CUDA graph has no passes of a teacher: leave graphs out")
        teacher.chunk.eval()
        self._readings.share(step, None)

    def stage_type(self, number: int, step: Step) -> Callable[..., Any] | None:
        is_last = number == self._physical.placement.num_stages - 1
        return partial(TaughtStage, teacher=self._known) if is_last else None

    @property
    def _known(self) -> FrozenModel:
        assert self.teacher is not None, "before_step has looked"
        return self.teacher

    def more_stages(self, stages: Mapping[int, Any], step: Step) -> Mapping[int, Any]:
        stage = step.program.schedule.placement.stages_of[step.logical][-1]
        return {stage: TeacherStage(step, self._known, len(step.model))}

    def allocation(self, usual: Allocate, step: Step) -> Allocate:
        rules = step.program.schedule.rules
        assert isinstance(rules, SecondModelRules)
        config = get_model_config(self._known.chunk)

        def allocate(message: Message) -> torch.Tensor:
            if not rules.is_second(message.stage):
                return usual(message)
            shape = (*step.shape[:2], message_width(config))
            return torch.empty(shape, dtype=config.pipeline_dtype, device=device())

        return allocate

    def after_step(self, step: Step) -> None:
        self._readings.finish(step.num_microbatches)
