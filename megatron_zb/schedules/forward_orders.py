"""Orders of forward-only steps: evaluation, and the log-probabilities of reinforcement learning.

The order of a training step lets a rank wait for backward passes that a forward-only step does not
have. A greedy order, in which every rank runs what can start first, waits less.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush

from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.stage_costs import StageCosts


def in_forward_order(schedule: Schedule, costs: Costs) -> Schedule:
    """Return the faster order of the forward passes of a schedule: that of training, or greedy.

    Among passes that can start at one time, the greedy one takes that of the latest stage: with the
    earliest first, the activations of nearly all microbatches would wait before the next chunk. A
    schedule with forward passes of other kinds, such as those of a vocabulary-parallel output
    layer, keeps its order.
    """
    trained = schedule.forwards()
    if schedule.placement.chunks == 1 or not _has_forwards_alone(trained):
        return trained
    greedy = _greedy(trained, costs.for_placement(schedule.placement))
    return min(trained, greedy, key=lambda each: simulate(each, costs).makespan)


def _has_forwards_alone(schedule: Schedule) -> bool:
    return {p.kind for rank in schedule.ranks for p in rank} == {PassKind.F}


def _greedy(schedule: Schedule, costs: StageCosts) -> Schedule:
    """Return the order in which every rank runs the pass that can start first."""
    line = _GreedyForwards(schedule.placement, schedule.num_microbatches, costs)
    while line.run_next():
        pass
    return replace(schedule, ranks=tuple(map(tuple, line.ranks)))


class _GreedyForwards:
    """Ranks that run forward passes: the earliest start first, then the latest stage."""

    def __init__(self, placement: Placement, m: int, costs: StageCosts) -> None:
        self._placement, self._costs = placement, costs
        self.ranks: list[list[Pass]] = [[] for _ in range(placement.pipeline_size)]
        self._clock = [0.0] * placement.pipeline_size
        self._arrivals: list[list[float]] = [[] for _ in range(placement.num_stages)]
        self._arrivals[0] = [0.0] * m
        self._done = [0] * placement.num_stages
        self._starts: list[tuple[float, int, int, int]] = []  # start, -stage, rank, stage
        self._offer(placement.rank_of[0])

    def run_next(self) -> bool:
        """Run the pass that can start first; return False where none is left."""
        while self._starts:
            offered = heappop(self._starts)
            rank, stage = offered[2:]
            if offered == self._best(rank):
                self._run(rank, stage, offered[0])
                return True
        return False

    def _best(self, rank: int) -> tuple[float, int, int, int] | None:
        ready = [
            (max(self._clock[rank], self._arrivals[s][self._done[s]]), -s, rank, s)
            for s in self._placement.stages_of[rank]
            if self._done[s] < len(self._arrivals[s])
        ]
        return min(ready, default=None)

    def _offer(self, rank: int) -> None:
        if (best := self._best(rank)) is not None:
            heappush(self._starts, best)

    def _run(self, rank: int, stage: int, start: float) -> None:
        microbatch = self._done[stage]
        row = self._costs.of(microbatch)
        self.ranks[rank].append(Pass(PassKind.F, stage, microbatch))
        self._done[stage] += 1
        self._clock[rank] = start + row.forward[stage]
        if stage + 1 < self._placement.num_stages:
            self._arrivals[stage + 1].append(self._clock[rank] + row.forward_hop[stage])
            reader = self._placement.rank_of[stage + 1]
            if reader != rank:
                self._offer(reader)
        self._offer(rank)
