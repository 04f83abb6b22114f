"""The replacement of Megatron's ``forward_backward_func``.

The contract is that of
``megatron.core.pipeline_parallel.schedules``: the same keywords, the same duties, the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.utils import get_model_config
from torch.distributed.distributed_c10d import _get_default_store

from megatron_zb.megatron_core import expert_metrics, graphs, refusals, versions
from megatron_zb.megatron_core.buckets import BucketReductions, overlaps_grad_reduce
from megatron_zb.megatron_core.cut_embedding import FirstStage
from megatron_zb.megatron_core.data_parallel import DataParallelSync, no_grad_sync
from megatron_zb.megatron_core.paired_stage import PairedStage, run_pair
from megatron_zb.megatron_core.part_marks import marking, reading
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.random_streams import LayerStreams
from megatron_zb.megatron_core.redo import Start
from megatron_zb.megatron_core.shared_reading import SharedReadings
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.stages import Iteration, MegatronStage, device, timed
from megatron_zb.megatron_core.unsplit_layers import UnsplitLayers
from megatron_zb.megatron_core.verification import Verification, start_reductions
from megatron_zb.megatron_core.vocabulary import (
    HANDLERS,
    Desk,
    LastStage,
    ShardPasses,
    empty_message,
)
from megatron_zb.megatron_core.vocabulary_shard import CutOutput
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.copy_engines import CopyEngines
from megatron_zb.runtime.copy_times import CopyTimes, copy_times
from megatron_zb.runtime.executor import Transport, run_program
from megatron_zb.runtime.groups import GroupOptions
from megatron_zb.runtime.link_times import clock_ahead, link_times
from megatron_zb.runtime.moved_activations import HostMemory, MovedActivations
from megatron_zb.runtime.observer import NOBODY, Observer, Observers
from megatron_zb.runtime.post_validation import run_from_cut
from megatron_zb.runtime.shaped_channels import ShapedChannels
from megatron_zb.runtime.watchdog.progress import Progress
from megatron_zb.runtime.watchdog.watchdog import Place, Watchdog
from megatron_zb.schedules.passes import Message, PassKind
from megatron_zb.schedules.program.lowering import Program, Run, runs_of
from megatron_zb.schedules.program.rollback import Rollback, rollback
from megatron_zb.schedules.schedule import Schedule

if TYPE_CHECKING:
    from megatron_zb.megatron_core.post_validation import PostValidation
    from megatron_zb.megatron_core.profiling import Measured, Profiling


@dataclass(frozen=True)
class Measurement:
    """Profiling of a job's steps."""

    start: Callable[[], Profiling]
    """Function called at the first step of training, when the process groups exist."""
    use: Callable[[Measured, Iteration], None]
    """Function called with every complete profile, between two steps."""
    copies: bool = False
    """Whether copies to the host and back are timed, too."""


@dataclass(frozen=True)
class StepOptions:
    """Options of all steps of a job."""

    group_options: GroupOptions = field(default_factory=GroupOptions)
    """Options for the process groups of the channels."""
    timeout: float | None = None
    """Seconds without progress after which a watchdog asks all ranks, and ends a job that has
    stopped; None for no watchdog.
    """
    streams: LayerStreams | None = None
    """Random streams of the layers; None for one stream of each rank."""
    steps_done: Callable[[], int] | None = None
    """Function that returns the steps since the start of training; used with ``streams``."""
    measurement: Measurement | None = None
    verifies: bool = False
    """Whether the first training step is compared with one in which nothing is split."""
    count_unsplit: Callable[[list[float]], None] | None = None
    """Function called after the first training step, with the share of each stage's weight
    gradients that B computes since their layers cannot be split; None where nothing is split.
    """
    copy_engines: CopyEngines | None = None
    """Engines that copy activations to the host and back; None for those of the device."""


class _Step(NamedTuple):
    """The passes of a call; ``allocate`` gives an empty tensor for a message."""

    iteration: Iteration
    program: Program
    allocate: Callable[[Message], torch.Tensor]


class ForwardBackward:
    """A pipeline schedule with the calling contract of Megatron's ``forward_backward_func``.

    ``program_for(num_microbatches, forward_only, captured)`` gives the program. The channels
    to other ranks are created at the first call, which is collective over the job.
    """

    def __init__(
        self,
        physical: PhysicalPlacement,
        program_for: Callable[[int, bool, bool], Program],
        splits: list[SplitBackward],
        options: StepOptions,
        output: Callable[[], CutOutput | None] = lambda: None,
    ) -> None:
        self._physical = physical
        self._output = output
        self._program_for = program_for
        self._splits = splits
        self._options = options
        self._channels: Channels | None = None
        self._headers: Channels | None = None
        self._buckets: list[BucketReductions | None] = []
        self._cuts: dict[int, tuple[Program, Rollback]] = {}
        self._activation_memory: ActivationMemory | None = None
        self._host: HostMemory | None = None
        self._shared_readings = SharedReadings()
        self._post_validation: PostValidation | None = None
        self._profiling: Profiling | None = None
        self._verification = Verification(splits) if options.verifies else None
        count = options.count_unsplit
        self._unsplit = UnsplitLayers(splits, physical, count) if count is not None else None
        self._progress = Progress()
        self._watchdog: Watchdog | None = None
        self._graphed: Schedule | None = None
        self._stashed: Schedule | None = None
        self._shares_metrics = True

    def track(self, memory: ActivationMemory | None) -> None:
        """Count the activations of the steps from the next one on; None to stop."""
        self._activation_memory = memory

    @property
    def peak_host_bytes(self) -> int:
        """The most memory of the host that moved activations have ever taken on this rank."""
        return 0 if self._host is None else self._host.taken_bytes

    def validate_with(self, validation: PostValidation) -> None:
        """Let every step also validate the optimizer's last one where that is still open."""
        self._post_validation = validation

    def forget_marks(self) -> None:
        """Wait for the device, and let the watchdog ask it nothing until the next step."""
        if torch.device(device()).type == "cuda":
            torch.cuda.synchronize()
        self._progress.forget_marks()

    def keep_to(self, schedule: Schedule) -> None:
        """Refuse to train in another order than this from now on: graphs have been captured."""
        self._graphed = schedule

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run all microbatches; see Megatron's ``get_forward_backward_func`` for the arguments.

        Returns:
            One entry for each microbatch on the rank that computes the loss, else an empty list.
        """
        del p2p_communicator  # channels of our own
        chunks = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(chunks[0])
        if not forward_only:
            self._before_training_step(num_microbatches)
        if self._options.streams is not None:
            self._options.streams.start_step(None if forward_only else self._steps_done())
        captured = graphs.is_capturing(device())
        program = self._program_for(num_microbatches, forward_only, captured)
        facts = self._facts(program.schedule, forward_only)
        refusals.check_step(config, program.schedule.name, adjust_tensor_shapes_fn, **facts)
        self._start_paged_stash(config, program.schedule, forward_only)
        groups = pg_collection or versions.process_groups()
        iteration = Iteration(
            physical=self._physical,
            pp_rank=groups.pp.rank(),
            config=config,
            pg_collection=groups,
            forward_step_func=forward_step_func,
            data_iterators=self._readings(iterators, groups.pp.rank()),
            model=chunks,
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            total_num_tokens=torch.zeros([], dtype=torch.int, device=device()),
            streams=self._options.streams,
        )
        (shape,) = megatron_schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        allocate = partial(torch.empty, shape, dtype=config.pipeline_dtype, device=device())
        with timed(config, "forward-backward", log_level=1, barrier=config.barrier_with_L1_time):
            step = _Step(iteration, program, self._allocate(config, shape, allocate))
            if self._verification is not None and not forward_only:
                self._run_unsplit(self._verification, step, force_all_reduce)
            with no_grad_sync(config, chunks), self._measuring(iteration):
                self._run(step)
            if not forward_only:
                self._reduce_gradients(iteration, force_all_reduce)
                self._end_training_step(iteration, program.schedule.name)
                if not captured:
                    self._share_metrics(iteration)
        self._tell_what_was_measured(iteration, program.schedule, allocate)
        return iteration.forward_data_store

    def _readings(self, iterators: list[Any], pp_rank: int) -> list[Any]:
        """Return the iterators of all chunks; one rank with both ends of a model reads once."""
        held = [self._physical.stage(pp_rank, chunk) for chunk in range(len(iterators))]
        ends = (0, self._physical.placement.num_stages - 1)
        if len(held) < 2 or any(end not in held for end in ends):
            return iterators
        return self._shared_readings.shared(iterators, *map(held.index, ends))

    def _allocate(
        self, config: Any, shape: Any, allocate: Callable[[], torch.Tensor]
    ) -> Callable[[Message], torch.Tensor]:
        """Return the function that gives an empty tensor for a message."""
        placement, output = self._physical.placement, self._output()
        stages = placement.num_stages

        def empty(message: Message) -> torch.Tensor:
            if output is None or message.stage < stages:
                return allocate()
            return empty_message(message, shape, config, output, placement)

        return empty

    def close(self) -> None:
        """Release the channels, collectively; the next call creates new ones."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        for channels in filter(None, (self._channels, self._headers)):
            channels.close()
        self._channels = self._headers = None

    def _run(self, step: _Step, *, overlaps: bool = True) -> None:
        """Run the passes of a step, whose reductions start within it where it ``overlaps`` them."""
        iteration, program, allocate = step
        transport = self._transport(iteration, program.schedule)
        logical = self._physical.logical(iteration.pp_rank)
        if not iteration.forward_only:
            iteration.sync = self._sync(iteration, program, logical, overlaps=overlaps)
        stages = self._stages(iteration, program.schedule)
        listening = iteration.sync.listening() if iteration.sync else nullcontext()
        with listening, self._looked_at() as observer:
            if not self._awaits_validation(iteration):
                run_program(
                    program,
                    logical,
                    stages,
                    transport,
                    allocate,
                    observer,
                    handlers=HANDLERS,
                    pairs=run_pair,
                )
            else:
                self._run_from_cut(step, logical, stages, transport)

    def _run_unsplit(
        self, verification: Verification, step: _Step, force_all_reduce: bool | None
    ) -> None:
        """Run a step with nothing split and all reductions at its end, to compare the next with."""
        iteration = step.iteration
        profiling, self._profiling = self._profiling, None
        try:
            with verification.unsplit(iteration):
                with no_grad_sync(iteration.config, iteration.model):
                    self._run(step, overlaps=False)
                if not iteration.config.grad_sync_func:
                    start_reductions(iteration.model)
                self._reduce_gradients(iteration, force_all_reduce)
        finally:
            self._profiling = profiling

    def _end_training_step(self, iteration: Iteration, schedule: str) -> None:
        if self._profiling is not None:
            self._profiling.end_step()
        if self._verification is not None:
            verification, self._verification = self._verification, None
            said = verification.check(iteration, schedule)
            if torch.distributed.get_rank() == 0:
                print(f"megatron_zb: {said}", flush=True)
        if self._unsplit is not None:
            self._unsplit.after_step(iteration)

    def _share_metrics(self, iteration: Iteration) -> None:
        """Make the metrics of experts known to all ranks, once: no later step counts others."""
        if self._shares_metrics and getattr(iteration.config, "num_moe_experts", None):
            expert_metrics.share(iteration.pg_collection.pp, device())
        self._shares_metrics = False

    def _facts(self, schedule: Schedule, forward_only: bool) -> dict[str, bool]:
        """Return what CUDA graphs depend on in a step, by the names in ``refusals.yaml``."""
        return {
            "draws_by_layer": self._options.streams is not None,
            "is_measured": self._options.measurement is not None,
            "is_validated_later": self._post_validation is not None,
            "has_another_order": self._graphed not in (None, schedule) and not forward_only,
        }

    def _start_paged_stash(self, config: Any, schedule: Schedule, forward_only: bool) -> None:
        """Start a step of the paged stash, which keeps to the order that it has recorded once."""
        if not getattr(config, "moe_paged_stash", False):
            return
        if not forward_only and schedule != self._stashed:
            versions.forget_order_of_paged_stash()
            self._stashed = schedule
        versions.start_paged_stash(config, forward_only=forward_only)

    def _steps_done(self) -> int:
        steps_done = self._options.steps_done
        assert steps_done is not None, "streams of layers need the number of the step"
        return steps_done()

    def _before_training_step(self, num_microbatches: int) -> None:
        if self._options.measurement is None:
            return
        if self._profiling is None:
            self._profiling = self._options.measurement.start()
        self._profiling.before_step(num_microbatches)

    @contextmanager
    def _looked_at(self) -> Iterator[Observer]:
        """Count a step, and return its observer; what is captured is no step, and nobody looks."""
        assert self._channels is not None
        with self._channels.capturing(graphs.is_capturing(device())) as captures:
            if captures:
                yield NOBODY
                return
            with self._progress.step():
                yield self._observer()

    def _observer(self) -> Observer:
        others = self._profiling.observers if self._profiling is not None else ()
        return Observers([self._progress, *others]) if others else self._progress

    @contextmanager
    def _measuring(self, iteration: Iteration) -> Iterator[None]:
        if self._profiling is None or iteration.forward_only:
            yield
            return
        usual = self._activation_memory
        parameters = (p for chunk in iteration.model for p in chunk.parameters())
        on_gpu = torch.device(device()).type == "cuda"
        marking = partial(self._marking, iteration)
        try:
            with self._profiling.step(usual, parameters, on_gpu, marking) as counter:
                self._activation_memory = counter
                yield
        finally:
            self._activation_memory = usual

    @contextmanager
    def _marking(self, iteration: Iteration, mark: Callable[[str], None]) -> Iterator[None]:
        usual = iteration.forward_step_func
        iteration.forward_step_func = reading(mark, usual)
        try:
            with marking(mark, iteration.model, [split.queue for split in self._splits]):
                yield
        finally:
            iteration.forward_step_func = usual

    def _tell_what_was_measured(
        self, iteration: Iteration, schedule: Schedule, allocate: Callable[[], torch.Tensor]
    ) -> None:
        profiling, measurement = self._profiling, self._options.measurement
        if profiling is None or iteration.forward_only or not profiling.is_complete:
            return
        assert self._channels is not None
        assert measurement is not None
        logical = self._physical.logical(iteration.pp_rank)
        channels, placement = self._channels, self._physical.placement
        more = schedule.rules.more_links(placement)
        links = link_times(channels, placement, logical, lambda: allocate().zero_(), more)
        ahead = clock_ahead(channels, placement, logical, device())
        copies = self._copy_times() if measurement.copies else None
        measurement.use(profiling.measured(links, allocate().nbytes, ahead, copies), iteration)

    def _copy_times(self) -> CopyTimes:
        host = self._host_memory()
        return copy_times(host.engines, host.device)

    def _awaits_validation(self, iteration: Iteration) -> bool:
        validation = self._post_validation
        if validation is not None and iteration.forward_only:
            validation.settle()
        return validation is not None and validation.is_open

    def _run_from_cut(
        self,
        step: _Step,
        logical: int,
        stages: dict[int, MegatronStage],
        transport: Transport,
    ) -> None:
        iteration, program, allocate = step
        validation = self._post_validation
        assert validation is not None
        start = Start(iteration.data_iterators)
        iteration.data_iterators = start.data_iterators

        def was_right() -> bool:
            right = validation.was_right()
            if right:
                start.forget()
            return right

        def start_anew() -> None:
            validation.mend()
            start.go_back()
            iteration.forward_data_store.clear()
            iteration.total_num_tokens.zero_()

        run_from_cut(
            program,
            self._cut(program),
            logical,
            stages,
            transport,
            allocate,
            is_right=was_right,
            start_anew=start_anew,
            observer=self._observer(),
        )

    def _cut(self, program: Program) -> Rollback:
        count = program.schedule.num_microbatches
        if count not in self._cuts or self._cuts[count][0] is not program:
            self._cuts[count] = (program, rollback(program))
        return self._cuts[count][1]

    def _stages(self, iteration: Iteration, schedule: Schedule) -> dict[int, Any]:
        stages: dict[int, Any] = {}
        overlaps = getattr(iteration.config, "overlap_moe_expert_parallel_comm", False)
        profiling = self._profiling
        in_pairs = schedule.pairs or (
            profiling is not None and profiling.is_for_pairs and not iteration.forward_only
        )
        kind = PairedStage if overlaps and in_pairs else MegatronStage
        output, desk = self._output(), Desk()
        for vp_stage, split in enumerate(self._splits):
            split.hooks_need_gradients = overlaps_grad_reduce(iteration.model[vp_stage])
            stage = kind(iteration, vp_stage, split)
            if output is not None and stage.is_output:
                stage = LastStage(iteration, vp_stage, split, output, desk)
            elif output is not None and self._physical.stage(iteration.pp_rank, vp_stage) == 0:
                assert output.embedding.lookups is not None
                stage = FirstStage(iteration, vp_stage, split, output.embedding.lookups)
            number = self._physical.stage(iteration.pp_rank, vp_stage)
            stage.dropped = frozenset(m for held, m in schedule.dropped if held == number)
            stage.moved = frozenset(m for held, m in schedule.moved if held == number)
            if stage.moved:
                stage.moves = self._moves(iteration.model[vp_stage])
            stage.activation_memory = split.queue.activation_memory = self._activation_memory
            if iteration.sync is not None:
                split.queue.on_gradient = iteration.sync.listener(vp_stage)
            stages[number] = stage
        if output is not None:
            logical = self._physical.logical(iteration.pp_rank)
            shard = self._physical.placement.num_stages + logical
            here = desk if logical == output.end else None
            stages[shard] = passes = ShardPasses(iteration, output, here, stages.get(0))
            passes.activation_memory = self._activation_memory
        return stages

    def _host_memory(self) -> HostMemory:
        if self._host is None:
            here = torch.device(device())
            self._host = HostMemory(here, self._options.copy_engines)
        return self._host

    def _moves(self, chunk: torch.nn.Module) -> MovedActivations:
        buffers = torch.nn.Module.buffers(chunk)  # Megatron's own wrappers have others
        moves = MovedActivations(self._host_memory(), [*chunk.parameters(), *buffers])
        moves.activation_memory = self._activation_memory
        return moves

    def _sync(
        self, iteration: Iteration, program: Program, logical: int, *, overlaps: bool
    ) -> DataParallelSync:
        held = self._physical.placement.stages_of[logical]
        order: list[int] = []
        if iteration.config.param_sync_func is not None:
            order = [held.index(stage) for stage in _by_first_forward(program, logical)]
        return DataParallelSync(
            iteration.config,
            iteration.model,
            order,
            passes=self._weight_passes(program, logical),
            buckets=self._bucket_reductions(iteration.model)
            if overlaps
            else [None] * len(iteration.model),
        )

    def _weight_passes(self, program: Program, logical: int) -> list[int]:
        """Count the passes of each chunk that bring weight gradients."""
        number = program.schedule.num_microbatches
        counts = [number] * len(self._splits)
        output = self._output()
        if output is None:
            return counts
        kinds = {run.work.kind for run in _passes(program, logical)}
        for kind, chunk in ((PassKind.V, output.chunk), (PassKind.G, output.embedding.chunk)):
            counts[chunk] += number if kind in kinds else 0
        return counts

    def _bucket_reductions(self, chunks: list[Any]) -> list[BucketReductions | None]:
        """Return the bucket reductions of the chunks, kept from step to step with their counts."""
        known = {id(b.chunk): b for b in self._buckets if b is not None}
        self._buckets = [
            known.get(id(c)) or BucketReductions(c) if overlaps_grad_reduce(c) else None
            for c in chunks
        ]
        return self._buckets

    def _connected(self, pp_group: torch.distributed.ProcessGroup, schedule: Schedule) -> Channels:
        if self._channels is None:
            ranks, placement = self.pipeline_ranks(pp_group), self._physical.placement
            self._channels = Channels(
                ranks,
                placement,
                device(),
                more_links=schedule.rules.more_links(placement),
                options=self._options.group_options,
            )
            self._watch(ranks, schedule)
        return self._channels

    def _transport(self, iteration: Iteration, schedule: Schedule) -> Transport:
        pp_group = iteration.pg_collection.pp
        channels = self._connected(pp_group, schedule)
        channels.activation_memory = self._activation_memory
        if not iteration.config.variable_seq_lengths:
            return channels
        if self._headers is None:
            ranks, options = self.pipeline_ranks(pp_group), self._options.group_options
            placement = self._physical.placement
            self._headers = Channels(
                ranks,
                placement,
                "cpu",
                more_links=schedule.rules.more_links(placement),
                backend="gloo",
                options=options,
            )
        return ShapedChannels(channels, self._headers)

    def _watch(self, ranks: list[int], schedule: Schedule) -> None:
        on_gpu = torch.device(device()).type == "cuda"
        self._progress = Progress(on_gpu=on_gpu, phases=PHASES, schedule=schedule)
        timeout = self._options.timeout
        if timeout is not None:
            me, job = torch.distributed.get_rank(), range(torch.distributed.get_world_size())
            place = Place(ranks.index(me), tuple(ranks), tuple(job))
            store = torch.distributed.PrefixStore("megatron_zb/watchdog", _get_default_store())
            self._watchdog = Watchdog(self._progress, place, store, timeout)

    def pipeline_ranks(self, pp_group: torch.distributed.ProcessGroup) -> list[int]:
        """Return the global ranks of a pipeline in logical order."""
        ranks = torch.distributed.get_process_group_ranks(pp_group)
        return ranks[::-1] if self._physical.mirrored else ranks

    def _reduce_gradients(self, iteration: Iteration, force_all_reduce: bool | None) -> None:
        config = iteration.config
        if config.finalize_model_grads_func is None:
            return
        tokens = iteration.total_num_tokens if config.calculate_per_token_loss else None
        config.finalize_model_grads_func(
            iteration.model,
            tokens,
            pg_collection=iteration.pg_collection,
            force_all_reduce=force_all_reduce,
        )


def _by_first_forward(program: Program, logical: int) -> list[int]:
    """Return the stages of a rank in the order of their first F."""
    passes = (run.work for run in _passes(program, logical))
    return list(dict.fromkeys(p.stage for p in passes if p.kind is PassKind.F))


def _passes(program: Program, logical: int) -> Iterator[Run]:
    return runs_of(program.ranks[logical])


# What Megatron does between two steps, by its functions: for the watchdog's report.
PHASES = {
    ("megatron.core.dist_checkpointing.", "save"): "writing a checkpoint",
    ("megatron.training.checkpointing", "save_checkpoint"): "writing a checkpoint",
    ("megatron.core.dist_checkpointing.", "load"): "reading a checkpoint",
    ("megatron.core.optimizer.", "step"): "in the optimizer step",
    ("megatron.core.distributed.finalize_model_grads", "finalize_model_grads"): "reducing "
    "gradients",
    ("megatron.training.training", "evaluate"): "in an evaluation",
}
