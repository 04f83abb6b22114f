"""Megatron on the CPU: every CUDA call of Megatron's is redirected to the CPU.

Megatron takes a CUDA device for granted: it asks `torch.cuda` for the current device, creates
small tensors with `device="cuda"` and keeps its random state in CUDA's generator. `run_on_cpu`
redirects those calls, so that unmodified Megatron trains over gloo on CPU ranks. It is meant for
debugging and tests: what `--cpu` of each command needs, and no training on GPUs.

`training_loop=True` adds the calls of Megatron-LM's training loop.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from megatron_zb.cpu_ranks.devices import redirect_devices
from megatron_zb.cpu_ranks.megatron_parts import (
    keep_messages,
    redirect_experts,
    redirect_predictions,
    share_norms,
    sum_norms_in_single_precision,
)
from megatron_zb.cpu_ranks.training_loop import prepare_arguments, redirect_training_loop

__all__ = ["prepare_arguments", "redirect_experts", "redirect_predictions", "run_on_cpu"]


def run_on_cpu(*, training_loop: bool = False) -> None:
    """Redirect Megatron's CUDA calls to the CPU in this process; calling it again does nothing.

    Must be called before the first import of `megatron`, because Megatron's modules decide while
    they are imported whether to compile their fused functions.

    Args:
        training_loop: Megatron-LM's own training loop also runs. It does not start unless
            `torch.cuda` says that there is a GPU, so then it says so.
    """
    cuda: Any = torch.cuda
    if getattr(cuda, "redirected_to_cpu", False):
        return
    # A GPU that happens to be there stays unused, also by libraries that are not redirected.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    redirect_devices()
    if training_loop:
        redirect_training_loop()
        redirect_experts()
        redirect_predictions()
        keep_messages()
        share_norms()
        sum_norms_in_single_precision()
    cuda.redirected_to_cpu = True
