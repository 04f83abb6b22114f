"""Copies of the word embedding that live in two chunks of one rank.

Where the output layer is tied to the embedding, and for multi-token prediction, Megatron keeps a
copy on the last stage and sums the gradients over the embedding group. In a V both copies are on
one rank, which no process group can serve, so they are kept equal here.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_attr_wrapped_model

from megatron_zb.megatron_core.versions import data_parallel_group


def tied_weights(chunks: list[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the embedding and its copy on the last stage if two chunks of this rank hold them."""
    embedding = copy = None
    for chunk in chunks:
        model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        if not model.share_embeddings_and_output_weights and not _predicts_tokens(model):
            continue
        if model.pre_process and not model.post_process:
            embedding = model.shared_embedding_or_output_weight()
        elif model.post_process and not model.pre_process:
            copy = model.shared_embedding_or_output_weight()
    return None if embedding is None or copy is None else (embedding, copy)


def _predicts_tokens(model: Any) -> bool:
    """Return whether the last stage embeds tokens, too, for multi-token prediction."""
    return bool(getattr(model.config, "mtp_num_layers", None))


def tie(chunks: list[Any]) -> None:
    """Initialise both copies equally and mark them as Megatron does, before DDP wraps them.

    ``shared`` keeps the copy out of the gradient norm; ``shared_embedding`` gives both the same
    optimizer settings.
    """
    pair = tied_weights(chunks)
    if pair is None:
        return
    embedding, output = pair
    output.data.copy_(embedding.data)
    output.shared = True  # type: ignore[attr-defined]
    for weight in pair:
        weight.shared_embedding = True  # type: ignore[attr-defined]


def finalize_with_tied_weights(
    chunks: list[Any],
    num_tokens: torch.Tensor | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Run Megatron's ``finalize_model_grads`` where both copies of tied weights are on one rank.

    The tied gradients are summed where Megatron sums them, after the data-parallel reduction and
    before the division by the number of tokens, so that the result is the same to the last bit.
    ``pg_collection`` must be given, as Megatron's schedules do.
    """
    finalize_model_grads(
        chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce
    )
    _sum_tied_gradients(chunks)
    if num_tokens is not None:
        _divide_by_tokens(chunks, num_tokens, pg_collection)


def _sum_tied_gradients(chunks: list[Any]) -> None:
    pair = tied_weights(chunks)
    if pair is None:
        return
    embedding, output = (gradient_of(weight) for weight in pair)
    embedding.add_(output)
    output.copy_(embedding)


def gradient_of(weight: Any) -> torch.Tensor:
    """Return a weight's gradient: data parallelism's ``main_grad``, or else torch's ``grad``."""
    gradient: torch.Tensor = getattr(weight, "main_grad", weight.grad)
    return gradient


def _divide_by_tokens(chunks: list[Any], num_tokens: torch.Tensor, pg_collection: Any) -> None:
    """Divide gradients by the number of tokens, which only the last pipeline rank has counted."""
    pp_group = pg_collection.pp
    last_rank = torch.distributed.get_process_group_ranks(pp_group)[-1]
    torch.distributed.broadcast(num_tokens, src=last_rank, group=pp_group)
    torch.distributed.all_reduce(num_tokens, group=data_parallel_group(pg_collection))
    scaling = 1.0 / torch.clamp(num_tokens, min=1)
    for chunk in chunks:
        chunk.scale_gradients(scaling)
