"""An output layer that is cut along the vocabulary over all pipeline ranks of Megatron's model.

Rank r of p has the r-th part of the rows that its tensor-parallel rank has in Megatron. The last
stage hands over what would go into the output layer; the loss function of the user gets the losses
of the tokens, as from Megatron's model. See :mod:`megatron_zb.runtime.vocabulary` for the passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.utils import get_attr_wrapped_model

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.linear import SplitBackward, accumulate, accumulate_fused
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.stages import Iteration, MegatronStage, device
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.executor import TRAINING, Handler
from megatron_zb.runtime.vocabulary import (
    LOSS_WIDTH,
    Hidden,
    Loss,
    Part,
    Rows,
    hidden_width,
    part_width,
    put_together,
)
from megatron_zb.schedules.passes import Message, PassKind

HANDLERS: dict[PassKind, Handler] = {
    **TRAINING,
    PassKind.O: lambda shard, microbatch, hidden=None: shard.output(microbatch, hidden),
    PassKind.P: lambda stage, microbatch, *parts: stage.put_together(microbatch, parts),
    PassKind.V: lambda shard, microbatch, loss=None: shard.backward_weight(microbatch, loss),
}


class VocabularyShard(torch.nn.Module):
    """The rows of the output layer's weight that one rank has, in the place of an output layer.

    On the last stage Megatron's model calls it as the output layer, and as its loss: it keeps the
    labels, and hands on what it is given. Checkpoints have the rows under the name that they have
    in Megatron, ``part`` of the parts of all ranks in its order.
    """

    def __init__(
        self, weight: torch.Tensor, start: int, group: dist.ProcessGroup, part: tuple[int, int]
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.start, self.group, self._part = start, group, part
        self._labels: torch.Tensor | None = None
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, *, logits: bool = False, **_options: Any) -> Any:
        """Return the logits (tokens, rows) of ``x`` (tokens, width), or hand ``x`` on to O."""
        return x @ self.weight.t() if logits else (x, None)

    def loss(self, labels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Stand in for ``compute_language_model_loss``: labels are (batch, sequence)."""
        self._labels = labels
        return x

    def labels(self) -> torch.Tensor:
        """Return the labels (batch, sequence) of the forward that has just run.

        Raises:
            UsageError: the model was called without labels.
        """
        labels, self._labels = self._labels, None
        if labels is None:
            raise UsageError(
                "the model was called without labels: where the vocabulary is cut over the "
                "pipeline, no rank has its logits; give labels, or --pipeline-vocabulary off"
            )
        return labels

    def rows(self, *, sequence_parallel: bool) -> Rows:
        group = self.group if self.group.size() > 1 else None
        return Rows(self.start, self.weight.size(0), group, sequence_parallel)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        """Return the rows as a part of Megatron's output layer."""
        del sharded_offsets  # those of layers, of which this is none
        group = (metadata or {}).get("dp_cp_group")
        group = group or parallel_state.get_data_parallel_group(with_context_parallel=True)
        key = f"{prefix}weight"
        weight = ShardedTensor.from_rank_offsets(
            key,
            self.weight,
            (0, *self._part),
            replica_id=(0, 0, group.rank()),
            allow_shape_mismatch=True,  # of rows that are padding
        )
        return {key: weight}


def cut(chunks: list[Any], physical: PhysicalPlacement) -> CutOutput:
    """Give every pipeline rank its rows of the output layer; collective over the pipeline.

    The last stage, or else the rank's first chunk, holds its shard as ``output_layer``.

    Raises:
        UsageError: the rows cannot be cut evenly, or the output layer is not a plain one.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    pp_rank, p = group.rank(), group.size()
    last = next((c for c in range(len(chunks)) if physical.holds_output(pp_rank, c)), None)
    model = None if last is None else _model(chunks[last])
    end = physical.logical(physical.placement.rank_of[-1])
    said = [None if model is None else _Layer.of(model)]
    dist.broadcast_object_list(said, src=dist.get_global_rank(group, end), group=group)
    layer = said[0]
    assert layer is not None
    layer.check(p)
    count = layer.rows // p
    own = torch.empty(count, layer.width, dtype=layer.dtype, device=device())
    parts = None
    if model is not None:
        of_logical = model.output_layer.weight.detach().to(own.device).chunk(p)
        parts = [of_logical[physical.logical(rank)].contiguous() for rank in range(p)]
    dist.scatter(own, parts, src=dist.get_global_rank(group, end), group=group)
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    part = tensor_group.rank() * p + physical.logical(pp_rank)
    chunk = 0 if last is None else last
    own = own.to(next(chunks[chunk].parameters()).device)
    shard = VocabularyShard(own, part * count, tensor_group, (part, p * tensor_group.size()))
    _model(chunks[chunk]).output_layer = shard
    if model is not None:
        model.compute_language_model_loss = shard.loss
    return CutOutput(shard, chunk, physical.placement.rank_of[-1])


def _model(chunk: Any) -> Any:
    return get_attr_wrapped_model(chunk, "post_process", return_model_obj=True)


class _Layer(NamedTuple):
    """What all ranks must know of the output layer; ``refused`` is why it cannot be cut."""

    rows: int
    width: int
    dtype: torch.dtype
    refused: str

    @classmethod
    def of(cls, model: Any) -> _Layer:
        config = model.config
        reasons = {
            "its weight is that of the embedding": model.share_embeddings_and_output_weights,
            "it is run again for multi-token prediction": getattr(config, "mtp_num_layers", None),
            "it has a bias": getattr(model.output_layer, "bias", None) is not None,
            "its logits are scaled": getattr(config, "use_mup", False),
        }
        weight = model.output_layer.weight
        refused = next((why for why, holds in reasons.items() if holds), "")
        return cls(weight.size(0), weight.size(1), weight.dtype, refused)

    def check(self, p: int) -> None:
        if self.refused:
            raise UsageError(
                f"the output layer cannot be cut along the vocabulary: {self.refused}; give "
                "--pipeline-vocabulary off"
            )
        if self.rows % p:
            raise UsageError(
                f"{self.rows} rows of the output layer cannot be cut evenly for {p} pipeline "
                f"ranks: make --make-vocab-size-divisible-by a multiple of {p}"
            )


class CutOutput(NamedTuple):
    """A rank's part of a cut output layer.

    ``chunk`` of the rank holds it; ``end`` is the logical rank of the last stage.
    """

    shard: VocabularyShard
    chunk: int
    end: int


@dataclass
class Desk:
    """What the last stage and the shard of the same rank hand to each other, by microbatch."""

    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)


class ShardPasses:
    """Passes O and V of one rank in one iteration.

    ``desk`` is that of the rank of the last stage, None on others.
    """

    def __init__(self, iteration: Iteration, output: CutOutput, desk: Desk | None) -> None:
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
        torch.autograd.backward(loss)
        assert per_token.grad is not None
        gradient = per_token.grad.t().reshape(-1)
        direction = whole.direction * self._rows.own(gradient).unsqueeze(1)
        self._gradients[microbatch] = direction.view(shape)
        message = Loss(log, gradient).packed()
        self._desk.losses[microbatch] = message
        return message

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
    message: Message, shape: tuple[int, int, int], dtype: torch.dtype, config: Any, stages: int
) -> torch.Tensor:
    """Return an empty tensor for a message of the output layer.

    ``shape`` (sequence, batch, width) is that of a message between stages, of so many ``stages``.
    """
    sequence, batch, width = shape
    tokens = sequence * batch
    empty = partial(torch.empty, device=device())
    if not message.is_gradient:
        return empty(tokens, hidden_width(width, dtype), dtype=dtype)
    if message.stage > stages:
        return empty(tokens, part_width(width, dtype), dtype=dtype)
    size = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return empty(tokens * size, LOSS_WIDTH, dtype=torch.float32)
