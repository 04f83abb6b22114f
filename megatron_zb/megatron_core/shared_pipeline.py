"""Several adapters in one pipeline, each trained as in a separate run.

Every pass of a microbatch runs with its adapter: F, R, B and W select it before anything else. So
an activation that is recomputed, or a weight gradient that comes later, does not read what another
adapter has left behind. The loss of a microbatch counts for a step of its adapter, and its layers
draw the random numbers of that step. An update of a stage runs in the middle of the step, between
passes of other adapters: see :mod:`megatron_zb.schedules.features.adapters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.auxiliary_losses import AuxiliaryScales
from megatron_zb.megatron_core.current_schedule import CurrentSchedule
from megatron_zb.megatron_core.data_parallel import overlaps_grad_reduce
from megatron_zb.megatron_core.post_validation import PostValidationPart
from megatron_zb.megatron_core.profiled_steps import ProfilePart
from megatron_zb.megatron_core.stages import MegatronStage
from megatron_zb.megatron_core.step import Step, StepPart
from megatron_zb.megatron_core.verification import Verification
from megatron_zb.runtime.executor import Handler
from megatron_zb.schedules.features.adapters import AdapterRules
from megatron_zb.schedules.passes import PassKind

_T = TypeVar("_T")

_OF_ONE: Mapping[type[StepPart], str] = {
    Verification: "verification",
    ProfilePart: "a profile",
    PostValidationPart: "optimizer post-validation",
}
"""Parts that know no update within a step, and what errors call them."""


class AdapterModel(Protocol):
    """Model chunks of a rank with adapters, and an optimizer for each of these."""

    def select(self, chunk: int, adapter: str) -> None:
        """Let a chunk compute with an adapter from now on."""

    def update(self, chunk: int, adapter: str) -> None:
        """Reduce the gradients of an adapter in a chunk, step its optimizer, and clear them.

        This takes the place of ``finalize_model_grads_func``, which is not called. Other ranks of
        the pipeline come to this update at other times, so it must not communicate with them.
        """

    def gradients_ready(self, chunk: int, adapter: str) -> None:
        """Take note that B of all microbatches of an adapter's step have run in a chunk."""

    def catch_up(self, adapter: str) -> None:
        """Finish the last update of an adapter, before the first F of its next step.

        All ranks of the pipeline have run ``gradients_ready`` for that step by then.
        """


class AdapterStage(MegatronStage):
    """Stage that computes every microbatch with its adapter."""

    def __init__(self, *arguments: Any, adapters: SharedPipelinePart) -> None:
        self._adapters = adapters
        self._left: dict[tuple[str, int], int] = {}
        super().__init__(*arguments)

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        if self._trains:
            adapter, _, own = self._adapters.rules.at(microbatch)
            if own == 0:
                self._adapters.model.catch_up(adapter.name)
        self._select(microbatch)
        output = super().forward(microbatch, activation)
        if self._trains:
            self._adapters.scales.keep(self._adapters.rules.at(microbatch)[0].name)
        return output

    def recompute(self, microbatch: int) -> None:
        self._select(microbatch)
        super().recompute(microbatch)

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self._select_for_backward(microbatch)
        return super().backward_input(microbatch, gradient)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self._select_for_backward(microbatch)
        result = super().backward(microbatch, gradient)
        self._count_backward(microbatch)
        return result

    def _count_backward(self, microbatch: int) -> None:
        """Report the last B of an adapter's step on this stage."""
        if not self._trains:
            return
        adapter, step, _ = self._adapters.rules.at(microbatch)
        left = self._left.setdefault((adapter.name, step), adapter.microbatches) - 1
        self._left[adapter.name, step] = left
        if left == 0:
            self._adapters.model.gradients_ready(self.chunk, adapter.name)

    @property
    def _trains(self) -> bool:
        step = self._step
        return not (step.forward_only or step.is_rehearsal or step.is_warm_up)

    def backward_weight(self, microbatch: int) -> None:
        self._select(microbatch)
        super().backward_weight(microbatch)

    def update(self, microbatch: int) -> None:
        """Update the adapter of a microbatch, the first of a step, on this stage."""
        if self._trains:
            name = self._adapters.rules.at(microbatch)[0].name
            self._adapters.model.update(self.chunk, name)

    def _select(self, microbatch: int) -> None:
        if not self._step.forward_only:
            name = self._adapters.rules.at(microbatch)[0].name
            self._adapters.model.select(self.chunk, name)

    def _select_for_backward(self, microbatch: int) -> None:
        self._select(microbatch)
        if self._trains:
            self._adapters.scales.put_back(self._adapters.rules.at(microbatch)[0].name)

    def _microbatches_of(self, microbatch: int) -> int:
        if self._step.forward_only:
            return super()._microbatches_of(microbatch)
        return self._adapters.rules.at(microbatch)[0].microbatches

    def _choose_streams(self, microbatch: int) -> None:
        if self.streams is None or self._step.forward_only:
            super()._choose_streams(microbatch)
            return
        adapter, step, own = self._adapters.rules.at(microbatch)
        self.streams.start_step(self._adapters.steps_done[adapter.name] + step)
        self.streams.start_pass(own)


class SharedPipelinePart(StepPart):
    """Trains the adapters of a schedule; an evaluation runs with what its caller has selected.

    Args:
        current: the schedule of the job, which was built for adapters. It may be exchanged for that
            of others between two steps.
        model: the chunks of this rank.
        steps_done: the steps that each adapter has done before, by name; none if left out.

    Raises:
        UsageError: the schedule has no adapters.
    """

    fact = "has_adapters"
    handlers: Mapping[PassKind, Handler] = {
        PassKind.U: lambda stage, microbatch: stage.update(microbatch)
    }

    def __init__(
        self,
        current: CurrentSchedule,
        model: AdapterModel,
        steps_done: Mapping[str, int] | None = None,
    ) -> None:
        self._current, self.model = current, model
        self.scales = AuxiliaryScales()
        names = [adapter.name for adapter in self.rules.adapters.each]
        self.steps_done = dict.fromkeys(names, 0) | dict(steps_done or {})

    @property
    def rules(self) -> AdapterRules:
        """The adapters of the schedule, and the steps of each in their order."""
        schedule = self._current.schedule
        if not isinstance(schedule.rules, AdapterRules):
            raise UsageError(
                f"{schedule.name}: the schedule was built for one training: give build() adapters"
            )
        return schedule.rules

    def before_step(self, step: Step) -> None:
        """Refuse what takes all microbatches of a step for one training.

        Raises:
            UsageError: names it, and what to leave out.
        """
        if step.forward_only:
            return
        names = [_OF_ONE[type(part)] for part in step.parts if type(part) in _OF_ONE]
        names += ["calculate_per_token_loss"] if step.config.calculate_per_token_loss else []
        names += ["overlap_grad_reduce"] if any(map(overlaps_grad_reduce, step.model)) else []
        names += ["CUDA graphs"] if step.captured else []
        if names:
            raise UsageError(
                f"adapters in one pipeline: {' and '.join(names)} would take the microbatches of "
                "all adapters for one training: leave it out"
            )
        step.reduces = False  # each update reduces its own gradients

    def stage_type(self, number: int, step: Step) -> Callable[..., Any]:
        return partial(AdapterStage, adapters=self)

    def after_step(self, step: Step) -> None:
        if not step.forward_only:
            for adapter in self.rules.adapters.each:
                self.steps_done[adapter.name] = self.steps_done.get(adapter.name, 0) + adapter.steps

    def merged(self, of_adapters: Mapping[str, Iterator[_T]]) -> Iterator[_T]:
        """Yield the data of all adapters in the order in which a chunk reads them.

        It goes on from step to step, also where the schedule is exchanged for that of others. A
        chunk has one for all steps: a rank with both ends of the model reads data once for both,
        and knows their iterators by this.
        """
        while True:
            rules = self.rules
            for unit in range(len(rules.columns)):
                try:
                    yield next(of_adapters[rules.at(unit)[0].name])
                except StopIteration:
                    return

    def by_adapter(self, values: Sequence[_T]) -> dict[str, list[list[_T]]]:
        """Return one value of each microbatch by adapter and step, such as its loss."""
        found: dict[str, list[list[_T]]] = {
            adapter.name: [[] for _ in range(adapter.steps)] for adapter in self.rules.adapters.each
        }
        for unit, value in enumerate(values):
            adapter, step, _ = self.rules.at(unit)
            found[adapter.name][step].append(value)
        return found
