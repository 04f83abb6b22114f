"""Encoders of vision-language models, by the model that has one: how they run apart from it.

Megatron builds an encoder into the first stage, which calls it in its forward. An
:class:`EncoderOfModel` runs the encoder for the arguments of a call of the model, and lets a
forward of the first stage take an output that was computed before.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.module import fp32_to_float16

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.model_calls import ModelCall, calls_replaced, recorded
from megatron_zb.runtime.observer import NOTHING

_FIRST = "is_first_microbatch"
"""Attribute of a layer that converts its weights in the first microbatch of a step."""


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

    def begin_step(self, model: Any) -> None:
        """Let layers that keep their weights in another precision convert them anew.

        Megatron's ``forward_step`` does so in the first forward of a chunk, and the encoder may
        run before that.
        """
        for _, part in self.parts(model):
            for module in part.modules():
                if hasattr(module, _FIRST):
                    setattr(module, _FIRST, True)

    def parameters(self, model: Any) -> list[torch.nn.Parameter]:
        """Return the weights of the encoder of a model."""
        return [weight for _, module in self.parts(model) for weight in module.parameters()]


def encoder_of(model: Any, kinds: Mapping[str, EncoderOfModel]) -> EncoderOfModel:
    """Return the encoder of a model, of those by the class of a model.

    Raises:
        UsageError: models of this class have none, or it is not known how to run it apart.
    """
    for kind in type(model).__mro__:
        if kind.__name__ in kinds:
            return kinds[kind.__name__]
    raise UsageError(
        f"the encoder of a {type(model).__name__} cannot run on every rank, only that of "
        f"{', '.join(kinds)}: leave it in the first stage"
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


def _encode_tower(model: Any, call: ModelCall) -> tuple[torch.Tensor, Any]:
    """Run the encoder alone: a projection behind it may train where it is frozen."""
    given = inspect.signature(type(model).forward).bind(model, *call.arguments, **call.options)
    given.arguments |= dict.fromkeys(_SOUNDS & given.signature.parameters.keys())
    usual = {name: getattr(model, name, None) for name in _NOT_IN_TOWER}
    with recorded(model.vision_model) as outputs:
        try:
            for name, value in _NOT_IN_TOWER.items():
                setattr(model, name, value)
            returned = type(model).forward(*given.args, **given.kwargs)
        finally:
            for name, value in usual.items():
                setattr(model, name, value)
    empty = outputs or [_nothing(model.vision_model, model.vision_model.config.hidden_size)]
    return empty[0], returned


_NOT_IN_TOWER: Mapping[str, Any] = {
    "add_encoder": True,
    "add_decoder": False,
    "vision_projection": torch.nn.Identity(),
    "_tile_tags": None,
}
"""Attributes of a LLaVAModel that runs its encoder alone."""

_SOUNDS = {"sound_clips"}
"""Arguments of another encoder, which stays in the first stage."""


def _given_to_tower(model: Any, output: torch.Tensor) -> AbstractContextManager[None]:
    def answer(*_arguments: Any, **_options: Any) -> Any:
        return output

    return calls_replaced(model.vision_model, answer)


# --- models of Megatron-Bridge whose forward calls the encoder of Hugging Face, by grids of patches


def _encode_grid(model: Any, call: ModelCall) -> tuple[torch.Tensor, Any]:
    _check_images_alone(call)
    pixels = call.options.get("pixel_values")
    if pixels is None:
        output = _nothing(model.visual, model.config.hidden_size)
    else:
        grid = call.options["image_grid_thw"]
        output = model.visual(pixels.type(model.visual.dtype), grid_thw=grid).pooler_output
    return output, output


def _given_grid(model: Any, output: torch.Tensor) -> AbstractContextManager[None]:
    def answer(*_arguments: Any, **_options: Any) -> Any:
        return SimpleNamespace(pooler_output=output)

    return calls_replaced(model.visual, answer)


def _check_images_alone(call: ModelCall) -> None:
    if call.options.get("pixel_values_videos") is not None:
        raise UsageError(
            "an encoder cannot run on every rank for videos: leave it in the first stage"
        )


def _nothing(encoder: torch.nn.Module, width: int) -> torch.Tensor:
    """Return the output for a microbatch without images."""
    return next(encoder.parameters()).new_empty(0, width)


# --- Qwen3-VL in Megatron-Bridge, some of whose layers take outputs of the encoder's inner layers


def _encode_qwen3(model: Any, call: ModelCall) -> tuple[torch.Tensor, Any]:
    """Return the output of the last layer and those of inner ones, side by side."""
    _check_images_alone(call)
    if model.pg_collection.cp.size() > 1:
        raise UsageError(
            "an encoder of Qwen3-VL cannot run on every rank with context parallelism: leave it in "
            "the first stage"
        )
    names = ("input_ids", "pixel_values", "image_grid_thw", "image_input_mask")
    inputs = {name: call.options.get(name) for name in names}
    of_model = {
        name: getattr(model, name)
        for name in ("image_token_id", "video_token_id", "square_merge_size")
    }
    reorganize = sys.modules[type(model).__module__].reorganize_inputs
    pixels, grid, _ = reorganize(**inputs, **of_model)
    if grid is None or not grid.shape[0]:
        output = _nothing(model.vision_model, model.config.hidden_size)
    else:
        last, inner = model.vision_model(hidden_states=pixels, grid_thw=grid)
        output = torch.cat([last, *inner], dim=-1)
    return output, output


def _given_to_qwen3(model: Any, output: torch.Tensor) -> AbstractContextManager[None]:
    def answer(*_arguments: Any, **_options: Any) -> Any:
        last, *inner = output.split(model.config.hidden_size, dim=-1)
        return last, inner

    return calls_replaced(model.vision_model, answer)


_OF_GRID = EncoderOfModel(("visual",), (), _encode_grid, _given_grid)
ENCODERS: Mapping[str, EncoderOfModel] = {
    "LLaVAModel": EncoderOfModel(
        ("vision_model", "vision_projection"),
        ("_drop_vision_class_token",),
        _encode_llava,
        _given_to_llava,
    ),
    "Qwen25VLModel": _OF_GRID,
    "GLM45VModel": _OF_GRID,
    "Qwen3VLModel": EncoderOfModel(("vision_model",), (), _encode_qwen3, _given_to_qwen3),
}
"""Encoders by the class of the model."""

FROZEN: Mapping[str, EncoderOfModel] = {
    **ENCODERS,
    "LLaVAModel": EncoderOfModel(
        ("vision_model",), ("_drop_vision_class_token",), _encode_tower, _given_to_tower
    ),
}
"""What of these may be frozen, and run without the rest of the model."""
