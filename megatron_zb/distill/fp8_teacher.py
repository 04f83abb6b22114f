"""Teacher in fp8: Transformer-Engine computes the matrix products of its layers in eight bits.

The teacher is frozen and only runs forwards, so that nothing but its outputs is rounded: students
inherit its weights, and learn, in the precision of the run. Each weight is quantised once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any

from megatron.core.fp8_utils import get_fp8_context
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear


def config_fields(recipe: str | None) -> dict[str, Any]:
    """Return the fields of Megatron's config for layers in fp8; none without a recipe."""
    return {} if recipe is None else {"fp8": "e4m3", "fp8_recipe": recipe}


def with_engine(parts: Any) -> Any:
    """Return the submodules of a layer, changed so that linear layers are Transformer-Engine's.

    The names of their weights are those of Megatron's own.
    """
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TERowParallelLinear,
    )

    linear = {ColumnParallelLinear: TEColumnParallelLinear, RowParallelLinear: TERowParallelLinear}
    return _changed(parts, linear)


def _changed(part: Any, linear: dict[type, type]) -> Any:
    if isinstance(part, type):
        return linear.get(part, part)
    if is_dataclass(part):
        for field in fields(part):
            setattr(part, field.name, _changed(getattr(part, field.name), linear))
    return part


def running(layer: Any) -> AbstractContextManager[Any]:
    """Return the context for the forward of a teacher's layer, in fp8 or not."""
    context: AbstractContextManager[Any] = get_fp8_context(layer.config, layer.layer_number - 1)
    return context
