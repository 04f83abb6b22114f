"""Weights that depend on the seed and the parameter's name alone.

Megatron draws weights from one random stream per rank, so the same seed gives another model under
another pipeline or tensor-parallel size. Drawing each weight from a generator of its own, seeded
by the seed and the parameter's global name, gives the same model everywhere, and losses can be
compared between schedules. Serves megatron-core 0.16.1 and 0.19.0.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_zb.errors import UsageError

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT_LAYER = "output_layer.weight"
# Layers that write to the residual stream: Megatron scales their weights down with the depth.
_RESIDUAL_LAYERS = ("linear_proj", "linear_fc2", "out_proj")


def initialise_by_global_name(
    model_chunks: Iterable[torch.nn.Module], config: Any, seed: int
) -> None:
    """Give every parameter of this rank's chunks the value that belongs to its global name.

    Args:
        model_chunks: the chunks (GPTModel) as built, not yet wrapped in Float16Module or DDP.
        config: their TransformerConfig, for the initialisation methods.
        seed: the user's seed.

    Raises:
        UsageError: the model has experts spread over expert-parallel ranks.
    """
    if (getattr(config, "expert_model_parallel_size", 1) or 1) > 1:
        raise UsageError(
            "initialisation by name does not know expert parallelism: "
            "--expert-model-parallel-size must be 1"
        )
    with torch.no_grad():
        for chunk in model_chunks:
            for name, parameter in global_parameters(chunk).items():
                _initialise(parameter, name, chunk, config, seed)


def global_parameters(chunk: torch.nn.Module) -> Mapping[str, torch.nn.Parameter]:
    """The chunk's parameters by global name.

    A global name counts the layers of the whole model from 0, whichever chunk and rank hold them:
    `decoder.layers.5.mlp.linear_fc1.weight` is in the sixth layer.
    """
    prefixes = {
        name: f"{name.rpartition('.')[0]}.{module.layer_number - 1}"
        for name, module in chunk.named_modules()
        if name.rpartition(".")[2].isdigit() and hasattr(module, "layer_number")
    }
    return {_globalise(name, prefixes): value for name, value in chunk.named_parameters()}


def _globalise(name: str, prefixes: Mapping[str, str]) -> str:
    for local, glob in prefixes.items():
        if name.startswith(local + "."):
            return glob + name[len(local) :]
    return name


def _initialise(
    parameter: torch.nn.Parameter, name: str, chunk: Any, config: Any, seed: int
) -> None:
    tied = getattr(chunk, "share_embeddings_and_output_weights", False)
    if name == _OUTPUT_LAYER and tied:
        name = _EMBEDDING  # the same name draws the same values
    method = _method(name, parameter, config)
    parallel = getattr(parameter, "tensor_model_parallel", False)
    shape = list(parameter.shape)
    size = parallel_state.get_tensor_model_parallel_world_size() if parallel else 1
    if size > 1:
        shape[parameter.partition_dim] *= size  # type: ignore[attr-defined]
    whole = torch.empty(shape, dtype=torch.float32)
    with _seeded(f"{seed}:{name}"):
        method(whole)
    if size > 1:
        whole = _slice(whole, parameter, parallel_state.get_tensor_model_parallel_rank(), size)
    parameter.copy_(whole)


def _slice(whole: torch.Tensor, parameter: Any, rank: int, size: int) -> torch.Tensor:
    """What tensor-parallel rank `rank` holds of a weight.

    A gated MLP's first layer stacks gate and value (stride 2), and every rank holds a part of each.
    """
    stride: int = parameter.partition_stride
    pieces = whole.chunk(size * stride, dim=parameter.partition_dim)
    return torch.cat(pieces[rank::size], dim=parameter.partition_dim)


def _method(
    name: str, parameter: torch.nn.Parameter, config: Any
) -> Callable[[torch.Tensor], object]:
    """How Megatron initialises the parameter of this global name."""
    module, _, kind = name.rpartition(".")
    if kind.endswith("bias"):
        return torch.nn.init.zeros_
    if parameter.dim() < 2:
        zero_centred = getattr(config, "layernorm_zero_centered_gamma", False)
        return torch.nn.init.zeros_ if zero_centred else torch.nn.init.ones_
    if module.startswith("embedding."):
        method = getattr(config, "embedding_init_method", None) or config.init_method
    elif module.rpartition(".")[2] in _RESIDUAL_LAYERS:
        method = config.output_layer_init_method
    else:
        method = config.init_method
    typed: Callable[[torch.Tensor], object] = method
    return typed


@contextlib.contextmanager
def _seeded(text: str) -> Iterator[None]:
    """Let torch's CPU generator start from a hash of `text`, and put its state back afterwards.

    The default generator is used because initialisation methods do not take another one.
    """
    generator = torch.default_generator
    state = generator.get_state()
    digest = hashlib.sha256(text.encode()).digest()
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    try:
        yield
    finally:
        generator.set_state(state)
