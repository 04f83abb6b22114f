"""Stages of a model in Megatron's forward and backward functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules as megatron_schedules

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.data_parallel import DataParallelSync
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.random_streams import LayerStreams, RandomState
from megatron_zb.megatron_core.redo import Start
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.runtime.autograd_stage import AutogradStage
from megatron_zb.runtime.observer import NOTHING


class MegatronStage(AutogradStage):
    """One model chunk in one iteration, computed by Megatron's own ``forward_step``."""

    def __init__(self, iteration: Iteration, vp_stage: int, split: SplitBackward) -> None:
        self._iteration = iteration
        self._vp_stage = vp_stage
        self.is_output = iteration.physical.holds_output(iteration.pp_rank, vp_stage)
        self._split, self._queue = split, split.queue
        self._past: dict[int, Start] = {}
        self._context_parallel = iteration.pg_collection.cp.size()
        super().__init__(
            self._forward_step,
            split.queue,
            is_last=self.is_output and self.computes_loss,
            forward_only=iteration.forward_only,
        )

    computes_loss = True
    """Whether the loss is a part of the last stage's F."""

    def _forward_step(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        it = self._iteration
        self._choose_streams(microbatch)
        if it.sync is not None:
            it.sync.before_forward(self._vp_stage)
        output, num_tokens = megatron_schedules.forward_step(
            self._user_step,
            it.data_iterators[self._vp_stage],
            it.model[self._vp_stage],
            it.num_microbatches,
            activation,
            it.forward_data_store,
            it.config,
            self._context_parallel,
            collect_non_loss_data=it.collect_non_loss_data,
            is_first_microbatch=megatron_schedules.check_first_val_step(
                it.first_val_step, it.forward_only, microbatch == 0
            ),
            current_microbatch=microbatch,
            vp_stage=self._vp_stage if len(it.model) > 1 else None,
            is_last_stage=self.is_output and self.computes_loss,
        )
        if not isinstance(output, torch.Tensor):
            raise UsageError(
                f"a stage returned a {type(output).__name__}: a pipeline schedule hands one tensor "
                "from stage to stage"
            )
        if self.is_output and self.computes_loss:
            return self._scaled(output, num_tokens)
        return output

    def _start_of_backward(self, output: torch.Tensor) -> Any:
        if not (self._split.has_looked or self._split.is_off):
            self._split.look_at(output)
        return super()._start_of_backward(output)

    def _user_step(self, *arguments: Any, **options: Any) -> Any:
        return self._iteration.forward_step_func(*arguments, **options)

    def _scaled(self, loss: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        """Count the tokens of a loss, and return it as the backward starts from it."""
        it = self._iteration
        it.total_num_tokens += num_tokens
        if it.forward_only or it.config.grad_scale_func is None:
            return loss
        scaled: torch.Tensor = it.config.grad_scale_func(loss)
        return scaled

    def _choose_streams(self, microbatch: int) -> None:
        """Choose a microbatch's random streams, for a forward or a backward's recomputation."""
        if self._iteration.streams is not None:
            self._iteration.streams.start_pass(microbatch)

    @contextmanager
    def _remembering(self, microbatch: int) -> Iterator[None]:
        iterators, chunk = self._iteration.data_iterators, self._vp_stage
        usual = iterators[chunk]
        start = self._past[microbatch] = Start([usual])
        (iterators[chunk],) = start.data_iterators
        try:
            yield
        finally:
            iterators[chunk] = usual

    @contextmanager
    def _repeating(self, microbatch: int) -> Iterator[None]:
        """Read and draw again what the forward has read and drawn.

        A router counts the tokens of a forward with gradients alone, and so once.
        """
        iterators, chunk = self._iteration.data_iterators, self._vp_stage
        usual, now = iterators[chunk], RandomState()
        start = self._past.pop(microbatch)
        start.go_back()
        (iterators[chunk],) = start.data_iterators
        try:
            yield
        finally:
            iterators[chunk] = usual
            now.restore()

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self._choose_streams(microbatch)
        with timed(self._iteration.config, "backward-compute", log_level=2):
            if self._queue.deferring:
                return super().backward(microbatch, gradient)
            sync = self._sync
            sync.before_weight_gradients(self._vp_stage, None)
            result = super().backward(microbatch, gradient)
            sync.after_weight_gradients(self._vp_stage)
            return result

    def backward_weight(self, microbatch: int) -> None:
        sync = self._sync
        sync.before_weight_gradients(self._vp_stage, partial(self._queue.weights, microbatch))
        super().backward_weight(microbatch)
        sync.after_weight_gradients(self._vp_stage)

    @property
    def _sync(self) -> DataParallelSync:
        sync = self._iteration.sync
        assert sync is not None, "an evaluation has no backward"
        return sync


@dataclass
class Iteration:
    """The arguments of one call of ``forward_backward_func``, and its results.

    ``sync`` is None where nothing is trained: an evaluation gathers and reduces nothing.
    """

    physical: PhysicalPlacement
    pp_rank: int
    config: Any
    pg_collection: Any
    forward_step_func: Callable[..., Any]
    data_iterators: list[Any]
    model: list[Any]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    total_num_tokens: torch.Tensor
    streams: LayerStreams | None = None
    sync: DataParallelSync | None = None
    forward_data_store: list[Any] = field(default_factory=list)


def device() -> Any:
    """Return the device on which Megatron creates its tensors."""
    return torch.cuda.current_device()


def timed(
    config: Any, name: str, *, log_level: int, barrier: bool = False
) -> AbstractContextManager[None]:
    """Return the context of one of Megatron's timers, if the user has asked for them."""
    return NOTHING if config.timers is None else _timer(config, name, log_level, barrier)


@contextmanager
def _timer(config: Any, name: str, log_level: int, barrier: bool) -> Iterator[None]:
    timer = config.timers(name, log_level=log_level)
    timer.start(barrier=barrier)
    yield
    timer.stop()
