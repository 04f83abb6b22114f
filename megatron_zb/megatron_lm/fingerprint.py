"""What must be equal on all ranks of a job for its schedule to run, by the names a message uses."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from megatron_zb import __version__
from megatron_zb.megatron.adapter import PipelineAdapter
from megatron_zb.schedules import interchange

# Arguments that shape messages, weights or the order of passes.
_ARGUMENTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
    "hidden_size",
    "num_layers",
    "num_attention_heads",
    "vocab_size",
    "params_dtype",
    "pipeline_dtype",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "recompute_granularity",
    "enable_optimizer_post_validation",
)
_PACKAGES = ("torch", "megatron-core", "transformer-engine")
# Variables that change numbers or the order of kernels; addresses of a host may differ.
_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")
_VARIABLE_PREFIXES = ("NVTE_",)


def of_run(
    args: argparse.Namespace, plan: PipelineAdapter, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The named values of a run with a schedule; they go to ``agreement.agree``."""
    values: dict[str, Any] = {
        "the schedule": plan.schedule.name,
        "a table with the digest": interchange.digest(plan.schedule),
        "layers placed as": str(plan.layer_layout),
        "microbatches": plan.schedule.num_microbatches,
    }
    for name in _ARGUMENTS:
        if hasattr(args, name):
            values["--" + name.replace("_", "-")] = str(getattr(args, name))
    values |= {f"{package} version": _version(package) for package in _PACKAGES}
    values["megatron_zb version"] = __version__
    for name in sorted(environment):
        if name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES):
            values[name] = environment[name]
    return values


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
