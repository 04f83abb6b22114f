"""The values that must be equal on all ranks of a job, by their names in error messages."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_zb import __version__, files
from megatron_zb.job import data_contents
from megatron_zb.job.agreement import named_arguments
from megatron_zb.job.data_contents import Record
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.parsing import flag_of
from megatron_zb.schedules import interchange

# The arguments that are not compared: the launcher gives each process its own.
OF_RANK = ("rank", "local_rank")
# A host may have its own value of these, which no other rank reads: it counts whether there is one.
LOCAL = (
    "config_logger_dir",
    "data_cache_path",
    "flight_recorder_dump_path",
    "inference_coordinator_port",
    "memory_snapshot_path",
    "moe_routing_trace_path",
    "non_persistent_local_ckpt_dir",
    "object_storage_cache_path",
    "pipeline_profile",
    "result_rejected_tracker_filename",
    "rl_profile_dir",
    "save_config_filepath",
    "straggler_ctrlr_port",
    "tensorboard_dir",
    "wandb_save_dir",
)
_PACKAGES = ("torch", "megatron-core", "transformer-engine")
# Variables that change numbers or the order of kernels; addresses of a host may differ.
_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")
_VARIABLE_PREFIXES = ("NVTE_",)

# Arguments that name data sets, and files with names of data sets.
_BLENDS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_LISTS_OF_DATA = ("data_args_path", "per_split_data_args_path")
# Files that decide what tokens a sample has, and files that decide how the model is built.
_FILES_OF_DATA = (
    "vocab_file",
    "merge_file",
    "tokenizer_model",
    "tokenizer_metadata",
    "per_dataset_sequences_path",
)
_FILES_OF_MODEL = (
    "heterogeneous_layers_config_path",
    "nccl_communicator_config_path",
    "te_precision_config_file",
)
_SETTINGS_OF_DATA = ("split", "mock_data")


def of_arguments(args: argparse.Namespace, flags: Collection[str] | None = None) -> dict[str, Any]:
    """Return every argument of a run, except those that differ by rank or host."""
    return named_arguments(args, of_rank=OF_RANK, local=LOCAL, flags=flags)


def of_run(
    args: argparse.Namespace,
    adapter: PipelineAdapter,
    data: Record,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Return what the arguments lead to on this host: schedule, packages, contents of files."""
    values: dict[str, Any] = {
        "the schedule": adapter.schedule.name,
        "a table with the digest": interchange.digest(adapter.schedule),
        "layers placed as": str(adapter.layer_layout),
        "microbatches": adapter.schedule.num_microbatches,
    }
    values |= {f"{package} version": _version(package) for package in _PACKAGES}
    values["megatron_zb version"] = __version__
    for name in sorted(environment):
        if name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES):
            values[name] = environment[name]
    files = data_contents.record({}, _paths(args, (*_LISTS_OF_DATA, *_FILES_OF_MODEL)), {})
    return values | data_contents.to_agree_on(files) | data_contents.to_agree_on(data)


def data_of(args: argparse.Namespace) -> Record:
    """Return the record of the training data: data sets, tokenizer and split, by their contents."""
    blends = {flag_of(name): getattr(args, name, None) for name in _BLENDS}
    blends |= _listed(args)
    given = {flag: list(words) for flag, words in blends.items() if words}
    settings = {
        flag_of(name): getattr(args, name)
        for name in _SETTINGS_OF_DATA
        if getattr(args, name, None)
    }
    return data_contents.record(given, _paths(args, _FILES_OF_DATA), settings)


def _listed(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the data sets listed in files; Megatron-LM itself reports files it cannot read."""
    found: dict[str, list[str]] = {}
    try:
        if getattr(args, "data_args_path", None):
            found["--data-args-path"] = files.read_text(Path(args.data_args_path)).split()
        if getattr(args, "per_split_data_args_path", None):
            splits = json.loads(files.read_text(Path(args.per_split_data_args_path)))
            for split, words in splits.items():
                name = f"--per-split-data-args-path ({split})"
                found[name] = words.split() if isinstance(words, str) else list(map(str, words))
    except (OSError, ValueError, AttributeError, TypeError):
        pass
    return found


def _paths(args: argparse.Namespace, names: Collection[str]) -> dict[str, str | None]:
    return {flag_of(name): getattr(args, name, None) for name in names}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
