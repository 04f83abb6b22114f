"""Runs of a step that leave nothing: data, random numbers, gradients and counters are put back.

``--pipeline-verify`` rehearses the first step with nothing split, and ``--pipeline-warm-up`` runs a
few of its passes on every stage at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.data_iterators import Start
from megatron_zb.megatron_core.forward_state import ForwardState
from megatron_zb.megatron_core.model_ends import gradient_of
from megatron_zb.megatron_core.random_streams import global_parameters
from megatron_zb.megatron_core.step import Step

Gradients = dict[str, torch.Tensor | None]
"""Copies of gradients on the host by the global names of their parameters, None for zeros."""


@contextmanager
def undone(step: Step) -> Iterator[None]:
    """Undo all changes that the passes inside make, except to the parts of the step.

    The passes read from iterators that repeat afterwards what they have given.
    """
    start = Start(step.data_iterators)
    usual, step.data_iterators = step.data_iterators, start.data_iterators
    before = [gradients(chunk) for chunk in step.model]
    try:
        with ExitStack() as contexts:
            contexts.enter_context(versions.losses_logged_apart())
            contexts.enter_context(versions.no_results_validated())
            for chunk in step.model:
                contexts.enter_context(ForwardState(chunk, step.forward_step_func).undone())
            yield
    except BaseException:
        step.data_iterators = usual
        raise
    start.go_back()
    step.forward_data_store.clear()
    step.total_num_tokens.zero_()
    for chunk, of_chunk in zip(step.model, before, strict=True):
        _set_gradients(chunk, of_chunk)


def trained_parameters(chunk: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a chunk that require gradients, with their global names."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    for name, parameter in global_parameters(chunk).items():
        if parameter.requires_grad:
            yield name, parameter


def gradients(chunk: Any) -> Gradients:
    """Return copies of the gradients of a chunk's parameters."""
    found: Gradients = {}
    for name, parameter in trained_parameters(chunk):
        gradient = gradient_of(parameter)
        there = gradient is not None and bool(gradient.any())
        found[name] = gradient.to("cpu", copy=True) if gradient is not None and there else None
    return found


def _set_gradients(chunk: Any, before: Gradients) -> None:
    """Set gradients as they were, and let data parallelism count them anew."""
    if isinstance(chunk, DistributedDataParallel):
        chunk.zero_grad_buffer()
    for name, parameter in trained_parameters(chunk):
        gradient = before[name]
        if not hasattr(parameter, "main_grad"):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        elif gradient is not None:
            parameter.main_grad.copy_(gradient)
