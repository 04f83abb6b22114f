"""Weights that do not depend on the pipeline rank that draws them.

Megatron draws weights from one random stream per rank, so the same seed gives another model under
another placement of layers, or another pipeline size. There are two ways to the same model:

- :func:`layers_draw_weights` lets Megatron's own builders draw, from streams of every layer. It
  serves whatever they build; tensor-parallel and expert-parallel ranks draw as Megatron's do.
- :func:`initialise_by_global_name` draws each weight by itself, seeded by its global name. The
  model is then the same for every tensor-parallel size, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer import multi_token_prediction, transformer_block
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.random_streams import LayerStreams, global_name, seed_of

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT_LAYER = "output_layer.weight"
# Layers that write to the residual stream: Megatron scales their weights down with the depth.
_RESIDUAL_LAYERS = ("linear_proj", "linear_fc2", "out_proj")


@contextlib.contextmanager
def layers_draw_weights(streams: LayerStreams) -> Iterator[None]:
    """Let the embedding and each layer of a chunk that is built inside draw from its own streams.

    Everything else in a chunk draws from the streams of the output layer. Megatron's blocks
    (TransformerBlock, MultiTokenPredictionBlock, HybridStack) build their layers by
    ``build_module``, which is replaced while this context is active.
    """
    init = LanguageModelEmbedding.__init__

    def seeded_init(*arguments: Any, **keywords: Any) -> None:
        with streams.of_layer("embedding"):
            init(*arguments, **keywords)

    hybrid = versions.hybrid_block()
    blocks = {transformer_block: "decoder.layers", multi_token_prediction: "mtp.layers"}
    blocks |= {hybrid: "decoder.layers"} if hybrid else {}
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(streams.of("output_layer"))
        contexts.enter_context(_replaced(LanguageModelEmbedding, "__init__", seeded_init))
        for block, layers in blocks.items():
            build = _seeded_builder(streams, block, layers)
            contexts.enter_context(_replaced(block, "build_module", build))
        yield


def _seeded_builder(streams: LayerStreams, block: Any, layers: str) -> Callable[..., Any]:
    """Return a ``build_module`` that seeds each layer by its number within its block."""
    build = block.build_module

    def build_seeded(*arguments: Any, **keywords: Any) -> Any:
        number = keywords.get("layer_number")
        if number is None:
            return build(*arguments, **keywords)
        if block is transformer_block:  # it counts from its stage
            number += get_transformer_layer_offset(keywords["config"], keywords.get("vp_stage"))
        with streams.of_layer(f"{layers}.{number - 1}"):
            return build(*arguments, **keywords)

    return build_seeded


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def initialise_by_global_name(
    model_chunks: Iterable[torch.nn.Module], config: Any, seed: int
) -> None:
    """Set every parameter of this rank's chunks to the value determined by its global name.

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
    """Return the chunk's parameters by global name.

    A global name counts the layers of the whole model from 0, whichever chunk and rank hold them:
    `decoder.layers.5.mlp.linear_fc1.weight` is in the sixth layer.
    """
    prefixes = _prefixes(chunk)
    return {_globalise(name, prefixes): value for name, value in chunk.named_parameters()}


def global_modules(chunk: torch.nn.Module) -> Mapping[str, torch.nn.Module]:
    """Return the chunk's modules by global name, as :func:`global_parameters` its parameters."""
    prefixes = _prefixes(chunk)
    return {_globalise(name, prefixes): module for name, module in chunk.named_modules()}


def _prefixes(chunk: torch.nn.Module) -> Mapping[str, str]:
    """Return the global names of the chunk's layers, by their names in it."""
    return {
        name: global_name(name, module)
        for name, module in chunk.named_modules()
        if name.rpartition(".")[2].isdigit() and hasattr(module, "layer_number")
    }


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
    with _seeded(seed_of(seed, name)):
        method(whole)
    if size > 1:
        whole = _slice(whole, parameter, parallel_state.get_tensor_model_parallel_rank(), size)
    parameter.copy_(whole)


def _slice(whole: torch.Tensor, parameter: Any, rank: int, size: int) -> torch.Tensor:
    """Return the part of a weight that tensor-parallel rank `rank` holds.

    A gated MLP's first layer stacks gate and value (stride 2), and every rank holds a part of each.
    """
    stride: int = parameter.partition_stride
    pieces = whole.chunk(size * stride, dim=parameter.partition_dim)
    return torch.cat(pieces[rank::size], dim=parameter.partition_dim)


def _method(
    name: str, parameter: torch.nn.Parameter, config: Any
) -> Callable[[torch.Tensor], object]:
    """Return Megatron's initialisation method for the parameter of this global name."""
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
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, and put its state back afterwards.

    The default generator is used because initialisation methods do not take another one.
    """
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
