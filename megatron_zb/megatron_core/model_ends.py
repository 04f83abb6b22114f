"""Ends of a model: copies of the word embedding on one rank, and an encoder in front.

Where the output layer is tied to the embedding, and for multi-token prediction, Megatron keeps a
copy on the last stage and sums the gradients over the embedding group. In a V both copies are on
one rank, for which there is no process group, so they are kept equal here.

A model with an encoder in front of a language model, such as Megatron's ``LLaVAModel``, runs as its
language model does if the encoder is a part of the first stage: one tensor goes from stage to
stage, and everything else that a stage needs comes with its own batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.module import fp32_to_float16
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import get_attr_wrapped_model

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.versions import data_parallel_group

_CHECKED = "megatron_zb_is_tied"


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
    """Return whether the last stage also embeds tokens, for multi-token prediction."""
    return bool(getattr(model.config, "mtp_num_layers", None))


def tie_embeddings(chunks: list[Any]) -> None:
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

    Raises:
        UsageError: the copies differ, see :func:`check_tied`.
    """
    check_tied(chunks)
    finalize_model_grads(
        chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce
    )
    _sum_tied_gradients(chunks)
    if num_tokens is not None:
        _divide_by_tokens(chunks, num_tokens, pg_collection)


def check_tied(chunks: list[Any]) -> None:
    """Check once for a model that both copies of tied weights on this rank are equal.

    Whatever loads weights by the last stage of the last rank, as importers of other formats do,
    finds no copy there and may leave this one as it is.

    Raises:
        UsageError: they differ.
    """
    pair = tied_weights(chunks)
    if pair is None or getattr(pair[1], _CHECKED, False):
        return
    embedding, output = pair
    if not torch.equal(embedding, output):
        raise UsageError(
            "the output layer is tied to the embedding, but the weights that were loaded differ: "
            "load the embedding into both chunks of this rank, before the optimizer is made"
        )
    setattr(output, _CHECKED, True)


def _sum_tied_gradients(chunks: list[Any]) -> None:
    pair = tied_weights(chunks)
    if pair is None:
        return
    embedding, output = (gradient_of(weight) for weight in pair)
    embedding.add_(output)
    output.copy_(embedding)


def gradient_of(weight: Any) -> Any:
    """Return a weight's gradient: data parallelism's ``main_grad``, or else torch's ``grad``."""
    return getattr(weight, "main_grad", weight.grad)


def _divide_by_tokens(chunks: list[Any], num_tokens: torch.Tensor, pg_collection: Any) -> None:
    """Divide gradients by the number of tokens, which only the last pipeline rank has counted."""
    pp_group = pg_collection.pp
    last_rank = torch.distributed.get_process_group_ranks(pp_group)[-1]
    torch.distributed.broadcast(num_tokens, src=last_rank, group=pp_group)
    torch.distributed.all_reduce(num_tokens, group=data_parallel_group(pg_collection))
    scaling = 1.0 / torch.clamp(num_tokens, min=1)
    for chunk in chunks:
        chunk.scale_gradients(scaling)


def language_model(model: Any) -> Any:
    """Return the part of a model that is divided into stages, which is the model if it has none."""
    part = getattr(model, "language_model", None)
    return model if part is None else part


def why_not_placed(model: Any) -> str | None:
    """Return why a chunk with a language model in it cannot be a stage; None if it can."""
    outside = dict(_outside(model))
    if not all(hasattr(model, name) for name in ("pre_process", "post_process")):
        return "it does not say by pre_process and post_process which ends of the model a chunk has"
    if not model.pre_process and any(m._parameters for m in outside.values()):
        return "a stage other than the first has weights outside its language_model"
    for name, block in outside.items():
        if isinstance(block, TransformerBlock) and len(block.layers) != block.config.num_layers:
            return (
                f"{name} has {len(block.layers)} of its {block.config.num_layers} layers: an "
                "encoder has no stages, so its config needs pipeline_model_parallel_size 1 and no "
                "pipeline_model_parallel_layout"
            )
    return None


def convert_inputs(chunk: Any) -> None:
    """Let the stage with the encoder convert images to the precision of its weights.

    Megatron does that for the first chunk of the first rank, where no V begins. Tokens are no
    floating-point numbers, so without an encoder there is nothing to convert.
    """
    if language_model(chunk) is chunk or not chunk.pre_process:
        return
    dtype = chunk.config.params_dtype

    def convert(module: Any, inputs: tuple[Any, ...]) -> Any:
        return fp32_to_float16(inputs, lambda value: value.to(dtype))

    chunk.register_forward_pre_hook(convert)


def _outside(model: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules outside the language model with their names."""
    inside = {id(module) for module in language_model(model).modules()}
    return ((n, m) for n, m in model.named_modules() if id(m) not in inside)
