"""A placement to fill with passes, and the passes as numbers for the inner loops.

The passes of a row, which are those of one kind and stage, have consecutive codes in the order in
which their rank runs them: see :class:`~inner_loops.Graph`. That order is a property of the rules,
so that slices of a microbatch, whose B run from the last one on, are numbered as anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from operator import add
from typing import Any, NamedTuple

from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.rules import TRAINING, TrainingRules
from megatron_zb.schedules.search.inner_loops import Edges, Graph
from megatron_zb.schedules.search.kernels import Engine
from megatron_zb.schedules.stage_costs import StageCosts

TOLERANCE = 1e-9
_F, _B, _W, _BW, _R = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.R
_O, _P, _V, _U = PassKind.O, PassKind.P, PassKind.V, PassKind.U
OTHERS = (_O, _P, _V, _U)
"""Kinds with inputs of several passes, in the order of their priorities."""


@dataclass(frozen=True)
class Problem:
    """A placement to fill: ``limit[r]`` in units of ``costs.activation``; BW only unless split.

    ``num_microbatches`` counts what passes count under the ``rules``, as do the rows of ``costs``.
    ``tail_seconds[r]`` are counted after the last pass of rank r, none if left out. There are
    ``turn`` seconds between F and B of the last stage. Under the rules of a vocabulary-parallel
    output layer, ranks have room for the logits of a unit beside the limit, and each holds those
    of up to ``logits`` units.
    """

    placement: Placement
    num_microbatches: int
    costs: StageCosts
    limit: tuple[float, ...]
    split: bool = True
    tail_seconds: tuple[float, ...] = ()
    turn: float = 0.0
    rules: TrainingRules = TRAINING
    logits: int = 0

    @property
    def num_passes(self) -> int:
        return self.codes.total

    @cached_property
    def codes(self) -> Codes:
        """Codes of the passes."""
        return Codes(self.placement, self.num_microbatches, self.rules, split=self.split)

    @property
    def mean_pass(self) -> float:
        """Mean seconds of F, B and W."""
        m, passes = self.num_microbatches, 3 * self.placement.num_stages
        return sum(
            count / m * (sum(row.seconds[_F] + row.seconds[_B] + row.seconds[_W]) / passes)
            for count, row in self.costs.rows(m)
        )

    @cached_property
    def largest_activation(self) -> tuple[float, ...]:
        """Memory of a stage that lets any microbatch move on: all of its units are held at once."""
        at_once, rows = self.rules.units_at_once, self.costs.microbatches
        if at_once == 1:
            return self.costs.largest_activation
        groups = [rows[i : i + at_once] for i in range(0, len(rows), at_once)]
        return tuple(
            max(sum(row.memory["activation"][s] for row in group) for group in groups)
            for s in range(self.placement.num_stages)
        )

    def smallest_limit(self, rank: int) -> float:
        """Return the memory a rank needs to run at all: one microbatch in each of its chunks."""
        return sum(self.largest_activation[s] for s in self.placement.stages_of[rank])


class Codes:
    """Codes of the passes of a problem: rows of F, then of B or BW, then of W if that is split.

    Those of shards of the vocabulary, and of updates, stand last.
    ``rows`` are the kind and stage of each row, ``turns`` its units in the order in which a rank
    runs them, and ``first`` the code of the first of them. Codes of F end before ``forwards``,
    those of B before ``backwards``, those of W before ``weights``, and all before ``total``. The R
    of an F has the code of the F plus ``total``.
    """

    def __init__(
        self, placement: Placement, num_units: int, rules: TrainingRules, *, split: bool
    ) -> None:
        kinds = (_F, _B, _W) if split else (_F, _BW)
        stages, units = range(placement.num_stages), range(num_units)
        self.rows = [(kind, stage) for kind in kinds for stage in stages]
        shards = [placement.num_stages + rank for rank in rules.shard_ranks]
        if shards:
            self.rows.append((_P, placement.num_stages - 1))
            self.rows += [(kind, stage) for kind in (_O, _V) for stage in shards]
        if _U in rules.by_kind:
            self.rows += [(_U, stage) for stage in stages]
        of_all = {kind: rules.turns(rules.by_kind[kind], units) for kind, _ in self.rows}
        visits = (rules.visits(rules.by_kind[kind], stage) for kind, stage in self.rows)
        self.turns = [
            of_all[kind] if some is None else rules.turns(rules.by_kind[kind], some)
            for (kind, _), some in zip(self.rows, visits, strict=True)
        ]
        self.first = [*accumulate(map(len, self.turns), initial=0)]
        self.number = {row: i for i, row in enumerate(self.rows)}
        ends = [self.first[(i + 1) * len(stages)] for i in range(len(kinds))]
        self.forwards, self.backwards, self.weights = ends[0], ends[1], ends[-1]
        self.total = self.first[-1]
        self.split, self._rules = split, rules

    def of(self, kind: PassKind, stage: int, unit: int) -> int:
        """Return the code of a pass; that of a B is also that of a BW."""
        if kind is _R:
            return self.total + self.of(_F, stage, unit)
        if (kind, stage) not in self.number:
            kind = _B if kind is _BW else _BW
        row = self.number[kind, stage]
        return self.first[row] + self.turns[row].index(unit)

    def of_all(self, passes: Sequence[Pass]) -> list[int]:
        """Return the codes of an order of F, B and W, or of F and BW, which is split if need be."""
        found = []
        for kind, stage, unit in passes:
            found.append(self.of(kind, stage, unit))
            if kind is _BW and self.split:
                found.append(self.of(_W, stage, unit))
        return found

    @cached_property
    def passes(self) -> list[Pass]:
        """Passes by code, with the R of all units behind all others."""
        found = []
        for (kind, stage), turns in zip(self.rows, self.turns, strict=True):
            for unit in turns:
                found.append(
                    Pass(self._rules.backward_of(unit) if kind is _BW else kind, stage, unit)
                )
        return found + [p._replace(kind=_R) for p in found[: self.forwards]]


def graph_of(problem: Problem, make: Engine, *, pairs: bool, with_r: bool) -> Graph:
    """Return the passes of a problem as arrays of an engine.

    Args:
        problem: the passes and their costs.
        make: engine that reads the arrays.
        pairs: all F of a rank are tried before its B.
        with_r: orders have an R of every unit.
    """
    placement, codes, built = problem.placement, problem.codes, _Rows(problem)
    rows = [built.row(kind, stage) for kind, stage in codes.rows]
    again = [built.of_r(stage) for stage in range(placement.num_stages)] if with_r else []
    everything = [*rows, *again]
    stages = [stage for _, stage in codes.rows]
    stage_of = [*stages, *range(len(again))]
    held = [0.0] * placement.pipeline_size
    if codes.total > codes.weights and "logits" in problem.costs.memory:
        held = [*problem.costs.memory["logits"][placement.num_stages :]]
    sized = [
        (_rank_of(placement, s), len(row.cell)) for s, row in zip(stage_of, everything, strict=True)
    ]
    ranks = [rank for rank, size in sized for _ in range(size)]
    leads = [_leads(codes, placement, rank, pairs=pairs) for rank in range(placement.pipeline_size)]
    full = map(add, problem.limit, held)
    lengths = [ranks.count(rank) for rank in range(placement.pipeline_size)]

    def integers(values: Iterable[Iterable[int]]) -> Any:
        return make.integers([*chain.from_iterable(values)])

    def floats(values: Iterable[Iterable[float]]) -> Any:
        return make.floats([*chain.from_iterable(values)])

    return Graph(
        pipeline_size=placement.pipeline_size,
        chunks=placement.chunks,
        forwards=codes.forwards,
        backwards=codes.backwards,
        weights=codes.weights,
        again=codes.total,
        split=codes.split,
        first=make.integers(codes.first),
        stage=make.integers(stages),
        row=integers([i] * size for i, (_, size) in enumerate(sized)),
        rank=make.integers(ranks),
        cell=integers(row.cell for row in everything),
        before=integers(row.before for row in everything),
        maker=integers(row.maker for row in everything),
        reader=integers(row.reader for row in everything),
        seconds=floats(row.seconds for row in rows),
        latency=floats(row.latency for row in everything),
        memory=floats(row.memory for row in rows),
        weight=integers(row.weight for row in rows),
        flight=floats(row.flight for row in rows),
        after=floats(row.after for row in rows),
        place=make.integers([*accumulate(lengths, initial=0)]),
        leads=make.integers([row for each in leads for row, _ in each]),
        lead_kind=make.integers([kind for each in leads for _, kind in each]),
        lead_first=make.integers([*accumulate(map(len, leads), initial=0)]),
        limit=make.floats([most + TOLERANCE * (1 + most) for most in full]),
        room=make.floats([most + TOLERANCE * (1 + most) for most in problem.limit]),
        work=make.floats(built.work()),
        tail_seconds=make.floats(problem.tail_seconds or (0.0,) * placement.pipeline_size),
    )


def _rank_of(placement: Placement, stage: int) -> int:
    """Return the rank of a stage, or of a shard."""
    shard = stage - placement.num_stages
    return shard if shard >= 0 else placement.rank_of[stage]


def _leads(codes: Codes, placement: Placement, rank: int, *, pairs: bool) -> list[tuple[int, int]]:
    """Return the rows of a rank but W, each with the number of its kind in the priorities.

    F of a chunk stands before its B, or before all B; then O, P, V and U.
    """
    held, backward = placement.stages_of[rank], _B if codes.split else _BW
    chunks = len(held)
    forwards = [(codes.number[_F, stage], c) for c, stage in enumerate(held)]
    backwards = [(codes.number[backward, stage], chunks + c) for c, stage in enumerate(held)]
    if pairs:
        return forwards + backwards
    of_shard = [
        (row, 2 * chunks + 1 + OTHERS.index(kind))
        for row, (kind, stage) in enumerate(codes.rows)
        if kind in OTHERS and _rank_of(placement, stage) == rank
    ]
    of_chunks = zip(forwards, backwards, strict=True)
    return [row for of_chunk in of_chunks for row in of_chunk] + of_shard


def edges_of(problem: Problem, make: Engine) -> Edges | None:
    """Return the inputs of passes that have several as arrays of an engine, None without any."""
    codes, built = problem.codes, _Rows(problem)
    if codes.total == codes.weights and not problem.rules.joins():
        return None
    found = built.edges()
    rows = [built.row(kind, stage) for kind, stage in codes.rows]
    cell = [code for row in rows for code in row.cell]
    main = [code for row in rows for code in row.maker]
    missing = [0] * codes.total
    readers: list[list[tuple[int, float]]] = [[] for _ in missing]
    makers: list[list[tuple[int, float]]] = [[] for _ in missing]
    for maker, reader, lag in found:
        missing[reader] += 1 if missing[reader] or main[reader] < 0 else 2
        readers[maker].append((reader, lag))
        if cell[maker] != cell[reader]:  # the order of a rank keeps those of a cell
            makers[reader].append((maker, lag))

    def flat(lists: list[list[tuple[int, float]]]) -> tuple[Any, Any, Any]:
        none: list[int] = [0] * codes.forwards  # of an R
        first = make.integers([*accumulate([*map(len, lists), *none], initial=0)])
        each = [entry for entries in lists for entry in entries]
        return first, make.integers([at for at, _ in each]), make.floats([lag for _, lag in each])

    return Edges(problem.logits, make.integers(missing), *flat(makers), *flat(readers))


def _on_route(route: tuple[int, ...], stage: int, step: int) -> int | None:
    """Return the stage one step further on a route, or back, None at its end."""
    at = route.index(stage) + step
    return route[at] if 0 <= at < len(route) else None


class _Row(NamedTuple):
    """Columns of a :class:`~inner_loops.Graph` for the passes of one row."""

    cell: Sequence[int]
    before: Sequence[int]
    maker: Sequence[int]
    reader: Sequence[int]
    weight: Sequence[int] = ()
    seconds: Sequence[float] = ()
    latency: Sequence[float] = ()
    memory: Sequence[float] = ()
    flight: Sequence[float] = ()
    after: Sequence[float] = ()


class _Rows:
    """Builder of the columns of rows."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._codes, self._costs = problem, problem.codes, problem.costs
        self._last = problem.placement.num_stages - 1
        self._units = range(problem.num_microbatches)
        rows = problem.costs.microbatches
        self._distinct = list({id(row): row for row in rows}.values()) or [problem.costs]
        index = {id(row): i for i, row in enumerate(self._distinct)}
        self._which = [index[id(row)] for row in rows]
        self._memory = {
            kind: problem.rules.by_kind[kind].memory
            for kind in {kind for kind, _ in self._codes.rows}
        }

    def row(self, kind: PassKind, stage: int) -> _Row:
        """Return the columns of a row of F, B, BW or W."""
        if kind is _F:
            return self._forward(stage)
        if kind in (_O, _P, _V):
            return self._of_shard(kind, stage)
        if kind is _U:
            return self._update(stage)
        return self._weight(stage) if kind is _W else self._backward(kind, stage)

    def of_r(self, stage: int) -> _Row:
        """Return the columns of the R of a stage."""
        units = self._of(_F, stage, self._units)
        none = [-1] * len(units)
        return _Row(units, none, none, none, latency=[0.0] * len(units))

    def work(self) -> list[float]:
        """Return the seconds of F, B and W of each rank."""
        rows = [self._costs.of(j) for j in self._units]
        if self._problem.rules.routes is not None:
            return self._work_on_routes()
        found = [
            sum(row.seconds[kind][s] for row in rows for kind in (_F, _B, _W) for s in stages)
            for stages in self._problem.placement.stages_of
        ]
        for kind, stage in self._codes.rows:
            if kind in (_O, _P, _V):
                rank = _rank_of(self._problem.placement, stage)
                found[rank] += sum(row.seconds[kind][stage] for row in rows)
        return found

    def _work_on_routes(self) -> list[float]:
        found = [0.0] * self._problem.placement.pipeline_size
        for (kind, stage), turns in zip(self._codes.rows, self._codes.turns, strict=True):
            rank = self._problem.placement.rank_of[stage]
            found[rank] += sum(self._seconds(kind, stage, unit) for unit in turns)
        return found

    def _forward(self, stage: int) -> _Row:
        turns = self._codes.turns[self._codes.number[_F, stage]]
        none, own = [-1] * len(turns), self._of(self._backward_kind, stage, turns)
        if stage == self._last and self._problem.rules.shard_ranks:
            own = none
        return _Row(
            cell=self._of(_F, stage, turns),
            before=none,
            maker=self._beside(_F, stage, turns, -1, none),
            reader=self._beside(_F, stage, turns, 1, own),
            weight=none,
            seconds=self._priced(turns, lambda row: row.seconds[_F][stage]),
            latency=self._latency(_F, stage, turns, -1),
            memory=self._priced(turns, lambda row: row.change(self._memory[_F], stage)),
            flight=self._flight(stage, turns, 1.0),
            after=[0.0] * len(turns),
        )

    def _backward(self, kind: PassKind, stage: int) -> _Row:
        turns = self._codes.turns[self._codes.number[kind, stage]]
        none, cell = [-1] * len(turns), self._of(_F, stage, turns)
        change = self._memory[kind]
        return _Row(
            cell=cell,
            before=cell,
            maker=self._beside(kind, stage, turns, 1, cell if self._problem.turn else none),
            reader=self._beside(kind, stage, turns, -1, none),
            weight=self._of(_W, stage, turns) if self._codes.split else none,
            seconds=self._priced(turns, lambda row: row.seconds[_B][stage]),
            latency=self._latency(kind, stage, turns, 1),
            memory=self._priced(turns, lambda row: row.change(change, stage)),
            flight=self._flight(stage, turns, -1.0),
            after=self._priced(turns, lambda row: row.seconds[_W][stage]),
        )

    def _of_shard(self, kind: PassKind, stage: int) -> _Row:
        """Return the columns of a row of O or V of a shard, or of P of the last stage."""
        turns, change = self._codes.turns[self._codes.number[kind, stage]], self._memory[kind]
        none = [-1] * len(turns)
        into = {_O: 1.0, _V: -1.0, _P: 0.0}[kind]
        before = none if kind is _O else self._of(_F if kind is _P else _O, stage, turns)
        return _Row(
            cell=self._of(_F if kind is _P else _O, stage, turns),
            before=before,
            maker=none,
            reader=none,
            weight=none,
            seconds=self._priced(turns, lambda row: row.seconds[kind][stage]),
            latency=[0.0] * len(turns),
            memory=self._priced(turns, lambda row: row.change(change, stage)),
            flight=[into] * len(turns),
            after=[0.0] * len(turns),
        )

    def edges(self) -> list[tuple[int, int, float]]:
        """Return the inputs of O, P, V and the last B, of U, and of F that wait for a U.

        Each is the maker, the reader, and the seconds of the message.
        """
        last, stages = self._last, self._last + 1
        end, units = self._problem.placement.rank_of[last], self._units
        found: list[tuple[int, int, float]] = []

        def join(maker: tuple[PassKind, int], reader: tuple[PassKind, int], *, near: bool) -> None:
            makers, readers = self._of(*maker, units), self._of(*reader, units)
            lags = self._priced(units, lambda row: row.latency[maker[0]][maker[1]])
            found.extend(zip(makers, readers, [0.0] * len(lags) if near else lags, strict=True))

        for rank in self._problem.rules.shard_ranks:
            join((_F, last), (_O, stages + rank), near=rank == end)
            join((_O, stages + rank), (_P, last), near=rank == end)
            join((_P, last), (_V, stages + rank), near=rank == end)
        if self._problem.rules.shard_ranks:
            join((_P, last), (self._backward_kind, last), near=True)
        found += [(*edge, 0.0) for edge in self._of_updates()]
        for made, read in self._problem.rules.joins():
            kind = self._backward_kind if made.kind is _B else made.kind
            lag = self._costs.of(made.microbatch).latency[kind][made.stage]
            found.append((self._codes.of(*made), self._codes.of(*read), lag))
        return found

    def _of_updates(self) -> Iterator[tuple[int, int]]:
        """Yield the inputs of U, and of F that wait for one: maker and reader."""
        rules, codes = self._problem.rules, self._codes
        done = _W if codes.split else _BW
        for stage in range(self._last + 1):
            for unit, last in rules.updates_on(stage):
                yield codes.of(done, stage, last), codes.of(_U, stage, unit)
            for unit, update in rules.waits_on(stage):
                yield codes.of(_U, stage, update), codes.of(_F, stage, unit)

    def _update(self, stage: int) -> _Row:
        """Return the columns of a row of U."""
        turns = self._codes.turns[self._codes.number[_U, stage]]
        none, nothing = [-1] * len(turns), [0.0] * len(turns)
        return _Row(
            cell=[self._codes.of(_U, stage, unit) for unit in turns],
            before=none,
            maker=none,
            reader=none,
            weight=none,
            seconds=[self._seconds(_U, stage, unit) for unit in turns],
            latency=nothing,
            memory=nothing,
            flight=nothing,
            after=nothing,
        )

    def _seconds(self, kind: PassKind, stage: int, unit: int) -> float:
        """Return the seconds of a pass, 0 for a kind that the costs do not have."""
        of_stages = self._costs.of(unit).seconds.get(kind)
        return of_stages[stage] if of_stages else 0.0

    def _weight(self, stage: int) -> _Row:
        turns, change = self._codes.turns[self._codes.number[_W, stage]], self._memory[_W]
        none = [-1] * len(turns)
        return _Row(
            cell=self._of(_F, stage, turns),
            before=self._of(_B, stage, turns),
            maker=none,
            reader=none,
            weight=none,
            seconds=self._priced(turns, lambda row: row.seconds[_W][stage]),
            latency=[0.0] * len(turns),
            memory=self._priced(turns, lambda row: row.change(change, stage)),
            flight=[0.0] * len(turns),
            after=[0.0] * len(turns),
        )

    def _beside(
        self,
        kind: PassKind,
        stage: int,
        units: Sequence[int],
        step: int,
        at_the_end: Sequence[int],
    ) -> Sequence[int]:
        """Return the passes of units on the stage one step further on their route, or back."""
        routes, other = self._problem.rules.routes, stage + step
        if routes is None:
            return self._of(kind, other, units) if 0 <= other <= self._last else at_the_end
        there = [_on_route(routes[unit], stage, step) for unit in units]
        each = zip(there, units, at_the_end, strict=True)
        return [end if at is None else self._codes.of(kind, at, unit) for at, unit, end in each]

    def _latency(
        self, kind: PassKind, stage: int, units: Sequence[int], step: int
    ) -> Sequence[float]:
        """Return the seconds of the messages from the stage one step away on the route of units."""
        routes, other = self._problem.rules.routes, stage + step
        ends = self._problem.turn if kind is not _F else 0.0
        if routes is None:
            inner = 0 <= other <= self._last
            return self._priced(units, lambda row: row.latency[kind][other] if inner else ends)
        rank_of = self._problem.placement.rank_of
        found = []
        for unit in units:
            at = _on_route(routes[unit], stage, step)
            if at is None or rank_of[at] == rank_of[stage]:
                found.append(0.0)
            else:
                found.append(self._costs.of(unit).latency[kind][at])
        return found

    @property
    def _backward_kind(self) -> PassKind:
        return _B if self._codes.split else _BW

    def _of(self, kind: PassKind, stage: int, units: Sequence[int]) -> Sequence[int]:
        """Return the codes of the passes of a row on some units, -1 for those that it has not."""
        row = self._codes.number[kind, stage]
        first, turns = self._codes.first[row], self._codes.turns[row]
        if isinstance(turns, range) and isinstance(units, range):
            return range(first + units.start, first + units.stop)
        return [first + turns.index(u) if u in turns else -1 for u in units]

    def _priced(self, units: Sequence[int], of: Callable[[StageCosts], float]) -> list[float]:
        """Return a number of each unit, in their order."""
        values = [of(row) for row in self._distinct]
        if not self._which:
            return values * len(units)
        return [values[self._which[unit]] for unit in units]

    def _flight(self, stage: int, units: Sequence[int], sign: float) -> list[float]:
        """Return how many average microbatches units are, by their memory."""
        mean = self._costs.mean_activation[stage]
        if not self._which or mean <= 0:
            return [sign] * len(units)
        return self._priced(units, lambda row: sign * row.memory["activation"][stage] / mean)
