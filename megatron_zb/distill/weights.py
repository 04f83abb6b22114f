"""Layers, embedding and output head as Megatron's sharded tensors, on whichever rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from megatron.core.transformer.utils import sharded_state_dict_default
from torch.distributed.checkpoint import FileSystemReader

from megatron_zb.distill.blocks import Embedding, OutputHead
from megatron_zb.distill.place import Holders
from megatron_zb.distill.teacher import FLAG
from megatron_zb.train.checkpoint import read

State = dict[str, Any]

_LAYERS = "decoder.layers."
_SCALES = "_extra_state"  # in fp8; a frozen layer finds its own
_EMBEDDING = "embedding."
_FINAL_NORM = "decoder.final_layernorm."
_TIED, _UNTIED = "embedding.word_embeddings.weight", "output_layer.weight"


def layer_state(layer: Any, block: int, num_layers: int, copies: Holders, *, alike: bool) -> State:
    """Return the sharded tensors of a layer, under a GPTModel's names in a checkpoint.

    Args:
        layer: a TransformerLayer.
        block: the index of the layer in the model, from 0.
        num_layers: the number of layers of the model.
        copies: the ranks that hold this layer.
        alike: whether all layers have one shape, and so are stored as slices of one tensor.
    """
    prefix = f"layer{block}."
    offsets = [(0, block, num_layers)] if alike else []
    state: State = layer.sharded_state_dict(prefix, offsets, _held_by(copies))
    _correct_experts(state, copies)
    stored = _LAYERS if alike else f"{_LAYERS}{block}."
    replace_prefix_for_sharding(state, prefix, stored)
    return state


def module_state(module: Any, prefix: str, copies: Holders) -> State:
    """Return the sharded tensors of a Megatron module that several ranks hold."""
    state: State = sharded_state_dict_default(
        module, prefix, (), _held_by(copies), get_tensor_model_parallel_group()
    )
    _correct_experts(state, copies)
    return state


def _correct_experts(state: State, copies: Holders) -> None:
    """Count the copies of experts within a stage, where Megatron counts them in the whole job."""
    for name, sharded in state.items():
        if ".local_experts." in name:
            sharded.replica_id = (*sharded.replica_id[:2], copies.experts.rank())


def state_like(parameter: Any, name: str, tensor: torch.Tensor) -> Any:
    """Return the sharded tensor of a part of an optimizer's state, split as its parameter is."""
    sharded = make_sharded_optimizer_tensor(parameter, tensor, "")
    sharded.key = name
    return sharded


def _vocabulary_state(name: str, tensor: torch.Tensor, copies: Holders) -> ShardedTensor:
    """Return the sharded tensor of an output layer, whose tokens a tensor-parallel group splits."""
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    replica = (0, 0, copies.dense.rank())
    return ShardedTensor.from_rank_offsets(name, tensor, (0, rank, size), replica_id=replica)


def embedding_state(embedding: Embedding, copies: Holders) -> State:
    """Return the sharded tensors of the embedding of a GPTModel."""
    return module_state(embedding.embedding, _EMBEDDING, copies)


def head_state(head: OutputHead, untied: bool, copies: Holders) -> State:
    """Return the sharded tensors of the last norm, and of the output layer if it is untied."""
    state = module_state(head.final_layernorm, _FINAL_NORM, copies)
    if untied:
        state[_UNTIED] = _vocabulary_state(_UNTIED, head.weight.detach(), copies)
    return state


@dataclass(frozen=True)
class TeacherPart:
    """The modules of a teacher that a rank holds."""

    layers: Mapping[int, Any]
    """The layers by block."""
    num_layers: int
    """Layers of the whole teacher."""
    embedding: Embedding | None
    """On a rank of the first stage."""
    head: OutputHead | None
    """On a rank of the last stage."""
    untied: bool
    """Whether the output layer has its own weight."""


def load_teacher(path: Path, part: TeacherPart, copies: Holders) -> None:
    """Load this rank's part of the teacher from a checkpoint; collective over all ranks.

    Args:
        path: the directory of the checkpoint's files.
        part: the modules to fill.
        copies: the ranks that hold the same.

    Raises:
        UsageError: the files are damaged, or are of another model.
    """
    layers, embedding, head = part.layers, part.embedding, part.head
    alike = _are_alike(path)
    request: State = {
        str(block): layer_state(layer, block, part.num_layers, copies, alike=alike)
        for block, layer in layers.items()
    }
    for block, layer in layers.items():
        if layer.config.fp8:
            request[str(block)] = _without_scales(request[str(block)])
    if embedding is not None:
        request["embedding"] = embedding_state(embedding, copies)
    if head is not None:
        request["norm"] = module_state(head.final_layernorm, _FINAL_NORM, copies)
        stored = _UNTIED if part.untied else _TIED
        request["output"] = _vocabulary_state(stored, head.weight.detach(), copies)
    # first and last stage both read an embedding that is the output layer, too
    state = read(
        path,
        lambda: dist_checkpointing.load(request, str(path), validate_access_integrity=False),
        FLAG,
    )
    for block, layer in layers.items():
        fill(layer, state[str(block)], f"layer{block}.")
    if embedding is not None:
        fill(embedding.embedding, state["embedding"], _EMBEDDING)
    if head is not None:
        fill(head.final_layernorm, state["norm"], _FINAL_NORM)
        with torch.no_grad():
            head.weight.copy_(state["output"])


def _without_scales(state: State) -> State:
    return {name: each for name, each in state.items() if not name.endswith(_SCALES)}


def _are_alike(path: Path) -> bool:
    """Return whether all layers of a checkpoint are slices of the same tensors.

    Names are read by torch: megatron-core's own way fails with the metadata of torch 2.15.
    """
    stored = read(path, lambda: FileSystemReader(path).read_metadata().state_dict_metadata, FLAG)
    return not any(name.startswith(f"{_LAYERS}0.") for name in stored)


def fill(module: Any, state: Mapping[str, Any], prefix: str) -> None:
    """Copy the loaded tensors of :func:`module_state` or :func:`layer_state` into a module."""
    found = {name.removeprefix(prefix): value for name, value in state.items()}
    missing, unexpected = module.load_state_dict(found, strict=False)
    wrong = [*unexpected, *_without_scales(dict.fromkeys(missing))]
    assert not wrong, f"a checkpoint's tensors and a module's differ by {wrong}"


def _held_by(copies: Holders) -> dict[str, Any]:
    """Return Megatron's metadata for tensors of which ranks hold copies."""
    return {"dp_cp_group": copies.dense, "singleton_local_shards": False}


def merged(states: Iterable[State]) -> State:
    """Merge several states into one."""
    return {name: value for state in states for name, value in state.items()}
