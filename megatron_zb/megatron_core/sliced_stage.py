"""Stages that run one token slice at a time, and the loss of whole microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.model_calls import (
    answered,
    calls_replaced,
    inner_model,
    recorded,
    usual_call,
)
from megatron_zb.megatron_core.random_streams import RandomState
from megatron_zb.megatron_core.sliced_documents import Cut
from megatron_zb.megatron_core.sliced_loss import ComparedGradients, SliceOutputs, TokenCounts
from megatron_zb.megatron_core.sliced_reading import FLAG, ReadingArguments, SlicedReading
from megatron_zb.megatron_core.stages import MegatronStage


class SlicedStage(MegatronStage):
    """A model chunk whose passes run one slice each.

    ``SlicesPart`` sets its attributes. ``looks_at_loss`` is whether no step has looked yet at what
    the loss of this stage depends on.
    """

    cut: Cut
    joins_weight: bool
    arguments: ReadingArguments
    reader: SlicedReading | None = None
    """The data of the first or the last stage."""
    outputs: SliceOutputs
    counts: TokenCounts
    compared: ComparedGradients
    looks_at_loss: bool
    flag_of_loss = FLAG
    _ends_in_loss = False

    @property
    def estimates_gradients(self) -> bool:
        """Whether B of a slice begins before the loss of its microbatch is known."""
        return not (self.computes_loss or self._step.forward_only)

    def _choose_unit(self, microbatch: int) -> None:
        self.cut.unit = microbatch
        if self.reader is not None:
            self.reader.check_next(microbatch)

    def _call_user(self, iterator: Any, model: Any, *more: Any, **options: Any) -> Any:
        start, end = self.cut.tokens
        with self._receiving(iterator, model, end - start):
            return super()._call_user(iterator, model, *more, **options)

    @contextmanager
    def _receiving(self, iterator: Any, model: Any, tokens: int) -> Iterator[None]:
        """Set the arguments for a batch, up to the call of the model."""
        usual = usual_call(model)

        def call(*arguments: Any, **options: Any) -> Any:
            self.arguments.restore()
            return usual(*arguments, **options)

        of_batch = self.arguments.of_batch(tokens, receives=iterator is None)
        with of_batch, calls_replaced(model, call):
            yield

    # --- the loss

    def _user_step(self, *arguments: Any, **options: Any) -> Any:
        """Return the output of the model itself, to which the gradient of the loss belongs."""
        if not (self.is_output and self.computes_loss):
            return super()._user_step(*arguments, **options)
        with recorded(inner_model(self._step.model[self.chunk])) as outputs:
            _, loss_func = super()._user_step(*arguments, **options)
        self._loss_of_slice = loss_func
        if len(outputs) != 1 or not isinstance(outputs[0], torch.Tensor):
            raise UsageError(
                f"{FLAG} needs a forward step that calls the model once, for one tensor: leave "
                "the flag out for this script"
            )
        return outputs[0], loss_func

    def forward(
        self, microbatch: int, activation: torch.Tensor | None, *more: torch.Tensor
    ) -> torch.Tensor | None:
        """Run F of a slice, and behind the last one the loss of the microbatch."""
        found = super().forward(microbatch, activation, *more)
        if not (self.is_output and self.computes_loss):
            return found
        assert found is not None
        if self.looks_at_loss:
            self.looks_at_loss = False
            self._look_at_loss(found)
        self.outputs.put(found)
        self._end_microbatch()
        return None

    def _look_at_loss(self, output: torch.Tensor) -> None:
        """Refuse a loss that depends on the layers of a slice by more than their output.

        Only the loss function of a slice shows that, which is run for nothing else: with that of
        the whole microbatch, no layer has run.
        """
        now, loss = RandomState(), None
        with suppress(Exception):  # it need not be one for a slice
            loss, *_ = self._loss_of_slice(output.detach().requires_grad_())
        now.restore()
        if isinstance(loss, torch.Tensor):
            self._refuse_other_uses(loss)

    def _run_loss(self, microbatch: int, output: torch.Tensor, loss_func: Any) -> None:
        """Run the loss of a vocabulary-parallel slice, whose output is a leaf."""
        self.outputs.put(output)
        if self.estimates_gradients:
            self._estimate_gradient(output, loss_func)
        self._end_microbatch()

    def _estimate_gradient(self, output: torch.Tensor, loss_func: Any) -> None:
        """Let a slice have the gradient that it has if the loss is a mean over tokens."""
        per_token = bool(self._step.config.calculate_per_token_loss)
        with self._unreported():
            weighed = partial(self.counts.weighed, loss_func, per_token)
            super()._run_loss(self.cut.unit, output, weighed)
        assert output.grad is not None, "a hook has run"
        self.compared.put(self.cut.unit, output.grad)

    @contextmanager
    def _unreported(self) -> Iterator[None]:
        """Keep what a loss function reports, and the tokens that it counts, from the step."""
        step = self._step
        reported, tokens = step.forward_data_store, step.total_num_tokens
        step.forward_data_store, step.total_num_tokens = [], tokens.clone()
        try:
            yield
        finally:
            step.forward_data_store, step.total_num_tokens = reported, tokens

    def _end_microbatch(self) -> None:
        """Behind the last slice, compute the loss of the whole microbatch, as Megatron does."""
        if self.cut.slice < self.cut.slices - 1:
            return
        leaf = self.outputs.whole().requires_grad_(not self._step.forward_only)
        output, loss_func = self._step_of_whole(leaf)
        if loss_func is not None:
            loss_func = partial(self._of_shared, loss_func)
        super()._run_loss(self.cut.unit, output, loss_func)
        if self._step.forward_only:
            return
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        self.outputs.split(gradient)
        if self.estimates_gradients:
            first = self.cut.microbatch * self.cut.slices
            for unit in range(first, first + self.cut.slices):
                self.compared.compare(unit, self.outputs.gradient(unit))

    def _step_of_whole(self, output: torch.Tensor) -> tuple[Any, Any]:
        """Run the user's forward step for the whole microbatch, whose output has been computed."""
        step, reader = self._step, self.reader
        model, tokens = step.model[self.chunk], self.cut.borders[-1]
        iterator = None if reader is None else reader.again(self.cut.microbatch)
        autocast: Any = nullcontext()
        if step.config.enable_autocast:
            autocast = torch.autocast("cuda", dtype=step.config.autocast_dtype)
        with autocast, self._receiving(iterator, model, tokens), answered(model, output):
            found, loss_func = step.forward_step_func(iterator, model)
        if reader is not None:
            del reader.kept[self.cut.microbatch]
        return found, loss_func

    def _of_shared(self, loss_func: Callable[..., Any], output: Any, **more: Any) -> Any:
        """Return the result of a loss function, a sum divided by the tokens of all ranks.

        Megatron divides the sum of a context-parallel rank by its own tokens, and averages.
        """
        result = loss_func(output, **more)
        ranks = self.cut.context.size
        if more or ranks == 1 or len(result) != 3 or self._step.config.calculate_per_token_loss:
            return result
        loss, num_tokens, record = result
        whole = num_tokens.clone()
        dist.all_reduce(whole, group=self.cut.context.group)
        return loss * ranks, whole, record

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self.cut.unit = microbatch
        if self.is_output and self.computes_loss:
            gradient = self.outputs.gradient(microbatch)
        if self.joins_weight and not self.split.queue.deferring:  # a BW: with W of all slices
            result = self.backward_input(microbatch, gradient)
            self.backward_weight(microbatch)
            return result
        return super().backward(microbatch, gradient)

    def backward_weight(self, microbatch: int) -> None:
        """Run W of a slice, or of all slices of the microbatch in the order of their B."""
        if not self.joins_weight:
            super().backward_weight(microbatch)
            return
        units = range(microbatch + self.cut.slices - 1, microbatch - 1, -1)
        queue = self.split.queue

        def weights() -> Counter[int]:
            return sum(map(queue.weights, units), Counter[int]())

        sync = self._training_sync
        sync.before_weight_gradients(self.chunk, weights)
        for unit in units:
            queue.run(unit)
        sync.after_weight_gradients(self.chunk)
