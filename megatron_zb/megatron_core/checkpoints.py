"""Corrections of Megatron's checkpoints.

Fully reshardable states of the distributed optimizer: Megatron joins the buckets of a buffer
without the padding at their ends, and then takes each weight's values from its place in the buffer
with the padding. Behind a padded bucket these are the values of others: the checkpoint holds
shifted weights and moments, in every version up to 0.19. Later versions correct this themselves.

Two copies of one weight on one rank: in a V a rank holds the embedding and its copy on the last
stage, which Megatron stores under one key. Its parallel save and load, which share out a state
between data-parallel ranks, expect a shard once on each rank.

Parameter groups without parameters: Megatron makes the same groups on all ranks, writes the common
state from the first one, and takes an empty list there for such a state. In a V the first rank may
have no embedding and no output layer, for which ``--decoupled-lr`` makes a group: no rank could
load that checkpoint. A rank without experts has an optimizer of theirs without any weights, whose
loaded state has no list.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_map_only

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions

BOUND = "load_parameter_state_from_dp_reshardable"
"""The method that :func:`load_bound` replaces: its default format, bound to the placement."""

_WEIGHT_OF_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?:fp32_)?param\.(.+)")
_LARGEST = 1 << 22  # elements of a weight that is read to compare; norms and biases have less


def sums_of(weights: Iterable[torch.Tensor]) -> list[float]:
    """Return two sums of each weight, by which ranks compare copies of it."""
    each = (weight.detach().double() for weight in weights)
    sums = [total for weight in each for total in (weight.sum(), weight.square().sum())]
    found: list[float] = torch.stack(sums).tolist() if sums else []
    return found


def as_replicas(state: Any) -> Any:
    """Return a sharded state that other ranks write, and this one only reads."""
    return tree_map_only((ShardedTensor, ShardedObject), _as_replica, state)


def _as_replica(sharded: Any) -> Any:
    replica = sharded.replica_id
    sharded.replica_id = replica + 1 if isinstance(replica, int) else (replica[0] + 1, *replica[1:])
    return sharded


@contextmanager
def without_padding(optimizers: Sequence[Any]) -> Iterator[None]:
    """Index the weights of distributed optimizers by their places in the joined buckets.

    An optimizer whose Megatron does so itself is left as it is.
    """
    shifted = [
        each
        for each in optimizers
        if hasattr(each, versions.RESHARDABLE) and not versions.saves_past_padding(type(each))
    ]
    buffers = [buffer for each in shifted for buffer in each.buffers]
    own = [buffer.param_index_map for buffer in buffers]
    try:
        for buffer in buffers:
            buffer.param_index_map = _joined(buffer)
        yield
    finally:
        for buffer, places in zip(buffers, own, strict=True):
            buffer.param_index_map = places


def save_without_padding(original: Any, optimizer: Any, *args: Any, **keywords: Any) -> Any:
    """Return the distributed optimizer's state to be saved, with every weight's own values."""
    with without_padding([optimizer]):
        return original(optimizer, *args, **keywords)


@torch.no_grad()
def load_bound(original: Any, *args: Any, **keywords: Any) -> None:
    """Load the default format of the distributed optimizer for weights of 32 bits as well.

    Its parameters are then the model's own, which Megatron would write with gradients on.
    """
    original(*args, **keywords)


def _joined(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Return each weight's start and end in the joined buckets, and its bucket."""
    padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
    before = list(accumulate(padding, initial=0))
    return {
        weight: (start - before[bucket], end - before[bucket], bucket)
        for weight, (start, end, bucket) in buffer.param_index_map.items()
    }


def check(path: Path) -> None:
    """Compare the small weights of a checkpoint with their copies in the optimizer's state.

    Raises:
        UsageError: they differ by more than the rounding to 16 bits.
    """
    reader = checkpoint.FileSystemReader(path)
    stored = {
        name: entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    found = ((name, _WEIGHT_OF_STATE.fullmatch(name)) for name in stored)
    weights = {name: match[1] for name, match in found if match and match[1] in stored}
    pairs = {n: w for n, w in weights.items() if stored[n].size.numel() <= _LARGEST}
    tensors = {
        name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype, device="cpu")
        for name in {*pairs, *pairs.values()}
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a single process on purpose
        checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    for name, weight in sorted(pairs.items()):
        one, two = tensors[name].float(), tensors[weight].float()
        if one.shape != two.shape or not torch.allclose(one, two, rtol=2**-7, atol=2**-20):
            raise UsageError(
                f"the optimizer's state in the checkpoint {path} is not that of its weights (see "
                f"{weight}): Megatron shifts what it writes with "
                "--dist-ckpt-optim-fully-reshardable where data parallelism pads a bucket, so load "
                "the weights alone with --no-load-optim and save with --pipeline-schedule"
            )


SHARING = "distribute_main_replicas_with_precomputed_distribution"
"""The function of Megatron's ``fully_parallel`` that :func:`share_out` replaces."""


def share_out(original: Any, state: Any, *rest: Any, **keywords: Any) -> None:
    """Share out the shards of a state, and leave one main replica to each.

    The copies are equal, so that the first may be written.
    """
    original(state, *rest, **keywords)
    written = set()
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id):
            name = _sharded_tensor_shard_id(shard)
            if name in written:
                shard.replica_id = 1
            written.add(name)


def load_apart(original: Any, *args: Any, **keywords: Any) -> Any:
    """Load a state in which no tensor occurs twice.

    Replaces ``FullyParallelLoadStrategyWrapper.load``, which gives one tensor to both copies: an
    optimizer that keeps it as its state would update it twice in a step.
    """
    loaded = original(*args, **keywords)
    seen: set[int] = set()

    def apart(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in seen:
            return value.clone()
        seen.add(id(value))
        return value

    dict_list_map_inplace(apart, loaded)
    return loaded


MASTERS = "fp32_from_fp16_params"
"""Key of the weights in 32 bits, a list for each group."""


def leave_out_empty_groups(
    original: Any, optimizer: Any, state: Any, is_loading: bool = False, **kw: Any
) -> Any:
    """Return the state of an optimizer to be saved, without groups that are empty on this rank.

    Replaces ``Float16OptimizerWithFloat16Params.sharded_state_dict``.
    """
    found = original(optimizer, state, is_loading, **kw)
    if not is_loading and MASTERS in found:
        found[MASTERS] = [group for group in found[MASTERS] if group]
    return found


def load_empty_groups(original: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Load the state of an optimizer, which may have no weights on this rank.

    Replaces ``Float16OptimizerWithFloat16Params.load_state_dict``.
    """
    if not any(optimizer.fp32_from_float16_groups):
        state.setdefault(MASTERS, [])
    original(optimizer, state)
