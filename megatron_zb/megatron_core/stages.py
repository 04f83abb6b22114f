"""Stages of a model in Megatron's forward and backward functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

import torch
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.utils import unwrap_model

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.data_iterators import Start
from megatron_zb.megatron_core.data_parallel import DataParallelSync
from megatron_zb.megatron_core.forward_state import ForwardState
from megatron_zb.megatron_core.random_streams import (
    LayerStreams,
    RandomState,
)
from megatron_zb.megatron_core.split_backward import SplitBackward, uses_of_leaves
from megatron_zb.megatron_core.step import Step, StepPart, device, timed
from megatron_zb.runtime.activation_memory import HostCopyEngines, HostMemory, OffloadedActivations
from megatron_zb.runtime.autograd_stage import AutogradStage
from megatron_zb.runtime.saved_state import Saved


class MegatronStage(AutogradStage):
    """One model chunk in one step, computed by Megatron's own ``forward_step``."""

    computes_loss = True
    """Whether the loss is a part of the last stage's F."""
    flag_of_loss = ""
    """The flag with which the loss is computed from an output without its graph, if any."""

    def __init__(self, step: Step, chunk: int, split: SplitBackward) -> None:
        self._step = step
        self.chunk, self.split = chunk, split
        self.is_output = step.physical.holds_output(step.pp_rank, chunk)
        self.streams: LayerStreams | None = None
        self.sync: DataParallelSync | None = None
        self.state: ForwardState | None = None
        self._past: dict[int, tuple[Start, list[Saved]]] = {}
        self._has_looked_at_loss = False
        self._context_parallel = step.pg_collection.cp.size()
        super().__init__(
            self._forward_step,
            split.queue,
            is_last=self._ends_in_loss,
            forward_only=step.forward_only,
        )
        self.activation_memory = split.queue.activation_memory = step.memory

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        if self.state is None or self.state.is_known or microbatch in self.recomputed:
            return super().forward(microbatch, activation)
        with self.state.recorded():  # to learn what forwards change
            return super().forward(microbatch, activation)

    def _forward_step(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        step = self._step
        self._choose_streams(microbatch)
        if self.sync is not None:
            self.sync.before_forward(self.chunk)
        self._choose_unit(microbatch)
        output, num_tokens = megatron_schedules.forward_step(
            self._user_step,
            step.data_iterators[self.chunk],
            step.model[self.chunk],
            self._microbatches_of(microbatch),
            activation,
            step.forward_data_store,
            step.config,
            self._context_parallel,
            collect_non_loss_data=step.collect_non_loss_data,
            is_first_microbatch=megatron_schedules.check_first_val_step(
                step.first_val_step, step.forward_only, microbatch == 0
            ),
            current_microbatch=microbatch,
            vp_stage=self._vp_stage,
            is_last_stage=self._ends_in_loss,
        )
        if not isinstance(output, torch.Tensor):
            raise UsageError(
                f"a stage returned a {type(output).__name__}: a pipeline schedule hands one tensor "
                "from stage to stage"
            )
        return self._scaled(output, num_tokens) if self._ends_in_loss else output

    @property
    def _ends_in_loss(self) -> bool:
        """Whether Megatron's forward step ends with the user's loss function."""
        return self.is_output and self.computes_loss

    @property
    def _vp_stage(self) -> int | None:
        return self.chunk if len(self._step.model) > 1 else None

    def _microbatches_of(self, microbatch: int) -> int:
        """Return the microbatches of the training step that a microbatch counts for."""
        return self._step.num_microbatches

    def _choose_unit(self, microbatch: int) -> None:
        """Choose the microbatch, or the slice of one, for which the user's functions run next."""

    def _start_of_backward(self, output: torch.Tensor) -> Any:
        if not (self.split.has_looked or self.split.is_off):
            self.split.look_at(output)
        return super()._start_of_backward(output)

    def _user_step(self, *arguments: Any, **options: Any) -> Any:
        """Run the user's forward step as Megatron's ``forward_step`` calls it."""
        return self._call_model(*arguments, **options)

    def _call_model(self, *arguments: Any, **options: Any) -> Any:
        """Return the model's output, or its plan, and the function that computes the loss."""
        return self._call_user(*arguments, **options)

    def _call_user(self, *arguments: Any, **options: Any) -> Any:
        """Call the user's forward step."""
        return self._step.forward_step_func(*arguments, **options)

    def _run_loss(self, microbatch: int, output: torch.Tensor, loss_func: Any) -> None:
        """Run the loss function on an output without its graph, and its backward in training."""
        loss = self._loss(output, loss_func)
        if not self._step.forward_only:
            if not self._has_looked_at_loss:  # its graph is small, and one for each step
                self._has_looked_at_loss = True
                self._refuse_other_uses(loss)
            torch.autograd.backward(loss)

    def _loss(self, output: torch.Tensor, loss_func: Any) -> torch.Tensor:
        """Do with an output of the model what Megatron does behind its forward."""
        step = self._step
        if step.config.timers is not None:
            step.config.timers("forward-compute", log_level=2).start()
        loss, num_tokens = megatron_schedules.forward_step_calc_loss(
            step.model[self.chunk],
            output,
            loss_func,
            step.config,
            self._vp_stage,
            step.collect_non_loss_data,
            step.num_microbatches,
            step.forward_data_store,
            cp_group_size=self._context_parallel,
            is_last_stage=True,
        )
        return self._scaled(loss, num_tokens)

    def _refuse_other_uses(self, loss: torch.Tensor) -> None:
        """Refuse a loss whose gradient would run through layers, whose backward comes later."""
        inputs = [activation for activation, _ in self._live.values() if activation is not None]
        for _, leaf in uses_of_leaves(loss.grad_fn):
            if any(leaf is activation for activation in inputs):
                raise UsageError(
                    "the loss depends on the model by more than its output, such as hidden states "
                    f"that a hook keeps, which is not possible with {self.flag_of_loss}: leave it "
                    "out of the loss, or leave out the flag"
                )

    def _scaled(self, loss: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        """Count the tokens of a loss, and return it as the backward starts from it."""
        step = self._step
        step.total_num_tokens += num_tokens
        if step.forward_only or step.config.grad_scale_func is None:
            return loss
        scaled: torch.Tensor = step.config.grad_scale_func(loss)
        return scaled

    def _choose_streams(self, microbatch: int) -> None:
        """Choose a microbatch's random streams, for a forward or a backward's recomputation."""
        if self.streams is not None:
            self.streams.start_pass(self._step.place_of(microbatch))

    @contextmanager
    def _remembering(self, microbatch: int) -> Iterator[None]:
        assert self.state is not None, "StatePart gives it to stages that recompute"
        start = Start([self._step.data_iterators[self.chunk]])
        with self.state.recorded() as record, self._reading(start):
            self._past[microbatch] = start, record
            yield

    @contextmanager
    def _repeating(self, microbatch: int) -> Iterator[None]:
        """Read, draw and count the same as the forward has done, and report nothing once more."""
        assert self.state is not None, "it has recorded the forward"
        now, step, (start, record) = RandomState(), self._step, self._past.pop(microbatch)
        start.go_back()
        reported, tokens = step.forward_data_store, step.total_num_tokens
        step.forward_data_store, step.total_num_tokens = [], tokens.clone()
        with versions.losses_logged_apart(), self.state.repeating(record), self._reading(start):
            try:
                yield
            finally:
                step.forward_data_store, step.total_num_tokens = reported, tokens
                now.restore()

    @contextmanager
    def _reading(self, start: Start) -> Iterator[None]:
        """Read from the iterator of a start."""
        iterators, chunk = self._step.data_iterators, self.chunk
        usual = iterators[chunk]
        (iterators[chunk],) = start.data_iterators
        try:
            yield
        finally:
            iterators[chunk] = usual

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self._choose_streams(microbatch)
        with timed(self._step.config, "backward-compute", log_level=2):
            if self.split.queue.deferring:
                return super().backward(microbatch, gradient)
            sync = self._training_sync
            sync.before_weight_gradients(self.chunk, None)
            result = super().backward(microbatch, gradient)
            sync.after_weight_gradients(self.chunk)
            return result

    def backward_weight(self, microbatch: int) -> None:
        sync = self._training_sync
        sync.before_weight_gradients(self.chunk, partial(self.split.queue.weights, microbatch))
        super().backward_weight(microbatch)
        sync.after_weight_gradients(self.chunk)

    @property
    def _training_sync(self) -> DataParallelSync:
        assert self.sync is not None, "an evaluation has no backward"
        return self.sync


class StreamsPart(StepPart):
    """Lets the layers of a model draw from separate RNG states.

    Args:
        steps_done: returns the number of steps since the start of training, resumed or not.
    """

    fact = "draws_by_layer"

    def __init__(self, streams: LayerStreams, steps_done: Callable[[], int]) -> None:
        self.streams, self._steps_done = streams, steps_done
        self._seen: WeakSet[torch.nn.Module] = WeakSet()

    def prepare_model(self, chunks: list[Any]) -> None:
        for chunk in chunks:
            self.streams.seed_forwards(chunk)

    def before_step(self, step: Step) -> None:
        for chunk in step.model if not step.captured else ():
            if chunk not in self._seen:
                self._seen.add(chunk)
                self.streams.seed_forwards(unwrap_model(chunk))  # it may draw since it was prepared
        self.streams.start_step(None if step.forward_only else self._steps_done())

    def wrap_stage(self, number: int, stage: Any, step: Step) -> None:
        stage.streams = self.streams


class OffloadPart(StepPart):
    """Lets stages keep only the input of recomputed microbatches, and offload others to the host.

    Args:
        engines: copy activations to the host and back; None for those of the device.
    """

    def __init__(self, engines: HostCopyEngines | None = None) -> None:
        self._engines = engines

    @cached_property
    def host(self) -> HostMemory:
        """Memory of the host for the activations of this rank, created at its first use."""
        return HostMemory(torch.device(device()), self._engines)

    @property
    def peak_host_bytes(self) -> int:
        """The most memory of the host that offloaded activations have taken on this rank."""
        return self.host.taken_bytes if "host" in vars(self) else 0

    def wrap_stage(self, number: int, stage: Any, step: Step) -> None:
        schedule = step.program.schedule
        stage.recomputed = frozenset(m for held, m in schedule.recomputed if held == number)
        stage.offloaded = frozenset(m for held, m in schedule.offloaded if held == number)
        if stage.offloaded:
            chunk = step.model[stage.chunk]
            buffers = torch.nn.Module.buffers(chunk)  # Megatron's own wrappers have others
            staying = [*chunk.parameters(), *buffers]
            stage.offload = OffloadedActivations(self.host, staying, stage.staying)
            stage.offload.activation_memory = step.memory
