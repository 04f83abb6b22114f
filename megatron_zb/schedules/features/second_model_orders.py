"""Orders of a trained model and of a second one in its bubbles, and a bound of their seconds.

:mod:`megatron_zb.schedules.features.second_model` describes both models. The passes of the second
one first go into the gaps of an order of the trained model alone; local search then moves passes of
both.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_zb.schedules.bounds import lower_bound, shortest
from megatron_zb.schedules.features.second_model import (
    PricedBeside,
    SecondModel,
    SecondModelRules,
    SecondRole,
    placed_beside,
)
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.request import Limit, LimitTooSmall, Request, keeps
from megatron_zb.schedules.schedule import Report, Schedule
from megatron_zb.schedules.search.hill_climbing import Pool, polished_pool
from megatron_zb.schedules.search.kernels import engine
from megatron_zb.schedules.search.place_w import fuse_for_free, split_all
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.runner import SINGLE, Effort, Runner, effort_of
from megatron_zb.schedules.simulator import Timeline, simulate
from megatron_zb.schedules.stage_costs import StageCosts, Table
from megatron_zb.schedules.task_graph import TaskGraph

_F, _B, _W, _BW = PassKind.F, PassKind.B, PassKind.W, PassKind.BW
_Numbers: TypeAlias = npt.NDArray[np.float64]


# --- orders: the second model's passes in the gaps of an order of the trained one


class _Eagerness(NamedTuple):
    """Numbers that steer one run of the gap filler.

    Args:
        wait: the least wait for the trained model's next pass that a pass fills, in the seconds of
            that pass.
        ahead: outputs that the second model makes ahead of the trained one even where no rank
            waits.
        before_w: whether a backward goes before any W of the trained model, or else only where
            nothing but W is left to its rank.
    """

    wait: float
    ahead: int = 0
    before_w: bool = False


_WAITS = (0.0, 0.5, 1.0)
_AHEAD = (0, 2, 8)


def _eagerness_of(second: SecondModel) -> Iterator[_Eagerness]:
    """Yield what is tried for a second model: only numbers that make a difference."""
    for wait in _WAITS:
        for ahead in (0,) if second.role is SecondRole.AHEAD else _AHEAD:
            for before_w in (False,) if second.is_frozen else (False, True):
                yield _Eagerness(wait, ahead, before_w)


class _InGaps:
    """An order of both models, in which the trained one keeps its own order on every rank.

    List scheduling in order of time:

    1. The next event is the earliest time at which a rank is free, or an input of it arrives.
    2. A free rank runs an F of the second model if too few outputs are ahead, or a backward of it
       in place of a W; else the next pass of the trained model if that is ready.
    3. Else it runs a pass of the second model, if the wait is long enough.

    Args:
        graph: of both models.
        ranks: the order of the trained model.
        costs: of both.
        eagerness: of the second model.
        is_whole: whether the second model runs both gradients at once.
    """

    def __init__(
        self,
        graph: TaskGraph,
        ranks: Sequence[Sequence[Pass]],
        costs: StageCosts,
        eagerness: _Eagerness,
        *,
        is_whole: bool,
    ) -> None:
        assert isinstance(graph.work, SecondModelRules)
        self._graph, self._rules, self._costs = graph, graph.work, costs
        self._eagerness, self._is_whole = eagerness, is_whole
        self._leads = [deque(rank) for rank in ranks]
        self._other_leads = [sum(p.kind is not _W for p in rank) for rank in ranks]
        self._rows = [list(self._rows_of(rank)) for rank in range(len(ranks))]
        self._arrival = [math.inf] * len(graph)
        self._free = [0.0] * len(ranks)
        self._found: list[list[Pass]] = [[] for _ in ranks]
        self._has_run: set[Pass] = set()
        self._readers = [reader for _, reader in self._rules.joins() if reader.kind is _F]
        self._read = 0
        self._events = [(0.0, rank) for rank in range(len(ranks))]

    def _rows_of(self, rank: int) -> Iterator[deque[Pass]]:
        for kind in (_F, _BW) if self._is_whole else (_F, _B, _W):
            for stage in self._graph.placement.stages_of[rank]:
                if self._rules.is_second(stage):
                    row = self._graph.rows[self._graph.number[rank][kind, stage]]
                    if row.visits:
                        yield deque(Pass(kind, stage, unit) for unit in row.visits)

    def order(self) -> list[list[Pass]] | None:
        """Return the order, None if some pass never ran."""
        while self._events:
            now, rank = heapq.heappop(self._events)
            if now >= self._free[rank] and (queue := self._chosen(rank, now)) is not None:
                self._run(rank, queue.popleft(), now)
        return None if any(self._leads) or any(map(any, self._rows)) else self._found

    def _chosen(self, rank: int, now: float) -> deque[Pass] | None:
        """Return the passes of which a free rank runs the next one now, None if it waits."""
        leads = self._leads[rank]
        at = self._ready(leads[0]) if leads else math.inf
        ready = [row for row in self._rows[rank] if row and self._ready(row[0]) <= now]
        waits_for_w = bool(leads) and leads[0].kind is _W
        if waits_for_w and not self._eagerness.before_w:
            waits_for_w = self._other_leads[rank] == 0
        for row in ready:
            if self._is_urgent(row[0]) if row[0].kind is _F else waits_for_w:
                return row
        if at <= now:
            return leads
        for row in ready:
            if at - now >= self._eagerness.wait * self._costs.duration(row[0]):
                return row
        return None

    def _is_urgent(self, p: Pass) -> bool:
        """Return whether too few outputs of the second model are ahead of what needs them."""
        if not self._readers:
            return False
        while self._read < len(self._readers) and self._readers[self._read] in self._has_run:
            self._read += 1
        return p.microbatch - self._rules.microbatches - self._read < self._eagerness.ahead

    def _ready(self, p: Pass) -> float:
        """Return when the inputs of a pass have arrived, as far as it is known."""
        before = p._replace(kind=_B if p.kind is _W else _F)
        is_behind = p.kind is not _F and self._rules.is_second(p.stage)
        if is_behind and before not in self._has_run:
            return math.inf
        code = self._graph.code_of(p, self._graph.placement.rank_of[p.stage])
        return max((self._arrival[maker] for maker in self._graph.makers_of(code)), default=0.0)

    def _run(self, rank: int, p: Pass, now: float) -> None:
        self._found[rank].append(p)
        self._has_run.add(p)
        row = self._costs.of(p.microbatch)
        end = now + row.seconds[p.kind][p.stage]
        self._free[rank] = end
        self._other_leads[rank] -= p.kind is not _W and not self._rules.is_second(p.stage)
        heapq.heappush(self._events, (end, rank))
        units = self._graph.units
        for role in self._graph.roles[self._graph.number[rank][p.kind, p.stage]]:
            made = role * units + p.microbatch
            arrival = self._arrival[made] = end + row.latency[p.kind][p.stage]
            for reader in self._graph.reader_ranks(made):
                heapq.heappush(self._events, (arrival, reader))


# --- the search


SECONDS = 4.0
"""Approximate seconds of the search, if it is compiled."""

_PACE = replace(SINGLE, most=Effort(runs=0, moves=400_000), parts=(2, 1))
_STARTS = 4  # orders with filled gaps that are polished
_ROUNDING = 1e-9
_TRIES = 3  # of a trained model with less memory, so that both keep a limit
_THRESHOLDS = (0.6, 1.0, 0.6, 0.15, 0.15)


class Base(NamedTuple):
    """A schedule of the trained model alone.

    Args:
        schedule: its order.
        limits: memory that it may hold on each rank.
    """

    schedule: Schedule
    limits: tuple[float, ...]


def with_second_model(
    request: Request, second: SecondModel, build: Callable[[Request], Base]
) -> Schedule:
    """Return the fastest order found of a trained model, beside which a second one runs.

    1. The passes of the second model go into the gaps of the order of the trained one, by runs of
       different eagerness.
    2. Where both hold more than a limit, the trained model is built anew with less.
    3. Local search improves the best of these orders, and moves passes of both models.

    Args:
        request: for the trained model.
        second: the other one.
        build: of the trained model alone.

    Raises:
        UsageError: tables have other sizes, or the limit is too small for both.
    """
    second.check(request.pipeline_size, request.num_microbatches)
    base = build(request)
    beside = _Beside(base, request, second)
    users = request.limit.per_rank(request.costs)
    if users is None:
        return beside.searched(beside.least_memory(base.limits))
    left = users
    for _ in range(_TRIES):
        over = max(map(operator.sub, beside.least_memory(users), users))
        left = tuple(most - over for most in left)
        if over <= _ROUNDING or min(left) <= 0.0:
            break
        limit = Limit(bytes=tuple(map(operator.add, left, request.costs.fixed)))
        try:
            base = build(replace(request, limit=limit))
        except LimitTooSmall:
            break
        beside = _Beside(base, request, second)
    needed = beside.least_memory(users)
    request.check_feasible(base.schedule.name, base.schedule.placement, users, needed)
    return beside.searched(users)


class _Beside:
    """A search for an order of both models, from one of the trained model alone."""

    def __init__(self, base: Base, request: Request, second: SecondModel) -> None:
        self._base, self._request = base, request
        trained, m = base.schedule.placement, request.num_microbatches
        self._rules = SecondModelRules.of(second, trained, m)
        self._is_split = any(p.kind in (_B, _W) for rank in base.schedule.ranks for p in rank)
        self._is_whole = second.has_whole_backward or not self._is_split
        self._placement = placed_beside(trained, second)
        self._units = len(self._rules.columns)
        self._costs = PricedBeside(request.costs, self._rules).for_placement(self._placement)
        self._graph = TaskGraph.of(self._rules, self._placement, self._units)
        self._known = sorted(self._orders(), key=lambda timeline: timeline.makespan)

    def _orders(self) -> Iterator[Timeline]:
        """Yield the orders of the gap filler, simulated."""
        base, seen = self._base.schedule, set[tuple[tuple[Pass, ...], ...]]()
        bases = {base.ranks: None}
        if self._is_split:
            bases[split_all(base).ranks] = None
        for eagerness, ranks in product(_eagerness_of(self._rules.second), bases):
            filler = _InGaps(self._graph, ranks, self._costs, eagerness, is_whole=self._is_whole)
            found = tuple(map(tuple, filler.order() or ()))
            if found and found not in seen:
                seen.add(found)
                yield simulate(self._schedule(found), self._request.costs)

    def _schedule(self, ranks: tuple[tuple[Pass, ...], ...]) -> Schedule:
        name = self._base.schedule.name
        return Schedule(name, self._placement, self._units, ranks, rules=self._rules)

    def least_memory(self, limits: Sequence[float]) -> tuple[float, ...]:
        """Return limits, raised to the peaks of the known order that exceeds them the least."""

        def raised(timeline: Timeline) -> tuple[float, ...]:
            return tuple(map(max, timeline.peak_memory, limits))

        return min(map(raised, self._known), key=lambda most: max(map(operator.sub, most, limits)))

    def searched(self, limit: tuple[float, ...]) -> Schedule:
        """Return the best order that keeps a limit, with its report."""
        known = [it for it in self._known if keeps(it.peak_memory, limit)]
        base, costs = self._base.schedule, self._request.costs
        table = costs.for_placement(base.placement)
        alone = lower_bound(base.placement, self._request.num_microbatches, table, limit)
        whole = self._costs if self._is_split else _with_whole_backward(self._costs)
        bound = max(alone, _Paths(self._graph, whole).bound())
        rules, split = replace(self._rules, whole=self._is_whole), self._is_split
        problem = Problem(self._placement, self._units, self._costs, limit, split, rules=rules)
        effort = effort_of(problem, SECONDS, _PACE)
        runner = Runner(problem, engine(float(effort.moves) * problem.num_passes))
        orders = [self._with(_B, _BW, it.schedule.ranks) for it in known[:_STARTS]]
        starts = [(runner.coded(order), None) for order in orders]
        pool = Pool(effort.moves, bound * (1 + 1e-9), 2, _THRESHOLDS)
        ranks = runner.passes(polished_pool(runner, starts, pool))
        found = fuse_for_free(self._schedule(self._with(_BW, _B, ranks)), costs)
        makespan = simulate(found, costs).makespan
        return replace(found, report=Report(makespan, bound), reason=base.reason)

    def _with(
        self, kind: PassKind, other: PassKind, ranks: Sequence[Sequence[Pass]]
    ) -> tuple[tuple[Pass, ...], ...]:
        """Return an order with another kind of backward of the second model, if that is whole."""

        def changed(p: Pass) -> Pass:
            is_other = p.kind is other and self._rules.is_second(p.stage)
            return p._replace(kind=kind) if is_other and self._is_whole else p

        return tuple(tuple(map(changed, rank)) for rank in ranks)


# --- the bound


def _with_whole_backward(costs: StageCosts) -> StageCosts:
    """Return the costs where B has the seconds of both gradients, and W none."""
    none = (0.0,) * len(costs.seconds[_W])
    seconds = {_B: costs.seconds[_BW], _W: none}
    rows = {id(row): _with_whole_backward(row) for row in costs.microbatches}
    of_units = tuple(rows[id(row)] for row in costs.microbatches)
    return replace(costs.with_seconds(seconds), microbatches=of_units)


class _Paths:
    """Least seconds of a step by its task graph, with no limit of memory.

    Every pass has a *head*, the least seconds before it along its inputs, and a *tail*, the least
    seconds behind it. A set of passes of one rank takes at least the smallest head, all of its
    seconds, and the smallest tail.
    """

    def __init__(self, graph: TaskGraph, costs: StageCosts) -> None:
        self._graph = graph
        self._costs = [shortest(costs.of(unit)) for unit in range(graph.units)]
        rows = [(i, row) for i, row in enumerate(graph.rows) if row.kind.kind in (_F, _B, _W)]
        self._nodes = [i * graph.units + unit for i, row in rows for unit in row.visits or ()]
        self._seconds = {code: self._of(code, "seconds") for code in self._nodes}
        self._before: dict[int, list[tuple[int, float]]] = {code: [] for code in self._nodes}
        for i, row in rows:
            units = row.visits or ()
            for before, unit in zip((None, *units), units, strict=False):
                code = i * graph.units + unit
                self._before[code] = list(self._inputs(code))
                if before is not None:
                    self._before[code].append((i * graph.units + before, 0.0))

    def bound(self) -> float:
        """Return the largest bound of the sets of passes whose heads and tails are large enough."""
        behind: dict[int, list[tuple[int, float]]] = {code: [] for code in self._nodes}
        for code, makers in self._before.items():
            for maker, lag in makers:
                behind[maker].append((code, lag))
        order = self._in_turn(behind)
        heads = self._longest(order, self._before)
        tails = self._longest(order[::-1], behind)
        of_rank: dict[int, list[int]] = {}
        for code in order:
            of_rank.setdefault(self._graph.rank_of(code), []).append(code)
        return max(
            _least_span(
                *(np.array([of[code] for code in codes]) for of in (heads, self._seconds, tails))
            )
            for codes in of_rank.values()
        )

    def _inputs(self, code: int) -> Iterator[tuple[int, float]]:
        """Yield the passes that a pass needs, each with the seconds of the message."""
        row, unit = divmod(code, self._graph.units)
        for maker in self._graph.order_rules[row]:
            if self._graph.rows[maker].has(unit):
                yield maker * self._graph.units + unit, 0.0
        for made in self._graph.makers_of(code):
            is_near = self._graph.rank_of(made) == self._graph.rank_of(code)
            yield made, 0.0 if is_near else self._of(made, "latency")

    def _of(self, code: int, table: str) -> float:
        row, unit = divmod(code, self._graph.units)
        kind, stage, *_ = self._graph.rows[row]
        of_kind: Mapping[PassKind, Table] = getattr(self._costs[unit], table)
        return of_kind[kind.kind][stage]

    def _in_turn(self, behind: Mapping[int, Sequence[tuple[int, float]]]) -> list[int]:
        """Return the passes, each behind those that it needs."""
        left = {code: len(makers) for code, makers in self._before.items()}
        found = [code for code, count in left.items() if not count]
        for code in found:
            for reader, _ in behind[code]:
                left[reader] -= 1
                if not left[reader]:
                    found.append(reader)
        return found

    def _longest(
        self, order: Sequence[int], along: Mapping[int, Sequence[tuple[int, float]]]
    ) -> dict[int, float]:
        """Return the longest way to each pass, without its own seconds."""
        found: dict[int, float] = {}
        for code in order:
            ways = (found[at] + self._seconds[at] + lag for at, lag in along[code])
            found[code] = max(ways, default=0.0)
        return found


def _least_span(heads: _Numbers, seconds: _Numbers, tails: _Numbers) -> float:
    """Return the least seconds of the passes of a rank, by their heads and tails.

    For every head and tail: those, and the seconds of all passes whose head and tail are no less.
    """
    by_head = np.argsort(-heads, kind="stable")
    heads, seconds, tails = heads[by_head], seconds[by_head], tails[by_head]
    least = np.unique(tails)
    counted = np.where(tails[:, None] >= least[None, :], seconds[:, None], 0.0)
    work = np.cumsum(counted, axis=0)
    spans = np.where(work > 0, heads[:, None] + work + least[None, :], 0.0)
    return float(spans.max())
