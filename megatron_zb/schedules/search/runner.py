"""Runs of the search's inner loops on one problem, and how many there is time for.

The effort for a number of seconds follows only from counts, so that every rank of a job agrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.search.inner_loops import (
    INFINITY,
    GreedySpace,
    Moves,
    PairCosts,
    PairPriorities,
    Priorities,
    RecomputeCosts,
    ReplaySpace,
)
from megatron_zb.schedules.search.kernels import Engine, available
from megatron_zb.schedules.search.priority_weights import PriorityWeights
from megatron_zb.schedules.search.problem import OTHERS, TOLERANCE, Problem, edges_of, graph_of

Coded = tuple[Any, Any]
"""An order as codes, and flags by code of F: paired, or recomputed; None where there are none."""


class Runner:
    """Runner of the inner loops on one problem, which reuses its working space.

    Args:
        pair_costs: where passes communicate, which pairs hide.
        recompute: where activations are recomputed: orders have an R of every unit.
    """

    def __init__(
        self,
        problem: Problem,
        engine: Engine,
        pair_costs: PairCosts | None = None,
        recompute: RecomputeCosts | None = None,
    ) -> None:
        self.problem, self.engine, self.runs = problem, engine, 0
        self.pair_costs, self.recompute = pair_costs, recompute
        pairs = pair_costs is not None
        self.inputs = graph_of(
            problem, engine, pairs=pairs, with_r=recompute is not None and not pairs
        )
        self.edges = edges_of(problem, engine)
        self.order = engine.integers([0] * problem.num_passes)
        self.block = problem.codes.forwards
        self.flags = engine.integers([0] * self.block)
        self.no_pairs = PairPriorities(0.0, engine.floats([0.0]))
        self.greedy_space, self.replay_space = self._new_space()
        self._quotas_of: dict[tuple[float, float, tuple[int, ...]], Any] = {}
        self._rank_bias_of: dict[tuple[float, ...], Any] = {}
        self.mean_pass = problem.mean_pass
        self._prepare_quotas()

    def _new_space(self) -> tuple[GreedySpace, ReplaySpace]:
        placement, codes = self.problem.placement, self.problem.codes
        p, rows = placement.pipeline_size, len(codes.rows)
        length = codes.total + (0 if self.recompute is None else self.block)
        stages = placement.num_stages + (p if codes.total > codes.weights else 0)

        def floats(count: int) -> Any:
            return self.engine.floats([0.0] * count)

        def integers(count: int) -> Any:
            return self.engine.integers([0] * count)

        greedy = GreedySpace(
            ready=floats(codes.total),
            arrival=floats(codes.total),
            missing=integers(codes.total),
            touched=integers(p),
            pending=integers(codes.total),
            upcoming=integers(rows),
            in_flight=floats(stages),
            oldest=integers(p),
            newest=integers(p),
            placed=integers(p),
            clock=floats(p),
            held=floats(p),
            left=floats(p),
            choice=integers(p),
            choice_start=floats(p),
        )
        replay = ReplaySpace(
            end=floats(length),
            predecessor=integers(length),
            critical=integers(length),
            position=integers(p),
            clock=floats(p),
            waiting=integers(p),
            stack=integers(p + 1),
            next_of=integers(rows),
            kept=integers(length),
            kept_flags=integers(length),
            span=integers(2),
        )
        return greedy, replay

    def _prepare_quotas(self) -> None:
        """Precompute, for each rank and each chunk but the last, the inputs of all quotas."""
        problem, activation = self.problem, self.problem.largest_activation
        mean = problem.costs.mean_activation
        chunks, stages_of = problem.placement.chunks, problem.placement.stages_of
        held_at_once = [sum(mean[s] for s in held) / chunks for held in stages_of]
        self._slots = [
            limit / one if one > 0 else float(problem.num_microbatches)
            for one, limit in zip(held_at_once, problem.limit, strict=True)
        ]
        self._sizes = [[mean[s] for s in held[:-1]] for held in stages_of]
        # with room for the largest microbatch in each chunk, every one can move on
        self._least = [
            [activation[s] / mean[s] if mean[s] > 0 else 1.0 for s in held[:-1]]
            for held in stages_of
        ]
        rooms = [
            limit - activation[held[-1]]
            for limit, held in zip(problem.limit, stages_of, strict=True)
        ]
        self._rooms = [room + TOLERANCE * (1 + room) for room in rooms]
        self._most = [
            1 + int(room / min(sizes)) if sizes and min(sizes) > 0 else problem.num_microbatches
            for room, sizes in zip(self._rooms, self._sizes, strict=True)
        ]
        self._portions = [_portion(c, chunks) for c in range(chunks - 1)]

    def makespan(
        self,
        weights: PriorityWeights,
        bound: float = INFINITY,
        pairs: PairPriorities | None = None,
    ) -> float:
        """Return the seconds of the order that the weights lead to.

        INFINITY if it gets stuck, or if the makespan is above ``bound``: such a run ends early.
        """
        self.runs += 1
        return self.engine.run_list_scheduler(
            self.inputs,
            self.edges,
            self.pair_costs,
            self.priorities(weights, bound),
            pairs or self.no_pairs,
            self.greedy_space,
            self.order,
            self.flags,
        )

    def priorities(self, weights: PriorityWeights, bound: float = INFINITY) -> Priorities:
        """Return the weights as arrays of the engine."""
        return Priorities(
            self._kept_quotas(weights),
            self.engine.floats(self._scores(weights)),
            self._kept_rank_bias(weights.rank_bias),
            bound,
        )

    def _kept_quotas(self, weights: PriorityWeights) -> Any:
        """Return the quotas as an array: most neighbours have those of an earlier run."""
        key = weights.quota, weights.quota_slope, weights.shift
        if key not in self._quotas_of:
            self._quotas_of[key] = self.engine.floats(self._quotas(weights))
        return self._quotas_of[key]

    def _kept_rank_bias(self, rank_bias: tuple[float, ...]) -> Any:
        """Return the scores of single ranks as an array, which most neighbours share."""
        if rank_bias not in self._rank_bias_of:
            width = 2 * self.problem.placement.chunks + 1
            none = [0.0] * len(_BIAS_OF_OTHERS)
            scores = [x * self.mean_pass for x in rank_bias]
            each = [[*scores[i : i + width], *none] for i in range(0, len(scores), width)]
            self._rank_bias_of[rank_bias] = self.engine.floats([x for row in each for x in row])
        return self._rank_bias_of[rank_bias]

    def _scores(self, weights: PriorityWeights) -> list[float]:
        unit, slots = self.mean_pass, self._slots[0]
        forced = weights.pending_share * slots if weights.pending_share > 0 else 1e18
        none = (0.0,) * len(_BIAS_OF_OTHERS)
        shards = _BIAS_OF_OTHERS.values()
        rows = (*weights.bias, *shards, *weights.slope, *none, *weights.late, *none)
        return [x * unit for x in rows] + [weights.early, weights.pending * unit, forced]

    def _quotas(self, weights: PriorityWeights) -> list[float]:
        """Return the average microbatches in flight allowed in each stage.

        In all chunks but the last. Together they leave a slot for the last chunk, so that the
        oldest microbatch can always move on and no run gets stuck.
        """
        placement = self.problem.placement
        p, chunks = placement.pipeline_size, placement.chunks
        of_shards = [1.0 + TOLERANCE] * p  # units for whose logits there is room
        quotas = [INFINITY] * placement.num_stages + of_shards
        if chunks == 1:
            return quotas
        for rank in range(p):
            share = weights.quota - weights.quota_slope * rank / (p - 1)
            total = self._slots[rank] * share
            sizes, room, first = self._sizes[rank], self._rooms[rank], rank * chunks
            most = self._most[rank]  # more than these would be taken back one by one
            least = self._least[rank]
            own = [
                max(least[c], float(min(most, round(total * portion) + weights.shift[first + c])))
                for c, portion in enumerate(self._portions)
            ]
            used = sum([q * size for q, size in zip(own, sizes, strict=True)])
            while used > room:
                spare = [quota - fewest for quota, fewest in zip(own, least, strict=True)]
                largest = spare.index(max(spare))
                if spare[largest] <= 0:
                    break
                fewer = max(least[largest], own[largest] - 1)
                used -= (own[largest] - fewer) * sizes[largest]
                own[largest] = fewer
            for stage, quota in zip(placement.stages_of[rank], own, strict=False):
                quotas[stage] = quota * (1 + TOLERANCE)
        return quotas

    def copied(self) -> Coded:
        """Return a copy of the order of the last run."""
        flags = None if self.pair_costs is None else self.engine.integers(self.flags)
        return self.engine.integers(self.order), flags

    def polished(
        self,
        start: Coded,
        steps: int,
        threshold: float,
        good_enough: float,
        seed: int,
        mean_weight: float = 0.0,
    ) -> tuple[float, Coded]:
        """Return the best order of a local search of ``steps`` moves, its makespan first."""
        make = self.engine
        moves = Moves(steps, threshold * self.mean_pass, mean_weight, good_enough, seed)
        now, best = (
            [None if codes is None else make.integers(codes) for codes in start] for _ in range(2)
        )
        seconds = make.local_search(
            self.inputs,
            self.edges,
            self.pair_costs,
            moves,
            self.replay_space,
            self.recompute,
            order=now[0],
            flags=now[1],
            best=best[0],
            best_flags=best[1],
        )
        return seconds, (best[0], best[1])

    def coded(self, ranks: Sequence[Sequence[Pass]]) -> Any:
        """Encode an order of F, B and W (or F and BW, if unsplit) in the kernels' numbers."""
        codes = self.problem.codes
        return self.engine.integers([code for rank in ranks for code in codes.of_all(rank)])

    def passes(self, coded: Coded) -> tuple[tuple[Pass, ...], ...]:
        """Decode the passes of an order; an R of what is not recomputed is left out."""
        order, flags = coded
        of_code, again = self.problem.codes.passes, self.inputs.again
        return tuple(
            tuple(
                of_code[code]
                for code in map(int, order[first:last])
                if code < again or flags[code - again]
            )
            for first, last in pairwise(self.inputs.place)
        )


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


_BIAS_OF_OTHERS = dict(zip(OTHERS, (-3.0, -5.0, 0.6, -5.0), strict=True))
"""Bias of O, P, V and U, in mean passes: other passes wait for O, P and U, and none for V."""


def _portion(chunk: int, chunks: int) -> float:
    """Return a chunk's share of the quota: earlier chunks hold their activations longer."""
    return 2 * (chunks - 0.5 - chunk) / (chunks * chunks - 1.0) if chunks > 2 else 1.0


# --- effort


_PLAIN_RUNS = 100  # at most where nothing is compiled, which is some forty times slower
_SLOWER = 40


@dataclass(frozen=True)
class Effort:
    """Effort of a search: runs of the list scheduler, and moves of the polishing after it."""

    runs: int
    moves: int


@dataclass(frozen=True)
class Pace:
    """Nanoseconds of a compiled search for each pass of a problem, and the most that is useful.

    Args:
        run: of a run of the list scheduler, and ``run_per_rank`` more for each rank.
        move: of a move of the local search.
        most: effort beyond which next to nothing is found.
        parts: what runs and moves get: the seconds divided by these numbers.
    """

    run: float
    run_per_rank: float
    move: float
    most: Effort
    parts: tuple[int, int] = (2, 2)


SINGLE = Pace(20, 3, 14, Effort(runs=4000, moves=120_000))
RESTARTS = Pace(20, 3, 14, Effort(runs=6000, moves=90_000))
RECOMPUTE = Pace(20, 3, 25, Effort(runs=3000, moves=600_000))
PAIRS = Pace(50, 30, 24, Effort(runs=20_000, moves=700_000), (3, 1))  # for 8 ranks, 32 microbatches


def effort_of(problem: Problem, seconds: float, pace: Pace, most: Effort | None = None) -> Effort:
    """Estimate runs and moves for a number of seconds; plain Python only has time for some runs."""
    most, (of_runs, of_moves) = most or pace.most, pace.parts
    per_pass = pace.run + pace.run_per_rank * problem.placement.pipeline_size
    run = problem.num_passes * per_pass * 1e-9
    if not available():
        return Effort(runs=min(_PLAIN_RUNS, int(seconds / (_SLOWER * run))), moves=0)
    move = problem.num_passes * (pace.move * 1e-9)
    return Effort(
        runs=min(most.runs, int(seconds / of_runs / run)),
        moves=min(most.moves, int(seconds / of_moves / move)),
    )
