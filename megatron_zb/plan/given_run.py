"""The run that a training's arguments describe: gains of a plan are relative to it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from megatron_zb.errors import UsageError
from megatron_zb.parsing import flag_of
from megatron_zb.plan.device import DeviceConfig
from megatron_zb.plan.features.catalog import FEATURES, features_of
from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.model_flags import written_pattern
from megatron_zb.plan.stages import StageWorkload, cut_into_stages
from megatron_zb.plan.strategy import (
    NO_PIPELINE,
    Choices,
    ScheduleCandidate,
    Strategy,
    candidates_of,
    no_strategy_message,
    of_family,
    strategies,
)
from megatron_zb.plan.work import Workload
from megatron_zb.schedules import layout
from megatron_zb.schedules.layout import Layers, Layout, spread
from megatron_zb.schedules.placement import Placement

# Settings with which a schedule has no order before it is searched for, or measured.
_NOT_PLANNED = (
    "pipeline_schedule_file",
    "pipeline_memory_limit",
    "pipeline_recompute",
    "pipeline_offload",
)


@dataclass(frozen=True)
class GivenRun:
    """A schedule with its division of the GPUs, its chunks and the layers of its stages."""

    candidate: ScheduleCandidate
    strategy: Strategy
    chunks: int | None
    layout: Layout | None
    """Layers of each stage; None without a pipeline, and where the schedule balances them."""

    @classmethod
    def of(
        cls,
        args: argparse.Namespace,
        model: ModelConfig,
        device: DeviceConfig,
        job: tuple[int, int],
        choices: Choices,
    ) -> GivenRun:
        """Return the run of parsed arguments, with Megatron's defaults for those that are left out.

        Args:
            args: all arguments of the training.
            model: the model of the arguments.
            device: the GPU.
            job: the GPUs and the samples of an iteration.
            choices: with the recomputation and the precision of the arguments.

        Raises:
            UsageError: the arguments give no run, or one that a plan does not count; names the
                argument.
        """
        if args.micro_batch_size is None:
            raise UsageError("--micro-batch-size is missing among the arguments")
        for name in _NOT_PLANNED:
            if getattr(args, name) not in (None, "off"):
                raise UsageError(f"a plan has no order of {flag_of(name)}: leave it out")
        strategy = _strategy(args, model, device, job, choices)
        candidate, chunks = _schedule(args, model, strategy)
        m = strategy.num_microbatches(job[1])
        if candidate.needs_whole_groups and m % strategy.pipeline:
            raise UsageError(
                f"--global-batch-size {job[1]} gives {m} microbatches, and Megatron's interleaved "
                f"schedule needs a multiple of --pipeline-model-parallel-size {strategy.pipeline}"
            )
        counts = None
        if strategy.pipeline > 1 and not args.pipeline_layer_layout:
            placement = candidate.placement(strategy.pipeline, chunks)
            counts = _layers(args, model, candidate, placement)
        return cls(candidate, strategy, chunks, counts)

    def staged(self, load: Workload) -> StageWorkload:
        """Cut a workload of this strategy into the stages of the run.

        Raises:
            UsageError: the layers cannot be placed; names the argument.
        """
        if self.layout is None:
            found = cut_into_stages(load, self.candidate, self.chunks)
            if found is None:
                raise UsageError("--num-layers: there are too few layers for the stages")
            return found
        placement = self.candidate.placement(self.strategy.pipeline, self.chunks)
        return StageWorkload(load, placement, self.layout, features_of(self.candidate))


def _strategy(
    args: argparse.Namespace,
    model: ModelConfig,
    device: DeviceConfig,
    job: tuple[int, int],
    choices: Choices,
) -> Strategy:
    tensor = args.tensor_model_parallel_size
    exactly = replace(
        choices,
        tensor=(tensor,),
        pipeline=(args.pipeline_model_parallel_size,),
        microbatch=(args.micro_batch_size,),
        context=(args.context_parallel_size,),
        expert=(args.expert_model_parallel_size,) if model.experts else None,
        expert_tensor=(args.expert_tensor_parallel_size or tensor,) if model.experts else None,
        overlap=bool(args.overlap_grad_reduce and args.overlap_param_gather),
        sequence_parallel=bool(args.sequence_parallel) and tensor > 1,
    )
    for strategy in strategies(model, device, *job, exactly):
        found: Strategy | None = strategy
        for feature in FEATURES:
            found = found and feature.given_strategy(args, found, model.sequence_length)
        if found is not None:
            return found
    raise UsageError(no_strategy_message(model, device, *job, exactly))


def _schedule(
    args: argparse.Namespace, model: ModelConfig, strategy: Strategy
) -> tuple[ScheduleCandidate, int | None]:
    """Return the schedule of the run and its chunks, where the schedule has the choice."""
    p, chunks = strategy.pipeline, _chunks(args, model)
    if p == 1:
        return ScheduleCandidate(NO_PIPELINE, "1f1b", megatron=True), None
    if args.pipeline_schedule is not None:
        found = of_family(args.pipeline_schedule)
        if found.takes_the_best:
            raise UsageError(f"--pipeline-schedule {args.pipeline_schedule} has its own row")
        return _with_features(args, found), (chunks or 2) if found.takes_chunks else None
    one, interleaved = candidates_of((), overlap=bool(args.overlap_p2p_comm))[:2]
    return (one, None) if (chunks or 1) == 1 else (_with_features(args, interleaved), chunks)


def _with_features(args: argparse.Namespace, candidate: ScheduleCandidate) -> ScheduleCandidate:
    for feature in FEATURES:
        candidate = feature.given(args, candidate)
    return candidate


def _chunks(args: argparse.Namespace, model: ModelConfig) -> int | None:
    """Return the chunks of a rank that the arguments give.

    Raises:
        UsageError: layers or stages cannot be divided so.
    """
    p = args.pipeline_model_parallel_size
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return int(args.num_virtual_stages_per_pipeline_rank)
    per_stage = args.num_layers_per_virtual_pipeline_stage
    if per_stage is not None:
        if per_stage < 1 or model.layers % (p * per_stage):
            raise UsageError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage} does not divide the "
                f"{model.layers} layers of {p} pipeline ranks"
            )
        return int(model.layers // (p * per_stage))
    written, flag = args.pipeline_model_parallel_layout, "--pipeline-model-parallel-layout"
    if (segments := _segments(args)) is not None:
        written, flag = "|".join(segments), "--hybrid-layer-pattern"
    if written is None:
        return None
    stages = len(written.split("|") if segments else layout.unrolled(written).split("|"))
    if stages % p:
        raise UsageError(
            f"{flag} has {stages} stages, no multiple of --pipeline-model-parallel-size {p}"
        )
    return stages // p


def _segments(args: argparse.Namespace) -> list[str] | None:
    """Return the layers of each stage, if the pattern of a hybrid model has them."""
    written = layout.main_pattern(written_pattern(args) or "")
    return written.split("|") if "|" in written else None


def _layers(
    args: argparse.Namespace, model: ModelConfig, candidate: ScheduleCandidate, placement: Placement
) -> Layout:
    """Return the layers of each stage, as Megatron or the schedule has them."""
    asked = Layers(
        model.layers,
        model.prediction_layers,
        embedding=int(args.account_for_embedding_in_pipeline_split),
        output=int(args.account_for_loss_in_pipeline_split),
        first=args.decoder_first_pipeline_num_layers,
        last=args.decoder_last_pipeline_num_layers,
    )
    written, segments = args.pipeline_model_parallel_layout, _segments(args)
    if segments is not None:
        if len(segments) != placement.num_stages:
            raise UsageError(
                f"--hybrid-layer-pattern has {len(segments)} stages, and the schedule has "
                f"{placement.num_stages}"
            )
        of_layer = 1 if model.kinds else 2  # letters
        return tuple(len(segment) // of_layer for segment in segments)
    if written is not None:
        letters = layout.read(written, asked, placement.num_stages)
        return tuple(stage.count("t") for stage in letters)
    return _megatrons(asked, placement) if candidate.megatron else spread(asked, placement)


def _megatrons(layers: Layers, placement: Placement) -> Layout:
    """Return the layers of each stage as Megatron spreads them without a layout."""
    p, chunks = placement.pipeline_size, placement.chunks
    ends = {0: layers.first, p - 1: layers.last}
    fixed = {rank: count for rank, count in ends.items() if count is not None}
    whole = layers.decoder + int(layers.embedding) + int(layers.output) - sum(fixed.values())
    each, rest = divmod(whole, max(1, p - len(fixed)))
    of_rank = [fixed.get(rank, each) for rank in range(p)]
    if rest or any(count % chunks for count in of_rank):
        stages = f" x --num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
        raise UsageError(
            f"--num-layers {layers.decoder} cannot be divided evenly among "
            f"--pipeline-model-parallel-size {p}{stages}"
        )
    counts = [of_rank[rank] // chunks for _ in range(chunks) for rank in range(p)]
    counts[0] -= int(layers.embedding)
    counts[-1] -= int(layers.output)
    return tuple(counts)
