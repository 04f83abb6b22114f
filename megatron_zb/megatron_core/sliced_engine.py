"""Transformer-Engine's weight gradients of token slices, whose order it does not expect.

The first F of a step marks its weight gradient as the one that overwrites ``main_grad``. With token
slices, it comes after those of all later slices of its microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatron_zb.megatron_core.transformer_engine import is_linear, quantize_weights_anew


def add_gradients_in_any_order(chunk: torch.nn.Module) -> None:
    """Let TE add all weight gradients of a chunk to ``main_grad``, in whatever order they come."""
    for module in chunk.modules():
        if is_linear(module):
            module.forward = partial(_anew, module, module.forward)


def _anew(module: Any, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    quantize_weights_anew(module)
    return whole(*args, **kwargs)
