"""LoRA adapters on the linear layers of a frozen model: the weights, and what they add to outputs.

An adapter adds ``alpha / rank * up(down(x))`` to the output of a linear layer, for the layer's
input ``x`` (Hu et al., arXiv 2106.09685). ``down`` starts with random numbers, and ``up`` with
zeros, as in PEFT. The weights are no part of the model, whose checkpoints stay those of the base.

With tensor parallelism, ``up`` of a column-parallel layer and ``down`` of a row-parallel one are
sharded as the layer's weight; the other matrix is whole on every rank. With sequence parallelism
each rank sees a part of the sequence, and so computes a part of the gradient of the whole matrix:
such weights have ``sequence_parallel`` set, as Megatron marks those of norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.utils import get_model_config, unwrap_model

from megatron_zb.megatron_core.random_streams import global_modules, seed_of

_COLUMN, _ROW = "column", "row"
DIVIDED = "sequence_parallel"
"""Megatron's attribute of weights whose gradient is a sum over tensor-parallel ranks."""


@dataclass(frozen=True)
class LoRAShape:
    """What the weights of an adapter are made by.

    Args:
        rank: numbers between the two matrices of a layer.
        alpha: the output of the matrices counts ``alpha / rank`` times.
        modules: the last part of the names of the layers, such as ``linear_qkv``.
        seed: of ``down``, whose numbers follow from it and from the name of the layer.
        dropout: share of the numbers of a layer's input that ``down`` does not see in training.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]
    seed: int
    dropout: float = 0.0


class LowRankPair(NamedTuple):
    """The two matrices of an adapter on a layer: ``[rank, inputs]`` and ``[outputs, rank]``."""

    down: torch.nn.Parameter
    up: torch.nn.Parameter


class AdapterWeights(torch.nn.Module):
    """The weights of one adapter in one model chunk, as a module that data parallelism can wrap.

    Args:
        config: of the model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.pairs: dict[str, LowRankPair] = {}
        """By the name of the layer in the whole model."""

    def add(self, place: str, pair: LowRankPair) -> None:
        """Add the matrices of a layer."""
        self.pairs[place] = pair
        for name, weight in pair._asdict().items():
            self.register_parameter(f"{place}.{name}".replace(".", "/"), weight)

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        """Return the weights by name, such as ``decoder.layers.3.mlp.linear_fc1.down``."""
        return {
            f"{place}.{name}": weight
            for place, pair in self.pairs.items()
            for name, weight in pair._asdict().items()
        }


class LoRALayers:
    """Adapters on the linear layers of the model chunks of a rank, whose own weights are frozen.

    Args:
        chunks: the model chunks, with the weights of the base.
        shapes: of the adapters, by name.
    """

    def __init__(self, chunks: Sequence[Any], shapes: Mapping[str, LoRAShape]) -> None:
        self._selected: list[str | None] = [None] * len(chunks)
        config = get_model_config(chunks[0])
        self._config = config
        self.weights: dict[str, list[AdapterWeights]] = {
            name: [AdapterWeights(config) for _ in chunks] for name in shapes
        }
        """Weights of each adapter in each chunk."""
        for number, chunk in enumerate(chunks):
            self._prepare(number, unwrap_model(chunk), shapes)

    def select(self, chunk: int, adapter: str | None) -> None:
        """Let a chunk compute with an adapter from now on, or without any."""
        self._selected[chunk] = adapter

    def _prepare(self, number: int, chunk: Any, shapes: Mapping[str, LoRAShape]) -> None:
        """Freeze a chunk, and add the weights of all adapters to its layers."""
        for parameter in chunk.parameters():
            parameter.requires_grad = False
        if getattr(chunk, "pre_process", False):
            # layers that are recomputed have gradients only if their input asks for one
            chunk.embedding.register_forward_hook(_with_gradient)
        for place, module in global_modules(chunk).items():
            kind = None if _is_left_out(place) else _parallel_kind(module)
            if kind is None:
                continue
            own = place.rpartition(".")[2]
            named = {name: shape for name, shape in shapes.items() if own in shape.modules}
            for name, shape in named.items():
                self.weights[name][number].add(place, self._pair(place, module, kind, shape))
            if named:
                self._hook(number, place, module, kind, named)

    def _pair(self, place: str, module: Any, kind: str, shape: LoRAShape) -> LowRankPair:
        outputs, inputs = module.weight.shape
        ranks = self._config.tensor_model_parallel_size
        whole = inputs * ranks if kind == _ROW else inputs
        drawn = torch.Generator().manual_seed(seed_of("LoRA", shape.seed, place))
        bound = 1 / math.sqrt(whole)
        down = torch.empty(shape.rank, whole).uniform_(-bound, bound, generator=drawn)
        if kind == _ROW:
            first = parallel_state.get_tensor_model_parallel_rank() * inputs
            down = down[:, first : first + inputs]
        like = {"dtype": module.weight.dtype, "device": module.weight.device}
        pair = LowRankPair(
            torch.nn.Parameter(down.to(**like).contiguous()),
            torch.nn.Parameter(torch.zeros(outputs, shape.rank, **like)),
        )
        sharded, shared = (pair.down, pair.up) if kind == _ROW else (pair.up, pair.down)
        set_tensor_model_parallel_attributes(
            sharded, is_parallel=True, dim=1 if kind == _ROW else 0, stride=1
        )
        setattr(shared, DIVIDED, bool(self._config.sequence_parallel))
        return pair

    def _hook(
        self, number: int, place: str, module: Any, kind: str, shapes: Mapping[str, LoRAShape]
    ) -> None:
        of_kind = self._column if kind == _COLUMN else self._row
        dropouts = {n: torch.nn.Dropout(it.dropout) for n, it in shapes.items() if it.dropout}
        if dropouts:
            # by it the streams of layers know that this one draws, and it is off in evaluation
            module.add_module("lora_dropout", torch.nn.ModuleList(dropouts.values()))

        def add(layer: Any, arguments: tuple[Any, ...], output: Any) -> Any:
            name = self._selected[number]
            if name is None or name not in shapes:
                return output
            pair = self.weights[name][number].pairs[place]
            x = _normed(layer, arguments[0])
            more = of_kind(self._dropped(x, kind, dropouts[name]) if name in dropouts else x, pair)
            return output[0] + shapes[name].alpha / shapes[name].rank * more, *output[1:]

        module.register_forward_hook(add)

    def _dropped(self, x: torch.Tensor, kind: str, dropout: torch.nn.Dropout) -> torch.Tensor:
        """Apply dropout to the input of a layer: ranks with the same numbers drop the same.

        With sequence parallelism, the block draws from a state that differs between ranks already.
        """
        is_whole = kind == _COLUMN or self._config.tensor_model_parallel_size == 1
        with nullcontext() if is_whole or self._config.sequence_parallel else _forked():
            dropped: torch.Tensor = dropout(x)
        return dropped

    def _column(self, x: torch.Tensor, pair: LowRankPair) -> torch.Tensor:
        low = torch.nn.functional.linear(x, pair.down)
        if self._config.sequence_parallel:
            low = gather_from_sequence_parallel_region(low)
        elif self._config.tensor_model_parallel_size > 1:
            low = copy_to_tensor_model_parallel_region(low)
        return torch.nn.functional.linear(low, pair.up)

    def _row(self, x: torch.Tensor, pair: LowRankPair) -> torch.Tensor:
        low = torch.nn.functional.linear(x, pair.down)
        if self._config.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low)
        elif self._config.tensor_model_parallel_size > 1:
            low = reduce_from_tensor_model_parallel_region(low)
        return torch.nn.functional.linear(low, pair.up)


def _forked() -> AbstractContextManager[None]:
    """Draw from the random state that differs between tensor-parallel ranks."""
    forked: AbstractContextManager[None] = get_cuda_rng_tracker().fork()
    return forked


def _is_left_out(place: str) -> bool:
    """Return whether a layer is one of routed experts, or of multi-token prediction."""
    parts = place.split(".")
    return "experts" in parts or "mtp" in parts


def _parallel_kind(module: Any) -> str | None:
    """Return how a linear layer is sharded, None for another module."""
    if isinstance(module, ColumnParallelLinear):
        return _COLUMN
    if isinstance(module, RowParallelLinear):
        return _ROW
    kind = getattr(module, "parallel_mode", None)  # of Transformer-Engine
    return kind if kind in (_COLUMN, _ROW) and hasattr(module, "weight") else None


def _normed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the input of a layer's product: of Transformer-Engine's fused layers, the normed one.

    They keep it to themselves, so it is computed once more.
    """
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return x
    if layer.zero_centered_gamma:
        weight = weight + 1
    size = weight.shape
    if layer.normalization == "RMSNorm":
        return torch.nn.functional.rms_norm(x, size, weight, layer.eps)
    return torch.nn.functional.layer_norm(x, size, weight, layer.layer_norm_bias, layer.eps)


def _with_gradient(_module: Any, _arguments: Any, output: torch.Tensor) -> torch.Tensor:
    return output if output.requires_grad else output.detach().requires_grad_()
