"""The adapter for the flags of a run, the same for Megatron-LM's scripts and for our own."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_zb.errors import UsageError
from megatron_zb.job.run_flags import (
    HOST_LIMIT_FLAG,
    MEMORY_LIMIT_FLAG,
    OFFLOAD_FLAG,
    placement_of,
    states_asked_for,
)
from megatron_zb.measured.balance import Ends
from megatron_zb.measured.usual_gpu import copy_share
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_core.step import device
from megatron_zb.megatron_core.vocabulary_choice import WHOLE, faster
from megatron_zb.runtime.groups import GroupOptions
from megatron_zb.schedules import catalog, interchange
from megatron_zb.schedules.catalog import Build
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.limit import Limit


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


@dataclass(frozen=True)
class JobSizes:
    """Model and batch of a run, for which a schedule is built; scripts have flags of their own."""

    num_microbatches: int
    layers: Layers
    layer_layout: str | Ends | None
    chunks: Chunks
    ends: Ends | None
    """The costs of the model's ends, if they are known."""
    group_size: int | None = None
    back_to_back: bool = False
    overlaps_exchange: bool = False
    """Whether a forward and a backward may run in one pass, to hide what experts exchange."""
    recomputes: bool = False
    """Whether activations may be dropped, and computed again before their backward."""
    copy: float | None = None
    """What copying activations to the host takes of the passes that use them, if any may move."""
    vocabulary: float | None = None
    """The layers that the output layer counts for, where it is cut over all ranks."""
    vocabulary_if_faster: bool = False
    """Whether it is cut only where that is faster in the simulator; needs known ends."""


def copy_of(args: argparse.Namespace) -> float | None:
    """Return what is assumed of copies to the host, None if nothing may be moved there."""
    if OFFLOAD_FLAG not in states_asked_for(args):
        return None
    if args.hidden_size is None:
        raise UsageError(f"{OFFLOAD_FLAG} auto has to know the size of a layer: give --hidden-size")
    here = torch.device(device() if torch.cuda.is_available() else "cpu")
    return copy_share(args.hidden_size, here.type)


def build_adapter(
    args: argparse.Namespace,
    sizes: JobSizes,
    build: Build = catalog.build,
    group_options: GroupOptions | None = None,
) -> PipelineAdapter:
    """Create the adapter that the flags ask for; they choose a schedule.

    Args:
        args: the flags of the run, see :mod:`megatron_zb.job.run_flags`.
        sizes: model and batch.
        build: builds schedules, such as on one rank for all.
        group_options: options for the process groups of messages, if not the usual ones.

    Raises:
        UsageError: the flags cannot be combined, or the schedule cannot be built.
    """
    named = args.pipeline_schedule_file is None
    if named and sizes.vocabulary_if_faster:
        adapter = _whole_or_cut(args, sizes, build)
    else:
        adapter = (_named if named else _of_file)(args, sizes, build)
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
    return adapter


def _whole_or_cut(args: argparse.Namespace, sizes: JobSizes, build: Build) -> PipelineAdapter:
    """Create the adapters with a whole and with a cut output layer; return the faster one.

    Every rank asks ``build`` for the same two schedules and comes to the same result.
    """
    whole = _named(args, replace(sizes, vocabulary=None), build)
    try:
        cut = _named(args, sizes, build)
    except UsageError as error:
        whole.say(f"{WHOLE}: {error}")
        return whole
    measured = sizes.layer_layout
    ends = measured if isinstance(measured, Ends) else sizes.ends
    assert ends is not None, "nobody can tell which is faster"
    return faster(whole, cut, ends)


def _of_file(args: argparse.Namespace, sizes: JobSizes, build: Build) -> PipelineAdapter:
    file = Path(args.pipeline_schedule_file)
    table = interchange.from_csv(file)
    chunks = table.placement.chunks
    sizes.chunks.check(chunks, f"--pipeline-schedule-file {file}")
    _check_ends(sizes.layers, chunks)
    return PipelineAdapter.of_table(
        table,
        pipeline_size=args.pipeline_model_parallel_size,
        num_microbatches=sizes.num_microbatches,
        layers=sizes.layers,
        layer_layout=sizes.layer_layout,
        build=build,
    )


def _named(args: argparse.Namespace, sizes: JobSizes, build: Build) -> PipelineAdapter:
    family, layers, asked = catalog.family(args.pipeline_schedule), sizes.layers, sizes.chunks
    placement = placement_of(args)
    memory_limit, host_limit = _limits(args, sizes)
    _check_ends(layers, asked.number or 1)

    def create(layers: Layers) -> PipelineAdapter:
        return PipelineAdapter.create(
            family.name,
            pipeline_size=args.pipeline_model_parallel_size,
            num_microbatches=sizes.num_microbatches,
            layers=layers,
            layer_layout=sizes.layer_layout,
            memory_limit=memory_limit,
            host_limit=host_limit,
            chunks=asked.number if family.takes_chunks else None,
            group_size=sizes.group_size if family.takes_group_size else None,
            back_to_back=sizes.back_to_back,
            ends=sizes.ends,
            placement=placement,
            vocabulary=sizes.vocabulary,
            overlaps_exchange=sizes.overlaps_exchange,
            recomputes=sizes.recomputes,
            copy=sizes.copy,
            build=build,
        )

    # Only the schedule knows its chunks; with several, its first stage is not the first rank.
    adapter = create(replace(layers, first=None, last=None))
    asked.check(adapter.chunks, f"--pipeline-schedule {family.name}")
    if layers.first is None and layers.last is None:
        return adapter
    _check_ends(layers, adapter.chunks)
    return create(layers)


def _limits(args: argparse.Namespace, sizes: JobSizes) -> tuple[Limit | None, Limit | None]:
    """Return the limits of device and host; bytes by the profile that balances the layers."""
    profile = sizes.layer_layout.profile if isinstance(sizes.layer_layout, Ends) else None
    scale = 1.0
    if profile is not None:
        microbatch = getattr(args, "micro_batch_size", None) or profile.model.microbatch
        context = getattr(args, "context_parallel_size", None) or profile.model.context
        scale = microbatch * profile.model.context / (profile.model.microbatch * context)
    whole = None if profile is None else scale * profile.one_f_one_b_bytes

    def known(flag: str, given: Limit | None) -> Limit | None:
        return None if given is None else Limit.given(given).with_share(flag, whole)

    return (
        known(MEMORY_LIMIT_FLAG, args.pipeline_memory_limit),
        known(HOST_LIMIT_FLAG, args.pipeline_host_limit),
    )


def _check_ends(layers: Layers, chunks: int) -> None:
    if chunks > 1 and (layers.first is not None or layers.last is not None):
        raise UsageError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers count the "
            "layers of a rank, which holds several chunks here: say the layers of every chunk "
            "with --pipeline-model-parallel-layout"
        )
