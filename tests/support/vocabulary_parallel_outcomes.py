"""Losses and gradients of all ranks together, where a vocabulary is sharded over them."""

from __future__ import annotations

from typing import TypeAlias

import torch
from gpt_cases import Outcome
from megatron.core import parallel_state

OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
SHARD_OF_EMBEDDING = "embedding_shard.weight"
Gradients: TypeAlias = dict[str, torch.Tensor]


def gathered(outcome: Outcome, schedule: str | None = None) -> Outcome:
    """Of all pipeline ranks, with the shards of the output layer put together."""
    group = parallel_state.get_pipeline_model_parallel_group()
    all_ranks = [outcome] * group.size()
    torch.distributed.all_gather_object(all_ranks, outcome, group=group)
    parts = [one.gradients for one in all_ranks]
    if schedule is None:
        gradients = whole(parts)
        if not gradients[OUTPUT].any():  # tied, beside multi-token prediction: Megatron has both
            gradients[OUTPUT] = gradients[EMBEDDING]
        return Outcome(all_ranks[-1].losses, gradients)
    logical = parts[::-1] if schedule.startswith("v-") else parts
    return Outcome(all_ranks[-1].losses, with_shards(logical))


def whole(parts: list[Gradients]) -> Gradients:
    return {name: gradient for part in parts for name, gradient in part.items()}


def with_shards(parts: list[Gradients]) -> Gradients:
    """Of all ranks in logical order, whose shards are put together under Megatron's names."""
    gradients = whole(parts)
    gradients[OUTPUT] = torch.cat([part[OUTPUT] for part in parts])
    if gradients.pop(SHARD_OF_EMBEDDING, None) is None:  # tied: one weight
        gradients[EMBEDDING] = gradients[OUTPUT]
    else:
        gradients[EMBEDDING] = torch.cat([part[SHARD_OF_EMBEDDING] for part in parts])
    return gradients
