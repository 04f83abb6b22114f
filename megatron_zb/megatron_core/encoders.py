"""Encoders of vision-language models, by the model that has one: how they run apart from it.

Megatron builds an encoder into the first stage, which calls it in its forward. An
:class:`EncoderOfModel` runs the encoder for the arguments of a call of the model, and lets a
forward of the first stage take an output that was computed before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.module import fp32_to_float16

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.model_calls import ModelCall, calls_replaced
from megatron_zb.runtime.observer import NOTHING


class EncoderOfModel(NamedTuple):
    """The encoder of a kind of model.

    Args:
        modules: names of the modules of the model that belong to it.
        settings: names of attributes of a model that has them.
        encode: returns its output for a call of the model, and what the model returns for that
            call where it is no last stage.
        given: returns the context in which a forward of the first stage takes an output.
    """

    modules: tuple[str, ...]
    settings: tuple[str, ...]
    encode: Callable[[Any, ModelCall], tuple[torch.Tensor, Any]]
    given: Callable[[Any, torch.Tensor], AbstractContextManager[None]]

    def parts(self, model: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the modules of the encoder that a model has, with their names."""
        for name in self.modules:
            module = getattr(model, name, None)
            if isinstance(module, torch.nn.Module):
                yield name, module

    def move(self, source: Any, model: Any) -> None:
        """Move the encoder of a model into another one of its class, which has none."""
        for name, module in list(self.parts(source)):
            setattr(source, name, None)
            setattr(model, name, module)
        for name in self.settings:
            setattr(model, name, getattr(source, name))

    def parameters(self, model: Any) -> list[torch.nn.Parameter]:
        """Return the weights of the encoder of a model."""
        return [weight for _, module in self.parts(model) for weight in module.parameters()]


def encoder_of(model: Any) -> EncoderOfModel:
    """Return the encoder of a model.

    Raises:
        UsageError: models of this class have none, or it is not known how to run it apart.
    """
    for kind in type(model).__mro__:
        if kind.__name__ in ENCODERS:
            return ENCODERS[kind.__name__]
    raise UsageError(
        f"the encoder of a {type(model).__name__} cannot run on every rank, only that of "
        f"{' and '.join(ENCODERS)}: leave it in the first stage"
    )


def converted(call: ModelCall, dtype: torch.dtype) -> ModelCall:
    """Return a call with floating-point inputs in the precision of a model's weights."""

    def convert(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype)

    arguments = fp32_to_float16(call.arguments, convert)
    options = {name: fp32_to_float16(value, convert) for name, value in call.options.items()}
    return ModelCall(arguments, options)


# --- Megatron's LLaVAModel, which itself knows models of an encoder or a decoder alone


def _encode_llava(model: Any, call: ModelCall) -> tuple[torch.Tensor, Any]:
    if model._tile_tags is not None:
        raise UsageError(
            "the encoder of a LLaVAModel with tile tags reads the embedding, which only the first "
            "stage has: leave the tags out, or leave the encoder in the first stage"
        )
    model.add_encoder, model.add_decoder = True, False
    try:
        returned = model(*call.arguments, **call.options)
    finally:
        model.add_encoder, model.add_decoder = False, True
    return returned[0], returned


def _given_to_llava(model: Any, output: torch.Tensor) -> AbstractContextManager[None]:
    """Do nothing: Megatron's ``forward_step`` hands the model what another stage has sent."""
    return NOTHING


# --- Qwen2.5-VL in Megatron-Bridge, whose forward calls the encoder of Hugging Face


def _encode_qwen(model: Any, call: ModelCall) -> tuple[torch.Tensor, Any]:
    pixels, grid = (call.options.get(name) for name in ("pixel_values", "image_grid_thw"))
    if call.options.get("pixel_values_videos") is not None:
        raise UsageError(
            "the encoder of a Qwen2.5-VL model cannot run on every rank for videos: leave it in "
            "the first stage"
        )
    if pixels is None:
        weight = next(model.visual.parameters())
        output = weight.new_empty(0, model.config.hidden_size)
    else:
        output = model.visual(pixels.type(model.visual.dtype), grid_thw=grid).pooler_output
    return output, output


@contextmanager
def _given_to_qwen(model: Any, output: torch.Tensor) -> Iterator[None]:
    def answer(*_arguments: Any, **_options: Any) -> Any:
        return SimpleNamespace(pooler_output=output)

    with calls_replaced(model.visual, answer):
        yield


ENCODERS: Mapping[str, EncoderOfModel] = {
    "LLaVAModel": EncoderOfModel(
        ("vision_model", "vision_projection"),
        ("_drop_vision_class_token",),
        _encode_llava,
        _given_to_llava,
    ),
    "Qwen25VLModel": EncoderOfModel(("visual",), (), _encode_qwen, _given_to_qwen),
}
"""Encoders by the class of the model."""
