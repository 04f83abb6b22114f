"""Models with an encoder in front of a language model, such as Megatron's ``LLaVAModel``.

Such a model runs as its language model does if the encoder is a part of the first stage: one tensor
goes from stage to stage, and all else that a stage needs comes with its own batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.module import fp32_to_float16
from megatron.core.transformer.transformer_block import TransformerBlock


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
