"""Hybrid models of trainers: their pattern of layers, and chunks where a provider builds none.

Megatron-Bridge's provider of hybrid models builds one chunk for each rank. Megatron core's model
takes a virtual stage, so the model that the provider builds is given one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.schedules.layout import main_pattern, pattern_kinds, predicting_parts

_PREDICTED = "mtp_hybrid_override_pattern"
"""Attribute of Bridge's providers: the layers of one depth of multi-token prediction."""
_MODEL = "MCoreHybridModel"
"""Name by which the module of Bridge's provider has Megatron core's model."""
_CHUNKS = "virtual_pipeline_model_parallel_size"


def pattern_of(model: Any) -> str | None:
    """Return the whole pattern of a hybrid model, None for another one.

    Bridge appends the layers of multi-token prediction when it finalises a provider.
    """
    names = versions.HYBRID_PATTERNS
    pattern = next(filter(None, (getattr(model, name, None) for name in names)), None)
    predicted = getattr(model, _PREDICTED, None)
    if pattern is None or not predicted or predicting_parts(pattern):
        return pattern
    return "/".join([main_pattern(pattern), *[predicted] * (model.mtp_num_layers or 0)])


def sizes_of(model: Any) -> dict[str, Any]:
    """Return the arguments of Megatron-LM that a hybrid model's pattern gives; none for others.

    Raises:
        UsageError: this Megatron core cannot place the layers of a pattern on chunks.
    """
    pattern = pattern_of(model)
    if pattern is None:
        return {}
    if not versions.hybrid_segments():
        raise UsageError(
            f"the hybrid layer pattern '{pattern}' needs megatron-core 0.17 or newer: install it, "
            "or train with Megatron-LM's command line"
        )
    values: dict[str, Any] = dict.fromkeys(versions.HYBRID_PATTERNS)
    return {**values, "hybrid_layer_pattern": pattern, "num_layers": len(pattern_kinds(pattern))}


def by_chunks(provider: Any, provide: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the ``provide`` of a hybrid model's provider, so that it builds any chunk.

    A provider that builds its model in another way than Bridge's is left as it is.
    """
    names = getattr(unwrap(provide), "__globals__", {})
    if _MODEL not in names:
        return provide

    @wraps(provide)
    def build(*args: Any, vp_stage: int | None = None, **keywords: Any) -> Any:
        model, chunks = names[_MODEL], getattr(provider, _CHUNKS, None)

        def with_stage(*given: Any, **more: Any) -> Any:
            setattr(provider, _CHUNKS, chunks)
            return model(*given, vp_stage=vp_stage, **more)

        setattr(provider, _CHUNKS, None)  # Bridge asserts that there are no virtual stages
        names[_MODEL] = with_stage
        try:
            return provide(*args, **keywords)
        finally:
            names[_MODEL] = model
            setattr(provider, _CHUNKS, chunks)

    return build
