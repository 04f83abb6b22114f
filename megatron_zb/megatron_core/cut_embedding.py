"""Passes of an embedding that is cut along the vocabulary over all pipeline ranks.

The rank of the first stage reads a microbatch ahead of its F, by the user's own forward step up to
the call of the model; every rank looks up its rows, and the F goes on with their sum.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.linear import accumulate
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.stages import Iteration, MegatronStage
from megatron_zb.megatron_core.vocabulary_shard import CutEmbedding, Lookups


class _Call(NamedTuple):
    """The arguments of a call of the model."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]


class _Called(Exception):
    """The user's forward step has called the model."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.call = call


class FirstStage(MegatronStage):
    """The first stage where the embedding is cut: its F is given what has been looked up."""

    def __init__(
        self, iteration: Iteration, vp_stage: int, split: SplitBackward, lookups: Lookups
    ) -> None:
        super().__init__(iteration, vp_stage, split)
        self._lookups = lookups
        self._calls: dict[int, _Call] = {}
        self._running: _Call | None = None
        self._found: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    def read(self, microbatch: int) -> torch.Tensor:
        """Run the user's forward step up to the call of the model.

        Returns:
            The tokens (sequence x batch) of the microbatch, all of each position together.

        Raises:
            UsageError: it does not call the model, or not with tokens.
        """
        it, chunk = self._iteration, self._vp_stage
        model = it.model[chunk]

        def stop(_model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            raise _Called(_Call(arguments, options))

        hook = model.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
        try:
            it.forward_step_func(it.data_iterators[chunk], model)
        except _Called as called:
            call = called.call
        else:
            raise UsageError(
                "the forward step did not call the model of the first stage, so the embedding "
                "cannot be cut along the vocabulary: give --pipeline-vocabulary off"
            )
        finally:
            hook.remove()
        self._calls[microbatch] = call
        return self._tokens(call).t().reshape(-1).contiguous()

    def _tokens(self, call: _Call) -> torch.Tensor:
        whole = get_attr_wrapped_model(
            self._iteration.model[self._vp_stage], "pre_process", return_model_obj=True
        )
        bound = inspect.signature(whole.forward).bind(*call.arguments, **call.options)
        tokens = bound.arguments.get("input_ids")
        if not isinstance(tokens, torch.Tensor) or bound.arguments.get("decoder_input") is not None:
            raise UsageError(
                "the model was not called with input_ids, so the embedding cannot be cut along the "
                "vocabulary: give --pipeline-vocabulary off"
            )
        return tokens

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
        rows = self._found.pop(microbatch)
        for others in (activation, *more):
            assert others is not None, "every other rank has a shard"
            rows = rows + others
        self._running = self._calls.pop(microbatch)
        return super().forward(microbatch, rows)

    def _forward_step(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        self._lookups.given = activation
        return super()._forward_step(microbatch, None)

    def _user_step(self, _data_iterator: Any, model: Any, *_more: Any) -> Any:
        call, self._running = self._running, None
        assert call is not None, "each F follows a reading of its microbatch"
        return model(*call.arguments, **call.options), None

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        """Run B or BW; return the gradient of what was looked up (tokens, width), for all ranks."""
        found = super().backward(microbatch, gradient)
        assert found is not None, "the first stage embeds its tokens"
        self._gradients[microbatch] = found = found.contiguous()
        return found


class TiedGradient:
    """The embedding's part of the gradient of a weight that is the output layer's, too.

    It is added when the last of so many ``passes`` has run, so that sums have the same order in
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
    """Passes E and G of one rank in one iteration.

    ``first`` is the first stage where this rank has it, else None; ``tied`` collects the gradients
    of a weight that is the output layer's, too.
    """

    def __init__(
        self,
        iteration: Iteration,
        embedding: CutEmbedding,
        first: FirstStage | None,
        tied: TiedGradient | None,
    ) -> None:
        self._iteration, self._first, self._tied = iteration, first, tied
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
        if not self._iteration.forward_only:
            self._tokens[microbatch] = tokens
        if self._first is None:
            return rows
        self._first.give(microbatch, rows)
        return tokens

    @torch.no_grad()
    def backward_weight(self, microbatch: int, gradient: torch.Tensor | None) -> None:
        """Run G from the gradient of the rows (tokens, width)."""
        if self._first is not None:
            gradient = self._first.gradient(microbatch)
        assert gradient is not None
        weight, sync = self._shard.weight, self._iteration.sync
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
