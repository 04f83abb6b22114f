"""The adapter for the flags of a run, the same for Megatron-LM's scripts and for our own."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_zb.errors import UsageError
from megatron_zb.job.settings import (
    HOST_LIMIT_FLAG,
    MEMORY_LIMIT_FLAG,
    OFFLOAD_FLAG,
    ScheduleSettings,
)
from megatron_zb.measured.usual_gpu import copy_share
from megatron_zb.megatron_core import refusals, versions
from megatron_zb.megatron_core.adapter import WHOLE, PipelineAdapter
from megatron_zb.megatron_core.current_schedule import JobSizes
from megatron_zb.megatron_core.step import device
from megatron_zb.parsing import flag_of
from megatron_zb.runtime.groups import GroupOptions
from megatron_zb.schedules import catalog, interchange
from megatron_zb.schedules.catalog import Build
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.request import Limit

_MULTIPLE, _USUAL_MULTIPLE = "make_vocab_size_divisible_by", 128


@dataclass(frozen=True)
class Chunks:
    """The number of model chunks per rank that a flag asks for, None where none does."""

    number: int | None = None
    flag: str = "--num-virtual-stages-per-pipeline-rank"

    def check(self, chunks: int, schedule: str) -> None:
        """Refuse a number other than that of the schedule."""
        if self.number not in (None, chunks):
            raise UsageError(
                f"{self.flag} asks for {self.number} chunks per pipeline rank, but {schedule} has "
                f"{chunks}: leave {self.flag} out"
            )


def copy_of(args: argparse.Namespace) -> float | None:
    """Return what is assumed of copies to the host, None if nothing may be moved there."""
    if args.pipeline_offload != "auto":
        return None
    if args.hidden_size is None:
        raise UsageError(f"{OFFLOAD_FLAG} auto has to know the size of a layer: give --hidden-size")
    here = torch.device(device() if torch.cuda.is_available() else "cpu")
    return copy_share(args.hidden_size, here.type)


def build_adapter(
    args: argparse.Namespace,
    sizes: JobSizes,
    chunks: Chunks,
    build: Build = catalog.build,
    group_options: GroupOptions | None = None,
) -> PipelineAdapter:
    """Create the adapter that the flags ask for; they choose a schedule.

    Args:
        args: the flags of the run, see :mod:`megatron_zb.job.settings`.
        sizes: model and batch.
        chunks: the number of chunks per rank that is asked for.
        build: builds schedules, such as on one rank for all.
        group_options: options for the process groups of messages, if not the usual ones.

    Raises:
        UsageError: the flags cannot be combined, or the schedule cannot be built.
    """
    named = args.pipeline_schedule_file is None
    why_whole = _why_whole(args, sizes) if args.pipeline_vocabulary == "auto" else None
    if named:
        adapter = _named(args, sizes, chunks, build, cuts=why_whole is None)
    else:
        adapter = _of_file(Path(args.pipeline_schedule_file), sizes, chunks, build)
    adapter.watch(args.pipeline_timeout, args.distributed_timeout_minutes)
    if group_options is not None:
        adapter.connect_with(group_options)
    if args.pipeline_verify:
        adapter.verify()
    profile = None if args.pipeline_profile is None else Path(args.pipeline_profile)
    for name in ("pipeline_memory_limit", "pipeline_host_limit"):
        if (limit := getattr(args, name)) is not None:
            setattr(args, name, str(limit))  # checkpoints have the arguments as plain values
    if versions.graphs_of(args) is versions.Graphs.NONE:
        adapter.profile(profile, args.pipeline_replan_every, is_named=named)
    if why_whole is not None:
        adapter.say(f"{WHOLE}: {why_whole}")
    return adapter


def _settings(
    args: argparse.Namespace, sizes: JobSizes, chunks: Chunks, *, cuts: bool
) -> ScheduleSettings:
    """Return the settings of a named schedule: limits have a share, and choices go to who has them.

    Args:
        cuts: whether the output layer may be cut along the vocabulary.
    """
    family, profile, scale = catalog.family(args.pipeline_schedule), sizes.profile, 1.0
    if profile is not None:
        microbatch = getattr(args, "micro_batch_size", None) or profile.model.microbatch
        context = getattr(args, "context_parallel_size", None) or profile.model.context
        scale = microbatch * profile.model.context / (profile.model.microbatch * context)
    whole = None if profile is None else scale * profile.one_f_one_b_bytes

    def known(flag: str, given: Limit | None) -> Limit | None:
        return None if given is None else Limit.given(given).with_share(flag, whole)

    group_size = getattr(args, "microbatch_group_size_per_vp_stage", None)
    return ScheduleSettings.of(
        args,
        num_virtual_stages_per_pipeline_rank=chunks.number if family.takes_chunks else None,
        microbatch_group_size_per_vp_stage=group_size if family.takes_group_size else None,
        pipeline_memory_limit=known(MEMORY_LIMIT_FLAG, args.pipeline_memory_limit),
        pipeline_host_limit=known(HOST_LIMIT_FLAG, args.pipeline_host_limit),
        pipeline_vocabulary=args.pipeline_vocabulary if cuts else "off",
    )


def _of_file(file: Path, sizes: JobSizes, asked: Chunks, build: Build) -> PipelineAdapter:
    table = interchange.from_csv(file)
    chunks = table.placement.chunks
    asked.check(chunks, f"--pipeline-schedule-file {file}")
    _check_ends(sizes.layers, chunks)
    return PipelineAdapter.of_table(table, sizes, build)


def _named(
    args: argparse.Namespace, sizes: JobSizes, asked: Chunks, build: Build, *, cuts: bool
) -> PipelineAdapter:
    layers, settings = sizes.layers, _settings(args, sizes, asked, cuts=cuts)
    _check_ends(layers, asked.number or 1)
    # Only the schedule knows its chunks; with several, its first stage is not the first rank.
    inner = replace(sizes, layers=replace(layers, first=None, last=None))
    adapter = PipelineAdapter.create(settings, inner, build)
    asked.check(adapter.chunks, f"--pipeline-schedule {settings.family.name}")
    if layers.first is None and layers.last is None:
        return adapter
    _check_ends(layers, adapter.chunks)
    return PipelineAdapter.create(settings, sizes, build)


def _check_ends(layers: Layers, chunks: int) -> None:
    if chunks > 1 and (layers.first is not None or layers.last is not None):
        raise UsageError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers count the "
            "layers of a rank, which holds several chunks here: say the layers of every chunk "
            "with --pipeline-model-parallel-layout"
        )


def _why_whole(args: argparse.Namespace, sizes: JobSizes) -> str | None:
    """Return why ``--pipeline-vocabulary auto`` leaves the output layer whole uncompared."""
    why = refusals.why_whole(args) or _why_rows_stay(args)
    if why is None and sizes.known_ends is None:
        return "what it takes cannot be counted for this model"
    return why


def _why_rows_stay(args: argparse.Namespace) -> str | None:
    """Return why the rows of an output layer cannot be shared out evenly, None if they can.

    They are those of Megatron-LM's padding, where the vocabulary is known.
    """
    p, tensor = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    rows = getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)
    if rows is None:
        return "its size is not known before the tokenizer is read: give --vocab-size"
    multiple = (getattr(args, _MULTIPLE, None) or _USUAL_MULTIPLE) * tensor
    rows = -(-rows // multiple) * multiple // tensor
    if rows % p:
        return (
            f"its {rows} rows cannot be cut evenly for {p} pipeline ranks: make "
            f"{flag_of(_MULTIPLE)} a multiple of {p}"
        )
    return None
