"""Seconds between two iterations: reduction of gradients, optimizer's step, gathering of weights.

With ``--overlap-grad-reduce`` a layer's gradients travel as soon as its last microbatch is through,
and with ``--overlap-param-gather`` its weights while the layers before it begin; what a schedule
leaves no time for is exposed. Layers stand for Megatron's buckets. That such communication slows
kernels down is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_zb.plan.byte_counts import GRADIENT, OPTIMIZER, WEIGHT, StateBytes
from megatron_zb.plan.device import Link
from megatron_zb.plan.stages import StageWorkload
from megatron_zb.plan.work import PassSeconds, Workload
from megatron_zb.schedules import Pass, PassKind
from megatron_zb.schedules.simulator import Timeline


@dataclass(frozen=True)
class Travel:
    """Seconds of communicating a rank's gradients and weights."""

    reduction: float
    gathering: float

    @classmethod
    def of(cls, load: Workload, states: StateBytes) -> Travel:
        """Return the seconds for the states of a rank.

        Dense weights have replicas over context and data ranks, experts over fewer.
        """
        strategy = load.strategy
        shards = strategy.expert * strategy.expert_tensor
        parts = (
            (states.parameters - states.routed, strategy.replicas, strategy.tensor),
            (states.routed, strategy.expert_replicas, shards),
        )
        return cls(
            sum(_seconds(load, GRADIENT * count, ranks, apart) for count, ranks, apart in parts),
            sum(_seconds(load, WEIGHT * count, ranks, apart) for count, ranks, apart in parts),
        )

    @property
    def total(self) -> float:
        return self.reduction + self.gathering

    def exposed(self, forward: float, backward: float, layers: int) -> float:
        """Return the seconds that a microbatch's F and backward on its layers do not hide."""
        first = 1 / max(1, layers)
        late = max(self.reduction * first, self.reduction - backward * (1 - first))
        return late + max(self.gathering * first, self.gathering - forward * (1 - first))


def _seconds(load: Workload, size: float, ranks: int, apart: int) -> float:
    """Return the seconds of a reduction or a gathering among ranks that lie ``apart`` ranks apart.

    Ranks of one node share its links to the other nodes, one link each.
    """
    if ranks == 1 or not size:
        return 0.0
    links, node = load.device.collectives, load.device.node.gpus
    near = max(1, min(ranks, node // apart))
    link = links.in_node
    if near < ranks:
        far = links.between_nodes
        speed = min(link.bandwidth, near * far.bandwidth)
        link = Link(bandwidth=speed, latency=far.latency, source=far.source)
    return link.seconds(size * (ranks - 1) / ranks)


def seconds_apart(load: Workload, states: StateBytes, *, post_validation: bool) -> float:
    """Return the seconds that nothing hides: the optimizer's step, and what comes before it.

    The step reads and writes the gradient, the state and the weight; without post-validation two
    small reductions over the pipeline come before it (norm and overflow).
    """
    strategy, device = load.strategy, load.device
    traffic = (GRADIENT + 2 * OPTIMIZER + WEIGHT) / OPTIMIZER * states.optimizer
    seconds = traffic / device.memory_bandwidth.reached
    if strategy.pipeline > 1 and not post_validation:
        seconds += 4 * strategy.pipeline * device.messages.between_nodes.latency
    return seconds


def by_formula(load: Workload, states: StateBytes, rank: PassSeconds) -> float:
    """Return the seconds between two iterations, from the work of one rank."""
    travel = Travel.of(load, states)
    alone = seconds_apart(load, states, post_validation=False)
    if not load.strategy.overlap:
        return alone + travel.total
    layers = -(-load.model.layers // load.strategy.pipeline)
    return alone + travel.exposed(rank.forward, rank.backward + rank.weight, layers)


def at_least(staged: StageWorkload, *, post_validation: bool) -> float:
    """Return the seconds that no order of passes can hide."""
    states = max(staged.states, key=lambda s: s.parameters)
    alone = seconds_apart(staged.load, states, post_validation=post_validation)
    overlaps = staged.load.strategy.overlap
    return alone if overlaps else alone + Travel.of(staged.load, states).total


def by_timeline(
    staged: StageWorkload, timeline: Timeline | None, *, post_validation: bool
) -> float:
    """Return the seconds between two iterations, from the begin and the end of each stage.

    ``timeline`` is None without a pipeline.
    """
    load = staged.load
    states = max(staged.states, key=lambda s: s.parameters)
    alone = seconds_apart(load, states, post_validation=post_validation)
    if not load.strategy.overlap or load.strategy.replicas == 1:
        return alone + Travel.of(load, states).total
    if timeline is None:
        return by_formula(load, states, staged.busiest)
    moving = _Moving(staged, timeline, [Travel.of(load, held) for held in staged.stage_states])
    ranks = range(len(staged.states))
    late = max(moving.late(rank, alone=post_validation) for rank in ranks)
    if post_validation:  # Megatron's gathering ahead cannot be combined with it
        return alone + late + Travel.of(load, states).gathering
    return alone + late + max(moving.delay(rank) for rank in ranks)


@dataclass(frozen=True)
class _Moving:
    """Communication of gradients and weights alongside the passes of a schedule."""

    staged: StageWorkload
    timeline: Timeline
    travel: list[Travel]

    def late(self, rank: int, *, alone: bool) -> float:
        """Return the seconds by which a rank's gradients arrive after the end of the pipeline.

        With ``alone``, after the end of the rank.
        """
        last = {p.stage: times for p, times in self._passes(rank) if p.kind is not PassKind.F}
        free = 0.0
        for stage, (start, end) in sorted(last.items(), key=lambda item: item[1][1]):
            seconds, first = self.travel[stage].reduction, self._first(stage)
            begin = max(free, end - (end - start) * (1 - first))
            free = max(begin + seconds, end + seconds * first)
        ends = self.timeline.end
        return max(0.0, free - (ends[rank][-1] if alone else max(times[-1] for times in ends)))

    def delay(self, rank: int) -> float:
        """Return the seconds by which waiting for weights delays a rank beyond the timeline."""
        passes: dict[int, tuple[float, float]] = {}
        for p, times in self._passes(rank):
            passes.setdefault(p.stage, times)
        begin = min(times[0] for times in self.timeline.start)
        travelled = delay = 0.0
        for stage, (start, end) in sorted(passes.items(), key=lambda item: item[1]):
            seconds, first = self.travel[stage].gathering, self._first(stage)
            delay = max(delay, travelled + seconds * first - (start - begin))
            travelled += seconds
            delay = max(delay, travelled - (start - begin) - (end - start) * (1 - first))
        return delay

    def _passes(self, rank: int) -> Iterator[tuple[Pass, tuple[float, float]]]:
        line = self.timeline
        spans = zip(line.start[rank], line.end[rank], strict=True)
        return zip(line.schedule.ranks[rank], spans, strict=True)

    def _first(self, stage: int) -> float:
        """Return the share of a stage, or of a shard, that its first layer is."""
        layers = self.staged.layout
        return 1 / max(1, layers[stage]) if stage < len(layers) else 1.0
