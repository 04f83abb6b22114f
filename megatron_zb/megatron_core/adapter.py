"""The adapter with which a training script runs a pipeline schedule inside Megatron."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads as _finalize

from megatron_zb.errors import UsageError
from megatron_zb.measured.balance import (
    TRANSFER,
    Balance,
    Ends,
    balanced,
    costs_of,
    with_counted_vocabulary,
)
from megatron_zb.measured.exchange import with_exchange
from megatron_zb.megatron_core import graphs, model_ends, versions
from megatron_zb.megatron_core.connections import ChannelsPart, WatchPart
from megatron_zb.megatron_core.forward_backward import ForwardBackward
from megatron_zb.megatron_core.graphs import GraphsPart
from megatron_zb.megatron_core.initialisation import layers_draw_weights
from megatron_zb.megatron_core.linear import split_linear_layers
from megatron_zb.megatron_core.parts import PartList
from megatron_zb.megatron_core.placement import PhysicalPlacement, StageLayout
from megatron_zb.megatron_core.post_validation import PostValidation, PostValidationPart
from megatron_zb.megatron_core.profiled_steps import ProfilePart
from megatron_zb.megatron_core.profiling import ITERATIONS, PAIRED
from megatron_zb.megatron_core.random_streams import LayerStreams
from megatron_zb.megatron_core.replanning import Replanning
from megatron_zb.megatron_core.report import StartReport
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.stages import OffloadPart, StreamsPart
from megatron_zb.megatron_core.step import StepPart
from megatron_zb.megatron_core.transformer_engine import split_transformer_engine
from megatron_zb.megatron_core.verification import UnsplitLayers, Verification
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.groups import GroupOptions
from megatron_zb.runtime.offload import HostCopyEngines
from megatron_zb.runtime.weight_grad import WeightGradQueue
from megatron_zb.schedules import catalog, layout
from megatron_zb.schedules.catalog import Build
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.layout import Layers, Letters
from megatron_zb.schedules.limit import Limit
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement, looped, wave
from megatron_zb.schedules.program.lowering import Program, lower
from megatron_zb.schedules.request import keeps
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import simulate

INPUT = 1 / 17
"""What the input of a layer takes of its activation: 2 of about 34 bytes a number in 16 bits
(Korthikanti et al., arXiv 2205.05198, without those of attention that are computed again)."""

# For another number of microbatches than a table's: evaluation, or a batch that is ramped up.
_SUBSTITUTE = "auto"


_Part = TypeVar("_Part", bound=StepPart)


class PipelineAdapter:
    """One schedule on one job. Build it with :meth:`create`, before any process group exists."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        memory_limit: Limit | None,
        letters: Letters,
        *,
        host_limit: Limit | None = None,
        group_size: int | None = None,
        back_to_back: bool = False,
        balance: Balance | None = None,
        keeps_places: bool = False,
        build: Build = catalog.build,
    ) -> None:
        versions.warn_of_core()
        self.schedule = schedule
        self._build = build
        self.costs = costs
        self._memory_limit, self._host_limit = memory_limit, host_limit
        self._is_measured = False
        self._group_size = group_size
        self._back_to_back = back_to_back
        self.physical = PhysicalPlacement(schedule.placement)
        self.layer_layout = StageLayout(letters, self.physical)
        self._balance = balance
        self.keeps_places = keeps_places
        """Whether every rank holds the layers that it has in Megatron without a schedule."""
        self._splits = [SplitBackward(WeightGradQueue()) for _ in range(self.chunks)]
        self.program_for = lru_cache(maxsize=16)(self._build_program)
        self._parts = PartList(self.physical, cuts_vocabulary=costs.vocabulary is not None)
        self._said: list[str] = []
        self.unsplit_shares: Sequence[float] = []
        """Share of each stage's weight gradients that B computes, once a step has shown it."""

    @classmethod
    def create(
        cls,
        name: str,
        *,
        pipeline_size: int,
        num_microbatches: int,
        layers: Layers,
        layer_layout: str | Ends | None = None,
        memory_limit: Limit | None = None,
        chunks: int | None = None,
        group_size: int | None = None,
        back_to_back: bool = False,
        ends: Ends | None = None,
        placement: Placement | None = None,
        vocabulary: float | None = None,
        overlaps_exchange: bool = False,
        recomputes: bool = False,
        copy: float | None = None,
        host_limit: Limit | None = None,
        build: Build = catalog.build,
    ) -> PipelineAdapter:
        """Build the schedule and place the layers.

        Args:
            name: one of ``schedules.names()``.
            layers: the layers to place, spread evenly unless there is a ``layer_layout``.
            layer_layout: the layers of every stage in model order, such as ``Ett|tt|tt|ttL``, or
                the costs of the model's ends, to balance the stages. ``auto`` takes the V for a
                text with two stages for each rank, as ``plan`` does, a zig-zag for four.
            memory_limit: the most activation memory of a rank.
            chunks, group_size, back_to_back: see ``schedules.build``.
            ends: the costs of the model's ends, if known: ``auto`` chooses its placement by them,
                which stays when costs have been measured.
            placement: the only placement that ``auto`` may choose.
            vocabulary: the number of layers that the output layer counts for, if it is to be cut
                along the vocabulary over all pipeline ranks.
            overlaps_exchange: a forward and a backward may run in one pass, so that what experts
                exchange in one hides behind the other.
            recomputes: activations may be dropped, and computed again before their backward, where
                that is faster under the memory limit.
            copy: what copying an activation to the host takes, as a share of the passes that use
                it, unless the profile that balances layers tells; activations may be moved there
                where that is faster. None: none moves.
            host_limit: the most memory of the host that the activations of a rank may take.
            build: the function that builds schedules, for example on one rank for all.

        Raises:
            UsageError: unknown name, sizes that cannot be scheduled, layers that cannot be placed.
        """
        costs = _equal_costs(pipeline_size)
        if catalog.family(name).chooses_placement:
            costs = _assumed_costs(pipeline_size, layers.decoder, ends)
            if placement is None and isinstance(layer_layout, str):
                placement = _placement_of(layer_layout, pipeline_size, layers.kinds)
        if vocabulary is not None:
            costs = with_counted_vocabulary(costs, layers.decoder, vocabulary)
        if overlaps_exchange:
            costs = _with_exchange(costs, layer_layout)
        if recomputes:
            costs = _with_recomputation(costs, layers.decoder)
        if copy is not None:
            most = _in_unit_of(costs, host_limit, is_measured=False)
            costs = _with_offload(costs, copy, layer_layout, most)
        schedule = build(
            name,
            pipeline_size=pipeline_size,
            num_microbatches=num_microbatches,
            costs=costs,
            memory_limit=memory_limit and memory_limit.share,
            chunks=chunks,
            group_size=group_size,
            placement=placement,
            back_to_back=back_to_back,
            num_layers=None if isinstance(layer_layout, str) else layers.decoder,
        )
        balance, letters = _placed(layers, layer_layout, schedule)
        return cls(
            schedule,
            costs,
            memory_limit,
            letters,
            host_limit=host_limit,
            group_size=group_size,
            back_to_back=back_to_back,
            balance=balance,
            keeps_places=_keeps_places(letters, layers, layer_layout, schedule),
            build=build,
        )

    @classmethod
    def of_table(
        cls,
        schedule: Schedule,
        *,
        pipeline_size: int,
        num_microbatches: int,
        layers: Layers,
        layer_layout: str | Ends | None = None,
        build: Build = catalog.build,
    ) -> PipelineAdapter:
        """Create the adapter of a finished schedule, such as one read from a file.

        Raises:
            UsageError: it is for other sizes, or the layers cannot be placed on it.
        """
        sizes = (schedule.placement.pipeline_size, schedule.num_microbatches)
        if sizes != (pipeline_size, num_microbatches):
            raise UsageError(
                f"the schedule {schedule.name} is for {sizes[0]} pipeline ranks and {sizes[1]} "
                f"microbatches, but the job has {pipeline_size} and {num_microbatches}"
            )
        if any(p.kind is PassKind.O for rank in schedule.ranks for p in rank):
            raise UsageError(
                f"the schedule {schedule.name} has passes of an output layer that is cut: tables "
                "train with a whole one; name a schedule, with --pipeline-vocabulary on"
            )
        balance, letters = _placed(layers, layer_layout, schedule)
        return cls(
            schedule,
            _equal_costs(pipeline_size),
            None,
            letters,
            balance=balance,
            keeps_places=_keeps_places(letters, layers, layer_layout, schedule),
            build=build,
        )

    @cached_property
    def forward_backward_func(self) -> ForwardBackward:
        """Replacement of Megatron's ``forward_backward_func``, with the options given until now."""
        if self.splits_backward:
            self._add(UnsplitLayers(self._splits, self.physical, self._count_unsplit))
        parts = self._parts.in_order()
        return ForwardBackward(self.physical, self.program_for, self._splits, parts)

    def _add(self, part: StepPart) -> None:
        assert "forward_backward_func" not in vars(self), "parts come before the function"
        self._parts.add(part)

    def part(self, kind: type[_Part]) -> _Part:
        """Return the part of a type, such as the one that watches or connects the ranks."""
        return self._parts[kind]

    @property
    def chunks(self) -> int:
        return self.schedule.placement.chunks

    @property
    def virtual_pipeline_size(self) -> int | None:
        return self.chunks if self.chunks > 1 else None

    @property
    def embedding_ranks(self) -> Callable[[list[int]], list[int]] | None:
        """Embedding ranks for ``initialize_model_parallel``: a V has both ends on one rank."""
        return (lambda ranks: [ranks[-1]]) if self.physical.mirrored else None

    def pre_process(self, pp_rank: int, vp_stage: int | None) -> bool:
        return self.physical.holds_embedding(pp_rank, vp_stage)

    def post_process(self, pp_rank: int, vp_stage: int | None) -> bool:
        return self.physical.holds_output(pp_rank, vp_stage)

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

    def prepare_model(self, model_chunks: list[Any]) -> None:
        """Tie the embeddings and split the linear layers; before data parallelism wraps them.

        Where layers draw from streams of their own, their forwards choose these from now on.

        Raises:
            UsageError: the vocabulary cannot be cut as asked for.
        """
        model_ends.tie_embeddings(model_chunks)
        for part in self._parts.in_order():
            part.prepare_model(model_chunks)
        for chunk, split in zip(model_chunks, self._splits, strict=True):
            model_ends.convert_inputs(chunk)
            split_linear_layers(chunk, split)
            if self.splits_backward:
                split_transformer_engine(chunk, split, self.schedule.name)

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule has a W, a weight gradient as a pass of its own."""
        return any(p.kind is PassKind.W for rank in self.schedule.ranks for p in rank)

    @property
    def finalize_model_grads(self) -> Callable[..., None]:
        """Value for ``config.finalize_model_grads_func``."""
        return model_ends.finalize_with_tied_weights if self.physical.mirrored else _finalize

    def watch(self, seconds: float | None, distributed_timeout_minutes: float) -> None:
        """Let a watchdog end the job after so many seconds without progress in a step; 0 is never.

        Without a number it is a little sooner than torch's own timeout, whose message names a
        collective and no rank. To be called before the first step.

        Raises:
            UsageError: the number is negative.
        """
        if seconds is not None and seconds < 0:
            raise UsageError(f"--pipeline-timeout is {seconds:g}: it must be 0 or greater")
        default = 0.9 * 60 * distributed_timeout_minutes
        self._add(WatchPart((default if seconds is None else seconds) or None))

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

        def order(num_microbatches: int) -> list[int]:
            schedule = self.program_for(num_microbatches, False, False).schedule
            self.part(GraphsPart).keep_to(schedule)
            return graphs.pass_order(schedule, rank)

        self.part(WatchPart).forget_marks()
        graphs.create(capture or type(helper).create_cudagraphs, helper, order)

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
            UsageError: the output layer is cut along the vocabulary.
        """
        if self.costs.vocabulary is not None:
            raise UsageError(
                "optimizer post-validation cannot be combined with an output layer that is cut "
                "along the vocabulary: the forwards that run again have no passes of it"
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
            every: iterations from one profile to the next; None for one alone.
            is_named: the schedule is no finished table, which cannot be rebuilt.

        Raises:
            UsageError: ``every`` is less than a profile takes, or there is nothing to tell apart.
        """
        iterations = ITERATIONS + (PAIRED if self.schedule.pairs else 0)
        if every is not None and every <= iterations:
            raise UsageError(
                f"--pipeline-replan-every is {every}: a profile takes {iterations} iterations, so "
                f"give {iterations + 1} or more"
            )
        if every is not None and not is_named:
            raise UsageError(
                "--pipeline-replan-every cannot be combined with --pipeline-schedule-file: a "
                "finished schedule is not built anew"
            )
        replan = is_named and (self.schedule.name == "auto" or every is not None)
        if path is None and not replan:
            return
        if not self.splits_backward:
            if path is None and every is None:
                return
            raise UsageError(
                f"{'--pipeline-profile' if path else '--pipeline-replan-every'} needs a schedule "
                f"that splits the backward, such as zb-h1 or v-half: {self.schedule.name} does not"
            )
        replanning = Replanning(self, path=path, replan=replan, say=_say_on_first_rank)
        times_copies = path is not None or bool(self.costs.copy or self.schedule.moved)
        host = (lambda: self.part(OffloadPart).host) if times_copies else None
        start = partial(replanning.start, every)
        self._add(ProfilePart(start, replanning.use, self._splits, host))

    def verify(self) -> None:
        """Compare the gradients of the first training step with those of an unsplit backward.

        To be called before the first step, which then takes twice as long.
        """
        self._add(Verification(self._splits))

    def _count_unsplit(self, shares: list[float]) -> None:
        """Count what B computes since layers cannot be split, by a share of each stage."""
        self.unsplit_shares = [round(share, 4) for share in shares]
        if not any(shares):
            return
        before = self.predicted_bubble_rate
        self.costs = self.costs.with_unsplit(shares)
        stages = ", ".join(f"{share:.0%} of stage {s}" for s, share in enumerate(shares) if share)
        _say_on_first_rank(
            f"B computes weight gradients that W cannot, by their sizes {stages}: the expected "
            f"bubble is {100 * self.predicted_bubble_rate:.1f} %, not {100 * before:.1f} %"
        )

    def use(self, schedule: Schedule, costs: Costs | None = None) -> None:
        """Switch to another order of passes on the same placement from the next step on."""
        assert schedule.placement == self.schedule.placement, "the model is placed already"
        self.schedule = schedule
        self._is_measured = self._is_measured or costs is not None
        self.costs = costs or self.costs
        self.program_for.cache_clear()

    def rebuilt(self, costs: Costs) -> Schedule:
        """Build the same kind of schedule on the same placement for other costs, on this rank.

        Raises:
            UsageError: the memory limit cannot be kept with these costs.
        """
        name, m = self.schedule.name, self.schedule.num_microbatches
        return self._built(name, m, costs, catalog.build, self._memory_limit, is_measured=True)

    def keeps_limit(self, schedule: Schedule, costs: Costs) -> bool:
        """Return whether an order keeps the memory limit, for costs in bytes."""
        most = _in_unit_of(costs, self._memory_limit, is_measured=True)
        return keeps(simulate(schedule, costs).peak_memory, [most] * costs.pipeline_size)

    def host_limit(self, costs: Costs) -> float:
        """Return the most bytes of the host that a rank may take, for costs in bytes."""
        return _in_unit_of(costs, self._host_limit, is_measured=True)

    def layers_of(self, stage: int) -> str:
        """Return the layers of a stage as letters, such as ``Ett``."""
        return self.layer_layout.letters[stage]

    def seconds(self, schedule: Schedule, costs: Costs) -> float:
        """Predict the seconds of an iteration."""
        return simulate(schedule, costs).seconds(back_to_back=self._back_to_back)

    def track(self, memory: ActivationMemory | None) -> None:
        """Count the activations of the steps from the next one on; None to stop."""
        self.forward_backward_func.track(memory)

    @property
    def predicted_bubble_rate(self) -> float:
        timeline = simulate(self.schedule, self.costs)
        return timeline.bubble_rate_back_to_back if self._back_to_back else timeline.bubble_rate

    def _build_program(self, num_microbatches: int, forward_only: bool, captured: bool) -> Program:
        schedule = self.schedule
        if num_microbatches != schedule.num_microbatches:
            name = schedule.name if schedule.name in catalog.names() else _SUBSTITUTE
            limit = None if forward_only else self._memory_limit  # forwards keep nothing
            schedule = self._built(
                name, num_microbatches, self.costs, self._build, limit, self._is_measured
            )
        if forward_only:
            schedule = schedule.forwards()
        timeline = simulate(schedule, self.costs)
        return lower(schedule, timeline, captured=captured)

    def _built(
        self,
        name: str,
        num_microbatches: int,
        costs: Costs,
        build: Build,
        limit: Limit | None,
        is_measured: bool,
    ) -> Schedule:
        placement = self.schedule.placement
        family = catalog.family(name)
        in_bytes = limit.bytes if limit is not None and is_measured else None
        return build(
            name,
            pipeline_size=placement.pipeline_size,
            num_microbatches=num_microbatches,
            costs=costs,
            memory_limit=limit.share if limit is not None and in_bytes is None else None,
            memory_limit_bytes=in_bytes,
            chunks=self.chunks if family.takes_chunks else None,
            group_size=self._group_size if family.takes_group_size else None,
            placement=placement,
            back_to_back=self._back_to_back,
        )

    def say(self, line: str) -> None:
        """Add a line to those that are said at the start."""
        self._said.append(line)

    def describe(self) -> str:
        """Return the start-up lines: schedule, layers on ranks, expected bubble rate and memory."""
        said = ["each layer draws from separate RNG states"] if self.draws_by_layer else []
        report = StartReport(
            self.schedule, self.costs, self.layer_layout, self.predicted_bubble_rate
        )
        return report.text(self._balance, [*said, *self._said])


def _say_on_first_rank(line: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(f"megatron_zb: {line}", flush=True)


def _placement_of(written: str, pipeline_size: int, kinds: str) -> Placement | None:
    """Return the placement that a layout's number of stages prescribes for ``auto``, if any."""
    chunks, rest = divmod(written.count("|") + 1, max(pipeline_size, 1))
    repeats = "*" in written and not kinds
    if rest or repeats or pipeline_size < 2:
        return None
    return looped(pipeline_size) if chunks == 1 else wave(pipeline_size, chunks)


def _assumed_costs(pipeline_size: int, layers: int, ends: Ends | None) -> Costs:
    """Return the costs by which a placement is chosen before any have been measured."""
    if ends is None or layers == 0:
        return _equal_costs(pipeline_size, p2p=TRANSFER)
    return costs_of(layers, pipeline_size, ends)


def _equal_costs(pipeline_size: int, p2p: float = 0.0) -> Costs:
    p = max(pipeline_size, 1)
    return Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=1.0, p2p=p2p)


def _with_exchange(costs: Costs, layer_layout: str | Ends | None) -> Costs:
    """Return the costs with what experts exchange, by the profile that balances layers, if any."""
    profile = layer_layout.profile if isinstance(layer_layout, Ends) else None
    measured = profile and profile.exchange
    return with_exchange(costs, measured.share, measured.loss) if measured else with_exchange(costs)


def _with_recomputation(costs: Costs, layers: int) -> Costs:
    """Return the costs with the choice to drop activations, which nobody has measured."""
    layer = sum(costs.activation) / max(layers, 1)
    return costs.with_recomputation(kept_input=INPUT * layer)


def _in_unit_of(costs: Costs, limit: Limit | None, *, is_measured: bool) -> float:
    """Return a limit in the unit of the costs, which is bytes where they are measured."""
    return math.inf if limit is None else limit.in_unit_of(costs, is_measured=is_measured)


def _with_offload(
    costs: Costs, copy: float, layer_layout: str | Ends | None, host_limit: float
) -> Costs:
    """Return the costs with the choice to move activations, which takes a share of their passes.

    By the profile that balances layers, if there is one in which copies were timed. ``host_limit``
    is the most memory of the host for a rank, in the unit of ``costs.activation``.
    """
    profile = layer_layout.profile if isinstance(layer_layout, Ends) else None
    copy = (profile and profile.copy_share) or copy
    passes = zip(costs.forward, costs.backward, costs.weight, strict=True)
    seconds = [copy * sum(of_slice) for of_slice in passes]
    return costs.with_offload(seconds=seconds, host_limit=host_limit)


def _keeps_places(
    letters: Letters,
    layers: Layers,
    layer_layout: str | Ends | None,
    schedule: Schedule,
) -> bool:
    """Return whether Megatron alone places layers so, too, as it does a layout written out."""
    if isinstance(layer_layout, str):
        return schedule.placement.chunks == 1
    return layout.is_megatrons(letters, layers, schedule.placement)


def _placed(
    layers: Layers, layer_layout: str | Ends | None, schedule: Schedule
) -> tuple[Balance | None, Letters]:
    """Return the layers of every stage, and the balance by which they were placed, if any."""
    placement, multi_token = schedule.placement, layers.multi_token
    if layer_layout is None:
        return None, layout.lettered(layout.spread(layers, placement), multi_token)
    if isinstance(layer_layout, str):
        return None, layout.read(layer_layout, layers, placement.num_stages)
    found = balanced(layers.decoder, schedule, layer_layout)
    return found, layout.lettered(found.layers, multi_token)
