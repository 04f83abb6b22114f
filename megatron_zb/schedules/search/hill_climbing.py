"""Search for a fast order within a memory limit: list scheduling and hill climbing.

One run of the list scheduler (:mod:`list_scheduler`) is steered by a vector of numbers; presets
that are good for many shapes come first, then small random changes are kept where they do not lose;
then the orders themselves are polished (:mod:`polishing`). Where that ends far from the lower
bound, walks follow, which also bias single ranks and are polished with an eye on all passes. All
randomness is seeded and the effort is counted in runs, not in seconds, so that every rank of a job
finds the same order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_zb.schedules.costs import StageCosts
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.search.kernels import Engine, engine
from megatron_zb.schedules.search.list_scheduler import INFINITY
from megatron_zb.schedules.search.presets import PRESETS
from megatron_zb.schedules.search.priority_weights import PriorityWeights

_TOLERANCE = 1e-9
_KINDS = (PassKind.F, PassKind.B, PassKind.W)


@dataclass(frozen=True)
class Problem:
    """A placement to fill: ``limit[r]`` in units of ``costs.activation``; BW only unless split.

    ``behind[r]`` seconds count behind the last pass of rank r, none if left out.
    """

    placement: Placement
    num_microbatches: int
    costs: StageCosts
    limit: tuple[float, ...]
    split: bool = True
    behind: tuple[float, ...] = ()

    @property
    def num_passes(self) -> int:
        kinds = 3 if self.split else 2
        return kinds * self.placement.num_stages * self.num_microbatches

    def smallest_limit(self, rank: int) -> float:
        """Return the memory a rank needs to run at all: one microbatch in each of its chunks."""
        return sum(self.costs.activation[s] for s in self.placement.stages_of[rank])


@dataclass
class _Runner:
    """Runner of the list scheduler on one problem, which reuses its working space."""

    problem: Problem
    engine: Engine
    runs: int = 0
    _space: tuple[object, ...] = field(init=False)
    _fixed: tuple[object, ...] = field(init=False)
    _quotas_of: dict[tuple[float, float, tuple[int, ...]], Any] = field(default_factory=dict)
    _own_of: dict[tuple[float, ...], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem, make = self.problem, self.engine
        placement, costs, m = problem.placement, problem.costs, problem.num_microbatches
        p, chunks, stages = placement.pipeline_size, placement.chunks, placement.num_stages
        self._fixed = (
            make.integers([s for held in placement.stages_of for s in held]),
            make.integers(placement.rank_of),
            *map(
                make.floats,
                (
                    costs.forward,
                    costs.backward,
                    costs.weight,
                    costs.forward_hop,
                    costs.backward_hop,
                    costs.activation,
                    costs.held_for_weight,
                    [limit + _TOLERANCE * (1 + limit) for limit in problem.limit],
                    problem.behind or (0.0,) * p,
                ),
            ),
        )
        self.order = make.integers([0] * problem.num_passes)
        self._space = (
            make.floats([0.0] * (stages * m)),
            make.floats([0.0] * (stages * m)),
            make.integers([0] * (stages * m)),
            make.integers([0] * (p * (2 * chunks + 3))),
            make.floats([0.0] * p),
            make.floats([0.0] * p),
            make.integers([0] * p),
            make.floats([0.0] * p),
        )
        self.mean_pass = sum(costs.forward + costs.backward + costs.weight) / (3 * stages)
        self._prepare_quotas()

    def _prepare_quotas(self) -> None:
        """Precompute, for each rank and each chunk but the last, the inputs of all quotas."""
        problem, activation = self.problem, self.problem.costs.activation
        chunks, stages_of = problem.placement.chunks, problem.placement.stages_of
        self._slots = [
            limit / (problem.smallest_limit(rank) / chunks)
            for rank, limit in enumerate(problem.limit)
        ]
        self._sizes = [[activation[s] for s in held[:-1]] for held in stages_of]
        rooms = [
            limit - activation[held[-1]]
            for limit, held in zip(problem.limit, stages_of, strict=True)
        ]
        self._rooms = [room + _TOLERANCE * (1 + room) for room in rooms]
        self._most = [
            1 + int(room / min(sizes)) if sizes and min(sizes) > 0 else problem.num_microbatches
            for room, sizes in zip(self._rooms, self._sizes, strict=True)
        ]
        self._portions = [_portion(c, chunks) for c in range(chunks - 1)]

    def makespan(self, weights: PriorityWeights) -> float:
        """Return the seconds of the order that the weights lead to; INFINITY if it gets stuck."""
        problem = self.problem
        placement = problem.placement
        self.runs += 1
        return self.engine.run_list_scheduler(
            placement.pipeline_size,
            placement.chunks,
            problem.num_microbatches,
            *self._fixed,
            self._kept_quotas(weights),
            self.engine.floats(self._scores(weights)),
            self._kept_own(weights.own),
            problem.split,
            self.order,
            *self._space,
        )

    def _kept_quotas(self, weights: PriorityWeights) -> Any:
        """Return the quotas as an array: most neighbours have those of an earlier run."""
        key = weights.quota, weights.quota_slope, weights.shift
        if key not in self._quotas_of:
            self._quotas_of[key] = self.engine.integers(self._quotas(weights))
        return self._quotas_of[key]

    def _kept_own(self, own: tuple[float, ...]) -> Any:
        """Return the scores of single ranks as an array, which most neighbours share, too."""
        if own not in self._own_of:
            self._own_of[own] = self.engine.floats([x * self.mean_pass for x in own])
        return self._own_of[own]

    def _scores(self, weights: PriorityWeights) -> list[float]:
        unit, slots = self.mean_pass, self._slots[0]
        forced = weights.pending_share * slots if weights.pending_share > 0 else 1e18
        rows = (*weights.bias, *weights.slope, *weights.late)
        return [x * unit for x in rows] + [weights.early, weights.pending * unit, forced]

    def _quotas(self, weights: PriorityWeights) -> list[int]:
        """Return the microbatches in flight allowed in each chunk but the last.

        Together they leave a slot for the last chunk, so that the oldest microbatch can always
        move on and no run gets stuck.
        """
        placement = self.problem.placement
        p, chunks = placement.pipeline_size, placement.chunks
        if chunks == 1:
            return [0] * p
        quotas: list[int] = []
        for rank in range(p):
            share = weights.quota - weights.quota_slope * rank / (p - 1)
            total = self._slots[rank] * share
            sizes, room, first = self._sizes[rank], self._rooms[rank], rank * chunks
            most = self._most[rank]  # more than these would be taken back one by one
            own = [
                max(1, min(most, round(total * portion) + weights.shift[first + c]))
                for c, portion in enumerate(self._portions)
            ]
            used = sum([q * size for q, size in zip(own, sizes, strict=True)])
            while used > room:
                largest = own.index(max(own))
                if own[largest] == 1:
                    break
                own[largest] -= 1
                used -= sizes[largest]
            quotas += own
            quotas.append(0)
        return quotas

    def order_copy(self) -> Any:
        """Return a copy of the order of the last run, coded."""
        return self.engine.integers(self.order)

    def local_search(
        self,
        order: Any,
        moves: int,
        threshold: float,
        good_enough: float,
        seed: int,
        mean_weight: float = 0.0,
    ) -> tuple[float, Any]:
        """Return the best order that so many single moves lead to, its makespan first."""
        problem, make = self.problem, self.engine
        placement, m = problem.placement, problem.num_microbatches
        p, stages = placement.pipeline_size, placement.num_stages
        best = make.integers(order)
        makespan = make.local_search(
            p,
            problem.num_passes // p,
            stages,
            m,
            *self._fixed[1:],
            problem.split,
            moves,
            threshold * self.mean_pass,
            mean_weight,
            good_enough,
            seed,
            make.integers(order),
            best,
            make.floats([0.0] * (3 * stages * m)),
            make.integers([0] * (3 * stages * m)),
            make.integers([0] * p),
            make.floats([0.0] * p),
            make.integers([0] * p),
            make.integers([0] * (p + 1)),
            make.integers([0] * (3 * stages * m)),
        )
        return makespan, best

    def coded(self, ranks: Sequence[Sequence[Pass]]) -> Any:
        """Encode an order of F, B and W (or F and BW, if unsplit) in the kernels' numbers."""
        m = self.problem.num_microbatches
        block = self.problem.placement.num_stages * m
        codes: list[int] = []
        for rank in ranks:
            for kind, stage, microbatch in rank:
                rest = stage * m + microbatch
                if kind is not PassKind.BW:
                    codes.append(_KINDS.index(kind) * block + rest)
                elif self.problem.split:
                    codes += [block + rest, 2 * block + rest]
                else:
                    codes.append(block + rest)
        return self.engine.integers(codes)

    def passes(self, order: Any) -> tuple[tuple[Pass, ...], ...]:
        """Decode the passes of a coded order."""
        problem = self.problem
        m, stages = problem.num_microbatches, problem.placement.num_stages
        per_rank = problem.num_passes // problem.placement.pipeline_size
        ranks: list[list[Pass]] = []
        for index, code in enumerate(order):
            if index % per_rank == 0:
                ranks.append([])
            kind, rest = divmod(int(code), stages * m)
            stage, microbatch = divmod(rest, m)
            pass_kind = _KINDS[kind]
            if pass_kind is PassKind.B and not problem.split:
                pass_kind = PassKind.BW
            ranks[-1].append(Pass(pass_kind, stage, microbatch))
        return tuple(map(tuple, ranks))


def _portion(chunk: int, chunks: int) -> float:
    """Return a chunk's share of the quota: earlier chunks hold their activations longer."""
    return 2 * (chunks - 0.5 - chunk) / (chunks * chunks - 1.0) if chunks > 2 else 1.0


@dataclass(frozen=True)
class Effort:
    """Effort of a search: runs of the list scheduler, and moves of the polishing after it."""

    runs: int
    moves: int


@dataclass(frozen=True)
class Found:
    """Best order of a search and its makespan in seconds, with :attr:`Problem.behind`."""

    ranks: tuple[tuple[Pass, ...], ...]
    makespan: float


_CLIMBS = 3  # from the same presets with other dice; each takes its share of the runs
_POOL = 4
_KEPT = 2  # of the pool, to be polished
# The loss that polishing accepts at first, in mean passes: for the starts in turn, then for the
# best. Small problems gain most from large losses, large ones from small.
_START_THRESHOLDS = (0.6, 0.15)
_THRESHOLDS = (1.0, 0.6, 0.15, 0.15)

_NO_EFFORT = Effort(0, 0)
_GAP_WORTH_A_WALK = 1.01  # of the lower bound
_WALKS = 2  # from the best preset, with other dice; each takes its share of the effort
_BIASING = 0.5  # share of the steps of a walk that change biases of single ranks
_WALK_LOSS = 0.06  # the mean loss that a walk accepts at first, in mean passes
# Polishing after a walk: how much the mean end counts, the loss of both together that it accepts at
# first, and that of the makespan alone at last.
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
    goes into :func:`_walk_and_polish`. Stops early when the lower bound is met. Every limit must be
    at least :meth:`Problem.smallest_limit`.
    """
    runner = _Runner(problem, engine(float(effort.runs + effort.moves) * problem.num_passes))
    good_enough = lower_bound * (1 + 1e-9)
    best: tuple[float, Any] = (INFINITY, None)
    starts = [runner.coded(order) for order in known]
    for climb in range(_CLIMBS):
        runs = effort.runs * (climb + 1) // _CLIMBS
        for weights in _climb(runner, runs, good_enough, seed + climb):
            runner.makespan(weights)
            starts.append(runner.order_copy())
    moves = effort.moves // (2 * len(starts))
    for number, order in enumerate(starts):
        if best[0] > good_enough:
            threshold = _START_THRESHOLDS[number % len(_START_THRESHOLDS)]
            polished = runner.local_search(order, moves, threshold, good_enough, seed + number)
            best = min(best, polished, key=lambda t: t[0])
    for round_, threshold in enumerate(_THRESHOLDS if effort.moves else ()):
        if best[0] > good_enough:
            moves = effort.moves // (2 * len(_THRESHOLDS))
            again = runner.local_search(best[1], moves, threshold, good_enough, seed + 100 + round_)
            best = min(best, again, key=lambda t: t[0])
    if further.runs and best[0] > lower_bound * _GAP_WORTH_A_WALK:
        walked = _walk_and_polish(runner, further, good_enough, seed)
        best = min(best, walked, key=lambda t: t[0])
    return Found(runner.passes(best[1]), best[0])


def _climb(runner: _Runner, runs: int, good_enough: float, seed: int) -> list[PriorityWeights]:
    """Return the best few weights: presets first, then neighbours that do not lose."""
    p = runner.problem.placement.pipeline_size
    chunks = runner.problem.placement.chunks
    pool = _best_presets(runner)[:_POOL]
    dice = random.Random(seed)
    while runner.runs < runs and pool[0][0] > good_enough:
        at = 0 if dice.random() < 0.7 else dice.randrange(len(pool))
        candidate = pool[at][1].changed(dice, chunks, p)
        makespan = runner.makespan(candidate)
        if makespan <= pool[at][0]:
            pool[at] = (makespan, candidate)
            pool.sort(key=lambda entry: entry[0])
    if pool[0][0] >= INFINITY:
        raise RuntimeError("the list scheduler got stuck; its quotas are wrong")
    return [weights for makespan, weights in pool[:_KEPT] if makespan < INFINITY]


def _best_presets(runner: _Runner) -> list[tuple[float, PriorityWeights]]:
    """Return all presets with their makespans, the fastest first."""
    placement = runner.problem.placement
    p, chunks = placement.pipeline_size, placement.chunks
    starts = [PriorityWeights.from_preset(numbers, chunks, p) for numbers in PRESETS]
    ranked = sorted((runner.makespan(s), i) for i, s in enumerate(starts))
    return [(makespan, starts[i]) for makespan, i in ranked]


def _walk_and_polish(
    runner: _Runner, effort: Effort, good_enough: float, seed: int
) -> tuple[float, Any]:
    """Return the best order of a few walks, polished for the ends of all passes, too.

    Where memory is tight, the polished orders of :func:`search` lie in basins that single moves do
    not leave. Here, biases of single ranks lead to other orders, and the mean of all ends tells
    which of the moves that leave the makespan as it is are on a way out.
    """
    best: tuple[float, Any] = (INFINITY, None)
    runs = effort.runs // _WALKS
    moves = effort.moves // (2 * _WALKS + 1)  # two shares for each walk, one for the best of them
    for walk in range(_WALKS):
        dice = seed + 200 + walk
        runner.makespan(_walk(runner, runs, good_enough, dice))
        order = runner.order_copy()
        threshold, weight = _SMOOTH_THRESHOLD, _MEAN_WEIGHT
        polished = runner.local_search(order, 2 * moves, threshold, good_enough, dice, weight)
        best = min(best, polished, key=lambda t: t[0])
    again = runner.local_search(best[1], moves, _LAST_THRESHOLD, good_enough, seed + 300)
    return min(best, again, key=lambda t: t[0])


def _walk(runner: _Runner, runs: int, good_enough: float, seed: int) -> PriorityWeights:
    """Return the best weights of a walk from the best preset, which may lose a little at first."""
    placement = runner.problem.placement
    p, chunks = placement.pipeline_size, placement.chunks
    dice = random.Random(seed)
    here, current = lowest, best = _best_presets(runner)[0]
    for step in range(runs):
        change = current.with_other_biases if dice.random() < _BIASING else current.changed
        candidate = change(dice, chunks, p)
        makespan = runner.makespan(candidate)
        loss = _WALK_LOSS * runner.mean_pass * (1 - step / runs) * dice.expovariate(1.0)
        if makespan <= here + loss:
            here, current = makespan, candidate
        if here < lowest:
            lowest, best = here, current
        if lowest <= good_enough:
            break
    return best
