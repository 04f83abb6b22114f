"""Vocabulary parallelism: passes of an output layer and an embedding that all ranks share.

The last stage hands over the input of the output layer; the loss function of the user gets the
losses of the tokens, as from Megatron's model. The rank of the first stage reads a microbatch ahead
of its F, by the user's own forward step without the model; every rank looks up its rows,
and the F continues with their sum. See :mod:`megatron_zb.runtime.vocabulary` for the arithmetic.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from operator import add
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.data_parallel import DataParallelSync
from megatron_zb.megatron_core.model_calls import ModelCall, read_up_to_model, run_without_use
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.split_backward import (
    SplitBackward,
    accumulate,
    accumulate_fused,
    has_hooks,
    uses_of_leaves,
)
from megatron_zb.megatron_core.stages import MegatronStage
from megatron_zb.megatron_core.step import Step, StepPart, device
from megatron_zb.megatron_core.vocabulary_shard import (
    PredictedLosses,
    VocabularyParallelEmbedding,
    VocabularyParallelOutput,
    shard_output,
    with_later,
)
from megatron_zb.runtime.executor import TRAINING, Allocate, Handler
from megatron_zb.runtime.vocabulary import (
    LOSS_WIDTH,
    Hidden,
    Loss,
    ShardLoss,
    hidden_width,
    part_width,
    put_together,
)
from megatron_zb.schedules.lowering import runs_of
from megatron_zb.schedules.passes import Message, PassKind
from megatron_zb.schedules.placement import Placement


def _backward(
    run: Handler,
    stage: Any,
    microbatch: int,
    received: torch.Tensor | None = None,
    later: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Run B or BW; that of the first stage may also read the gradient of later tokens."""
    if later is not None:
        stage.handoff.later_gradients[microbatch] = later
    return run(stage, microbatch, received)


HANDLERS: dict[PassKind, Handler] = {
    PassKind.F: lambda stage, microbatch, *received: stage.forward(
        microbatch, *received or (None,)
    ),
    PassKind.O: lambda shard, microbatch, hidden=None: shard.output(microbatch, hidden),
    PassKind.P: lambda stage, microbatch, *parts: stage.put_together(microbatch, parts),
    PassKind.V: lambda shard, microbatch, loss=None: shard.backward_weight(microbatch, loss),
    PassKind.E: lambda shard, microbatch, tokens=None: shard.embedding.lookup(microbatch, tokens),
    PassKind.G: lambda shard, microbatch, gradient=None: shard.embedding.backward_weight(
        microbatch, gradient, shard.sync
    ),
    PassKind.M: lambda stage, microbatch: stage.send(stage.handoff.later, microbatch),
    PassKind.K: lambda stage, microbatch: stage.send(stage.handoff.later_gradients, microbatch),
    **{kind: partial(_backward, TRAINING[kind]) for kind in (PassKind.B, PassKind.BW)},
}


class VocabularyPart(StepPart):
    """Passes of the shards of a vocabulary, in the steps of one model."""

    handlers = HANDLERS

    def __init__(self, physical: PhysicalPlacement) -> None:
        self._physical = physical
        self._output: VocabularyParallelOutput | None = None
        self._prediction: PredictedLosses | None = None
        self._handoff = HandoffBuffer()

    @property
    def output(self) -> VocabularyParallelOutput:
        assert self._output is not None, "the model is built before the first step"
        return self._output

    def prepare_model(self, chunks: list[Any]) -> None:
        if self._output is not None:
            raise UsageError(
                "a second model was built, but the shards of the vocabulary are those of one "
                "model: give --pipeline-vocabulary off, or build one"
            )
        self._output = shard_output(chunks, self._physical)
        model = get_attr_wrapped_model(
            chunks[self._output.chunk], "post_process", return_model_obj=True
        )
        if self._output.depths > 1 and model.post_process:
            self._prediction = PredictedLosses.of(model, self._output.shard)

    def weight_passes(self, step: Step) -> Mapping[int, int]:
        """Count the V and G of each chunk of this rank, which compute weight gradients."""
        kinds = {run.work.kind for run in runs_of(step.program.ranks[step.logical])}
        found: Counter[int] = Counter()
        holders = {PassKind.V: self.output.chunk, PassKind.G: self.output.embedding.chunk}
        for kind, chunk in holders.items():
            found[chunk] += step.program.schedule.num_microbatches * (kind in kinds)
        return found

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        try:
            yield
        finally:  # a step that has failed may leave tensors
            self._handoff = HandoffBuffer()

    def stage_type(self, number: int, step: Step) -> Callable[..., Any] | None:
        shared: dict[str, Any] = {"output": self.output, "handoff": self._handoff}
        if number == step.physical.placement.num_stages - 1:
            return partial(LastStage, **shared, prediction=self._prediction)
        return partial(FirstStage, **shared) if number == 0 else None

    def more_stages(self, stages: Mapping[int, Any], step: Step) -> Mapping[int, Any]:
        number = step.physical.placement.num_stages + step.logical
        handoff = self._handoff if step.logical == self.output.end else None
        return {number: ShardPasses(step, self.output, handoff, stages.get(0))}

    def allocation(self, usual: Allocate, step: Step) -> Allocate:
        output, placement = self.output, step.physical.placement
        stages = placement.num_stages

        def empty(message: Message) -> torch.Tensor:
            if message.stage < stages:
                return usual(message)
            shape = step.shape_of(message.microbatch)
            return empty_message(message, shape, step.config, output, placement)

        return empty


@dataclass
class HandoffBuffer:
    """Tensors that the last stage, the first, and a shard of one rank hand over, by microbatch.

    ``later`` (depths x tokens, width) are the rows of the tokens that the last stage embeds for
    multi-token prediction, and ``later_gradients`` their gradients.
    """

    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    later: dict[int, torch.Tensor] = field(default_factory=dict)
    later_gradients: dict[int, torch.Tensor] = field(default_factory=dict)


class ShardPasses:
    """Passes O and V of one rank in one step, and those of its shard of the ``embedding``.

    ``handoff`` is that of the rank of the last stage, None on others; ``first`` is the first stage,
    on the rank that has it.
    """

    split = None
    """Marks a stage without layers that could be split."""

    def __init__(
        self,
        step: Step,
        output: VocabularyParallelOutput,
        handoff: HandoffBuffer | None,
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
            passes = 2 * step.program.schedule.num_microbatches
            self._tied = TiedGradient(output.shard.weight, passes)
        self.embedding = EmbeddingPasses(step, output.embedding, first, self._tied)
        self._step, self._chunk, self._handoff = step, output.chunk, handoff
        self._depths = output.depths
        self._shard = shard = output.shard
        self._fused = bool(step.config.gradient_accumulation_fusion)
        self._rows = shard.rows(sequence_parallel=bool(step.config.sequence_parallel))
        self._live: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.activation_memory = step.memory
        self.sync: DataParallelSync | None = None

    @torch.no_grad()
    def output(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run O; the part goes to the last stage's rank."""
        if received is None:
            assert self._handoff is not None
            received = self._handoff.hidden.pop(microbatch)
        x, labels = Hidden.of(self._rows.gathered(received))
        logits = self._shard(x, logits=True)
        part = self._rows.part(self._shard.weight, logits, labels).packed()
        if not self._step.forward_only:
            self._live[microbatch] = (received, logits)
            self._hold(received, logits)
        if self._handoff is None:
            return part
        self._handoff.parts[microbatch] = part
        return None

    @torch.no_grad()
    def backward_weight(self, microbatch: int, received: torch.Tensor | None) -> None:
        """Run V."""
        if received is None:
            assert self._handoff is not None
            received = self._handoff.losses.pop(microbatch)
        hidden, logits = self._live.pop(microbatch)
        weight, sync = self._shard.weight, self.sync
        assert sync is not None, "an evaluation has no V"
        sync.before_weight_gradients(self._chunk, lambda: {id(weight): 1})
        x, labels = Hidden.of(self._rows.gathered(hidden))
        gradient = self._rows.gradient(logits, labels, Loss.of(received), x.dtype)
        # in products as long as Megatron's: longer sums would be less exact
        parts = zip(*(of.chunk(self._depths) for of in (gradient, x)), strict=True)
        if self._fused:
            for rows, inputs in parts:
                accumulate_fused(inputs.contiguous(), rows, getattr(weight, "main_grad", None))
        else:
            accumulate(weight, reduce(add, [rows.t() @ inputs for rows, inputs in parts]))
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


class _End(MegatronStage):
    """First or last stage: both look tokens up, the last one for multi-token prediction."""

    def __init__(
        self,
        step: Step,
        chunk: int,
        split: SplitBackward,
        output: VocabularyParallelOutput,
        handoff: HandoffBuffer,
    ) -> None:
        super().__init__(step, chunk, split)
        self.handoff, self._depths = handoff, output.depths
        self._is_alone = output.end != output.embedding.start

    def _with_later(self, tokens: torch.Tensor, packed: Any) -> list[torch.Tensor]:
        return with_later(tokens, self._depths, self._step.pg_collection.cp, packed)

    @cached_property
    def _lookups(self) -> Any:
        return get_attr_wrapped_model(
            self._step.model[self.chunk], "pre_process", return_model_obj=True
        ).embedding.word_embeddings

    def send(self, of: dict[int, torch.Tensor], microbatch: int) -> torch.Tensor | None:
        """Run M or K: return what goes to the rank of the other end, if it is another one."""
        return of.pop(microbatch) if self._is_alone else None


class LastStage(_End):
    """Last stage with a vocabulary-parallel output layer: F ends before it, P computes the loss."""

    computes_loss = False
    flag_of_loss = "--pipeline-vocabulary on"

    def __init__(
        self,
        step: Step,
        chunk: int,
        split: SplitBackward,
        output: VocabularyParallelOutput,
        handoff: HandoffBuffer,
        prediction: PredictedLosses | None,
    ) -> None:
        super().__init__(step, chunk, split, output, handoff)
        self._shard, self._end, self._prediction = output.shard, output.end, prediction
        self._rows = output.shard.rows(sequence_parallel=bool(step.config.sequence_parallel))
        self._dtype = output.shard.weight.dtype
        self._loss_func: Any = None
        self._open: dict[int, tuple[Any, torch.Size, dict[str, Any]]] = {}
        self._later: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    def _user_step(self, *arguments: Any, **options: Any) -> Any:
        user_step = partial(super()._user_step, *arguments, **options)
        output, self._loss_func = run_without_use(user_step, self._step.model[self.chunk])
        return output, self._loss_func

    def forward(
        self, microbatch: int, activation: torch.Tensor | None, *later: torch.Tensor
    ) -> torch.Tensor:
        """Run F; return the message to all shards, of rows (tokens) with their labels."""
        if self._prediction is not None:
            self._embed(microbatch, *later or (self.handoff.later.pop(microbatch),))
        x = super().forward(microbatch, activation)
        assert x is not None
        call = {} if self._prediction is None else self._prediction.call()
        packed = call.get("packed_seq_params")
        every = self._with_later(self._shard.labels(), packed)
        labels = torch.cat([self._rows.own(of.t()).reshape(-1) for of in every])
        rows = x.reshape(-1, x.size(-1)).to(self._dtype)
        message = Hidden(rows, labels).packed()
        self._open[microbatch] = (self._loss_func, x.shape, call)
        self.handoff.hidden[microbatch] = message
        return message

    def _embed(self, microbatch: int, later: torch.Tensor) -> None:
        """Let the prediction layers of the F that comes find the rows of later tokens."""
        if not self._step.forward_only:
            self._later[microbatch] = later.requires_grad_()
            self._hold(later)
        self._lookups.given = list(later.chunk(self._depths - 1))

    def put_together(self, microbatch: int, received: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Run P; return what V needs, for all ranks."""
        loss_func, shape, call = self._open.pop(microbatch)
        parts = list(received)
        parts.insert(self._end, self.handoff.parts.pop(microbatch))
        trains = not self._step.forward_only
        with torch.no_grad():
            whole = put_together([ShardLoss.of(part) for part in parts], with_gradient=trains)
            log = self._rows.gathered(whole.log)
            every = self._sequences(whole.per_token, shape[1])
        per_token = [of.contiguous().requires_grad_(trains) for of in every]
        main = per_token[0]
        if self._prediction is not None:
            right = self._sequences(whole.right, shape[1])
            main = self._prediction.main_loss(call, per_token, right)
        self._choose_unit(microbatch)
        self._run_loss(microbatch, main, loss_func)
        if not trains:
            return log
        gradient = self._rows.in_order_of_ranks(torch.stack([_gradient(of) for of in per_token]))
        direction = whole.direction * self._rows.own(gradient).unsqueeze(1)
        self._gradients[microbatch] = direction.view(shape)
        message = Loss(log, gradient).packed()
        self.handoff.losses[microbatch] = message
        return message

    def _sequences(self, own: torch.Tensor, batch: int) -> list[torch.Tensor]:
        """Return numbers of the rank's tokens for each depth (batch, sequence)."""
        every = self._rows.by_depth(self._rows.gathered(own), self._depths)
        return [of.view(-1, batch).t() for of in every]

    def _start_of_backward(self, output: torch.Tensor) -> Any:
        if not self.split.has_looked:
            self._refuse_rows(output)
        return super()._start_of_backward(output)

    def _refuse_other_uses(self, loss: torch.Tensor) -> None:
        super()._refuse_other_uses(loss)
        self._refuse_rows(loss)

    def _refuse_rows(self, result: torch.Tensor) -> None:
        """Refuse a graph that uses this rank's rows as if they were all, as a penalty in a loss."""
        if any(leaf is self._shard.weight for _, leaf in uses_of_leaves(result.grad_fn)):
            raise UsageError(
                "the model or its loss uses the weight of the output layer by itself, of which "
                "each rank has a part: give --pipeline-vocabulary off"
            )

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        found = super().backward(microbatch, self._gradients.pop(microbatch))
        if (later := self._later.pop(microbatch, None)) is not None:
            self._release(later)
            assert later.grad is not None, "every prediction layer embeds tokens"
            self.handoff.later_gradients[microbatch] = later.grad
        return found


def _gradient(losses: torch.Tensor) -> torch.Tensor:
    """Return the gradient of losses (batch, sequence), all of each position together."""
    assert losses.grad is not None, "the loss depends on every token"
    return losses.grad.t().reshape(-1)


def empty_message(
    message: Message,
    shape: tuple[int, int, int],
    config: Any,
    output: VocabularyParallelOutput,
    placement: Placement,
) -> torch.Tensor:
    """Return an empty tensor for a message to or from a shard.

    ``shape`` (sequence, batch, width) is that of a message between stages.
    """
    sequence, batch, width = shape
    stages, everyone = placement.num_stages, placement.num_stages + placement.pipeline_size + 1
    depths, own, dtype = output.depths, output.depths * sequence * batch, output.shard.weight.dtype
    whole = own * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    looked_up = own if output.embedding.spread else whole
    sizes = {
        False: (own, hidden_width(width, dtype), dtype),
        True: (whole, LOSS_WIDTH, torch.float32),
    }
    if message.stage == everyone + 1:
        sizes = dict.fromkeys(sizes, (looked_up // depths * (depths - 1), width, dtype))
    elif message.stage == everyone:
        sizes = {False: (whole, 0, torch.int64), True: (looked_up, width, dtype)}
    elif message.stage > stages:
        sizes = {False: (looked_up, width, dtype), True: (own, part_width(width, dtype), dtype)}
    tokens, columns, kind = sizes[message.is_gradient]
    size = (tokens, columns) if columns else (tokens,)
    return torch.empty(size, dtype=kind, device=device())


class FirstStage(_End):
    """First stage with a vocabulary-parallel embedding: its F gets the tokens' embeddings."""

    def __init__(
        self,
        step: Step,
        chunk: int,
        split: SplitBackward,
        output: VocabularyParallelOutput,
        handoff: HandoffBuffer,
    ) -> None:
        super().__init__(step, chunk, split, output, handoff)
        embedding = output.embedding
        self._rows = embedding.shard.rows(sequence_parallel=embedding.spread)
        self._calls: dict[int, ModelCall] = {}
        self._running: ModelCall | None = None
        self._found: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    def read(self, microbatch: int) -> torch.Tensor:
        """Run the user's forward step without the model.

        Returns:
            The tokens (sequence x batch) of the microbatch, all of each position together, and
            those of all depths of prediction.

        Raises:
            UsageError: it does not call the model, or not with tokens, or it uses the output.
        """
        step, chunk = self._step, self.chunk
        model = step.model[chunk]
        self._choose_unit(microbatch)
        read = partial(self._call_user, step.data_iterators[chunk], model)
        call = read_up_to_model(read, model, step.placeholder(microbatch))
        self._calls[microbatch] = call
        every = [of.t().reshape(-1) for of in self._tokens(call)]
        return self._rows.in_order_of_ranks(torch.stack(every))

    def _tokens(self, call: ModelCall) -> list[torch.Tensor]:
        whole = get_attr_wrapped_model(
            self._step.model[self.chunk], "pre_process", return_model_obj=True
        )
        bound = inspect.signature(whole.forward).bind(*call.arguments, **call.options)
        tokens = bound.arguments.get("input_ids")
        if not isinstance(tokens, torch.Tensor) or bound.arguments.get("decoder_input") is not None:
            raise UsageError(
                "the model was not called with input_ids, so the embedding cannot be vocabulary "
                "parallel: give --pipeline-vocabulary off"
            )
        packed = bound.arguments.get("packed_seq_params")
        return self._with_later(tokens, packed)

    def give(self, microbatch: int, rows: torch.Tensor) -> None:
        """Take what this rank itself has looked up (tokens, width)."""
        self._found[microbatch] = rows

    def gradient(self, microbatch: int) -> torch.Tensor:
        """Return the gradient (tokens, width) of what was looked up, once."""
        return self._gradients.pop(microbatch)

    def forward(
        self, microbatch: int, activation: torch.Tensor | None, *more: torch.Tensor
    ) -> torch.Tensor | None:
        """Run F on the sum of what all ranks have looked up (tokens, width), each row by one."""
        assert activation is not None, "every other rank has a shard"
        found = [self._found.pop(microbatch), activation, *more]
        count = activation.size(0) // self._depths
        if self._depths > 1:
            self.handoff.later[microbatch] = reduce(add, [rows[count:] for rows in found])
        self._running = self._calls.pop(microbatch)
        return super().forward(microbatch, reduce(add, [rows[:count] for rows in found]))

    def _forward_step(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        assert activation is not None
        self._lookups.given = [activation]
        return super()._forward_step(microbatch, None)

    def _call_model(
        self, _data_iterator: Any, model: Any, *_more: Any, return_schedule_plan: bool = False
    ) -> Any:
        call, self._running = self._running, None
        assert call is not None, "each F follows a reading of its microbatch"
        run = model.build_schedule_plan if return_schedule_plan else model
        return run(*call.arguments, **call.options), None

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """Run B or BW; return the gradient of what was looked up (tokens, width), for all ranks."""
        found = super().backward(microbatch, gradient)
        assert found is not None, "the first stage embeds its tokens"
        if self._depths > 1:
            found = torch.cat([found, self.handoff.later_gradients.pop(microbatch)])
        self._gradients[microbatch] = found = found.contiguous()
        return found


class TiedGradient:
    """The embedding's part of the gradient of a weight that the output layer shares.

    It is added when the last of ``passes`` has run, so that sums have the same order in
    every schedule.
    """

    def __init__(self, weight: torch.Tensor, passes: int) -> None:
        self._weight, self._left = weight, passes
        self._sum: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        """Take what a G has made, before :meth:`passed`."""
        if self._sum is None:
            main_grad = getattr(self._weight, "main_grad", None)
            self._sum = torch.zeros_like(self._weight if main_grad is None else main_grad)
        self._sum.add_(gradient)

    def passed(self) -> None:
        """Count a V or a G."""
        self._left -= 1
        if not self._left:
            assert self._sum is not None
            accumulate(self._weight, self._sum)
            self._sum = None


class EmbeddingPasses:
    """Passes E and G of one rank in one step.

    ``first`` is the first stage where this rank has it, else None; ``tied`` collects the gradients
    of a weight that is the output layer's, too.
    """

    def __init__(
        self,
        step: Step,
        embedding: VocabularyParallelEmbedding,
        first: FirstStage | None,
        tied: TiedGradient | None,
    ) -> None:
        self._step, self._first, self._tied = step, first, tied
        self._shard, self._chunk = embedding.shard, embedding.chunk
        self._rows = embedding.shard.rows(sequence_parallel=embedding.spread)
        self._tokens: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def lookup(self, microbatch: int, tokens: torch.Tensor | None) -> torch.Tensor:
        """Run E; return the rows for the first stage, or on its rank the tokens for all others."""
        if self._first is not None:
            tokens = self._first.read(microbatch)
        assert tokens is not None
        rows: torch.Tensor = self._shard(tokens, rows=self._rows)
        if not self._step.forward_only:
            self._tokens[microbatch] = tokens
        if self._first is None:
            return rows
        self._first.give(microbatch, rows)
        return tokens

    @torch.no_grad()
    def backward_weight(
        self, microbatch: int, gradient: torch.Tensor | None, sync: DataParallelSync | None
    ) -> None:
        """Run G from the gradient of the rows (tokens, width)."""
        if self._first is not None:
            gradient = self._first.gradient(microbatch)
        assert gradient is not None
        weight = self._shard.weight
        assert sync is not None, "an evaluation has no G"
        sync.before_weight_gradients(self._chunk, lambda: {id(weight): 1})
        tokens = self._tokens.pop(microbatch)
        own = self._rows.embedding_gradient(self._rows.gathered(gradient), tokens)
        if self._tied is None:
            accumulate(weight, own)
        else:
            self._tied.add(own)
            self._tied.passed()
        if (listener := sync.listener(self._chunk)) is not None:
            listener(weight)
        sync.after_weight_gradients(self._chunk)
