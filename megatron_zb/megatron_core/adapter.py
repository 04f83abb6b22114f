"""The adapter with which a training script runs a pipeline schedule inside Megatron.

:func:`build_adapter` makes it from the flags of a run, for Megatron-LM's scripts and for our own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads as _finalize

from megatron_zb.errors import UsageError
from megatron_zb.job.settings import OFFLOAD_FLAG, ScheduleSettings
from megatron_zb.measured.balance import costs_beside
from megatron_zb.measured.usual_gpu import copy_share
from megatron_zb.megatron_core import graphs, model_ends, refusals, versions
from megatron_zb.megatron_core.connections import ChannelsPart, WatchPart
from megatron_zb.megatron_core.current_schedule import CurrentSchedule, JobSizes
from megatron_zb.megatron_core.encoder_ahead import EncoderAheadPart
from megatron_zb.megatron_core.forward_backward import ForwardBackward
from megatron_zb.megatron_core.frozen_model import FrozenModel, FrozenModelPart
from megatron_zb.megatron_core.graphs import GraphsPart
from megatron_zb.megatron_core.late_updates import DelayedPart, LateUpdates
from megatron_zb.megatron_core.parts import PartList
from megatron_zb.megatron_core.placement import (
    ModelPlacement,
    PhysicalPlacement,
    StageLayout,
    StartReport,
)
from megatron_zb.megatron_core.planned_steps import PlannedLengths, PlannedSteps, ReadAhead
from megatron_zb.megatron_core.post_validation import PostValidation, PostValidationPart
from megatron_zb.megatron_core.profiled_steps import ProfilePart, ProfileUse
from megatron_zb.megatron_core.random_streams import LayerStreams, layers_draw_weights
from megatron_zb.megatron_core.shared_pipeline import AdapterModel, SharedPipelinePart
from megatron_zb.megatron_core.split_backward import SplitBackward, split_linear_layers
from megatron_zb.megatron_core.spread_encoder import CHUNK as CHUNK_OF_ENCODER
from megatron_zb.megatron_core.spread_encoder import EncoderPart
from megatron_zb.megatron_core.stages import OffloadPart, StreamsPart
from megatron_zb.megatron_core.step import StepPart, device
from megatron_zb.megatron_core.transformer_engine import (
    split_transformer_engine,
)
from megatron_zb.megatron_core.verification import UnsplitLayers, Verification
from megatron_zb.megatron_core.warm_up import WarmUp
from megatron_zb.parsing import Written, flag_of
from megatron_zb.runtime.activation_memory import ActivationMemory, HostCopyEngines
from megatron_zb.runtime.autograd_stage import WeightGradQueue
from megatron_zb.runtime.channels import GroupOptions
from megatron_zb.schedules import catalog, interchange
from megatron_zb.schedules.call_programs import CallPrograms
from megatron_zb.schedules.catalog import Build
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.second_model import SecondModel
from megatron_zb.schedules.features.update_delay import DelayedRules
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.request import Limit
from megatron_zb.schedules.schedule import Schedule

__all__ = ["JobSizes", "Layers", "PipelineAdapter", "ScheduleSettings"]

WHOLE = "the output layer stays whole"

_Part = TypeVar("_Part", bound=StepPart)


class PipelineAdapter:
    """One schedule on one job. Build it with :meth:`create`, before any process group exists.

    Args:
        current: the schedule of the job.
        placed: the model on its stages.
    """

    def __init__(self, current: CurrentSchedule, placed: ModelPlacement) -> None:
        versions.warn_of_core()
        self.current, self.placed = current, placed
        self._splits = [SplitBackward(WeightGradQueue()) for _ in range(placed.chunks)]
        self._parts = PartList(placed.physical, current, self._splits)
        self.planned = PlannedSteps(current)
        """Plans of steps of unequal microbatches."""
        for part in (ReadAhead(self.planned), PlannedLengths(self.planned)):
            self._parts.add(part)
        self._said: list[str] = []

    @classmethod
    def create(
        cls,
        settings: ScheduleSettings,
        sizes: JobSizes,
        build: Build = catalog.build,
    ) -> PipelineAdapter:
        """Build the schedule and place the layers.

        Args:
            settings: the schedule and its options, such as
                ``ScheduleSettings(pipeline_schedule="v-half")``. Those of a run, such as
                ``pipeline_verify``, have methods instead: ``watch``, ``verify``, ``warm_up``,
                ``profile``, ``draw_by_layer``, ``connect_with``, ``post_validate``.
            sizes: model and batch, such as
                ``JobSizes(pipeline_size=4, num_microbatches=8, layers=Layers(32))``.
            build: the function that builds schedules, for example on one rank for all.

        Raises:
            UsageError: unknown name, sizes that cannot be scheduled, layers that cannot be placed.
        """
        if settings.pipeline_vocabulary == "auto":
            return cls._whole_or_sharded(settings, sizes, build)
        current = CurrentSchedule.named(settings, sizes, build)
        return cls(current, ModelPlacement.of(sizes, current.schedule))

    @classmethod
    def _whole_or_sharded(
        cls, settings: ScheduleSettings, sizes: JobSizes, build: Build
    ) -> PipelineAdapter:
        """Create two adapters, whose output layer is whole or sharded; return the faster one.

        Every rank asks ``build`` for the same two schedules and comes to the same result.
        """
        if (ends := sizes.known_ends) is None:
            raise UsageError(
                "pipeline_vocabulary 'auto' has to know what the ends of the model take: give "
                "ends, or 'on' or 'off'"
            )
        of = {asked: replace(settings, pipeline_vocabulary=asked) for asked in ("off", "on")}
        whole = cls.create(of["off"], sizes, build)
        try:
            sharded = cls.create(of["on"], sizes, build)
        except UsageError as error:
            whole.say(f"{WHOLE}: {error}")
            return whole
        seconds = []
        for adapter in (whole, sharded):
            layers = tuple(letters.count("t") for letters in adapter.layer_layout.letters)
            costs = costs_beside(
                adapter.schedule.placement, layers, ends, sharded=adapter is sharded
            )
            seconds.append(adapter.current.seconds(adapter.schedule, costs))
        less = 1 - seconds[1] / seconds[0]
        if less > 0:
            sharded.say(
                f"the output layer is vocabulary parallel: {less:.1%} less time than whole, "
                f"simulated for {ends}"
            )
            return sharded
        whole.say(f"{WHOLE}: sharded, a step would take {-less:.1%} longer, simulated for {ends}")
        return whole

    @classmethod
    def of_table(
        cls, schedule: Schedule, sizes: JobSizes, build: Build = catalog.build
    ) -> PipelineAdapter:
        """Create the adapter of a finished schedule, such as one read from a file.

        Raises:
            UsageError: it is for other sizes, or the layers cannot be placed on it.
        """
        current = CurrentSchedule.of_table(schedule, sizes, build)
        return cls(current, ModelPlacement.of(sizes, schedule))

    # --- the schedule and the model on it

    @property
    def schedule(self) -> Schedule:
        return self.current.schedule

    @property
    def second_model(self) -> SecondModel | None:
        """The model that runs beside the trained one, if any."""
        return self.current.second_model

    @property
    def costs(self) -> Costs:
        return self.current.costs

    @property
    def physical(self) -> PhysicalPlacement:
        return self.placed.physical

    @property
    def layer_layout(self) -> StageLayout:
        """Value for ``config.pipeline_model_parallel_layout``."""
        return self.placed.layout

    @property
    def chunks(self) -> int:
        return self.placed.chunks

    @property
    def virtual_pipeline_size(self) -> int | None:
        """Value for ``virtual_pipeline_model_parallel_size``."""
        return self.chunks if self.chunks > 1 else None

    @property
    def embedding_ranks(self) -> Callable[[list[int]], list[int]] | None:
        """Embedding ranks for ``initialize_model_parallel``: a V has both ends on one rank."""
        return (lambda ranks: [ranks[-1]]) if self.physical.mirrored else None

    def pre_process(self, pp_rank: int, vp_stage: int | None) -> bool:
        return self.physical.holds_embedding(pp_rank, vp_stage)

    def post_process(self, pp_rank: int, vp_stage: int | None) -> bool:
        return self.physical.holds_output(pp_rank, vp_stage)

    @property
    def is_encoding(self) -> bool:
        """Whether the forward step runs for an encoder, with what a first stage reads."""
        return self.encoder is not None and self.encoder.is_encoding

    @property
    def encoder(self) -> EncoderPart | None:
        """The part that runs an encoder on every rank, if any."""
        parts = self._parts.in_order()
        return next((part for part in parts if isinstance(part, EncoderPart)), None)

    def holds_encoder(self, pp_rank: int, vp_stage: int | None) -> bool:
        """Whether a chunk is to be built with the encoder of the model, if it has one."""
        if self.encoder is not None:
            return (vp_stage or 0) == CHUNK_OF_ENCODER
        return self.pre_process(pp_rank, vp_stage)

    @property
    def predicted_bubble_rate(self) -> float:
        return self.current.bubble_rate

    # --- training

    @cached_property
    def forward_backward_func(self) -> ForwardBackward:
        """Replacement of Megatron's ``forward_backward_func``, with the options given until now.

        Raises:
            UsageError: the schedule is for late updates, and nobody makes them.
        """
        if isinstance(self.schedule.rules, DelayedRules) and DelayedPart not in self._parts:
            raise UsageError(
                f"{self.schedule.name}: the schedule was built for updates that come one step "
                "late: call delay_updates first, or leave pipeline_update_delay out"
            )
        if self.current.splits_backward:
            self._add(UnsplitLayers(self._splits, self.current.count_unsplit))
        parts = self._parts.in_order()
        return ForwardBackward(self.physical, self.planned.program_for, self._splits, parts)

    @property
    def finalize_model_grads(self) -> Callable[..., None]:
        """Value for ``config.finalize_model_grads_func``."""
        return model_ends.finalize_with_tied_weights if self.physical.mirrored else _finalize

    def prepare_model(self, model_chunks: list[Any]) -> None:
        """Tie the embeddings and split the linear layers; before data parallelism wraps them.

        Where layers draw from streams of their own, their forwards choose these from now on.

        Raises:
            UsageError: the vocabulary cannot be sharded as requested.
        """
        model_ends.tie_embeddings(model_chunks)
        for part in self._parts.in_order():
            part.prepare_model(model_chunks)
        for chunk, split in zip(model_chunks, self._splits, strict=True):
            model_ends.convert_inputs(chunk)
            split_linear_layers(chunk, split)
            if self.current.splits_backward:
                split_transformer_engine(chunk, split, self.schedule.name)
        for part in self._parts.in_order():
            part.finish_model(model_chunks)

    @property
    def reads_on_every_stage(self) -> bool:
        """Whether stages between the first and the last also need data."""
        return any(part.reads_on_every_stage for part in self._parts.in_order())

    def track(self, memory: ActivationMemory | None) -> None:
        """Count the activations of the steps from the next one on; None to stop."""
        self.forward_backward_func.track(memory)

    # --- options

    def _add(self, part: StepPart) -> None:
        assert "forward_backward_func" not in vars(self), "parts come before the function"
        self._parts.add(part)

    def part(self, kind: type[_Part]) -> _Part:
        """Return the part of a type, such as the one that watches or connects the ranks."""
        return self._parts[kind]

    def draw_by_layer(
        self, seed: int, steps_done: Callable[[], int], *, replicas_differ: bool = False
    ) -> None:
        """Let each layer draw weights and dropout masks from separate RNG states.

        A layer's weights then follow from the seed, its dropout masks from seed, step and
        microbatch, so neither depends on the schedule, nor on the pipeline size, nor on whether
        training was resumed. To be called before the model is built. Weights are those of a model
        that is built under :meth:`drawing_weights`.

        Args:
            seed: the user's seed.
            steps_done: returns the number of steps since the start of training, resumed or not.
            replicas_differ: data-parallel ranks draw differently (``data_parallel_random_init``).
        """
        streams = LayerStreams(seed, replicas_differ=replicas_differ)
        self._add(StreamsPart(streams, steps_done))

    @property
    def draws_by_layer(self) -> bool:
        return StreamsPart in self._parts

    def drawing_weights(self) -> AbstractContextManager[None]:
        """Return the context for Megatron to build a chunk in, with its layers' own streams."""
        if not self.draws_by_layer:
            return nullcontext()
        return layers_draw_weights(self.part(StreamsPart).streams)

    def watch(self, seconds: float | None, distributed_timeout_minutes: float) -> None:
        """Let a watchdog end the job after ``seconds`` without progress in a step; 0 is never.

        Without a number it is a little sooner than torch's own timeout, whose message names a
        collective and no rank. To be called before the first step.

        Raises:
            UsageError: the number is negative.
        """
        if seconds is not None and seconds < 0:
            raise UsageError(f"--pipeline-timeout is {seconds:g}: it must be 0 or greater")
        default = 0.9 * 60 * distributed_timeout_minutes
        self._add(WatchPart((default if seconds is None else seconds) or None))

    def abandon(self) -> None:
        """Stop the threads of a run whose process groups are gone; waits for nothing.

        As with an in-process restart, which begins again with another adapter.
        """
        for part in self._parts.in_order():
            part.abandon()

    def create_graphs(self, helper: Any, capture: Callable[[Any], None] | None = None) -> None:
        """Capture Transformer-Engine's CUDA graphs in the order of the schedule.

        To be called in place of ``helper.create_cudagraphs()``, which is what ``capture`` is unless
        it is given. Training keeps to the number of microbatches from then on. The model has to be
        wrapped in ``DistributedDataParallel`` on a side stream, as Megatron-LM does it: CUDA
        refuses to capture gradients that autograd accumulates on the default stream.

        Args:
            helper: a ``TECudaGraphHelper`` of Megatron.
        """
        rank = self.physical.logical(parallel_state.get_pipeline_model_parallel_rank())

        def captured(num_microbatches: int) -> Schedule:
            schedule = self.current.program_for(num_microbatches, False, False).schedule
            self.part(GraphsPart).keep_to(schedule)
            return schedule

        self.part(WatchPart).forget_marks()
        graphs.create(capture or type(helper).create_cudagraphs, helper, captured, rank)

    def train_adapters(
        self, model: AdapterModel, steps_done: Mapping[str, int] | None = None
    ) -> SharedPipelinePart:
        """Train the adapters that the schedule was built for; before the first step.

        Args:
            model: selects and updates the adapters of the model chunks of this rank.
            steps_done: the steps that each adapter has done before, by name; none if left out.

        Raises:
            UsageError: the schedule was built for one training.
        """
        part = SharedPipelinePart(self.current, model, steps_done)
        self._add(part)
        return part

    def encode_ahead(self, may_read_ahead: Callable[[], bool]) -> None:
        """Run a frozen encoder for the next step, as the schedule was built for.

        To be called before the first step.

        Args:
            may_read_ahead: returns whether the step that begins may read the microbatches of the
                next step. It may not where there is none. Where the state of the data iterators is
                saved behind a step, it may not read beyond that step.

        Raises:
            UsageError: the schedule was built without such an encoder.
        """
        if EncoderAheadPart not in self._parts:
            raise UsageError(
                f"{self.schedule.name}: the schedule has no passes of an encoder that runs ahead: "
                "give JobSizes a second_model with the role AHEAD, and a copy on each rank"
            )
        self.part(EncoderAheadPart).may_read_ahead = may_read_ahead

    def teach_with(self, teacher: FrozenModel) -> FrozenModel:
        """Run the forwards of a frozen model beside training; before the first step.

        Returns:
            The teacher, whose ``output`` the forward step reads.

        Raises:
            UsageError: the schedule was built without a teacher.
        """
        if FrozenModelPart not in self._parts:
            raise UsageError(
                f"{self.schedule.name}: the schedule has no passes of a teacher: give JobSizes a "
                "second_model with the role TEACHER"
            )
        self.part(FrozenModelPart).teacher = teacher
        return teacher

    def delay_updates(
        self,
        optimizer: Any,
        scheduler: Any,
        chunks: list[Any],
        may_read_ahead: Callable[[], bool] = lambda: True,
        *,
        feedback: float | None = None,
        prediction: str | None = None,
    ) -> DelayedPart:
        """Let updates come one step late, as the schedule was built for; before the first step.

        Collective over the job. ``drain`` of the result has to be called before anything else
        reads weights or states of the optimizer, but not before an evaluation by the schedule;
        before a checkpoint, ``restart``.

        Args:
            optimizer: Megatron's, whose functions are replaced: see :class:`LateUpdates`.
            scheduler: of the learning rate, None without.
            chunks: of this rank, wrapped for data parallelism.
            may_read_ahead: returns whether the step that begins may read the first microbatches of
                the next step. It may not where there is none, or a ``restart`` comes between.
            feedback: strength of the error feedback, 0 for none; by default 1 with Muon and 0 with
                others.
            prediction: ``linear`` or ``momentum``: compute with weights predicted along the last
                update, or along the momentum of SGD, Adam or AdamW.

        Raises:
            UsageError: the schedule was built without a delay, or the optimizer is not served.
        """
        programs = CallPrograms(self.schedule, self.costs)
        updates = LateUpdates(optimizer, scheduler, chunks, feedback, prediction)
        part = DelayedPart(programs, updates, may_read_ahead)
        self._add(part)
        return part

    def connect_with(self, options: GroupOptions) -> None:
        """Make the process groups of the messages with these options; before the first step."""
        self._add(ChannelsPart(options))

    def copy_with(self, engines: HostCopyEngines) -> None:
        """Move activations to the host with these engines, not those of the device."""
        self._add(OffloadPart(engines))

    def post_validate(
        self, optimizer: Any, scheduler: Any, chunks: list[Any], *, on_host: bool = False
    ) -> PostValidation:
        """Let the optimizer step without waiting for the whole pipeline; collective over the job.

        Every step has to be followed by one of the scheduler, and ``settle`` has to be called
        before anything else reads weights, gradients or states: see :class:`PostValidation`.

        Raises:
            UsageError: the output layer is vocabulary parallel.
        """
        if self.costs.feature(Vocabulary) is not None:
            raise UsageError(
                "optimizer post-validation cannot be combined with a vocabulary-parallel output "
                "layer: the forwards that run again have no passes of it"
            )
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        ranks = self.physical.pipeline_ranks(pipeline)
        validation = PostValidation(optimizer, scheduler, chunks, ranks, on_host=on_host)
        self.forward_backward_func.add(PostValidationPart(validation))
        return validation

    def profile(self, path: Path | None, every: int | None, *, is_named: bool = True) -> None:
        """Measure the job's passes and links in its first iterations, and use the measured costs.

        ``auto`` rebuilds its schedule for the measured costs, on the placement of the model, and
        switches to it if it is faster; so does every schedule with ``every``. The first rank of the
        job reports the result. To be called before the first step.

        Args:
            path: the file for ``megatron-zb plan --profile``; None for none.
            every: iterations from one profile to the next; None for a single one.
            is_named: the schedule is no finished table, which cannot be rebuilt.

        Raises:
            UsageError: ``every`` is less than a profile takes, or there is nothing to tell apart.
        """
        use = ProfileUse.of(self.current, path, every, is_named=is_named)
        if use is not None:
            times_copies = path is not None or bool(
                self.costs.feature(Offload) or self.schedule.offloaded
            )
            host = (lambda: self.part(OffloadPart).host) if times_copies else None
            letters = self.layer_layout.letters
            self._add(ProfilePart(self.current, letters, self._splits, use, host))

    def count_iterations(self, left: Callable[[], int | None]) -> None:
        """Tell a profile how many iterations the run has from the current one on, None if unknown.

        A run that is too short for it then says so at its first iteration.
        """
        if ProfilePart in self._parts:
            self.part(ProfilePart).iterations_left = left

    def missing_profile(self) -> str | None:
        """Return a line about a profile that was requested and not completed, at the run's end."""
        return self.part(ProfilePart).what_is_missing() if ProfilePart in self._parts else None

    def verify(self) -> None:
        """Compare the gradients of the first training step with those of an unsplit backward.

        To be called before the first step, which then takes twice as long.
        """
        self._add(Verification(self._splits))

    def warm_up(self, *, always: bool = False) -> None:
        """Let every stage run its kinds of passes before the first training step, all at once.

        What the passes change is undone. To be called before the first step.

        Args:
            always: on CPU ranks as well, where there is little to compile.
        """
        self._add(WarmUp(self._splits, always=always))

    # --- start-up lines

    def say(self, line: str) -> None:
        """Add a line to those logged at the start."""
        self._said.append(line)

    def describe(self) -> str:
        """Return the start-up lines: schedule, layers on ranks, expected bubble rate and memory."""
        said = ["each layer draws from separate RNG states"] if self.draws_by_layer else []
        current = self.current
        report = StartReport(
            current.timeline, current.costs, self.layer_layout, self.predicted_bubble_rate
        )
        return report.text(self.placed.balance, [*current.remarks, *said, *self._said])


# --- from the flags of a run


_MULTIPLE, _USUAL_MULTIPLE = "make_vocab_size_divisible_by", 128


@dataclass(frozen=True)
class Chunks:
    """The number of model chunks per rank that a flag requests, None where none does."""

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
    """Return what is assumed of copies to the host, None if nothing may be offloaded."""
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
    """Create the adapter that the flags request; they choose a schedule.

    Args:
        args: the flags of the run, see :mod:`megatron_zb.job.settings`.
        sizes: model and batch.
        chunks: the number of chunks per rank that is requested.
        build: builds schedules, such as on one rank for all.
        group_options: options for the process groups of messages, if not the usual ones.

    Raises:
        UsageError: the flags cannot be combined, or the schedule cannot be built.
    """
    named = args.pipeline_schedule_file is None
    why_whole = _why_whole(args, sizes) if args.pipeline_vocabulary == "auto" else None
    if named:
        adapter = _named(args, sizes, chunks, build, may_shard=why_whole is None)
    else:
        adapter = _of_file(Path(args.pipeline_schedule_file), sizes, chunks, build)
    adapter.watch(args.pipeline_timeout, args.distributed_timeout_minutes)
    if group_options is not None:
        adapter.connect_with(group_options)
    if args.pipeline_verify:
        adapter.verify()
    if args.pipeline_warm_up != "off" and not getattr(args, "pipeline_update_delay", 0):
        adapter.warm_up(always=args.pipeline_warm_up == "on")
    profile = None if args.pipeline_profile is None else Path(args.pipeline_profile)
    for name, value in vars(args).items():
        if isinstance(value, Written):
            setattr(args, name, str(value))  # checkpoints have the arguments as plain values
    if versions.graphs_of(args) is versions.Graphs.NONE and adapter.current.is_profiled:
        adapter.profile(profile, args.pipeline_replan_every, is_named=named)
    if why_whole is not None:
        adapter.say(f"{WHOLE}: {why_whole}")
    return adapter


def _settings(
    args: argparse.Namespace, sizes: JobSizes, chunks: Chunks, *, may_shard: bool
) -> ScheduleSettings:
    """Return the settings of a named schedule: limits have a share, and choices go to who has them.

    Args:
        may_shard: whether the output layer may be vocabulary parallel.
    """
    family, profile, scale = catalog.family(args.pipeline_schedule), sizes.profile, 1.0
    if profile is not None:
        microbatch = getattr(args, "micro_batch_size", None) or profile.model.microbatch
        context = getattr(args, "context_parallel_size", None) or profile.model.context
        scale = microbatch * profile.model.context / (profile.model.microbatch * context)
    whole = None if profile is None else scale * profile.one_f_one_b_bytes
    limits = {
        name: Limit.given(given).with_share(flag_of(name), whole)
        for name in ("pipeline_memory_limit", "pipeline_host_limit")
        if (given := getattr(args, name)) is not None
    }
    group_size = getattr(args, "microbatch_group_size_per_vp_stage", None)
    return ScheduleSettings.of(
        args,
        num_virtual_stages_per_pipeline_rank=chunks.number if family.takes_chunks else None,
        microbatch_group_size_per_vp_stage=group_size if family.takes_group_size else None,
        pipeline_vocabulary=args.pipeline_vocabulary if may_shard else "off",
        **limits,
    )


def _of_file(file: Path, sizes: JobSizes, asked: Chunks, build: Build) -> PipelineAdapter:
    table = interchange.from_csv(file)
    chunks = table.placement.chunks
    asked.check(chunks, f"--pipeline-schedule-file {file}")
    _check_ends(sizes.layers, chunks)
    return PipelineAdapter.of_table(table, sizes, build)


def _named(
    args: argparse.Namespace, sizes: JobSizes, asked: Chunks, build: Build, *, may_shard: bool
) -> PipelineAdapter:
    layers, settings = sizes.layers, _settings(args, sizes, asked, may_shard=may_shard)
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
            f"its {rows} rows cannot be sharded evenly for {p} pipeline ranks: make "
            f"{flag_of(_MULTIPLE)} a multiple of {p}"
        )
    return None
