"""Search for an order with pairs: which passes to join is a part of the search.

To join neighbours of an order that is good without pairs makes ranks wait in a circle, or wait for
what a pair holds back. So the list scheduler chooses pairs as it goes (:mod:`pair_loops`), steered
by numbers that are searched for as those of single passes are; then moves join and part passes, and
each order is timed before it is kept. The orders that are known take part, so that the result is
never slower than any of them.
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
from megatron_zb.schedules.search.hill_climbing import Effort
from megatron_zb.schedules.search.inner_loops import (
    INFINITY,
    Moves,
    PairCosts,
    PairPriorities,
)
from megatron_zb.schedules.search.kernels import available, engine
from megatron_zb.schedules.search.priority_weights import PriorityWeights
from megatron_zb.schedules.search.runner import Problem, Runner

_FILE = Path(__file__).with_name("pair_presets.csv")
_POOL = 4
_CLIMBS = 8  # each with dice of its own: a long climb gains less than another one
_RUNS = 500  # of a climb, at least
_POLISHED = 8  # starts that are polished, the fastest ones
_THRESHOLDS = (0.3, 0.15)  # the loss that polishing accepts at first, in mean passes
_MOST = Effort(runs=20_000, moves=700_000)  # enough for 8 ranks and 32 microbatches
_JOINING = 0.35  # share of the steps that change what is joined


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

    def changed(self, dice: random.Random, chunks: int, ranks: int) -> PairWeights:
        """Return a neighbour."""
        if dice.random() < _JOINING:
            bias = tuple(b + dice.gauss(0, 1.0) if dice.random() < 0.5 else b for b in self.bias)
            return replace(self, gain=max(0.0, self.gain + dice.gauss(0, 0.7)), bias=bias)
        return replace(self, single=self.single.changed(dice, chunks, ranks))


def effort_of(problem: Problem, seconds: float) -> Effort:
    """Estimate runs and moves for so many seconds, from counts alone so that every rank agrees.

    A compiled run takes about 50 + 30p nanoseconds a pass and a move 16; plain Python is some forty
    times slower, and looks at less.
    """
    run = problem.num_passes * (50 + 30 * problem.placement.pipeline_size) * 1e-9
    if not available():
        return Effort(runs=min(100, int(seconds / (40 * run))), moves=0)
    return Effort(
        runs=min(_MOST.runs, int(seconds / 3 / run)),
        moves=min(_MOST.moves, int(seconds / (problem.num_passes * 24e-9))),
    )


def search_pairs(
    name: str, problem: Problem, effort: Effort, lower_bound: float, known: Sequence[Schedule]
) -> Schedule:
    """Return the fastest order found, of the known ones and all that are looked at.

    ``known`` are schedules of the placement within the limit, at least one.
    """
    runner = _PairRunner(problem, effort)
    good_enough = lower_bound * (1 + 1e-9)
    starts = [runner.polished(runner.coded(schedule), 0, 0.0, 0.0, 0) for schedule in known]
    climbs = max(1, min(_CLIMBS, effort.runs // _RUNS))
    for seed in range(climbs):
        pool = _climb(runner, effort.runs // climbs, good_enough, seed)
        for weights in pool if climbs == 1 else pool[:1]:
            seconds = runner.makespan(weights)
            if seconds < INFINITY:
                starts.append((seconds, runner.copied()))
    starts = sorted(starts, key=lambda entry: entry[0])[:_POLISHED]
    best = starts[0]
    share = effort.moves // (len(starts) + len(_THRESHOLDS))
    rounds = [*((start, _THRESHOLDS[0]) for start in starts), *((None, t) for t in _THRESHOLDS)]
    for number, (start, threshold) in enumerate(rounds if share else ()):
        if best[0] <= good_enough:
            break
        found = runner.polished((start or best)[1], share, threshold, good_enough, number)
        best = min(best, found, key=lambda entry: entry[0])
    return runner.schedule(name, best[1])


def _climb(runner: _PairRunner, runs: int, good_enough: float, seed: int) -> list[PairWeights]:
    """Return the best few weights: presets first, then neighbours that do not lose."""
    placement = runner.problem.placement
    p, chunks = placement.pipeline_size, placement.chunks
    dice = random.Random(seed)
    pool = [(runner.makespan(weights), weights) for weights in _presets(chunks, p)]
    pool = sorted(pool, key=lambda entry: entry[0])[:_POOL]
    for _ in range(runs - len(pool)):
        if pool[0][0] <= good_enough:
            break
        at = 0 if dice.random() < 0.6 else dice.randrange(len(pool))
        candidate = pool[at][1].changed(dice, chunks, p)
        seconds = runner.makespan(candidate)
        if seconds <= pool[at][0]:
            pool[at] = (seconds, candidate)
            pool.sort(key=lambda entry: entry[0])
    return [weights for _, weights in pool]


def _presets(chunks: int, ranks: int) -> list[PairWeights]:
    """Return starting points, found by climbing on a V of 8 ranks: numbers of single passes first.

    Those of ``presets.csv`` stand before ``gain`` and the four of ``bias``.
    """
    with _FILE.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    found = []
    for row in rows:
        *single, gain, a, b, c, d = map(float, row)
        weights = PriorityWeights.from_preset(single, chunks, ranks)
        found.append(PairWeights(weights, gain, (a, b, c, d)))
    return found


_Coded = tuple[Any, Any]
"""An order as codes, and which F of it are joined, by code."""


class _PairRunner:
    """Runner of the inner loops on one problem."""

    def __init__(self, problem: Problem, effort: Effort) -> None:
        self.problem = problem
        make = self._engine = engine(float(effort.runs + effort.moves) * problem.num_passes)
        self._single = Runner(problem, make)
        stages, m = problem.placement.num_stages, problem.num_microbatches
        rows = [problem.costs.of(j) for j in range(m)]
        each = [
            (row.forward_comm, row.backward_comm)[kind][s] if row.forward_comm else 0.0
            for kind in range(2)
            for s in range(stages)
            for row in rows
        ]
        self._exchange = PairCosts(
            make.floats(each + [0.0] * (stages * m)), float(problem.costs.pair_loss)
        )
        self._greedy_space, self._replay_space = self._single.spaces
        self._joined = make.integers([0] * (stages * m))

    def makespan(self, weights: PairWeights) -> float:
        """Return the seconds of the order that the weights lead to; INFINITY if it gets stuck."""
        placement, unit = self.problem.placement, self.problem.mean_pass
        chunks = range(placement.chunks)
        half = placement.chunks / 2
        bias = [
            unit * weights.bias[2 * (forward >= half) + (backward >= half)]
            for forward in chunks
            for backward in chunks
        ]
        return self._engine.run_list_scheduler(
            self._single.inputs,
            self._exchange,
            self._single.priorities(weights.single),
            PairPriorities(weights.gain, self._engine.floats(bias)),
            self._greedy_space,
            self._single.order,
            self._joined,
        )

    def copied(self) -> _Coded:
        """Return a copy of the order of the last run."""
        return self._single.order_copy(), self._engine.integers(self._joined)

    def polished(
        self, start: _Coded, steps: int, threshold: float, good_enough: float, seed: int
    ) -> tuple[float, _Coded]:
        """Return the best order that so many moves lead to, its makespan first."""
        make = self._engine
        order, joined = map(make.integers, start)
        best, best_joined = map(make.integers, start)
        moves = Moves(steps, threshold * self.problem.mean_pass, 0.0, good_enough, seed)
        seconds = make.local_search(
            self._single.inputs,
            self._exchange,
            moves,
            self._replay_space,
            None,
            order,
            joined,
            best,
            best_joined,
        )
        return seconds, (best, best_joined)

    def coded(self, schedule: Schedule) -> _Coded:
        """Encode a schedule in the numbers of the inner loops."""
        m = self.problem.num_microbatches
        joined = [0] * (self.problem.placement.num_stages * m)
        for _, stage, microbatch in schedule.pairs:
            joined[stage * m + microbatch] = 1
        return self._single.coded(schedule.ranks), self._engine.integers(joined)

    def schedule(self, name: str, coded: _Coded) -> Schedule:
        """Decode a schedule."""
        order, joined = coded
        m = self.problem.num_microbatches
        pairs = frozenset(
            Pass(PassKind.F, *divmod(code, m)) for code, is_joined in enumerate(joined) if is_joined
        )
        ranks = self._single.passes(order)
        return Schedule(name, self.problem.placement, m, ranks, pairs=pairs)
