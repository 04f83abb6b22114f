"""Pairs: a forward and a backward of two units run as one pass, and hide each other's all-to-all.

As in DeepSeek-V3 (arXiv 2412.19437, section 3.2.1). Which passes to pair is a part of the search.
To pair neighbours of an order that is good without pairs makes ranks wait in a circle, or wait for
what a pair holds back. So

1. the list scheduler chooses pairs as it goes (:mod:`search.inner_loops`), steered by numbers that
   are searched for as those of single passes are;
2. moves pair and part passes, and each order is timed before it is kept;
3. the orders that are known take part, so that the result is never slower than any of them.

Beside recomputation, below 1F1B's memory: a pair hides communication only if both of its passes are
ready, so units wait longer and hold more, and there is room for few. A recomputed unit waits for
little. Its R runs right before its B, or before the pair that B is in: R also communicates, with
nothing to hide it.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from megatron_zb.schedules.costs import (
    Costs,
    Feature,
    Scale,
    added,
    by_slice,
    check_table,
    filled,
    level,
    seconds_of,
    times,
)
from megatron_zb.schedules.features.recomputation import (
    Recomputation,
    mixed_problems,
    runner_with_r,
    seconds_of_search,
    with_recompute,
)
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import keeps
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.hill_climbing import (
    POOL,
    Climb,
    Pool,
    climbed,
    polished_pool,
)
from megatron_zb.schedules.search.inner_loops import INFINITY, PairPriorities
from megatron_zb.schedules.search.kernels import engine
from megatron_zb.schedules.search.place_w import fuse_for_free
from megatron_zb.schedules.search.placement_search import (
    LimitedSearch,
    PlacementSearch,
    SearchFeature,
    bound_of,
)
from megatron_zb.schedules.search.priority_weights import PriorityWeights
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.runner import (
    PAIRS,
    Coded,
    Effort,
    Runner,
    effort_of,
    pair_costs_of,
)
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.stage_costs import StageCosts

_F, _B, _W, _BW, _R = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.R
_LEAST_SECONDS = 1.0  # of the search, where passes may be paired

PAIR_LOSS = 0.03
"""How much longer a pair takes because F and backward slow each other down. An assumption."""


@dataclass(frozen=True)
class Communication(SearchFeature):
    """An expert all-to-all that nothing hides unless a pair does.

    Args:
        forward: seconds of it in F, beside what F computes: of each slice, or one number for a
            microbatch on one whole rank.
        backward: the same of B, and of BW.
        pair_loss: the share by which a pair of F and B takes longer because each slows the other
            down.
    """

    name: ClassVar[str] = "communication"
    turn: ClassVar[int] = 2

    forward: float | Sequence[float]
    backward: float | Sequence[float]
    pair_loss: float = 0.0

    def said(self) -> dict[str, str]:
        return {self.name: "communication in F and B"} if self.takes_time else {}

    @property
    def takes_time(self) -> bool:
        """Whether there is anything to hide."""
        return any(filled(self.forward)) or any(filled(self.backward))

    def completed(self, costs: Costs) -> Communication:
        """Return the feature with the seconds of each slice.

        Raises:
            UsageError: a value is negative or not finite, or there is not one for each slice.
        """
        forward, backward = by_slice(costs, self.forward), by_slice(costs, self.backward)
        slices = len(costs.seconds[_F])
        check_table("forward_comm", forward, slices)
        check_table("backward_comm", backward, slices)
        check_table("pair_loss", (self.pair_loss,), 1)
        return replace(self, forward=forward, backward=backward)

    def scaled(self, scale: Scale) -> Communication:
        both = times(filled(self.forward), scale.tokens), times(filled(self.backward), scale.tokens)
        return replace(self, forward=both[0], backward=both[1])

    def leveled(self) -> Communication:
        return replace(
            self, forward=level(filled(self.forward)), backward=level(filled(self.backward))
        )

    def placed(self, costs: Costs, placement: Placement, table: StageCosts) -> StageCosts:
        there = seconds_of(costs, filled(self.forward), placement)
        back = seconds_of(costs, filled(self.backward), placement)
        seconds = dict(table.seconds)
        for kind, more in ((_F, there), (_B, back), (_R, there)):
            seconds[kind] = added(seconds[kind], more)
        is_known = _BW in costs.seconds
        seconds[_BW] = added(seconds[_BW if is_known else _B], back if is_known else seconds[_W])
        exchange = {_F: there, _B: back}
        return replace(table, seconds=seconds, exchange=exchange, pair_loss=self.pair_loss)

    def improved(self, schedule: Schedule, search: PlacementSearch) -> Schedule:
        """Return the fastest of the order found without pairs, of known ones, and with pairs."""
        request, limit = search.request, search.problem().limit
        if not self.takes_time:
            return schedule
        peaks = [simulate(known, request.costs).peak_memory for known in search.known]
        each = zip(search.known, peaks, strict=True)
        fitting = [known for known, peak in each if keeps(peak, limit)]
        seconds = max(search.seconds, _LEAST_SECONDS) + search.restarting
        return with_pairs([schedule, *fitting], replace(search, seconds=seconds))

    def within_limit(self, search: LimitedSearch) -> Iterable[Schedule]:
        """Return the fastest order that a search finds, with pairs and recomputed units."""
        if "kept_input" not in search.problem.costs.memory or not self.takes_time:
            return []
        known = [*search.orders, *search.found]
        effort = effort_of(search.problem, seconds_of_search(search), PAIRS)
        paired = search_paired_recompute(search.name, search.problem, effort, search.bound, known)
        return [] if paired is None else [fuse_for_free(paired, search.request.costs)]


def without_communication(costs: Costs) -> Costs:
    """Return the costs with the all-to-all as a part of F and B that nothing can hide."""
    found = costs.feature(Communication)
    if found is None:
        return costs
    there, back = filled(found.forward), filled(found.backward)
    more = {_F: there, _B: back, _BW: back}
    seconds = {k: added(of, more[k]) if k in more else of for k, of in costs.seconds.items()}
    features: list[Feature] = []
    for it in costs.features:
        if isinstance(it, Recomputation):
            features.append(replace(it, seconds=added(filled(it.seconds), there)))
        elif it is not found:
            features.append(it)
    rows = tuple(map(without_communication, costs.microbatches))
    return replace(costs, seconds=seconds, features=tuple(features), microbatches=rows)


# --- search


def with_pairs(known: Sequence[Schedule], search: PlacementSearch) -> Schedule:
    """Return the fastest of known schedules of a placement that fit, and of what a search pairs.

    It has the name of the first.
    """
    name, request, problem = known[0].name, search.request, search.problem()
    effort = effort_of(problem, search.seconds, PAIRS)
    found = search_pairs(name, problem, effort, bound_of(problem), known)
    if search.split:
        found = fuse_for_free(found, request.costs)
    entries = [*known, found]
    best = min(entries, key=lambda entry: request.seconds(simulate(entry, request.costs)))
    return replace(best, name=name)


_PAIR_PRESETS = Path(__file__).with_name("pair_presets.csv")
_PAIR_RESTARTS = 8  # each from another seed: a long climb gains less than a further one
_LEAST_RUNS = 500  # of a climb, at least
_POLISHED_PAIRS = 8  # starts that are polished, the fastest ones
_PAIR_THRESHOLDS = (0.3, 0.15)  # the loss that polishing accepts at first, in mean passes
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
    runner = runner_of_pairs(problem, effort)
    good_enough = lower_bound * (1 + 1e-9)
    starts = [runner.polished(_coded(runner, schedule), 0, 0.0, 0.0, 0) for schedule in known]
    restarts = max(1, min(_PAIR_RESTARTS, effort.runs // _LEAST_RUNS))
    for seed in range(restarts):
        pool = climb_pairs(runner, effort.runs // restarts, good_enough, seed)
        for weights in pool if restarts == 1 else pool[:1]:
            seconds = _seconds_of(runner, weights)
            if seconds < INFINITY:
                starts.append((seconds, runner.copied()))
    starts = sorted(starts, key=lambda entry: entry[0])[:_POLISHED_PAIRS]
    best = starts[0]
    share = effort.moves // (len(starts) + len(_PAIR_THRESHOLDS))
    rounds = [
        *((start, _PAIR_THRESHOLDS[0]) for start in starts),
        *((None, t) for t in _PAIR_THRESHOLDS),
    ]
    for number, (start, threshold) in enumerate(rounds if share else ()):
        if best[0] <= good_enough:
            break
        found = runner.polished((start or best)[1], share, threshold, good_enough, number)
        best = min(best, found, key=lambda entry: entry[0])
    return _decoded(runner, name, best[1])


def climb_pairs(runner: Runner, runs: int, good_enough: float, seed: int) -> list[PairWeights]:
    """Return the best few weights: presets first, then neighbours that do not lose."""
    placement = runner.problem.placement
    p, chunks = placement.pipeline_size, placement.chunks
    rng = random.Random(seed)
    presets = [(_seconds_of(runner, weights), weights) for weights in _pair_presets(chunks, p)]
    pool = climbed(
        sorted(presets, key=lambda entry: entry[0])[:POOL],
        lambda weights, _: _seconds_of(runner, weights),
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


def runner_of_pairs(problem: Problem, effort: Effort) -> Runner:
    """Return a runner on a problem whose passes communicate."""
    make = engine(float(effort.runs + effort.moves) * problem.num_passes)
    return Runner(problem, make, pair_costs_of(problem, make))


def _seconds_of(runner: Runner, weights: PairWeights) -> float:
    """Return the seconds of the order that the weights lead to; INFINITY if it gets stuck."""
    chunks = range(runner.problem.placement.chunks)
    half = len(chunks) / 2
    bias = [
        runner.mean_pass * weights.bias[2 * (forward >= half) + (backward >= half)]
        for forward in chunks
        for backward in chunks
    ]
    pairs = PairPriorities(weights.gain, runner.engine.floats(bias))
    return runner.makespan(weights.single, pairs=pairs)


def _coded(runner: Runner, schedule: Schedule) -> Coded:
    """Encode a schedule, with what it pairs, in the numbers of the inner loops."""
    paired = runner.engine.integers(paired_flags(schedule, runner.block))
    return runner.coded(schedule.ranks), paired


def _decoded(runner: Runner, name: str, coded: Coded) -> Schedule:
    """Decode a schedule, with what it pairs."""
    problem, m = runner.problem, runner.problem.num_microbatches
    pairs = paired_passes(coded[1], m)
    return Schedule(name, problem.placement, m, runner.passes(coded), pairs=pairs)


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


# --- beside recomputation


_RECOMPUTE_POOL = 4  # starts that are polished further, the fastest ones
_RECOMPUTE_THRESHOLDS = (
    0.3,
    0.3,
    0.15,
    0.3,
)  # the loss that polishing accepts at first, in mean passes


def search_paired_recompute(
    name: str, problem: Problem, effort: Effort, lower_bound: float, known: Iterable[Schedule]
) -> Schedule | None:
    """Return the fastest schedule found that keeps the limit, None if none was found.

    ``known`` are schedules of the placement, whatever they hold, whose orders and pairs take part.
    """
    runner = runner_with_r(problem, effort, pairs=True)
    orders = [*known, *_mixed_orders(name, problem, effort)]
    starts = [coded for order in orders if (coded := _coded_with_r(runner, order)) is not None]
    if not starts:
        return None
    pool = Pool(effort.moves, lower_bound * (1 + 1e-9), _RECOMPUTE_POOL, _RECOMPUTE_THRESHOLDS)
    return _decoded_with_r(runner, name, polished_pool(runner, starts, pool))


def _mixed_orders(name: str, problem: Problem, effort: Effort) -> Iterator[Schedule]:
    """Yield orders with pairs, found for costs of units that are recomputed in part."""
    problems = list(mixed_problems(problem))
    for mixed in problems:
        runner = runner_of_pairs(mixed, effort)
        for weights in climb_pairs(runner, effort.runs // len(problems), 0.0, 0)[:1]:
            if _seconds_of(runner, weights) < INFINITY:
                yield _decoded(runner, name, runner.copied())


def _coded_with_r(runner: Runner, schedule: Schedule) -> Coded | None:
    """Encode a schedule, and recompute what the limit has no room for.

    Flags are 1 for a unit whose F is paired, and 2 more for one that has an R.
    """
    coded = with_recompute(runner, schedule.ranks, schedule.pairs)
    if coded is None:
        return None
    order, recomputed = coded
    codes = [int(code) for code in order if code < 3 * runner.block]
    flags = paired_flags(schedule, runner.block)
    flags = [flag + 2 * int(again) for flag, again in zip(flags, recomputed, strict=True)]
    return runner.engine.integers(codes), runner.engine.integers(flags)


def _decoded_with_r(runner: Runner, name: str, coded: Coded) -> Schedule:
    """Decode a schedule, with what it pairs and what it recomputes."""
    order, flags = coded
    problem, m = runner.problem, runner.problem.num_microbatches
    pairs = paired_passes(flags, m)
    recomputed = {divmod(unit, m) for unit, flag in enumerate(flags) if flag >= 2}
    ranks = runner.passes((order, [0] * runner.block))
    with_r = tuple(tuple(_with_r(passes, pairs, recomputed)) for passes in ranks)
    return Schedule(name, problem.placement, m, with_r, pairs=pairs)


def _with_r(
    passes: Sequence[Pass], pairs: frozenset[Pass], recomputed: set[tuple[int, int]]
) -> Iterator[Pass]:
    """Yield the passes of a rank, with each R before its B, or before the pair that B is in."""
    for place, p in enumerate(passes):
        backward = passes[place + 1] if p in pairs else p
        is_second = place > 0 and passes[place - 1] in pairs
        if backward.kind is PassKind.B and backward[1:] in recomputed and not is_second:
            yield backward._replace(kind=PassKind.R)
        yield p
