"""Places of W: in the time that an order of F and B leaves free, or fused with its B.

B and W are fused where it costs nothing: a fused backward is one kernel call and frees memory. Gaps
also take the passes of a vocabulary-parallel output layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.kinds import Home
from megatron_zb.schedules.memory import peak
from megatron_zb.schedules.passes import Pair, Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.rules import TRAINING, TrainingRules
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.inner_loops import INFINITY, Gaps, GapSpace
from megatron_zb.schedules.search.kernels import Engine, engine
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.stage_costs import StageCosts

# --- fusion with B, and the reverse, to measure each by itself


def fuse_for_free(schedule: Schedule, costs: Costs) -> Schedule:
    """Join every B and the W right behind it to BW, if no pass of any rank starts later for it.

    A BW also lets the previous stage wait until W has ended. Where that stage starts its B later
    still, and the whole backward takes no longer than its halves, nothing is late; all of them can
    be fused at once. A B that runs as one with an F stays as it is.
    """
    timeline, graph = simulate(schedule, costs), schedule.graph
    table = timeline.costs
    starts = {
        (p.stage, p.microbatch): start
        for passes, times in zip(schedule.ranks, timeline.start, strict=True)
        for p, start in zip(passes, times, strict=True)
        if p.kind in (PassKind.B, PassKind.BW)
    }
    tolerance = 1e-9 * max(timeline.makespan, 1e-30)

    def costs_nothing(p: Pass, end_of_w: float) -> bool:
        row, stage = table.of(p.microbatch), p.stage
        halves = row.seconds[_B][stage] + row.seconds[_W][stage]
        if row.seconds[_BW][stage] > halves + tolerance:
            return False
        code = graph.code_of(Pass(_B, stage, p.microbatch), graph.placement.rank_of[stage])
        readers = (divmod(reader, graph.units) for reader in graph.readers_of(code))
        needed = (starts.get((graph.rows[at].stage, unit), math.inf) for at, unit in readers)
        arrival = end_of_w + row.latency[_B][stage] - tolerance
        return all(arrival <= start for start in needed)

    ranks = []
    for passes, ends in zip(schedule.ranks, timeline.end, strict=True):
        fused: list[Pass] = []
        for p, end in zip(passes, ends, strict=True):
            before = fused[-1] if fused else None
            if (
                p.kind is PassKind.W
                and before == Pass(PassKind.B, p.stage, p.microbatch)
                and not (len(fused) > 1 and fused[-2] in schedule.pairs)
                and costs_nothing(p, end)
            ):
                fused[-1] = Pass(PassKind.BW, p.stage, p.microbatch)
            else:
                fused.append(p)
        ranks.append(tuple(fused))
    return replace(schedule, ranks=tuple(ranks))


def fuse_all(ranks: Sequence[Sequence[Pass]]) -> tuple[tuple[Pass, ...], ...]:
    """Replace every B by BW, in orders of F and B whose backward is never split."""
    return tuple(
        tuple(Pass(PassKind.BW, *p[1:]) if p.kind is PassKind.B else p for p in rank)
        for rank in ranks
    )


def join_all(schedule: Schedule) -> Schedule:
    """Replace every B by BW, and drop every W: the same order, each backward whole."""
    kept = [[p for p in rank if p.kind is not PassKind.W] for rank in schedule.ranks]
    return replace(schedule, ranks=fuse_all(kept))


def split_all(schedule: Schedule) -> Schedule:
    """Replace every BW by B and W right behind it: the same order, each pass by itself."""
    return replace(
        schedule,
        ranks=tuple(
            tuple(
                part
                for p in rank
                for part in (
                    (
                        Pass(PassKind.B, p.stage, p.microbatch),
                        Pass(PassKind.W, p.stage, p.microbatch),
                    )
                    if p.kind is PassKind.BW
                    else (p,)
                )
            )
            for rank in schedule.ranks
        ),
    )


# --- W in gaps


_F, _B, _W, _BW, _R = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.R
_COUNTS = 9


class Filled(NamedTuple):
    """One filled order: when each rank begins and ends, and the codes of its passes."""

    begin: list[float]
    end: list[float]
    codes: list[list[int]]

    def seconds(self, *, back_to_back: bool) -> float:
        """Return :meth:`Timeline.seconds` of the order."""
        if back_to_back:
            return max(end - begin for begin, end in zip(self.begin, self.end, strict=True))
        return max(self.end) - min(self.begin)


class GapFiller:
    """Filler of the gaps of one order of F and B, or BW, within the limits of a problem.

    ``pairs`` are the F that are paired with the B or BW right behind them.
    """

    def __init__(
        self,
        problem: Problem,
        order: Sequence[Sequence[Pass]],
        engine: Engine,
        pairs: Collection[Pass] = (),
    ) -> None:
        placement, costs, limit = problem.placement, problem.costs, problem.limit
        self._placement, self._engine = placement, engine
        self._rules = problem.rules
        self._m = m = problem.num_microbatches
        self._units = self._rules.turns(self._rules.by_kind[_F], range(m))
        split = not any(p.kind is _BW for passes in order for p in passes)
        self._rows = self._rows_of(costs, split=split)
        shards = costs.seconds.get(PassKind.O, ())[placement.num_stages :]
        self._holders = [0] * placement.pipeline_size
        if shards:
            self._holders = [int(sum(shards) == 0 or seconds > 0) for seconds in shards]
        self._width = max(map(len, order))
        self._length = 2 * self._width + 3 * m
        leads = [[self._code(p) for p in passes] for passes in order]
        self._split, self._vocabulary_parallel = split, bool(shards)
        self._needed = sum(map(len, leads))
        weights = [w for stage in range(placement.num_stages) for w in self._weights(stage, m)]
        self._needed += sum(w >= 0 for w in weights) if split else 0
        self._needed += m * (2 * sum(self._holders) + 1) if self._vocabulary_parallel else 0
        self._gaps = Gaps(
            num_microbatches=m,
            stages=placement.num_stages,
            split=split,
            vocabulary_parallel=self._vocabulary_parallel,
            end=placement.rank_of[-1],
            rank=engine.integers([self._rank_of(stage) for _, stage in self._rows]),
            holders=engine.integers(self._holders),
            seconds=self._by_code(costs, lambda row, p: row.seconds[p.kind][p.stage]),
            memory=self._by_code(costs, self._memory_change),
            latency=self._by_code(costs, lambda row, p: row.latency[p.kind][p.stage]),
            limit=engine.floats(limit),
            leads=engine.integers([c for each in leads for c in self._padded(each)]),
            num_leads=engine.integers([len(each) for each in leads]),
            weight=engine.integers(weights),
            **self._joined(order, costs, pairs),
        )

    def _joined(
        self, order: Sequence[Sequence[Pass]], costs: StageCosts, pairs: Collection[Pass]
    ) -> dict[str, Any]:
        """Return the partner of each F, and the seconds of both."""
        forwards = self._placement.num_stages * self._m
        partner, of_pair = [-1] * forwards, [0.0] * forwards
        for passes in order if pairs else ():
            for forward, backward in pairwise(passes):
                if forward in pairs:
                    partner[self._code(forward)] = self._code(backward)
                    of_pair[self._code(forward)] = costs.pair_seconds(Pair(forward, backward))
        return {
            "partner": self._engine.integers(partner),
            "of_pair": self._engine.floats(of_pair),
        }

    def fill(self, eagerness: float, of_shards: float, room: int = 1) -> Filled | None:
        """Return the filled order; None if ranks wait for each other.

        A W fills a wait of at least ``eagerness`` times its seconds, a V of ``of_shards`` times.
        """
        space = self._space()
        placed = self._engine.fill_gaps(self._gaps, space, eagerness, of_shards, room)
        if placed != self._needed:
            return None
        p, length = self._placement.pipeline_size, self._length
        counts = [int(space.counts[p + rank]) for rank in range(p)]
        starts = range(0, p * length, length)
        codes = [
            [int(code) for code in space.order[at : at + count]]
            for at, count in zip(starts, counts, strict=True)
        ]
        return Filled([*map(float, space.begin)], [*map(float, space.clock)], codes)

    def passes_of(self, filled: Filled) -> tuple[tuple[Pass, ...], ...]:
        """Return the passes of every rank of a filled order."""
        return tuple(tuple(map(self._pass_of, codes)) for codes in filled.codes)

    def _pass_of(self, code: int) -> Pass:
        (kind, stage), unit = self._rows[code // self._m], self._units[code % self._m]
        return Pass(self._rules.backward_of(unit) if kind is _BW else kind, stage, unit)

    def _weights(self, stage: int, units: int) -> list[int]:
        """Return the codes of W of the units of a stage, -1 for one without."""
        turns = self._rules.turns(self._rules.by_kind[_W], range(units))
        first = (2 * self._placement.num_stages + stage) * units
        return [first + unit if unit in turns else -1 for unit in range(units)]

    def _memory_change(self, row: StageCosts, p: Pass) -> float:
        return row.change(self._rules.by_kind[p.kind].memory, p.stage)

    def _rows_of(self, costs: StageCosts, *, split: bool) -> list[tuple[PassKind, int]]:
        stages, p = self._placement.num_stages, self._placement.pipeline_size
        kinds = (_F, _B if split else _BW, _W)
        rows = [(kind, stage) for kind in kinds for stage in range(stages)]
        if PassKind.O in costs.seconds:
            rows.append((PassKind.P, stages - 1))
            rows += [(kind, stages + r) for kind in (PassKind.O, PassKind.V) for r in range(p)]
        return rows

    def _rank_of(self, stage: int) -> int:
        shard = stage - self._placement.num_stages
        return shard if shard >= 0 else self._placement.rank_of[stage]

    def _code(self, p: Pass) -> int:
        return ((p.kind is not _F) * self._placement.num_stages + p.stage) * self._m + p.microbatch

    def _padded(self, codes: list[int]) -> list[int]:
        return [*codes, *[-1] * (self._width - len(codes))]

    def _by_code(self, costs: StageCosts, of: Callable[[StageCosts, Pass], float]) -> Any:
        """Return a number of every pass by its code."""
        m = range(self._m)
        if costs.microbatches:
            each = [of(costs.of(j), Pass(*row, j)) for row in self._rows for j in m]
        else:
            rows = (of(costs, Pass(*row, 0)) for row in self._rows)
            each = [number for number in rows for _ in m]
        return self._engine.floats(each)

    def _space(self) -> GapSpace:
        m, p, stages = self._m, self._placement.pipeline_size, self._placement.num_stages
        floats, integers = self._engine.floats, self._engine.integers
        first = len(self._rows) * m if self._vocabulary_parallel else 3 * stages * m
        ready = [0.0] * m + [INFINITY] * (first - m)
        if not self._vocabulary_parallel:  # the last stage's B follows its F in the order
            begin = (2 * stages - 1) * m
            ready[begin : begin + m] = [0.0] * m
        return GapSpace(
            ready=floats(ready),
            order=integers([0] * (p * self._length)),
            pending=integers([0] * (p * self._width)),
            of_shards=integers([0] * (p * m)),
            parts=integers([0] * m),
            latest=floats([0.0] * m),
            clock=floats([0.0] * p),
            begin=floats([0.0] * p),
            held=floats([0.0] * p),
            counts=integers([0] * (_COUNTS * p)),
        )


_EAGERNESS = (1.0, 0.75, 0.5, 0.25, 0.0)


def place_weight_gradients(
    name: str,
    placement: Placement,
    order: Sequence[Sequence[Pass]],
    request: Request,
    peak_microbatches: float,
) -> Schedule:
    """Start each F and B as early as its order and inputs allow, and fill the waits with W.

    No rank holds more than ``peak_microbatches`` of its own, or the user's limit: where an F would
    exceed that, the oldest W runs first. Several rules for how large a wait must be to take a W are
    tried and the shortest result is kept, so the costs decide where W goes.
    """
    costs = request.costs.for_placement(placement)
    limit = request.limits(placement, peak_microbatches)
    request.check_feasible(name, placement, limit, least_memory(order, costs, request.rules))
    make = engine(len(_EAGERNESS) * sum(map(len, order)))
    m = request.num_microbatches
    filler = GapFiller(Problem(placement, m, costs, limit, rules=request.rules), order, make)
    filled = [
        found for each in _EAGERNESS if (found := filler.fill(each, of_shards=0.0)) is not None
    ]
    best = min(filled, key=lambda found: found.seconds(back_to_back=request.back_to_back))
    schedule = request.completed(name, placement, filler.passes_of(best))
    return fuse_for_free(schedule, request.costs)


def squeezed_if_it_fits(
    name: str,
    placement: Placement,
    order: Sequence[Sequence[Pass]],
    request: Request,
    peak_microbatches: float,
) -> list[Schedule]:
    """Return the squeezed order as the one known schedule.

    There is none if the limit is too low, or if an update holds passes of the order back.
    """
    costs = request.costs.for_placement(placement)
    limit = request.limits(placement, peak_microbatches)
    needs = least_memory(order, costs, request.rules)
    if any(need > most * (1 + 1e-9) for need, most in zip(needs, limit, strict=True)):
        return []
    if not request.keeps_order(fuse_all(order)):
        return []
    return [place_weight_gradients(name, placement, order, request, peak_microbatches)]


def least_memory(
    order: Sequence[Sequence[Pass]],
    costs: StageCosts,
    rules: TrainingRules = TRAINING,
    *,
    drops: bool = False,
) -> list[float]:
    """Return the most memory each rank holds if every W runs right behind its B.

    Args:
        order: F, B and W, or BW, of each rank.
        costs: of the stages.
        rules: of the passes.
        drops: whether every activation that can be is recomputed, right before its B.
    """
    units = range(1 + max(p.microbatch for passes in order for p in passes))
    with_w = rules.turns(rules.by_kind[_W], units)
    last = max(p.stage for passes in order for p in passes)
    kept = last if rules.by_kind[_R].home is Home.INNER else None

    def changes(p: Pass) -> Iterator[float]:
        is_dropped, is_backward = drops and p.stage != kept, p.kind in (_B, _BW)
        if is_backward and is_dropped:
            yield rules.memory_change(p._replace(kind=_R), costs, recomputed=True)
        if p.kind is _W:
            return
        found = rules.memory_change(p, costs, recomputed=is_dropped)
        if p.kind is _B and p.microbatch in with_w:
            found += rules.memory_change(p._replace(kind=_W), costs)
        yield found

    return [peak(each for p in passes for each in changes(p)) for passes in order]
