"""Calls of the model in a user's forward step: what they return, and outputs given in its place."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_zb.errors import UsageError


def inner_model(chunk: Any) -> Any:
    """Return the model in the wrappers of data parallelism and of precision."""
    return get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)


@contextmanager
def recorded(*modules: torch.nn.Module) -> Iterator[list[Any]]:
    """Record what the modules return inside, in the order of their calls."""
    found: list[Any] = []
    hooks = [
        module.register_forward_hook(lambda _module, _arguments, output: found.append(output))
        for module in modules
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def answered(chunk: Any, output: torch.Tensor) -> Iterator[None]:
    """Let calls of the model return an output, in the place that its hooks and layers have.

    Its tokens (batch, sequence) get the shape of the labels of the call, which may be packed.
    """
    model = inner_model(chunk)
    signature = inspect.signature(model.forward)

    def answer(*arguments: Any, **options: Any) -> torch.Tensor:
        given = signature.bind(*arguments, **options).arguments
        like = given.get("labels")
        if like is None:
            like = given.get("input_ids")
        if like is None or like.shape == output.shape[:2]:
            return output
        if like.numel() != output[:, :, ...].shape[:2].numel():
            raise UsageError(
                f"the forward step calls the model with {like.numel()} labels for the output of "
                f"{output.shape[:2].numel()} tokens: leave --pipeline-slices out"
            )
        return output.reshape(*like.shape, *output.shape[2:])

    usual = model._compiled_call_impl
    model._compiled_call_impl = answer  # which the call of a module runs in place of its hooks
    try:
        yield
    finally:
        model._compiled_call_impl = usual
