"""Search for a fast order within a memory limit: list scheduling and hill climbing.

One run of the list scheduler (:mod:`inner_loops`) is steered by a vector of numbers; presets that
are good for many shapes come first, then small random changes are kept where they do not lose; then
the orders themselves are polished. Where that ends far from the lower bound, annealed restarts
follow, which also bias single ranks and are polished for the mean end of all passes. All randomness
is seeded and the effort is counted in runs, not in seconds, so that every rank of a job finds the
same order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_zb.schedules.passes import Pass
from megatron_zb.schedules.search.inner_loops import INFINITY
from megatron_zb.schedules.search.kernels import engine
from megatron_zb.schedules.search.priority_weights import PRESETS, PriorityWeights
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.runner import Coded, Effort, Runner


@dataclass(frozen=True)
class Found:
    """Best order of a search and its makespan in seconds, with :attr:`Problem.tail_seconds`."""

    ranks: tuple[tuple[Pass, ...], ...]
    makespan: float


_Weighed = tuple[float, PriorityWeights]  # seconds of the order, and what led to it

_HILL_CLIMBS = 3  # from the same presets with other seeds; each takes its share of the runs
POOL = 4  # weights that a climb goes on from
_KEPT = 2  # of the pool, to be polished
# The loss that polishing accepts at first, in mean passes: for the starts in turn, then for the
# best. Small problems gain most from large losses, large ones from small.
_START_THRESHOLDS = (0.6, 0.15)
_THRESHOLDS = (1.0, 0.6, 0.15, 0.15)

_NO_EFFORT = Effort(0, 0)
_GAP_WORTH_A_RESTART = 1.01  # of the lower bound
_RESTARTS = 2  # from the best preset, each with its own seed and its share of the effort
_BIASING = 0.5  # share of the steps of a restart that change biases of single ranks
_ANNEALING_LOSS = 0.06  # the mean loss that a restart accepts at first, in mean passes
# Polishing after a restart: how much the mean end counts, the loss of both together that it accepts
# at first, and that of the makespan alone at last.
_MEAN_WEIGHT = 1000.0
_SMOOTH_THRESHOLD = 30.0
_LAST_THRESHOLD = 0.15


def search(
    problem: Problem,
    effort: Effort,
    lower_bound: float,
    known: Sequence[Sequence[Sequence[Pass]]] = (),
    seed: int = 0,
    further: Effort = _NO_EFFORT,
) -> Found:
    """Climb from the presets, polish the best few orders, and the best of them once more.

    ``known`` are orders within the limit that compete from the start. ``further`` effort, if any,
    goes into :func:`_restarted`. Stops early when the lower bound is met. Every limit must be
    at least :meth:`Problem.smallest_limit`.
    """
    runner = Runner(problem, engine(float(effort.runs + effort.moves) * problem.num_passes))
    good_enough = lower_bound * (1 + 1e-9)
    best: tuple[float, Coded] = (INFINITY, (None, None))
    starts: list[Coded] = [(runner.coded(order), None) for order in known]
    presets = _best_presets(runner)
    for climb in range(_HILL_CLIMBS):
        runs = effort.runs * (climb + 1) // _HILL_CLIMBS
        runner.runs += len(PRESETS) if climb else 0  # run once, they count in the effort of each
        for weights in _climb(runner, presets, runs, good_enough, seed + climb):
            runner.makespan(weights)
            starts.append(runner.copied())
    if not starts:
        raise RuntimeError("the list scheduler got stuck; its quotas are wrong")
    moves = effort.moves // (2 * len(starts))
    for number, order in enumerate(starts):
        if best[0] > good_enough:
            threshold = _START_THRESHOLDS[number % len(_START_THRESHOLDS)]
            polished = runner.polished(order, moves, threshold, good_enough, seed + number)
            best = min(best, polished, key=lambda t: t[0])
    for round_, threshold in enumerate(_THRESHOLDS if effort.moves else ()):
        if best[0] > good_enough:
            moves = effort.moves // (2 * len(_THRESHOLDS))
            again = runner.polished(best[1], moves, threshold, good_enough, seed + 100 + round_)
            best = min(best, again, key=lambda t: t[0])
    if further.runs and best[0] > lower_bound * _GAP_WORTH_A_RESTART:
        restarted = _restarted(runner, presets[0], further, good_enough, seed)
        best = min(best, restarted, key=lambda t: t[0])
    return Found(runner.passes(best[1]), best[0])


@dataclass(frozen=True)
class Pool:
    """Settings of the polishing of many orders.

    Args:
        moves: single moves in all, half of them for the starts.
        good_enough: seconds at which nothing is left to gain.
        size: orders that are polished further, the fastest ones.
        thresholds: the loss that polishing accepts at first, in mean passes: for the starts, then
            for each further round.
    """

    moves: int
    good_enough: float
    size: int
    thresholds: tuple[float, ...]


def polished_pool(runner: Runner, starts: Sequence[Coded], pool: Pool) -> Coded:
    """Return the best order: all starts are polished, then the fastest ones in rounds."""
    first, *later = pool.thresholds
    moves = pool.moves // (2 * len(starts))
    found = sorted(
        (
            runner.polished(start, moves, first, pool.good_enough, number)
            for number, start in enumerate(starts)
        ),
        key=lambda entry: entry[0],
    )[: pool.size]
    moves = pool.moves // (2 * len(found) * len(later))
    for number, threshold in enumerate(later):
        for place, entry in enumerate(found):
            if found[0][0] > pool.good_enough:
                again = runner.polished(entry[1], moves, threshold, pool.good_enough, 100 + number)
                found[place] = min(entry, again, key=lambda entry: entry[0])
    return min(found, key=lambda entry: entry[0])[1]


def _climb(
    runner: Runner, presets: Sequence[_Weighed], runs: int, good_enough: float, seed: int
) -> list[PriorityWeights]:
    """Return the best few weights: presets first, then neighbours that do not lose."""
    placement, rng = runner.problem.placement, random.Random(seed)
    p, chunks = placement.pipeline_size, placement.chunks
    pool = climbed(
        presets[:POOL],
        lambda weights, bound: runner.makespan(weights, bound),
        lambda weights: weights.changed(rng, chunks, p),
        Climb(rng, runs - runner.runs, good_enough, favour=0.7),
    )
    return [weights for makespan, weights in pool[:_KEPT] if makespan < INFINITY]


@dataclass(frozen=True)
class Climb:
    """Settings of hill climbing: ``steps``, a share ``favour`` of them from the best."""

    rng: random.Random
    steps: int
    good_enough: float
    favour: float


_W = TypeVar("_W")


def climbed(
    starts: Sequence[tuple[float, _W]],
    makespan: Callable[[_W, float], float],
    changed: Callable[[_W], _W],
    climb: Climb,
) -> list[tuple[float, _W]]:
    """Return a pool of weights, the best first, where neighbours replace what they do not lose to.

    Args:
        starts: weights with their seconds, the best first.
        makespan: seconds of weights, which may be INFINITY if above the bound.
        changed: a neighbour of weights.
    """
    pool, rng = list(starts), climb.rng
    for _ in range(climb.steps):
        if pool[0][0] <= climb.good_enough:
            break
        at = 0 if rng.random() < climb.favour else rng.randrange(len(pool))
        candidate = changed(pool[at][1])
        seconds = makespan(candidate, pool[at][0])
        if seconds <= pool[at][0]:
            pool[at] = (seconds, candidate)
            pool.sort(key=lambda entry: entry[0])
    return pool


def _best_presets(runner: Runner) -> list[_Weighed]:
    """Return all presets with their makespans, the fastest first."""
    placement = runner.problem.placement
    p, chunks = placement.pipeline_size, placement.chunks
    starts = [PriorityWeights.from_preset(numbers, chunks, p) for numbers in PRESETS]
    ranked = sorted((runner.makespan(s), i) for i, s in enumerate(starts))
    return [(makespan, starts[i]) for makespan, i in ranked]


def _restarted(
    runner: Runner, start: _Weighed, effort: Effort, good_enough: float, seed: int
) -> tuple[float, Coded]:
    """Return the best order of a few restarts, also polished for the mean end of all passes.

    Where memory is tight, the polished orders of :func:`search` are local optima. Restarts escape
    them by biases of single ranks, and by the mean end, which ranks moves of equal makespan.
    """
    best: tuple[float, Coded] = (INFINITY, (None, None))
    runs = effort.runs // _RESTARTS
    moves = effort.moves // (2 * _RESTARTS + 1)  # two shares for each restart, one for the best
    for number in range(_RESTARTS):
        rng = seed + 200 + number
        runner.makespan(_annealed(runner, start, runs, good_enough, rng))
        order = runner.copied()
        threshold, weight = _SMOOTH_THRESHOLD, _MEAN_WEIGHT
        polished = runner.polished(order, 2 * moves, threshold, good_enough, rng, weight)
        best = min(best, polished, key=lambda t: t[0])
    again = runner.polished(best[1], moves, _LAST_THRESHOLD, good_enough, seed + 300)
    return min(best, again, key=lambda t: t[0])


def _annealed(
    runner: Runner, start: _Weighed, runs: int, good_enough: float, seed: int
) -> PriorityWeights:
    """Return the best weights of simulated annealing from a preset."""
    placement = runner.problem.placement
    p, chunks = placement.pipeline_size, placement.chunks
    rng = random.Random(seed)
    here, current = lowest, best = start
    for step in range(runs):
        change = current.with_other_biases if rng.random() < _BIASING else current.changed
        candidate = change(rng, chunks, p)
        loss = _ANNEALING_LOSS * runner.mean_pass * (1 - step / runs) * rng.expovariate(1.0)
        makespan = runner.makespan(candidate, here + loss)
        if makespan <= here + loss:
            here, current = makespan, candidate
        if here < lowest:
            lowest, best = here, current
        if lowest <= good_enough:
            break
    return best
