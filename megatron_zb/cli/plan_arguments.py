"""``plan -- ARGUMENTS``: the model and the sizes that a training's own arguments describe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_zb.planner.model import ModelConfig

_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "micro_batch_size": "micro_batch_size",
}
_OF_EXPERTS = {
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}


def read(words: Sequence[str]) -> tuple[ModelConfig, dict[str, str]]:
    """Return the model of a training's arguments, and the sizes that they give, by plan's names.

    What the arguments leave out is left to the plan.

    Raises:
        UsageError: an argument is unknown or wrong, or the planner cannot count it.
    """
    from megatron_zb.cli.check import installed_series
    from megatron_zb.megatron_lm import argument_table, flags
    from megatron_zb.planner.model_of_arguments import model_of

    parser = flags.add_arguments(argument_table.parser_of(installed_series()))
    model = model_of(parser.parse_args(list(words)))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    given = parser.parse_args(list(words))  # only what the words give, also where it is a default
    return model, _sizes(given, has_experts=model.experts is not None)


def _sizes(given: argparse.Namespace, *, has_experts: bool) -> dict[str, str]:
    names = {**_SIZES, **(_OF_EXPERTS if has_experts else {})}
    out = {name: str(getattr(given, of)) for name, of in names.items() if hasattr(given, of)}
    granularity = getattr(given, "recompute_granularity", None)
    if granularity is not None or hasattr(given, "recompute_activations"):
        modules = getattr(given, "recompute_modules", None) if granularity == "selective" else None
        out["recompute"] = "+".join(modules) if modules else granularity or "selective"
    if hasattr(given, "fp8"):
        out["precision"] = "fp8"
    return out
