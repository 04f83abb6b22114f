"""Unequal microbatches: their work, and a plan of one step, an order of them and of the passes.

A search takes seconds and the lengths are known milliseconds before the step, so that a plan starts
from the schedule for equal microbatches. Short microbatches at both ends, the longest in the middle
("hill"), shorten the fill and the drain of a pipeline under any schedule; swaps of two follow, then
the list scheduler's presets, and a fixed number of moves of single passes. The effort is counted in
runs and not in seconds, and all randomness is seeded: the plan is a function of its arguments, so
that every rank finds the same.

A forward-only step (evaluation, the log-probabilities of reinforcement learning) has an order of
its own: that of a training step lets a rank wait for backward passes that it does not have. A
greedy order, in which every rank runs what can start first, waits less.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import isfinite
from typing import Any

import numpy as np

from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import Costs, Scale
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import keeps
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.inner_loops import INFINITY
from megatron_zb.schedules.search.kernels import Compiled, Engine, fastest
from megatron_zb.schedules.search.place_w import fuse_for_free
from megatron_zb.schedules.search.priority_weights import PRESETS, PriorityWeights
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.runner import Runner
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.stage_costs import StageCosts

# --- work: tokens, and what attention takes beside linear layers


BACKWARD_OF_ATTENTION = 2.5
"""Work of attention's backward, in that of its forward: five products of matrices for two."""


@dataclass(frozen=True)
class AttentionWork:
    """Work of attention in a model.

    Args:
        forward: the tokens of linear layers that take as long as attention to one pair of a query
            and a key, in F. It is what F of ``squares`` takes beside that of ``tokens``.
        backward: the same in B.
    """

    forward: float
    backward: float

    @classmethod
    def counted(cls, scores: float, linear: float) -> AttentionWork:
        """Return the work of a layer by its operations for a pair, and in F for a token."""
        share = scores / linear
        return cls(share, BACKWARD_OF_ATTENTION * share)


NO_ATTENTION = AttentionWork(0.0, 0.0)


@dataclass(frozen=True)
class Lengths:
    """Lengths of the microbatches of a step, in the order in which they run.

    Args:
        tokens: of each microbatch, all of its sequences together.
        squares: the sum of the squares of its sequences' lengths.
        shapes: sequence length and batch size that the model computes with, if they are given.
    """

    tokens: tuple[float, ...]
    squares: tuple[float, ...]
    shapes: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def of(
        cls,
        tokens: Sequence[float],
        squares: Sequence[float] | None = None,
        shapes: Sequence[tuple[int, int]] | None = None,
    ) -> Lengths:
        """Check lengths; without squares, each microbatch is one sequence.

        Raises:
            UsageError: a number is not positive, or there are not as many of each as tokens.
        """
        if squares is None:
            squares = [float(t) * float(t) for t in tokens]
        if len(squares) != len(tokens):
            raise UsageError(
                f"lengths: {len(tokens)} tokens and {len(squares)} squares: give one of each for "
                "every microbatch"
            )
        if not tokens or not all(isfinite(x) and x > 0 for x in (*tokens, *squares)):
            raise UsageError(
                f"lengths: tokens are {list(tokens)} and squares {list(squares)}: give positive "
                "numbers, and leave out microbatches that have no tokens"
            )
        found = None if shapes is None else tuple((int(s), int(b)) for s, b in shapes)
        if found is not None and (len(found) != len(tokens) or min(map(min, found)) < 1):
            raise UsageError(
                f"lengths: {len(tokens)} tokens and the shapes {list(found)}: give a sequence "
                "length and a batch size of at least 1 for every microbatch"
            )
        return cls(tuple(map(float, tokens)), tuple(map(float, squares)), found)

    def __len__(self) -> int:
        return len(self.tokens)

    def in_order(self, order: Sequence[int]) -> Lengths:
        """Return the lengths of the microbatches in another order."""
        tokens, squares = (tuple(of[j] for j in order) for of in (self.tokens, self.squares))
        shapes = None if self.shapes is None else tuple(self.shapes[j] for j in order)
        return Lengths(tokens, squares, shapes)


def together(of_all: Sequence[Lengths]) -> Lengths:
    """Return the lengths of several ranks' microbatches as those of one."""
    tokens = [of_one for lengths in of_all for of_one in lengths.tokens]
    return Lengths.of(tokens, [of_one for lengths in of_all for of_one in lengths.squares])


def costs_of_work(
    costs: Costs,
    lengths: Lengths,
    attention: AttentionWork = NO_ATTENTION,
    mean: Lengths | None = None,
) -> Costs:
    """Return the costs of microbatches of some lengths, of which a mean one has the given costs.

    F and B grow with the tokens and with the work of attention, W, messages and memory with the
    tokens alone. The mean is over ``mean``, or over the lengths themselves if it is left out.
    """

    def shares(of_pair: float) -> list[float]:
        work = _work(lengths, of_pair)
        of = work if mean is None else _work(mean, of_pair)
        average = sum(of) / len(of)
        return [each / average for each in work]

    scales = list(map(Scale, shares(0.0), shares(attention.forward), shares(attention.backward)))
    rows = {scale: costs.scaled(scale) for scale in scales}
    return replace(costs, microbatches=tuple(rows[scale] for scale in scales))


def _work(lengths: Lengths, of_pair: float) -> list[float]:
    return [t + of_pair * q for t, q in zip(lengths.tokens, lengths.squares, strict=True)]


# --- forward-only steps


def in_forward_order(schedule: Schedule, costs: Costs) -> Schedule:
    """Return the faster order of the forward passes of a schedule: that of training, or greedy.

    Among passes that can start at one time, the greedy one takes that of the latest stage: with the
    earliest first, the activations of nearly all microbatches would wait before the next chunk. A
    schedule with forward passes of other kinds, such as those of a vocabulary-parallel output
    layer, keeps its order, and so does one of units with routes of their own.
    """
    trained = schedule.forwards()
    has_routes = schedule.rules.routes is not None
    if schedule.placement.chunks == 1 or has_routes or not _has_forwards_alone(trained):
        return trained
    of_units = schedule.rules.unit_costs(trained, costs)
    greedy = _greedy(trained, of_units.for_placement(schedule.placement))
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
        self._clock[rank] = start + row.seconds[PassKind.F][stage]
        if stage + 1 < self._placement.num_stages:
            self._arrivals[stage + 1].append(self._clock[rank] + row.latency[PassKind.F][stage])
            reader = self._placement.rank_of[stage + 1]
            if reader != rank:
                self._offer(reader)
        self._offer(rank)


# --- training steps


Order = tuple[int, ...]
"""For each position in a step, the microbatch that runs there, by its place before the step."""

_TOLERANCE = 1e-9
_TRAINING = {PassKind.F, PassKind.B, PassKind.W, PassKind.BW}
_THRESHOLD = 0.3  # of a mean pass: the loss that moves accept at first


@dataclass(frozen=True)
class StepPlan:
    """Order of a step's microbatches, and the schedule of their passes by their new places.

    ``costs`` are those of the microbatches in this order, ``peaks`` the most memory of every rank.
    """

    order: Order
    schedule: Schedule
    costs: Costs
    peaks: tuple[float, ...]


@dataclass(frozen=True)
class PlanEffort:
    """Effort of a plan, the same number of timed passes for small and large steps.

    Args:
        swaps: passes of the schedules that are timed to swap two microbatches.
        orders: orders of microbatches whose passes are scheduled anew.
        moves: passes of the schedules that are timed to move a single pass.
    """

    swaps: int
    orders: int
    moves: int

    def number(self, timed: int, passes: int) -> int:
        """Return how many schedules of ``passes`` can be timed; enough for small ones."""
        return min(timed // passes, _ENOUGH)


_ENOUGH = 8000
_SWAPS_OF_A_TABLE = 40  # each takes milliseconds: the inner loops know no other passes
COMPILED = PlanEffort(swaps=120_000, orders=2, moves=1_500_000)
PLAIN = PlanEffort(swaps=12_000, orders=1, moves=30_000)
"""For about 40 and 120 milliseconds of a processor with 8 ranks and 32 microbatches."""


def plan_step(
    table: Schedule,
    costs: Costs,
    limit: Sequence[float],
    *,
    keeps_order: bool = False,
    keeps_passes: bool = False,
    engine: Engine | None = None,
) -> StepPlan | None:
    """Return the fastest plan found within a limit, or None if none was found there.

    It is never slower than ``table`` with the microbatches in their order, if that keeps the limit.
    Where no order of a table that recomputes or offloads keeps it, the plan does neither.

    Args:
        table: the schedule for equal microbatches, of as many.
        costs: of each microbatch, in the order that is given.
        limit: the most memory of every rank, in the unit of the costs.
        keeps_order: the microbatches stay in their order.
        keeps_passes: the passes stay in that of the table, such as a published one.
        engine: of the inner loops; the fastest there is if left out.
    """
    given = tuple(range(table.num_microbatches))
    orders = [given] if keeps_order else list(dict.fromkeys([given, *rules(_work_of(costs))]))
    if not _has_only_training(table):
        plan, plain = (
            _in_another_order(table, costs, limit, orders),
            _without_recompute_or_offload(table),
        )
        if plan is not None or keeps_passes or not _has_only_training(plain):
            return plan
        table = plain
    engine = engine or fastest()
    effort = COMPILED if isinstance(engine, Compiled) else PLAIN
    search = _Search(table, costs, tuple(limit), engine)
    found = [search.replayed(order) for order in orders]
    if not keeps_order:
        swaps = effort.number(effort.swaps, search.passes)
        found.append(search.swapped(min(found, key=search.rank_of), swaps))
    reorders = search.is_possible and not keeps_passes
    if reorders:
        best_first = sorted(found, key=search.rank_of)
        found += [search.scheduled(each.order) for each in best_first[: effort.orders]]
    best = min(found, key=search.rank_of)
    if not search.fits(best):
        return None
    if not reorders:
        return _planned(table, costs, best.order)
    best = search.polished(best, effort.number(effort.moves, search.passes))
    return _planned(search.schedule_of(best), costs, best.order, fuses=search.splits)


def usual_limit(table: Schedule, equal: Costs, costs: Costs, *, follows_costs: bool) -> float:
    """Return the most memory of a rank in a step for which no limit is given.

    It is the share of 1F1B's memory that the table takes of equal microbatches: of what 1F1B takes
    of these in their order. A table whose passes keep their order may take as much as it does then.

    Args:
        table: the schedule for equal microbatches.
        equal: costs of these.
        costs: of each microbatch of the step.
        follows_costs: other costs may give another order of passes.
    """
    m, p = table.num_microbatches, costs.pipeline_size
    share = max(simulate(table, equal).peak_memory) / (equal.one_f_one_b_peak() * min(m, p) / p)
    most = share * costs.one_f_one_b_peak()
    if follows_costs and _has_only_training(table):
        return most
    return max(most, *simulate(table, costs).peak_memory)


def _has_only_training(table: Schedule) -> bool:
    """Whether the passes of a table may be reordered: forwards and backwards, without pairs."""
    return not table.pairs and {p.kind for rank in table.ranks for p in rank} <= _TRAINING


def _without_recompute_or_offload(table: Schedule) -> Schedule:
    """Return a table that neither recomputes nor offloads activations."""
    added = (PassKind.R, PassKind.D, PassKind.H)
    ranks = tuple(tuple(p for p in rank if p.kind not in added) for rank in table.ranks)
    return replace(table, ranks=ranks, report=None)


def plan_forwards(table: Schedule, costs: Costs, *, keeps_order: bool = False) -> StepPlan:
    """Return the fastest plan found for a step of only forwards, which hold no activations."""
    given = tuple(range(table.num_microbatches))
    orders = [given]
    if not keeps_order:
        hill, falling = rules(_work_of(costs))
        orders = list(dict.fromkeys([given, hill, falling, falling[::-1]]))
    plans = [
        _planned(in_forward_order(table, in_order), costs, order)
        for order in orders
        for in_order in [costs.in_order(order)]
    ]
    return min(plans, key=_seconds)


def _in_another_order(
    table: Schedule, costs: Costs, limit: Sequence[float], orders: Sequence[Order]
) -> StepPlan | None:
    """Return the fastest plan found whose passes are those of the table; None if none fits.

    Where several orders of the microbatches are allowed, swaps of two follow.
    """

    def rank_of(plan: StepPlan) -> tuple[float, float]:
        excess = max(peak / most for peak, most in zip(plan.peaks, limit, strict=True))
        return (0.0 if keeps(plan.peaks, limit) else excess), _seconds(plan)

    best = min((_planned(table, costs, order) for order in orders), key=rank_of)
    rng = random.Random(0)
    for _ in range(_SWAPS_OF_A_TABLE if len(orders) > 1 else 0):
        i, j = rng.sample(range(len(best.order)), 2)
        order = list(best.order)
        order[i], order[j] = order[j], order[i]
        best = min(best, _planned(table, costs, tuple(order)), key=rank_of)
    return best if keeps(best.peaks, limit) else None


def _planned(schedule: Schedule, costs: Costs, order: Order, *, fuses: bool = False) -> StepPlan:
    in_order = costs.in_order(order)
    schedule = replace(schedule, report=None)
    if fuses:
        schedule = fuse_for_free(schedule, in_order)
    return StepPlan(order, schedule, in_order, simulate(schedule, in_order).peak_memory)


def _seconds(plan: StepPlan) -> float:
    return simulate(plan.schedule, plan.costs).makespan


def _work_of(costs: Costs) -> list[float]:
    """Return the seconds of all passes of each microbatch."""
    kinds = PassKind.F, PassKind.B, PassKind.W
    return [sum(sum(row.seconds[kind]) for kind in kinds) for row in costs.microbatches]


def rules(work: Sequence[float]) -> list[Order]:
    """Return orders that suit a pipeline: longest in the middle, and longest first."""
    falling = sorted(range(len(work)), key=lambda j: (-work[j], j))
    hill = falling[::2][::-1] + falling[1::2]
    return [tuple(hill), tuple(falling)]


@dataclass(frozen=True)
class _Candidate:
    """Codes of an order of passes, in the numbers of the microbatches' places in ``order``."""

    order: Order
    codes: Any
    seconds: float
    excess: float
    """Memory above the limit of the worst rank, as a share of it; 0 if there is none."""


class _Search:
    """Search for a plan of one step.

    The inner loops number microbatches by their places. One graph per order has the costs of all
    passes in its order, so that the same codes mean other microbatches.
    """

    def __init__(
        self, table: Schedule, costs: Costs, limit: tuple[float, ...], engine: Engine
    ) -> None:
        self._table, self._limit, self._engine = table, limit, engine
        self._costs = costs.for_placement(table.placement)
        self.splits = any(p.kind is PassKind.W for rank in table.ranks for p in rank)
        self._runners: dict[Order, Runner] = {}
        given = tuple(range(table.num_microbatches))
        self._given = self._runner(given)
        self._codes = np.asarray(self._given.coded(table.ranks))
        self._memory = np.asarray(self._given.inputs.memory)

    @property
    def passes(self) -> int:
        return self._given.problem.num_passes

    @property
    def is_possible(self) -> bool:
        """Whether the limit has room for the longest microbatch in every chunk of a rank."""
        return all(
            most >= self._given.problem.smallest_limit(rank)
            for rank, most in enumerate(self._limit)
        )

    def rank_of(self, found: _Candidate) -> tuple[bool, float, float]:
        """Return what is smaller for a better order: those within the limit first."""
        fits = self.fits(found)
        return (not fits, 0.0, found.seconds) if fits else (not fits, found.excess, found.seconds)

    @staticmethod
    def fits(found: _Candidate) -> bool:
        return found.excess <= _TOLERANCE and found.seconds < INFINITY

    def replayed(self, order: Order) -> _Candidate:
        """Return the table with the microbatches in an order."""
        places = np.asarray(order)
        m = self._table.num_microbatches
        microbatch = self._codes % m
        given = self._codes - microbatch + places[microbatch]
        seconds, _ = self._given.polished((self._array(given), None), 0, 0.0, -1.0, 0)
        return _Candidate(order, self._codes, seconds, self._excess(given))

    def swapped(self, start: _Candidate, count: int) -> _Candidate:
        """Return the best order by swaps and shifts of two microbatches under the table."""
        rng, best, m = random.Random(count), start, self._table.num_microbatches
        for _ in range(count if m > 1 else 0):
            i, j = rng.sample(range(m), 2)
            order = list(best.order)
            if rng.random() < 0.5:
                order[i], order[j] = order[j], order[i]
            else:
                order.insert(j, order.pop(i))
            best = min(best, self.replayed(tuple(order)), key=self.rank_of)
        return best

    def scheduled(self, order: Order) -> _Candidate:
        """Return the best order of passes that the presets lead to."""
        runner = self._runner(order)
        placement = self._table.placement
        best = INFINITY
        codes = None
        for numbers in PRESETS:
            weights = PriorityWeights.from_preset(
                numbers, placement.chunks, placement.pipeline_size
            )
            seconds = runner.makespan(weights, best)
            if seconds < best:
                best, codes = seconds, np.array(runner.order)
        return _Candidate(order, codes, best, 0.0)

    def polished(self, found: _Candidate, moves: int) -> _Candidate:
        """Return an order after a number of moves of single passes."""
        runner = self._runner(found.order)
        coded = (self._array(found.codes), None)
        seconds, best = runner.polished(coded, moves, _THRESHOLD, -1.0, 0)
        return replace(found, codes=np.array(best[0]), seconds=seconds)

    def schedule_of(self, found: _Candidate) -> Schedule:
        ranks = self._runner(found.order).passes((found.codes, None))
        return replace(self._table, ranks=ranks)

    def _runner(self, order: Order) -> Runner:
        if order not in self._runners:
            rows = self._costs.microbatches
            costs = replace(self._costs, microbatches=tuple(rows[j] for j in order))
            table = self._table
            problem = Problem(
                table.placement, table.num_microbatches, costs, self._limit, self.splits
            )
            self._runners[order] = Runner(problem, self._engine)
        return self._runners[order]

    def _array(self, codes: Any) -> Any:
        return self._engine.integers(codes.tolist())

    def _excess(self, given: Any) -> float:
        peaks = self._peaks(self._memory, given)
        shares = [peak / most for peak, most in zip(peaks, self._limit, strict=True)]
        return float(max(0.0, max(shares) - 1.0))

    def _peaks(self, memory: Any, codes: Any) -> Any:
        of_ranks = memory[codes].reshape(self._table.placement.pipeline_size, -1)
        return np.cumsum(of_ranks, axis=1).max(axis=1)
