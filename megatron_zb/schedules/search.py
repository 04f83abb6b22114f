"""Find a fast order for a placement, costs and a memory limit: list scheduling and hill climbing.

One run of the list scheduler (:mod:`list_scheduler`) is steered by a vector of numbers; presets
that are good for many shapes come first, then small random changes are kept where they do not lose;
at last, the orders themselves are polished (:mod:`polishing`). All randomness is seeded and the
effort is counted in runs, not in seconds, so that every rank of a job finds the same order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_zb.schedules.compiled import Engine, engine
from megatron_zb.schedules.costs import StageCosts
from megatron_zb.schedules.list_scheduler import INFINITY
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.presets import PRESETS

_TOLERANCE = 1e-9
_KINDS = (PassKind.F, PassKind.B, PassKind.W)


@dataclass(frozen=True)
class Problem:
    """A placement to fill: ``limit[r]`` in units of ``costs.activation``; BW only unless split."""

    placement: Placement
    num_microbatches: int
    costs: StageCosts
    limit: tuple[float, ...]
    split: bool = True

    @property
    def num_passes(self) -> int:
        kinds = 3 if self.split else 2
        return kinds * self.placement.num_stages * self.num_microbatches

    def smallest_limit(self, rank: int) -> float:
        """What a rank needs to run at all: one microbatch in each of its chunks."""
        return sum(self.costs.activation[s] for s in self.placement.stages_of[rank])


@dataclass(frozen=True)
class Steering:
    """The numbers that steer one run.

    ``bias``, ``slope`` and ``late`` have one entry for F of each chunk, B of each chunk, and W.
    ``shift[r * chunks + c]`` is added to the quota of chunk c on rank r.
    """

    bias: tuple[float, ...]
    slope: tuple[float, ...]
    late: tuple[float, ...]
    quota: float
    quota_slope: float
    early: float
    pending: float
    pending_share: float
    shift: tuple[int, ...]

    @classmethod
    def from_preset(cls, numbers: Sequence[float], chunks: int, ranks: int) -> Steering:
        """A preset is for two chunks: others lie between its first and its second, or in both."""

        def spread(five: Sequence[float]) -> tuple[float, ...]:
            first_f, last_f, first_b, last_b, w = five
            shares = [c / (chunks - 1) if chunks > 1 else 0.5 for c in range(chunks)]
            forward = [first_f + (last_f - first_f) * x for x in shares]
            backward = [first_b + (last_b - first_b) * x for x in shares]
            return (*forward, *backward, w)

        return cls(
            spread(numbers[:5]),
            spread(numbers[5:10]),
            spread(numbers[10:15]),
            quota=numbers[15],
            quota_slope=numbers[16],
            early=numbers[17],
            pending=numbers[18],
            pending_share=numbers[19],
            shift=(0,) * (ranks * chunks),
        )

    def changed(self, dice: random.Random, chunks: int, ranks: int) -> Steering:
        """A neighbour: the quota of a range of ranks moved, or one to three numbers changed."""
        if chunks > 1 and dice.random() < 0.35:
            return self._with_other_quotas(dice, chunks, ranks)
        rows = [list(self.bias), list(self.slope), list(self.late)]
        scalars = {
            "quota": self.quota,
            "quota_slope": self.quota_slope,
            "early": self.early,
            "pending": self.pending,
            "pending_share": self.pending_share,
        }
        width = len(self.bias)
        for _ in range(dice.choice((1, 1, 2, 3))):
            at = dice.randrange(3 * width + len(scalars))
            size = 0.2 if dice.random() < 0.3 else 1.0
            if at < 3 * width:
                rows[at // width][at % width] += dice.gauss(0, size)
            else:
                name = list(scalars)[at - 3 * width]
                reach = 0.08 if name.startswith("quota") else 0.4
                scalars[name] += dice.gauss(0, reach * size)
        bias, slope, late = map(tuple, rows)
        return Steering(bias, slope, late, **scalars, shift=self.shift)

    def _with_other_quotas(self, dice: random.Random, chunks: int, ranks: int) -> Steering:
        first = dice.randrange(ranks)
        last = dice.randrange(first, ranks)
        chunk = dice.randrange(chunks - 1)
        step = dice.choice((-2, -1, 1, 2))
        shift = list(self.shift)
        for rank in range(first, last + 1):
            shift[rank * chunks + chunk] += step
        return replace(self, shift=tuple(shift))


@dataclass
class _Runner:
    """Runs the list scheduler on one problem, reusing its working space."""

    problem: Problem
    engine: Engine
    runs: int = 0
    _space: tuple[object, ...] = field(init=False)
    _fixed: tuple[object, ...] = field(init=False)

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
        self._unit = sum(costs.forward + costs.backward + costs.weight) / (3 * stages)

    def makespan(self, steering: Steering) -> float:
        """Seconds of the order that the steering leads to; INFINITY if it gets stuck."""
        problem = self.problem
        placement = problem.placement
        self.runs += 1
        return self.engine.decode(
            placement.pipeline_size,
            placement.chunks,
            problem.num_microbatches,
            *self._fixed,
            self.engine.integers(self._quotas(steering)),
            self.engine.floats(self._scores(steering)),
            problem.split,
            self.order,
            *self._space,
        )

    def _scores(self, steering: Steering) -> list[float]:
        unit, slots = self._unit, self._slots(0)
        forced = steering.pending_share * slots if steering.pending_share > 0 else 1e18
        rows = (*steering.bias, *steering.slope, *steering.late)
        return [x * unit for x in rows] + [steering.early, steering.pending * unit, forced]

    def _slots(self, rank: int) -> float:
        problem = self.problem
        chunks = problem.placement.chunks
        return problem.limit[rank] / (problem.smallest_limit(rank) / chunks)

    def _quotas(self, steering: Steering) -> list[int]:
        """Microbatches in flight allowed in each chunk but the last.

        Together they leave a slot for the last chunk, so that the oldest microbatch can always
        move on and no run gets stuck.
        """
        placement, costs = self.problem.placement, self.problem.costs
        p, chunks = placement.pipeline_size, placement.chunks
        quotas: list[int] = []
        for rank, stages in enumerate(placement.stages_of):
            share = steering.quota - steering.quota_slope * rank / (p - 1)
            total = self._slots(rank) * share
            own = [
                max(1, round(total * _portion(c, chunks)) + steering.shift[rank * chunks + c])
                for c in range(chunks - 1)
            ]
            room = self.problem.limit[rank] - costs.activation[stages[-1]]
            room += _TOLERANCE * (1 + room)
            while sum(q * costs.activation[s] for q, s in zip(own, stages, strict=False)) > room:
                largest = max(range(chunks - 1), key=own.__getitem__)
                if own[largest] == 1:
                    break
                own[largest] -= 1
            quotas += [*own, 0]
        return quotas

    def order_copy(self) -> Any:
        """The order of the last run, coded."""
        return self.engine.integers(self.order)

    def polish(
        self, order: Any, moves: int, threshold: float, good_enough: float, seed: int
    ) -> tuple[float, Any]:
        """The best order that so many single moves lead to, with its makespan first."""
        problem, make = self.problem, self.engine
        placement, m = problem.placement, problem.num_microbatches
        p, stages = placement.pipeline_size, placement.num_stages
        best = make.integers(order)
        makespan = make.polish(
            p,
            problem.num_passes // p,
            stages,
            m,
            *self._fixed[1:],
            problem.split,
            moves,
            threshold * self._unit,
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
        """An order of F, B and W (or of F and BW, if nothing is split) in the kernels' numbers."""
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
        """The passes of a coded order."""
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
    """Share of the quota that a chunk gets: earlier chunks hold their activations longer."""
    return 2 * (chunks - 0.5 - chunk) / (chunks * chunks - 1.0) if chunks > 2 else 1.0


@dataclass(frozen=True)
class Effort:
    """How long to look: runs of the list scheduler, and moves of the polishing after it."""

    runs: int
    moves: int


@dataclass(frozen=True)
class Found:
    """The best order of a search and its makespan in seconds."""

    ranks: tuple[tuple[Pass, ...], ...]
    makespan: float


_CLIMBS = 3  # from the same presets with other dice; each takes its share of the runs
_POOL = 4
_KEPT = 2  # of the pool, to be polished
# The loss that polishing accepts at first, in mean passes: for the starts in turn, then for the
# best. Small problems gain most from large losses, large ones from small.
_START_THRESHOLDS = (0.6, 0.15)
_THRESHOLDS = (1.0, 0.6, 0.15, 0.15)


def search(
    problem: Problem,
    effort: Effort,
    lower_bound: float,
    known: Sequence[Sequence[Sequence[Pass]]] = (),
    seed: int = 0,
) -> Found:
    """Climb from the presets, polish the best few orders, and the best of them once more.

    ``known`` are orders within the limit that compete from the start. Stops early when the lower
    bound is met. Every limit must be at least :meth:`Problem.smallest_limit`.
    """
    runner = _Runner(problem, engine(float(effort.runs + effort.moves) * problem.num_passes))
    good_enough = lower_bound * (1 + 1e-9)
    best: tuple[float, Any] = (INFINITY, None)
    starts = [runner.coded(order) for order in known]
    for climb in range(_CLIMBS):
        runs = effort.runs * (climb + 1) // _CLIMBS
        for steering in _climb(runner, runs, good_enough, seed + climb):
            runner.makespan(steering)
            starts.append(runner.order_copy())
    moves = effort.moves // (2 * len(starts))
    for number, order in enumerate(starts):
        if best[0] > good_enough:
            threshold = _START_THRESHOLDS[number % len(_START_THRESHOLDS)]
            polished = runner.polish(order, moves, threshold, good_enough, seed + number)
            best = min(best, polished, key=lambda t: t[0])
    for round_, threshold in enumerate(_THRESHOLDS if effort.moves else ()):
        if best[0] > good_enough:
            moves = effort.moves // (2 * len(_THRESHOLDS))
            again = runner.polish(best[1], moves, threshold, good_enough, seed + 100 + round_)
            best = min(best, again, key=lambda t: t[0])
    return Found(runner.passes(best[1]), best[0])


def _climb(runner: _Runner, runs: int, good_enough: float, seed: int) -> list[Steering]:
    """The best few steerings: presets first, then neighbours that do not lose."""
    p = runner.problem.placement.pipeline_size
    chunks = runner.problem.placement.chunks
    starts = [Steering.from_preset(numbers, chunks, p) for numbers in PRESETS]
    ranked = sorted((runner.makespan(s), i) for i, s in enumerate(starts))
    pool = [(makespan, starts[i]) for makespan, i in ranked[:_POOL]]
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
    return [steering for makespan, steering in pool[:_KEPT] if makespan < INFINITY]
