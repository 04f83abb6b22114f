"""Search for an order of a placement and for the passes that it pairs.

Which passes to pair is a part of the search. To pair neighbours of an order that is good
without pairs makes ranks wait in a circle, or wait for what a pair holds back. So the list
scheduler chooses pairs as it goes (:mod:`inner_loops`), steered by numbers that are searched for as
those of single passes are; then moves pair and part passes, and each order is timed before it is
kept. The orders that are known take part, so that the result is never slower than any of them.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.hill_climbing import POOL, Climb, climbed
from megatron_zb.schedules.search.inner_loops import INFINITY, PairCosts, PairPriorities
from megatron_zb.schedules.search.kernels import Engine, engine
from megatron_zb.schedules.search.priority_weights import PriorityWeights
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.runner import Coded, Effort, Runner

_PAIR_PRESETS = Path(__file__).with_name("pair_presets.csv")
_RESTARTS = 8  # each from another seed: a long climb gains less than a further one
_RUNS = 500  # of a climb, at least
_POLISHED_PAIRS = 8  # starts that are polished, the fastest ones
_THRESHOLDS = (0.3, 0.15)  # the loss that polishing accepts at first, in mean passes
_PAIRING = 0.35  # share of the steps that change what is paired


@dataclass(frozen=True)
class PairWeights:
    """The numbers that steer a run: those of single passes, and those of pairs.

    ``gain`` is what a second that is hidden is worth. ``bias`` is added to the score of a pair, in
    mean passes: of F of the first half of the chunks with B of the same half, F of the first with B
    of the second, F of the second with B of the first, and both of the second.
    """

    single: PriorityWeights
    gain: float
    bias: tuple[float, ...]

    def changed(self, rng: random.Random, chunks: int, ranks: int) -> PairWeights:
        """Return a neighbour."""
        if rng.random() < _PAIRING:
            bias = tuple(b + rng.gauss(0, 1.0) if rng.random() < 0.5 else b for b in self.bias)
            return replace(self, gain=max(0.0, self.gain + rng.gauss(0, 0.7)), bias=bias)
        return replace(self, single=self.single.changed(rng, chunks, ranks))


def search_pairs(
    name: str, problem: Problem, effort: Effort, lower_bound: float, known: Sequence[Schedule]
) -> Schedule:
    """Return the fastest order found, of the known ones and all that are looked at.

    ``known`` are schedules of the placement within the limit, at least one.
    """
    runner = PairRunner(problem, effort)
    good_enough = lower_bound * (1 + 1e-9)
    starts = [
        runner.polished(runner.coded_with_pairs(schedule), 0, 0.0, 0.0, 0) for schedule in known
    ]
    restarts = max(1, min(_RESTARTS, effort.runs // _RUNS))
    for seed in range(restarts):
        pool = climb_pairs(runner, effort.runs // restarts, good_enough, seed)
        for weights in pool if restarts == 1 else pool[:1]:
            seconds = runner.seconds_of(weights)
            if seconds < INFINITY:
                starts.append((seconds, runner.copied()))
    starts = sorted(starts, key=lambda entry: entry[0])[:_POLISHED_PAIRS]
    best = starts[0]
    share = effort.moves // (len(starts) + len(_THRESHOLDS))
    rounds = [*((start, _THRESHOLDS[0]) for start in starts), *((None, t) for t in _THRESHOLDS)]
    for number, (start, threshold) in enumerate(rounds if share else ()):
        if best[0] <= good_enough:
            break
        found = runner.polished((start or best)[1], share, threshold, good_enough, number)
        best = min(best, found, key=lambda entry: entry[0])
    return runner.schedule(name, best[1])


def climb_pairs(runner: PairRunner, runs: int, good_enough: float, seed: int) -> list[PairWeights]:
    """Return the best few weights: presets first, then neighbours that do not lose."""
    placement = runner.problem.placement
    p, chunks = placement.pipeline_size, placement.chunks
    rng = random.Random(seed)
    presets = [(runner.seconds_of(weights), weights) for weights in _pair_presets(chunks, p)]
    pool = climbed(
        sorted(presets, key=lambda entry: entry[0])[:POOL],
        lambda weights, _: runner.seconds_of(weights),
        lambda weights: weights.changed(rng, chunks, p),
        Climb(rng, runs - min(POOL, len(presets)), good_enough, favour=0.6),
    )
    return [weights for _, weights in pool]


def _pair_presets(chunks: int, ranks: int) -> list[PairWeights]:
    """Return starting points, found by climbing on a V of 8 ranks: numbers of single passes first.

    Those of ``presets.csv`` stand before ``gain`` and the four of ``bias``.
    """
    with _PAIR_PRESETS.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    found = []
    for row in rows:
        *single, gain, a, b, c, d = map(float, row)
        weights = PriorityWeights.from_preset(single, chunks, ranks)
        found.append(PairWeights(weights, gain, (a, b, c, d)))
    return found


def pair_costs_of(problem: Problem, make: Engine) -> PairCosts:
    """Return what pairs can hide, as arrays of an engine."""
    stages, m = problem.placement.num_stages, problem.num_microbatches
    rows = [problem.costs.of(j) for j in range(m)]
    each = [
        row.exchange[kind][s] if kind in row.exchange else 0.0
        for kind in (PassKind.F, PassKind.B)
        for s in range(stages)
        for row in rows
    ]
    seconds = make.floats(each + [0.0] * (stages * m))
    return PairCosts(seconds, float(problem.costs.pair_loss))


class PairRunner(Runner):
    """Runner on a problem whose passes communicate."""

    def __init__(self, problem: Problem, effort: Effort) -> None:
        make = engine(float(effort.runs + effort.moves) * problem.num_passes)
        super().__init__(problem, make, pair_costs_of(problem, make))

    def seconds_of(self, weights: PairWeights) -> float:
        """Return the seconds of the order that the weights lead to; INFINITY if it gets stuck."""
        chunks = range(self.problem.placement.chunks)
        half = len(chunks) / 2
        bias = [
            self.mean_pass * weights.bias[2 * (forward >= half) + (backward >= half)]
            for forward in chunks
            for backward in chunks
        ]
        pairs = PairPriorities(weights.gain, self.engine.floats(bias))
        return self.makespan(weights.single, pairs=pairs)

    def coded_with_pairs(self, schedule: Schedule) -> Coded:
        """Encode a schedule in the numbers of the inner loops."""
        paired = self.engine.integers(paired_flags(schedule, self.block))
        return self.coded(schedule.ranks), paired

    def schedule(self, name: str, coded: Coded) -> Schedule:
        """Decode a schedule."""
        problem, m = self.problem, self.problem.num_microbatches
        pairs = paired_passes(coded[1], m)
        return Schedule(name, problem.placement, m, self.passes(coded), pairs=pairs)


def paired_flags(schedule: Schedule, units: int) -> list[int]:
    """Return for each unit whether its F is paired, in the numbers of the inner loops."""
    paired = [0] * units
    for _, stage, microbatch in schedule.pairs:
        paired[stage * schedule.num_microbatches + microbatch] = 1
    return paired


def paired_passes(flags: Any, num_microbatches: int) -> frozenset[Pass]:
    """Return the F that such flags pair."""
    units = (unit for unit, flag in enumerate(flags) if flag % 2)
    return frozenset(Pass(PassKind.F, *divmod(unit, num_microbatches)) for unit in units)
