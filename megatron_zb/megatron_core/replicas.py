"""Two copies of one weight on one rank, in checkpoints that data-parallel ranks share out.

In a V a rank holds the embedding and its copy on the last stage, which Megatron stores under one
key. Its parallel save and load expect that a rank has a shard once.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id

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
