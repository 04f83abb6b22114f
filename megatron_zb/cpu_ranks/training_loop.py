"""Megatron-LM's training loop on the CPU: its arguments, and its questions about a GPU."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections import Counter
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace
from typing import Any

import torch

from megatron_zb.cpu_ranks.adam import redirect_adam
from megatron_zb.cpu_ranks.devices import nothing

# Communication over gloo, and no fused kernel.
_CPU_ARGUMENTS = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "no_persist_layer_norm": True,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "create_attention_mask_in_dataloader": True,
}

# Their samples have the ends of sequences instead of a mask.
_PACKED = ("sft", "dataloader_inter_document_masking")


def prepare_arguments(args: Any) -> None:
    """Set the arguments of Megatron-LM without which it does not run on a CPU."""
    for name, value in _CPU_ARGUMENTS.items():
        if hasattr(args, name):
            setattr(args, name, value)
    if any(getattr(args, name, False) for name in _PACKED):
        from megatron_zb.megatron_core.versions import sum_lengths_on_cpu

        args.create_attention_mask_in_dataloader = False
        sum_lengths_on_cpu()


def redirect_training_loop() -> None:
    """Answer the GPU queries of `megatron.training` before and between its iterations."""
    cuda: Any = torch.cuda
    # it refuses to start without them
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.set_device = nothing()
    cuda.get_device_capability = lambda device=None: (0, 0)
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=os.cpu_count()
    )
    _redirect_reports()
    # data loaders would pin their memory for it
    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: False
    _use_compiled_dataset_helpers()
    redirect_adam()
    from megatron_zb.megatron_core.versions import skip_fused_kernels

    skip_fused_kernels()


def _redirect_reports() -> None:
    """Redirect device statistics: logs and profilers read zeros."""
    cuda: Any = torch.cuda
    for name in ("memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda device=None: 0)
        setattr(cuda, f"max_{name}", lambda device=None: 0)
    for name in ("device_memory_used", "temperature", "power_draw", "utilization", "clock_rate"):
        setattr(cuda, name, lambda device=None: 0)
    cuda.memory_stats = lambda device=None: Counter()  # 0, whatever the name
    cuda.reset_peak_memory_stats = nothing()
    cuda.empty_cache = nothing()
    cuda.memory._snapshot = lambda device=None: {"segments": [], "device_traces": []}
    cuda.memory._record_memory_history = nothing()
    bindings: Any = torch._C
    bindings._cuda_attach_out_of_memory_observer = nothing()
    cuda.cudart = lambda: SimpleNamespace(cudaProfilerStart=int, cudaProfilerStop=int)
    cuda.check_error = nothing()
    profiler: Any = torch.autograd.profiler
    profiler.emit_nvtx = lambda enabled=True, record_shapes=False: contextlib.nullcontext()


def _use_compiled_dataset_helpers() -> None:
    """Take the data set helpers of an installed megatron-core, so that no compiler is needed."""
    try:
        files = distribution("megatron-core").files or []
    except PackageNotFoundError:
        return
    name = "megatron.core.datasets.helpers_cpp"
    compiled = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    for file in files:
        if file.name == compiled and (spec := spec_from_file_location(name, file.locate())):
            from megatron.core.datasets import utils

            module = module_from_spec(spec)
            assert spec.loader is not None
            spec.loader.exec_module(module)
            sys.modules[name] = module
            utils.compile_helpers = nothing()
