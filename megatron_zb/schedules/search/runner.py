"""Runs of the search's inner loops on one problem, and how many there is time for.

The effort for so many seconds follows only from counts, so that every rank of a job agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.rules import TRAINING
from megatron_zb.schedules.search.inner_loops import (
    INFINITY,
    Graph,
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
from megatron_zb.schedules.stage_costs import StageCosts

_TOLERANCE = 1e-9
_KINDS = (PassKind.F, PassKind.B, PassKind.W, PassKind.R)

Coded = tuple[Any, Any]
"""An order as codes, and flags by code of F: paired, or recomputed; None where there are none."""


@dataclass(frozen=True)
class Problem:
    """A placement to fill: ``limit[r]`` in units of ``costs.activation``; BW only unless split.

    ``tail_seconds[r]`` are counted after the last pass of rank r, none if left out. There are
    ``turn`` seconds between F and B of the last stage.
    """

    placement: Placement
    num_microbatches: int
    costs: StageCosts
    limit: tuple[float, ...]
    split: bool = True
    tail_seconds: tuple[float, ...] = ()
    turn: float = 0.0

    @property
    def num_passes(self) -> int:
        kinds = 3 if self.split else 2
        return kinds * self.placement.num_stages * self.num_microbatches

    @property
    def mean_pass(self) -> float:
        """Mean seconds of F, B and W."""
        m, passes = self.num_microbatches, 3 * self.placement.num_stages
        return sum(
            count / m * (sum(row.forward + row.backward + row.weight) / passes)
            for count, row in self.costs.rows(m)
        )

    def smallest_limit(self, rank: int) -> float:
        """Return the memory a rank needs to run at all: one microbatch in each of its chunks."""
        activation = self.costs.largest_activation
        return sum(activation[s] for s in self.placement.stages_of[rank])

    def _work(self, rank: int) -> float:
        """Return the seconds of all passes of a rank."""
        rows = [self.costs.of(j) for j in range(self.num_microbatches)]
        tables = ("forward", "backward", "weight")
        stages = self.placement.stages_of[rank]
        return sum(getattr(row, table)[s] for row in rows for table in tables for s in stages)

    def graph(self, make: Engine) -> Graph:
        """Return the passes as arrays of an engine."""
        placement, costs, m = self.placement, self.costs, self.num_microbatches
        stages, rows = range(placement.num_stages), [costs.of(j) for j in range(m)]

        def each(*tables: Callable[[StageCosts, int], float]) -> Any:
            return make.floats([of(row, s) for of in tables for s in stages for row in rows])

        last, block = placement.num_stages - 1, placement.num_stages * m
        sources, needed = [-1] * m, [costs.forward_of(turn) for turn in range(m)]
        turn_of = {needs: turn for turn, needs in enumerate(needed)}
        sinks = [2 * block - m + turn_of[j] for j in range(m)]
        implied = needed == list(range(m)) and not self.turn
        turns = sources if implied else [block - m + j for j in needed]
        backward, weight = (
            TRAINING.by_kind[kind].memory
            for kind in (PassKind.B if self.split else PassKind.BW, PassKind.W)
        )
        return Graph(
            placement.pipeline_size,
            placement.chunks,
            m,
            self.split,
            stage_at=make.integers([s for held in placement.stages_of for s in held]),
            rank=make.integers([r for r in placement.rank_of for _ in range(m)] * 3),
            maker=make.integers(
                [
                    *sources,
                    *range(block - m),
                    *range(block + m, 2 * block),
                    *turns,
                    *[-1] * 2 * block,
                ]
            ),
            reader=make.integers(
                [
                    *range(m, block),
                    *sinks,
                    *sources,
                    *range(block, 2 * block - m),
                    *[-1] * 2 * block,
                ]
            ),
            seconds=each(
                lambda row, s: row.forward[s],
                lambda row, s: row.backward[s],
                lambda row, s: row.weight[s],
            ),
            latency=each(
                lambda row, s: row.forward_p2p[s - 1] if s > 0 else 0.0,
                lambda row, s: row.backward_p2p[s + 1] if s < last else self.turn,
            ),
            memory=each(
                lambda row, s: row.activation[s],
                lambda row, s: row.change(backward, s),
                lambda row, s: row.change(weight, s),
            ),
            limit=make.floats([limit + _TOLERANCE * (1 + limit) for limit in self.limit]),
            work=make.floats([self._work(rank) for rank in range(placement.pipeline_size)]),
            tail_seconds=make.floats(self.tail_seconds or (0.0,) * placement.pipeline_size),
            alike=not costs.microbatches,
            before=make.floats([share for s in stages for share in self._before(s)]),
        )

    def _before(self, stage: int) -> list[float]:
        """Return the memory of the first j microbatches, in that of an average one, for all j."""
        m, mean = self.num_microbatches, self.costs.mean_activation[stage]
        if not self.costs.microbatches:
            return [0.0]
        if mean <= 0:
            return [float(j) for j in range(m + 1)]
        held = (row.activation[stage] / mean for row in self.costs.microbatches)
        return list(accumulate(held, initial=0.0))


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
        self.inputs = problem.graph(engine)
        self.order = engine.integers([0] * problem.num_passes)
        self.block = problem.placement.num_stages * problem.num_microbatches
        self.flags = engine.integers([0] * self.block)
        self.no_pairs = PairPriorities(0.0, engine.floats([0.0]))
        self.greedy_space, self.replay_space = self._new_space()
        self._quotas_of: dict[tuple[float, float, tuple[int, ...]], Any] = {}
        self._rank_bias_of: dict[tuple[float, ...], Any] = {}
        self.mean_pass = problem.mean_pass
        self._prepare_quotas()

    def _new_space(self) -> tuple[GreedySpace, ReplaySpace]:
        placement = self.problem.placement
        p, codes = placement.pipeline_size, (3 if self.recompute is None else 4) * self.block

        def floats(count: int) -> Any:
            return self.engine.floats([0.0] * count)

        def integers(count: int) -> Any:
            return self.engine.integers([0] * count)

        greedy = GreedySpace(
            ready=floats(codes),
            pending=integers(self.block),
            counts=integers(p * (2 * placement.chunks + 3)),
            clock=floats(p),
            held=floats(p),
            left=floats(p),
            choice=integers(p),
            choice_start=floats(p),
        )
        replay = ReplaySpace(
            end=floats(codes),
            predecessor=integers(codes),
            critical=integers(codes),
            position=integers(p),
            clock=floats(p),
            waiting=integers(p),
            stack=integers(p + 1),
            next_of=integers(3 * placement.num_stages),
            kept=integers(codes // p),
            kept_flags=integers(codes // p),
            span=integers(2),
        )
        return greedy, replay

    def _prepare_quotas(self) -> None:
        """Precompute, for each rank and each chunk but the last, the inputs of all quotas."""
        problem, activation = self.problem, self.problem.costs.largest_activation
        mean = problem.costs.mean_activation
        chunks, stages_of = problem.placement.chunks, problem.placement.stages_of
        self._slots = [
            limit / (sum(mean[s] for s in held) / chunks)
            for held, limit in zip(stages_of, problem.limit, strict=True)
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
        self._rooms = [room + _TOLERANCE * (1 + room) for room in rooms]
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
            self._rank_bias_of[rank_bias] = self.engine.floats(
                [x * self.mean_pass for x in rank_bias]
            )
        return self._rank_bias_of[rank_bias]

    def _scores(self, weights: PriorityWeights) -> list[float]:
        unit, slots = self.mean_pass, self._slots[0]
        forced = weights.pending_share * slots if weights.pending_share > 0 else 1e18
        rows = (*weights.bias, *weights.slope, *weights.late)
        return [x * unit for x in rows] + [weights.early, weights.pending * unit, forced]

    def _quotas(self, weights: PriorityWeights) -> list[float]:
        """Return the average microbatches in flight allowed in each chunk but the last.

        Together they leave a slot for the last chunk, so that the oldest microbatch can always
        move on and no run gets stuck.
        """
        placement = self.problem.placement
        p, chunks = placement.pipeline_size, placement.chunks
        if chunks == 1:
            return [0.0] * p
        quotas: list[float] = []
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
            quotas += [quota * (1 + _TOLERANCE) for quota in own]
            quotas.append(0.0)
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
        """Return the best order that so many single moves lead to, its makespan first."""
        make = self.engine
        moves = Moves(steps, threshold * self.mean_pass, mean_weight, good_enough, seed)
        now, best = (
            [None if codes is None else make.integers(codes) for codes in start] for _ in range(2)
        )
        seconds = make.local_search(
            self.inputs,
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
        m, block = self.problem.num_microbatches, self.block
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

    def passes(self, coded: Coded) -> tuple[tuple[Pass, ...], ...]:
        """Decode the passes of an order; an R of what is not recomputed is left out."""
        order, flags = coded
        problem, m = self.problem, self.problem.num_microbatches
        per_rank = len(order) // problem.placement.pipeline_size
        ranks: list[list[Pass]] = []
        for index, code in enumerate(order):
            if index % per_rank == 0:
                ranks.append([])
            number, unit = divmod(int(code), self.block)
            kind = _KINDS[number]
            if kind is PassKind.R and not flags[unit]:
                continue
            if kind is PassKind.B and not problem.split:
                kind = PassKind.BW
            ranks[-1].append(Pass(kind, *divmod(unit, m)))
        return tuple(map(tuple, ranks))


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
        parts: what runs and moves get: one part in so many of all seconds.
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
    """Estimate runs and moves for so many seconds; plain Python only has time for some runs."""
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
