"""Layers, embedding and output head as Megatron's sharded tensors, whatever rank holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.transformer.utils import sharded_state_dict_default

from megatron_zb.distillation.blocks import Embedding, OutputHead
from megatron_zb.training.checkpoint import read

State = dict[str, Any]

_LAYERS = "decoder.layers."
_EMBEDDING = "embedding."
_FINAL_NORM = "decoder.final_layernorm."
_TIED, _UNTIED = "embedding.word_embeddings.weight", "output_layer.weight"


def layer_state(
    layer: Any, block: int, num_layers: int, group: dist.ProcessGroup, *, alike: bool = True
) -> State:
    """A layer of a GPTModel under its names in a checkpoint.

    Args:
        layer: a TransformerLayer.
        block: its place in the model, from 0.
        num_layers: of the model.
        group: the ranks that hold this layer.
        alike: whether all layers have one shape, and so are stored as slices of one tensor.
    """
    prefix = f"layer{block}."
    offsets = [(0, block, num_layers)] if alike else []
    state: State = layer.sharded_state_dict(prefix, offsets, _held_by(group))
    stored = _LAYERS if alike else f"{_LAYERS}{block}."
    replace_prefix_for_sharding(state, prefix, stored)
    return state


def module_state(module: Any, prefix: str, group: dist.ProcessGroup) -> State:
    """A module of Megatron under its names in a checkpoint, as the ranks of a group hold it."""
    state: State = sharded_state_dict_default(module, prefix, (), _held_by(group))
    return state


def tensor_state(name: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> ShardedTensor:
    """A whole tensor, as the ranks of a group hold it."""
    return ShardedTensor.from_rank_offsets(name, tensor, replica_id=(0, 0, dist.get_rank(group)))


def embedding_state(embedding: Embedding, group: dist.ProcessGroup) -> State:
    """The embedding of a GPTModel."""
    return module_state(embedding.embedding, _EMBEDDING, group)


def head_state(head: OutputHead, untied: bool, group: dist.ProcessGroup) -> State:
    """The last norm of a GPTModel, and its output layer where that is not the embedding."""
    state = module_state(head.final_layernorm, _FINAL_NORM, group)
    if untied:
        state[_UNTIED] = tensor_state(_UNTIED, head.weight.detach(), group)
    return state


def load_teacher(
    path: Path,
    layers: Mapping[int, Any],
    num_layers: int,
    embedding: Embedding | None,
    head: OutputHead | None,
    untied: bool,
    group: dist.ProcessGroup,
    flag: str,
) -> None:
    """Fill this rank's part of the teacher from a checkpoint; collective over all ranks.

    Args:
        path: of the checkpoint's files.
        layers: this rank's, by block.
        num_layers: of the teacher.
        embedding: where this rank is of the first stage.
        head: where this rank is of the last stage.
        untied: whether the output layer has a weight of its own.
        group: the ranks that hold the same.
        flag: that named the checkpoint.

    Raises:
        UsageError: the files are damaged, or are of another model.
    """
    request: State = {
        str(block): layer_state(layer, block, num_layers, group) for block, layer in layers.items()
    }
    if embedding is not None:
        request["embedding"] = embedding_state(embedding, group)
    if head is not None:
        request["norm"] = module_state(head.final_layernorm, _FINAL_NORM, group)
        stored = _UNTIED if untied else _TIED
        request["output"] = tensor_state(stored, head.weight.detach(), group)
    # first and last stage both read an embedding that is the output layer, too
    state = read(
        path,
        lambda: dist_checkpointing.load(request, str(path), validate_access_integrity=False),
        flag,
    )
    for block, layer in layers.items():
        fill(layer, state[str(block)], f"layer{block}.")
    if embedding is not None:
        fill(embedding.embedding, state["embedding"], _EMBEDDING)
    if head is not None:
        fill(head.final_layernorm, state["norm"], _FINAL_NORM)
        with torch.no_grad():
            head.weight.copy_(state["output"])


def fill(module: Any, state: Mapping[str, Any], prefix: str) -> None:
    """Load what :func:`module_state` or :func:`layer_state` asked for."""
    module.load_state_dict({name.removeprefix(prefix): value for name, value in state.items()})


def _held_by(group: dist.ProcessGroup) -> dict[str, Any]:
    """Megatron's way to say which ranks hold copies of the same."""
    return {"dp_cp_group": group, "singleton_local_shards": False}


def merged(states: Iterable[State]) -> State:
    """Several states as one."""
    return {name: value for state in states for name, value in state.items()}
