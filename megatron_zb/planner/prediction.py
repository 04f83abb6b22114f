"""Prediction for one strategy and schedule: seconds of an iteration, tokens per second, memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_zb import schedules
from megatron_zb.planner.candidate import ScheduleCandidate
from megatron_zb.planner.memory import RankMemory, without_pipeline, worst_rank
from megatron_zb.planner.operators import model_flops
from megatron_zb.planner.row import PlanRow
from megatron_zb.planner.stages import StageWorkload
from megatron_zb.planner.step import by_timeline
from megatron_zb.planner.work import Workload
from megatron_zb.schedules import Costs, Schedule, catalog, lower
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.simulator import Timeline
from megatron_zb.schedules.waiting_kernels import waiting_kernels

Build = Callable[[Costs, int], Schedule]
"""Function that builds a schedule from costs and the number of microbatches."""

# Above so many passes 3p and 4p microbatches are simulated, and the others continued from them.
_MOST_PASSES = 16_000


@dataclass(frozen=True)
class IterationSettings:
    """Settings of an iteration that do not change the order of passes within the model.

    Attributes:
        num_microbatches: microbatches of each pipeline.
        post_validation: ranks start the next iteration one by one instead of together.
        back_to_back: build the schedule for that, where there is post-validation.
        snapshot: keep a copy of the optimizer's state to take a step back with.
    """

    num_microbatches: int
    post_validation: bool = False
    back_to_back: bool = True
    snapshot: bool = False


@dataclass(frozen=True, kw_only=True)
class Prediction(PlanRow):
    """Predicted time and memory of one choice.

    Where there are many microbatches, the timeline is that of the first ones, from which the
    seconds of the rest are extrapolated. ``memory_limit`` is the limit to give ``auto``, as a
    fraction of 1F1B's activations. ``host_bytes`` are the most that the host holds of the
    activations of any rank.
    """

    load: Workload
    num_microbatches: int
    pipeline_seconds: float
    bubble: float
    step_seconds: float
    memory: RankMemory
    costs: Costs | None = None
    post_validation: bool = False
    memory_limit: float | None = None
    host_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        return self.pipeline_seconds + self.step_seconds

    @property
    def gpus(self) -> int:
        strategy = self.load.strategy
        return strategy.model_ranks * strategy.pipeline

    @property
    def tokens(self) -> int:
        """Tokens of an iteration on all GPUs."""
        strategy = self.load.strategy
        samples = self.num_microbatches * strategy.microbatch * strategy.data
        return samples * self.load.sequence

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the share of the data sheet's FLOP/s that training needs.

        Training on frozen weights needs two thirds: it has no weight gradients.
        """
        flops = model_flops(self.load.model, self.tokens, self.load.sequence)
        flops *= 2 / 3 if self.load.frozen else 1
        return flops / self.seconds / self.gpus / self.load.rate.peak


@dataclass(frozen=True)
class Ordered:
    """A workload with the schedule that runs it; the schedule is None without a pipeline.

    The memory is known before the time is: only what fits is worth a simulation.
    """

    staged: StageWorkload
    candidate: ScheduleCandidate
    iteration: IterationSettings
    chunks: int | None
    schedule: Schedule | None
    costs: Costs
    build: Build

    @cached_property
    def memory(self) -> RankMemory:
        """Memory of the worst rank."""
        if self.schedule is None:
            return without_pipeline(self.staged)
        return worst_rank(self.staged, self.schedule, snapshot=self.iteration.snapshot)

    def predicted(self) -> Prediction:
        """Simulate the schedule."""
        staged, candidate, iteration = self.staged, self.candidate, self.iteration
        m, post_validation = iteration.num_microbatches, iteration.post_validation
        timeline, bubble = None, 0.0
        seconds = m * staged.busiest.total
        if self.schedule is None:
            post_validation = False
        else:
            timeline = schedules.simulate(self.schedule, self.costs)
            seconds = max(self._seconds(timeline), m * staged.link_seconds)
            bubble = 1 - m * _busy(staged, timeline) / seconds
        return Prediction(
            candidate=candidate.name,
            runs=replace(
                candidate,
                cuts_vocabulary=staged.cuts_vocabulary,
                overlaps_exchange=staged.overlaps_exchange,
            ),
            load=staged.load,
            num_microbatches=m,
            chunks=self.chunks,
            layout=staged.layout,
            has_by_default=candidate.has_by_default(staged.layout, staged.placement),
            pipeline_seconds=seconds,
            bubble=bubble,
            step_seconds=by_timeline(staged, timeline, post_validation=post_validation),
            memory=self.memory,
            timeline=timeline,
            costs=None if timeline is None else self.costs,
            post_validation=post_validation,
            host_bytes=0.0 if timeline is None else max(timeline.peak_host),
        )

    def _seconds(self, timeline: Timeline) -> float:
        """Return the pipeline's seconds of an iteration.

        Where the timeline is that of the first microbatches, the others take as long as the last
        of these do, found from one more schedule of fewer.
        """
        back_to_back, m = self.iteration.post_validation, self.iteration.num_microbatches
        seconds = timeline.seconds(back_to_back=back_to_back)
        more, p = timeline.schedule.num_microbatches, self.staged.placement.pipeline_size
        if more == m:
            return seconds
        shorter = schedules.simulate(self.build(self.costs, more - p), self.costs)
        each = (seconds - shorter.seconds(back_to_back=back_to_back)) / p
        return seconds + (m - more) * max(each, _least(self.costs, self.staged.placement))


def ordered(
    staged: StageWorkload,
    candidate: ScheduleCandidate,
    iteration: IterationSettings,
    chunks: int | None,
    build: Build | None = None,
) -> Ordered:
    """Build the schedule of a workload.

    Args:
        staged: the workload on the placement of the schedule.
        candidate: the schedule.
        iteration: number of microbatches and post-validation.
        chunks: chunks per rank where the schedule has the choice.
        build: function that builds the schedule in another way than the catalog.

    Raises:
        UsageError: the schedule cannot be built within the memory.
    """
    costs = staged.costs(blocking=candidate.blocking)

    def by_name(costs: Costs, num_microbatches: int) -> Schedule:
        return schedules.build(
            candidate.family,
            pipeline_size=staged.placement.pipeline_size,
            num_microbatches=num_microbatches,
            costs=costs,
            chunks=chunks,
            back_to_back=iteration.back_to_back and iteration.post_validation,
        )

    build, schedule = build or by_name, None
    p, m = staged.placement.pipeline_size, iteration.num_microbatches
    if p > 1:
        is_small = 3 * m * staged.placement.num_stages <= _MOST_PASSES or m <= 4 * p
        schedule = build(costs, m if is_small else 4 * p)
    return Ordered(staged, candidate, iteration, chunks, schedule, costs, build)


def predict(
    staged: StageWorkload,
    candidate: ScheduleCandidate,
    iteration: IterationSettings,
    chunks: int | None,
    build: Build | None = None,
) -> Prediction:
    """Build and simulate a schedule; the arguments and errors are those of :func:`ordered`."""
    return ordered(staged, candidate, iteration, chunks, build).predicted()


def _busy(staged: StageWorkload, timeline: Timeline) -> float:
    """Return the seconds in which a rank, on average, runs passes of one microbatch.

    A pair counts once, with the exchange that it does not hide, and what is made again counts; a
    message that stops a rank is no pass.
    """
    if staged.overlaps_exchange or staged.drops:
        running = (1 - timeline.bubble_rate) * timeline.makespan
        return running / timeline.schedule.num_microbatches
    p = staged.placement.pipeline_size
    return sum(staged.rank_work(r).total for r in range(p)) / p


def _least(costs: Costs, placement: Placement) -> float:
    """Return a microbatch's seconds on the busiest rank: one more takes no schedule less."""
    stages = costs.for_placement(placement).hidden()
    times = zip(stages.forward, stages.backward, stages.weight, strict=True)
    work = [sum(of) for of in times]
    of_ranks = [sum(work[s] for s in held) for held in placement.stages_of]
    if stages.shards is None:
        return max(of_ranks)
    of_ranks[placement.rank_of[-1]] += stages.shards.loss
    return max(map(sum, zip(of_ranks, stages.shards.output, stages.shards.weight, strict=True)))


# --- overheads that the seconds leave out ---------------------------------------------------------


@dataclass(frozen=True)
class Overheads:
    """Overheads of one schedule of this package that the predicted seconds leave out.

    A receive is a kernel that waits for its message beside the computation and occupies thread
    blocks meanwhile. How much that slows the computation down has not been measured, so it is in
    no time. Megatron's backward hides the reduce-scatter of tensor parallelism in its input
    gradient behind the weight gradient; a split backward exposes it in B. The seconds of all rows
    include it as exposed, so the lead of a split schedule may be smaller by its share.

    Attributes:
        waiting: message kernels that wait on a rank while it computes, the mean over time and
            ranks.
        exposed: share of an iteration in which B waits for collectives of tensor parallelism that
            Megatron's own backward hides.
    """

    waiting: float
    exposed: float


def overheads(row: Prediction) -> Overheads | None:
    """Return the overheads of a row; None where Megatron itself runs it."""
    timeline = row.timeline
    if timeline is None or row.megatron:
        return None
    found = waiting_kernels(lower(timeline.schedule, timeline), timeline.costs)
    return Overheads(sum(rank.mean for rank in found) / len(found), _exposed(row))


def _exposed(row: Prediction) -> float:
    if not catalog.family(row.family).splits_backward:
        return 0.0
    seconds = sum(_hidden_by_weight_gradient(row.load, i) for i in range(row.load.model.layers))
    return row.num_microbatches * seconds / row.load.strategy.pipeline / row.seconds


def _hidden_by_weight_gradient(load: Workload, index: int) -> float:
    """Return the seconds of a layer's reduce-scatters in B that its W could hide."""
    return min(load.tensor_parallel(index) / 2, load.layer(index).weight)
