"""Passes of an output layer that is cut along the vocabulary over all pipeline ranks.

The last stage hands over what would go into the output layer; the loss function of the user gets
the losses of the tokens, as from Megatron's model. See :mod:`megatron_zb.runtime.vocabulary` for
their arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules as megatron_schedules

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.cut_embedding import EmbeddingPasses, FirstStage, TiedGradient
from megatron_zb.megatron_core.linear import accumulate, accumulate_fused
from megatron_zb.megatron_core.split_backward import SplitBackward, has_hooks, uses_of_leaves
from megatron_zb.megatron_core.stages import Iteration, MegatronStage, device
from megatron_zb.megatron_core.vocabulary_shard import CutOutput
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.executor import TRAINING, Handler
from megatron_zb.runtime.vocabulary import (
    LOSS_WIDTH,
    Hidden,
    Loss,
    Part,
    hidden_width,
    part_width,
    put_together,
)
from megatron_zb.schedules.passes import Message, PassKind
from megatron_zb.schedules.placement import Placement

HANDLERS: dict[PassKind, Handler] = {
    **TRAINING,
    PassKind.F: lambda stage, microbatch, *received: stage.forward(
        microbatch, *received or (None,)
    ),
    PassKind.O: lambda shard, microbatch, hidden=None: shard.output(microbatch, hidden),
    PassKind.P: lambda stage, microbatch, *parts: stage.put_together(microbatch, parts),
    PassKind.V: lambda shard, microbatch, loss=None: shard.backward_weight(microbatch, loss),
    PassKind.E: lambda shard, microbatch, tokens=None: shard.embedding.lookup(microbatch, tokens),
    PassKind.G: lambda shard, microbatch, gradient=None: shard.embedding.backward_weight(
        microbatch, gradient
    ),
}


@dataclass
class Desk:
    """What the last stage and the shard of the same rank hand to each other, by microbatch."""

    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)


class ShardPasses:
    """Passes O and V of one rank in one iteration, and those of its shard of the ``embedding``.

    ``desk`` is that of the rank of the last stage, None on others; ``first`` the first stage where
    this rank has it.
    """

    def __init__(
        self,
        iteration: Iteration,
        output: CutOutput,
        desk: Desk | None,
        first: FirstStage | None,
    ) -> None:
        for shard in (output.shard, output.embedding.shard):
            if has_hooks(shard.weight):
                raise UsageError(
                    "a shard of the vocabulary has a hook on its weight, which passes of the "
                    "schedule do not call: give --pipeline-vocabulary off"
                )
        self._tied = None
        if output.embedding.tied:
            passes = 2 * iteration.num_microbatches
            self._tied = TiedGradient(output.shard.weight, passes)
        self.embedding = EmbeddingPasses(iteration, output.embedding, first, self._tied)
        self._iteration, self._chunk, self._desk = iteration, output.chunk, desk
        self._shard = shard = output.shard
        self._fused = bool(iteration.config.gradient_accumulation_fusion)
        self._rows = shard.rows(sequence_parallel=bool(iteration.config.sequence_parallel))
        self._live: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.activation_memory: ActivationMemory | None = None

    @torch.no_grad()
    def output(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run O; the part goes to the last stage's rank."""
        if received is None:
            assert self._desk is not None
            received = self._desk.hidden.pop(microbatch)
        x, labels = Hidden.of(self._rows.gathered(received))
        logits = self._shard(x, logits=True)
        part = self._rows.part(self._shard.weight, logits, labels).packed()
        if not self._iteration.forward_only:
            self._live[microbatch] = (received, logits)
            self._hold(received, logits)
        if self._desk is None:
            return part
        self._desk.parts[microbatch] = part
        return None

    @torch.no_grad()
    def backward_weight(self, microbatch: int, received: torch.Tensor | None) -> None:
        """Run V."""
        if received is None:
            assert self._desk is not None
            received = self._desk.losses.pop(microbatch)
        hidden, logits = self._live.pop(microbatch)
        weight, sync = self._shard.weight, self._iteration.sync
        assert sync is not None, "an evaluation has no V"
        sync.before_weight_gradients(self._chunk, lambda: {id(weight): 1})
        x, labels = Hidden.of(self._rows.gathered(hidden))
        gradient = self._rows.gradient(logits, labels, Loss.of(received), x.dtype)
        if self._fused:
            accumulate_fused(x.contiguous(), gradient, getattr(weight, "main_grad", None))
        else:
            accumulate(weight, gradient.t() @ x)
        if self._tied is not None:
            self._tied.passed()
        self._release(hidden, logits)
        if (listener := sync.listener(self._chunk)) is not None:
            listener(weight)
        sync.after_weight_gradients(self._chunk)

    def _hold(self, *tensors: torch.Tensor) -> None:
        if self.activation_memory is not None:
            for tensor in tensors:
                self.activation_memory.hold(tensor)

    def _release(self, *tensors: torch.Tensor) -> None:
        if self.activation_memory is not None:
            for tensor in tensors:
                self.activation_memory.release(tensor)


class LastStage(MegatronStage):
    """The last stage where the output layer is cut: its F ends before it, and P has the loss."""

    computes_loss = False

    def __init__(
        self,
        iteration: Iteration,
        vp_stage: int,
        split: SplitBackward,
        output: CutOutput,
        desk: Desk,
    ) -> None:
        super().__init__(iteration, vp_stage, split)
        self._shard, self._desk, self._end = output.shard, desk, output.end
        self._rows = output.shard.rows(sequence_parallel=bool(iteration.config.sequence_parallel))
        self._dtype = output.shard.weight.dtype
        self._loss_func: Any = None
        self._open: dict[int, tuple[Any, torch.Size]] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._has_looked_at_loss = False

    def _user_step(self, *arguments: Any, **options: Any) -> Any:
        output, self._loss_func = super()._user_step(*arguments, **options)
        return output, self._loss_func

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        """Run F; return the message to all shards, of rows (tokens) with their labels."""
        x = super().forward(microbatch, activation)
        assert x is not None
        labels = self._rows.own(self._shard.labels().t())
        rows = x.reshape(-1, x.size(-1)).to(self._dtype)
        message = Hidden(rows, labels.reshape(-1)).packed()
        self._open[microbatch] = (self._loss_func, x.shape)
        self._desk.hidden[microbatch] = message
        return message

    def put_together(self, microbatch: int, received: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Run P; return what V needs, for all ranks."""
        loss_func, shape = self._open.pop(microbatch)
        parts = list(received)
        parts.insert(self._end, self._desk.parts.pop(microbatch))
        trains = not self._iteration.forward_only
        with torch.no_grad():
            whole = put_together([Part.of(part) for part in parts], with_gradient=trains)
            log, losses = map(self._rows.gathered, (whole.log, whole.per_token))
        per_token = losses.view(-1, shape[1]).t().contiguous().requires_grad_(trains)
        loss = self._loss(per_token, loss_func)
        if not trains:
            return log
        if not self._has_looked_at_loss:  # its graph is small, and one for each step
            self._has_looked_at_loss = True
            self._refuse_other_uses(loss)
        torch.autograd.backward(loss)
        assert per_token.grad is not None
        gradient = per_token.grad.t().reshape(-1)
        direction = whole.direction * self._rows.own(gradient).unsqueeze(1)
        self._gradients[microbatch] = direction.view(shape)
        message = Loss(log, gradient).packed()
        self._desk.losses[microbatch] = message
        return message

    def _start_of_backward(self, output: torch.Tensor) -> Any:
        if not self._split.has_looked:
            self._refuse_other_uses(output)
        return super()._start_of_backward(output)

    def _refuse_other_uses(self, result: torch.Tensor) -> None:
        """Refuse a graph that uses this rank's rows as if they were all, as a penalty in a loss."""
        if any(leaf is self._shard.weight for _, leaf in uses_of_leaves(result.grad_fn)):
            raise UsageError(
                "the model or its loss uses the weight of the output layer by itself, of which "
                "each rank has a part: give --pipeline-vocabulary off"
            )

    def _loss(self, per_token: torch.Tensor, loss_func: Any) -> torch.Tensor:
        """Do with the losses of the tokens (batch, sequence) what Megatron does."""
        it = self._iteration
        if it.config.timers is not None:
            it.config.timers("forward-compute", log_level=2).start()
        loss, num_tokens = megatron_schedules.forward_step_calc_loss(
            it.model[self._vp_stage],
            per_token,
            loss_func,
            it.config,
            self._vp_stage if len(it.model) > 1 else None,
            it.collect_non_loss_data,
            it.num_microbatches,
            it.forward_data_store,
            cp_group_size=self._context_parallel,
            is_last_stage=True,
        )
        return self._scaled(loss, num_tokens)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return super().backward(microbatch, self._gradients.pop(microbatch))


def empty_message(
    message: Message,
    shape: tuple[int, int, int],
    config: Any,
    output: CutOutput,
    placement: Placement,
) -> torch.Tensor:
    """Return an empty tensor for a message to or from a shard.

    ``shape`` (sequence, batch, width) is that of a message between stages.
    """
    sequence, batch, width = shape
    stages, everyone = placement.num_stages, placement.num_stages + placement.pipeline_size + 1
    own, dtype = sequence * batch, output.shard.weight.dtype
    whole = own * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    looked_up = own if output.embedding.spread else whole
    sizes = {
        False: (own, hidden_width(width, dtype), dtype),
        True: (whole, LOSS_WIDTH, torch.float32),
    }
    if message.stage == everyone:
        sizes = {False: (whole, 0, torch.int64), True: (looked_up, width, dtype)}
    elif message.stage > stages:
        sizes = {False: (looked_up, width, dtype), True: (own, part_width(width, dtype), dtype)}
    tokens, columns, kind = sizes[message.is_gradient]
    size = (tokens, columns) if columns else (tokens,)
    return torch.empty(size, dtype=kind, device=device())
