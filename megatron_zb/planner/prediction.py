"""Prediction for one strategy and schedule: seconds of an iteration, tokens per second, memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from megatron_zb import schedules
from megatron_zb.planner.candidate import Candidate
from megatron_zb.planner.memory import Memory, without_pipeline, worst_rank
from megatron_zb.planner.stages import StageWorkload
from megatron_zb.planner.step import by_timeline
from megatron_zb.planner.work import Workload, model_flops
from megatron_zb.schedules import Costs, Schedule
from megatron_zb.schedules.layout import Layout
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.simulator import Timeline

Build = Callable[[Costs, int], Schedule]
"""Function that builds a schedule from costs and the number of microbatches."""

# Above so many passes 3p and 4p microbatches are simulated, and the others continued from them.
_MOST_PASSES = 16_000


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of one choice.

    ``schedule`` and the ``costs`` it was built for are None where there is no pipeline; where there
    are many microbatches, it is that of the first ones, from which the rest was continued.
    ``memory_limit`` is the limit to give ``auto``, as a fraction of 1F1B's activations;
    ``cuts_vocabulary`` tells that the output layer is cut along the vocabulary, and
    ``overlaps_exchange`` that pairs hide the exchange of tokens between experts. ``host_bytes`` are
    the most that the host holds of the activations of any rank.
    """

    candidate: str
    family: str
    load: Workload
    num_microbatches: int
    chunks: int | None
    layout: Layout
    is_even: bool
    pipeline_seconds: float
    bubble: float
    step_seconds: float
    memory: Memory
    schedule: Schedule | None = None
    costs: Costs | None = None
    post_validation: bool = False
    memory_limit: float | None = None
    cuts_vocabulary: bool = False
    overlaps_exchange: bool = False
    host_bytes: float = 0.0

    @property
    def dropped(self) -> float:
        """Share of the forwards whose activations are made again by the schedule."""
        return 0.0 if self.schedule is None else _share(self.schedule, self.schedule.dropped)

    @property
    def moved(self) -> float:
        """Share of the forwards whose activations are moved to the host."""
        return 0.0 if self.schedule is None else _share(self.schedule, self.schedule.moved)

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
        """Model FLOPs utilization: the share of the data sheet's FLOP/s that training needs."""
        flops = model_flops(self.load.model, self.tokens, self.load.sequence)
        return flops / self.seconds / self.gpus / self.load.rate.peak


def predict(
    staged: StageWorkload,
    candidate: Candidate,
    num_microbatches: int,
    chunks: int | None,
    *,
    is_even: bool,
    post_validation: bool = False,
    back_to_back: bool = True,
    snapshot: bool = False,
    build: Build | None = None,
) -> Prediction:
    """Simulate a schedule.

    Args:
        staged: the workload on the placement of the schedule.
        candidate: the schedule.
        num_microbatches: microbatches of each pipeline in an iteration.
        chunks: chunks per rank where the schedule has the choice.
        is_even: whether the layout is the one that needs no flag.
        post_validation: ranks start the next iteration one by one instead of together.
        back_to_back: build the schedule for that, where there is post-validation.
        snapshot: keep a copy of the optimizer's state to take a step back with.
        build: function that builds the schedule in another way than the catalog.

    Raises:
        UsageError: the schedule cannot be built within the memory.
    """
    if staged.placement.pipeline_size == 1:
        return _without_pipeline(staged, candidate, num_microbatches)
    costs = staged.costs(blocking=candidate.blocking)
    back_to_back = back_to_back and post_validation
    builder = _Builder(candidate, costs, chunks, staged.placement, back_to_back, build)
    seconds, timeline = builder.seconds(num_microbatches, post_validation)
    seconds = max(seconds, num_microbatches * staged.link_seconds)
    schedule = timeline.schedule
    bubble = 1 - num_microbatches * _busy(staged, timeline) / seconds
    return Prediction(
        candidate=candidate.name,
        family=candidate.family,
        load=staged.load,
        num_microbatches=num_microbatches,
        chunks=chunks,
        layout=staged.layout,
        is_even=is_even,
        pipeline_seconds=seconds,
        bubble=bubble,
        step_seconds=by_timeline(staged, timeline, post_validation=post_validation),
        memory=worst_rank(staged, schedule, snapshot=snapshot),
        schedule=schedule,
        costs=costs,
        post_validation=post_validation,
        cuts_vocabulary=staged.cuts_vocabulary,
        overlaps_exchange=staged.overlaps_exchange,
        host_bytes=max(timeline.peak_host),
    )


def _share(schedule: Schedule, units: Collection[tuple[int, int]]) -> float:
    return len(units) / (schedule.num_microbatches * schedule.placement.num_stages)


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


def _without_pipeline(staged: StageWorkload, candidate: Candidate, m: int) -> Prediction:
    return Prediction(
        candidate=candidate.name,
        family=candidate.family,
        load=staged.load,
        num_microbatches=m,
        chunks=None,
        layout=staged.layout,
        is_even=True,
        pipeline_seconds=m * staged.busiest.total,
        bubble=0.0,
        step_seconds=by_timeline(staged, None, post_validation=False),
        memory=without_pipeline(staged),
    )


@dataclass(frozen=True)
class _Builder:
    """Builder of one schedule for any number of microbatches."""

    candidate: Candidate
    costs: Costs
    chunks: int | None
    placement: Placement
    back_to_back: bool
    other: Build | None = None

    def build(self, m: int) -> Schedule:
        if self.other is not None:
            return self.other(self.costs, m)
        return schedules.build(
            self.candidate.family,
            pipeline_size=self.placement.pipeline_size,
            num_microbatches=m,
            costs=self.costs,
            chunks=self.chunks,
            back_to_back=self.back_to_back,
        )

    def seconds(self, m: int, post_validation: bool) -> tuple[float, Timeline]:
        """Return an iteration's seconds and its timeline.

        Seconds of many microbatches are extrapolated from two schedules of fewer; the timeline is
        that of the larger one.
        """

        def simulated(microbatches: int) -> tuple[float, Timeline]:
            timeline = schedules.simulate(self.build(microbatches), self.costs)
            return timeline.seconds(back_to_back=post_validation), timeline

        p = self.placement.pipeline_size
        if 3 * m * self.placement.num_stages <= _MOST_PASSES or m <= 4 * p:
            return simulated(m)
        (some, _), (more, timeline) = simulated(3 * p), simulated(4 * p)
        return more + (m - 4 * p) * max((more - some) / p, self._least), timeline

    @property
    def _least(self) -> float:
        """Seconds of a microbatch on the busiest rank: no schedule takes less for one more."""
        stages = self.costs.for_placement(self.placement).hidden()
        times = zip(stages.forward, stages.backward, stages.weight, strict=True)
        work = [sum(of) for of in times]
        of_ranks = [sum(work[s] for s in held) for held in self.placement.stages_of]
        if stages.shards is None:
            return max(of_ranks)
        of_ranks[self.placement.rank_of[-1]] += stages.shards.loss
        return max(map(sum, zip(of_ranks, stages.shards.output, stages.shards.weight, strict=True)))
