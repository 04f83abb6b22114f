"""Tied embedding and output weights that live in two chunks of one rank.

Megatron keeps two copies on two ranks and sums their gradients over the embedding group. In a V
both copies are on one rank, which no process group can serve, so the copies are kept equal here.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_attr_wrapped_model


def tied_weights(chunks: list[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The embedding and the output weight if this rank holds both, in two chunks, tied."""
    embedding = output = None
    for chunk in chunks:
        model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        if not model.share_embeddings_and_output_weights or model.pre_process == model.post_process:
            continue
        if model.pre_process:
            embedding = model.shared_embedding_or_output_weight()
        else:
            output = model.shared_embedding_or_output_weight()
    return None if embedding is None or output is None else (embedding, output)


def tie(chunks: list[Any]) -> None:
    """Start both copies equal and mark them as Megatron does, before data parallelism wraps them.

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
    """Megatron's ``finalize_model_grads`` where both copies of tied weights live on one rank.

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
    """Where data parallelism keeps a weight's gradient, or where torch does."""
    gradient: torch.Tensor = getattr(weight, "main_grad", weight.grad)
    return gradient


def _divide_by_tokens(chunks: list[Any], num_tokens: torch.Tensor, pg_collection: Any) -> None:
    """Only the last pipeline rank has counted tokens; every rank divides by all of them."""
    pp_group = pg_collection.pp
    last_rank = torch.distributed.get_process_group_ranks(pp_group)[-1]
    torch.distributed.broadcast(num_tokens, src=last_rank, group=pp_group)
    reduce_group = getattr(pg_collection, "dp_cp_gtp_remat", None) or pg_collection.dp_cp
    torch.distributed.all_reduce(num_tokens, group=reduce_group)
    scaling = 1.0 / torch.clamp(num_tokens, min=1)
    for chunk in chunks:
        chunk.scale_gradients(scaling)
