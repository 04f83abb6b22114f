"""Prediction for one strategy and schedule: seconds of an iteration, tokens per second, memory.

The memory is that of the worst rank, part by part, from the passes that it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from megatron_zb import schedules
from megatron_zb.plan.byte_counts import FOR_WEIGHT, ActivationBytes
from megatron_zb.plan.features.catalog import with_features
from megatron_zb.plan.rows import Prediction, RankMemory
from megatron_zb.plan.stages import StageWorkload
from megatron_zb.plan.step import by_timeline
from megatron_zb.plan.strategy import ScheduleCandidate
from megatron_zb.plan.work import Workload
from megatron_zb.schedules import Costs, Pass, PassKind, Schedule, catalog, lower
from megatron_zb.schedules.bounds import hidden
from megatron_zb.schedules.features.vocabulary import PREDICTION_KINDS
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.simulator import Timeline
from megatron_zb.schedules.waiting_kernels import waiting_kernels

# --- memory


def worst_rank(staged: StageWorkload, schedule: Schedule, *, snapshot: bool) -> RankMemory:
    """Return the memory of the rank that needs the most.

    ``snapshot`` keeps a copy of the optimizer's state, with which a step can be taken back.
    """
    ranks = range(staged.placement.pipeline_size)
    passes = map(staged.units.passes, schedule.ranks)
    peaks = [peak_of(rank, staged.held_by_units) for rank in passes]
    return max(
        (_of_rank(staged, r, *peaks[r], snapshot=snapshot) for r in ranks), key=lambda m: m.total
    )


def without_pipeline(staged: StageWorkload) -> RankMemory:
    """Return the memory of one rank that runs F and BW of each microbatch in turn."""
    passes = (
        *(Pass(PassKind.F, s, 0) for s in range(len(staged.held))),
        *(Pass(PassKind.BW, s, 0) for s in reversed(range(len(staged.held)))),
    )
    return _of_rank(staged, 0, *peak_of(passes, staged.held), snapshot=False)


def _of_rank(
    staged: StageWorkload, rank: int, activations: float, queue: float, *, snapshot: bool
) -> RankMemory:
    states, device = staged.states[rank], staged.load.device
    return RankMemory(
        rank=staged.placement.pipeline_rank(rank),
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=activations + staged.kept(rank),
        weight_queue=queue,
        logits=staged.logits(rank),
        messages=staged.messages(rank),
        snapshot=states.optimizer if snapshot else 0.0,
        reserved=device.reserved_bytes - device.fragmentation_bytes,
        fragmentation=device.fragmentation_bytes,
    )


_KINDS = {it.kind: it for it in PREDICTION_KINDS}
_BACKWARD = (PassKind.B, PassKind.BW)


def peak_of(passes: Sequence[Pass], held: Sequence[ActivationBytes]) -> tuple[float, float]:
    """Return the bytes of activations and the bytes waiting for W, when their sum is largest.

    The table of kinds tells what a pass takes and frees. A backward that recomputes also holds its
    layer's activations while it runs.
    """
    live = queue = most = 0.0
    best = (0.0, 0.0)
    again = {(stage, microbatch) for kind, stage, microbatch in passes if kind is PassKind.R}

    @cache
    def change(kind: PassKind, stage: int, recomputed: bool) -> tuple[float, float]:
        tables = _KINDS[kind].change(recomputed=recomputed)
        sizes = [(name == FOR_WEIGHT, sign * held[stage].of(name)) for name, sign in tables]
        waits, runs = (sum(size for w, size in sizes if w is of) for of in (True, False))
        return runs, waits

    for kind, stage, microbatch in passes:
        if kind in _BACKWARD and live + held[stage].in_backward + queue > most:
            best = (live + held[stage].in_backward, queue)
            most = sum(best)
        runs, waits = change(kind, stage, (stage, microbatch) in again)
        live, queue = live + runs, queue + waits
        if live + queue > most:
            most, best = live + queue, (live, queue)
    return best


# --- time


Build = Callable[[Costs, int], Schedule]
"""Function that builds a schedule from costs and the number of microbatches."""

# Above this number of passes 3p and 4p microbatches are simulated, and the others continued from
# them; 4p and 8p where a schedule frees activations, since the first microbatches need less of it.
_MOST_PASSES = 16_000
_TURNS, _MORE_TURNS = 4, 8


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
            timeline = self._simulated(self.schedule)
            seconds, running = self._of_all(timeline)
            seconds = max(seconds, m * staged.link_seconds)
            bubble = 1 - running / seconds
        return Prediction(
            candidate=candidate.name,
            runs=with_features(candidate, staged.features),
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
        )

    def _of_all(self, timeline: Timeline) -> tuple[float, float]:
        """Return the pipeline's seconds of an iteration, and those in which a rank runs passes.

        Where the timeline is that of the first microbatches, the others take as long as the last
        of these do, found from one more schedule of fewer.
        """
        back_to_back, m = self.iteration.post_validation, self.iteration.num_microbatches
        seconds = timeline.seconds(back_to_back=back_to_back)
        running = _running(self.staged, timeline)
        more = timeline.schedule.rules.whole_microbatches(timeline.schedule)
        if more == m:
            return seconds, running
        few = _filling(self.staged) * (_MORE_TURNS // 2 if self.staged.frees_activations else 1)
        shorter = self._simulated(self.build(self.costs, more - few))
        each_runs = (running - _running(self.staged, shorter)) / few
        each = (seconds - shorter.seconds(back_to_back=back_to_back)) / few
        each = max(each, each_runs, _least(self.costs, self.staged.placement))
        return seconds + (m - more) * each, running + (m - more) * each_runs

    def _simulated(self, schedule: Schedule) -> Timeline:
        return schedules.simulate(schedule, self.costs)


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
    costs, units = staged.costs(blocking=candidate.blocking), staged.units

    def by_name(costs: Costs, num_microbatches: int) -> Schedule:
        return schedules.build(
            candidate.family,
            pipeline_size=staged.placement.pipeline_size,
            num_microbatches=num_microbatches,
            costs=costs,
            chunks=chunks,
            back_to_back=iteration.back_to_back and iteration.post_validation,
            slices=units.cut,
        )

    build, schedule = build or by_name, None
    m = iteration.num_microbatches
    enough = _filling(staged) * (_MORE_TURNS if staged.frees_activations else _TURNS)
    if staged.placement.pipeline_size > 1:
        passes = 3 * m * units.count * staged.placement.num_stages
        schedule = build(costs, m if passes <= _MOST_PASSES or m <= enough else enough)
    return Ordered(staged, candidate, iteration, chunks, schedule, costs, build)


def _filling(staged: StageWorkload) -> int:
    """Return the least microbatches of whose units each rank can run one at a time."""
    return -(-staged.placement.pipeline_size // staged.units.count)


def predict(
    staged: StageWorkload,
    candidate: ScheduleCandidate,
    iteration: IterationSettings,
    chunks: int | None,
    build: Build | None = None,
) -> Prediction:
    """Build and simulate a schedule; the arguments and errors are those of :func:`ordered`."""
    return ordered(staged, candidate, iteration, chunks, build).predicted()


def _running(staged: StageWorkload, timeline: Timeline) -> float:
    """Return the seconds in which a rank, on average, runs passes of a timeline.

    A pair counts once, with what it does not hide; recomputation also counts; a message that stops
    a rank is no pass.
    """
    if any(it.changes_work for it in staged.features):
        return (1 - timeline.bubble_rate) * timeline.makespan
    schedule, p = timeline.schedule, staged.placement.pipeline_size
    work = sum(staged.rank_work(r).total for r in range(p)) / p
    return schedule.rules.whole_microbatches(schedule) * work


def _least(costs: Costs, placement: Placement) -> float:
    """Return a microbatch's seconds on the busiest rank: one more takes no schedule less."""
    seconds = hidden(costs.for_placement(placement)).seconds
    times = zip(*(seconds[kind] for kind in (PassKind.F, PassKind.B, PassKind.W)), strict=True)
    work = [sum(of) for of in times]
    of_ranks = [sum(work[s] for s in held) for held in placement.stages_of]
    if PassKind.O not in seconds:
        return max(of_ranks)
    of_ranks[placement.rank_of[-1]] += seconds[PassKind.P][-1]
    shards = (seconds[kind][placement.num_stages :] for kind in (PassKind.O, PassKind.V))
    return max(map(sum, zip(of_ranks, *shards, strict=True)))


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
