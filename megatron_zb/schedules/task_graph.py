"""Task graph of a schedule: passes as nodes, their inputs as edges, and a replay in time.

A node is a pass, numbered ``row * units + unit``: a *row* is a kind of pass on one stage, a *unit*
the microbatch (or step) that it works on. Nearly all edges join rows at the same unit, so a graph
takes as much memory for one microbatch as for thousands. The rows follow from the table of kinds;
no code here names a kind. Copies of activations between a rank's device and its host take
their time on engines of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

from megatron_zb.schedules.kinds import At, Copies, Due, Home, Kind, Need
from megatron_zb.schedules.passes import Message, Pair, Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.stage_costs import StageCosts

# --- copies to the host and back


class Copy(NamedTuple):
    """A copy of one unit's activation to the host, or from it, in seconds."""

    stage: int
    microbatch: int
    to_host: bool
    start: float
    end: float


class CopyEngines:
    """The two copy engines of a rank, or the one that both directions share.

    Each engine copies what it is given in turn: out of the device in the order of F, into it in the
    order of H. What a pass of an offloaded unit waits for follows from the passes of its own rank
    alone.
    """

    def __init__(self, costs: StageCosts) -> None:
        self._costs = costs
        self._free = dict.fromkeys(Copies, 0.0)
        self._ended: dict[tuple[Copies, int, int], float] = {}
        self.copies: list[Copy] = []

    def awaited_by(self, kind: Kind, p: Pass) -> float:
        """Return when the copy ends that a pass of an offloaded unit waits for, 0 if for none."""
        return 0.0 if kind.awaits is None else self._ended[kind.awaits, p.stage, p.microbatch]

    def follow(self, kind: Kind, p: Pass, end: float) -> None:
        """Start the copy that follows a pass of an offloaded unit, which has ended."""
        if kind.copies is not None:
            self._copy(p, end, kind.copies)

    def _copy(self, p: Pass, now: float, direction: Copies) -> None:
        costs = self._costs.of(p.microbatch)
        start = max(now, self._free[direction])
        copies = costs.copies
        end = start + (0.0 if copies is None else copies.seconds[p.stage])
        for engine in (direction,) if copies is None or copies.full_duplex else Copies:
            self._free[engine] = end
        self._ended[direction, p.stage, p.microbatch] = end
        self.copies.append(Copy(p.stage, p.microbatch, direction is Copies.OUT, start, end))


# --- the graph


_MOST_GRAPHS = 64  # kept for further schedules of the same sizes


class Work(Protocol):
    """Kind of work: its kinds of passes, and the edges that do not join rows at the same unit."""

    @property
    def kinds(self) -> tuple[Kind, ...]: ...
    def __hash__(self) -> int: ...
    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """Ranks that hold a shard of the vocabulary."""
        ...

    @property
    def routes(self) -> tuple[tuple[int, ...], ...] | None:
        """Stages that each unit visits, None where all units visit all stages in turn."""
        ...

    def visits(self, kind: Kind, stage: int) -> tuple[int, ...] | None:
        """Return the units that a kind of pass has on a stage, None for all."""
        ...

    def units(self, num_microbatches: int) -> int:
        """Return the number of units that a row can have."""
        ...

    def units_of(self, kind: Kind, units: int) -> int:
        """Return the number of units that the passes of a kind have, of all ``units``."""
        ...

    def more_inputs(self, graph: TaskGraph) -> Mapping[int, tuple[int, ...]]:
        """Return further inputs of nodes: on the same rank an order rule, else waited for."""
        ...

    def further_message(self, row: Row, unit: int) -> Message | None:
        """Return the message that carries the output of a node to those of ``more_inputs``."""
        ...


class Row(NamedTuple):
    """Passes of one kind and stage; unit u is on rank ``ranks[u % len(ranks)]``.

    ``visits`` are the units that the row has, None for all of them.
    """

    kind: Kind
    stage: int
    ranks: tuple[int, ...]
    units: int
    visits: tuple[int, ...] | None = None

    def units_on(self, rank: int) -> Sequence[int]:
        """Return the units of the row that a rank runs."""
        if self.visits is not None:
            return self.visits
        return range(self.ranks.index(rank), self.units, len(self.ranks))

    def has(self, unit: int) -> bool:
        """Return whether the row has a unit."""
        return self.visits is None or unit in self.visits


@dataclass(frozen=True)
class TaskGraph:
    """Passes of a kind of work on a placement, and what each of them needs.

    ``inputs[row]`` are the rows whose output arrives from another stage, ``order_rules[row]``
    those that must have run before on the same rank, ``roles[row]`` those whose output a pass of
    the row makes: its own, but for a fused backward.
    """

    work: Work
    placement: Placement
    units: int
    rows: tuple[Row, ...]
    inputs: tuple[tuple[int, ...], ...]
    order_rules: tuple[tuple[int, ...], ...]
    roles: tuple[tuple[int, ...], ...]
    forward_only: bool
    more: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, work: Work, placement: Placement, num_microbatches: int, *, forward_only: bool = False
    ) -> TaskGraph:
        """Return the graph of all passes that such a schedule can have."""
        return _graph(work, placement, num_microbatches, forward_only)

    def __len__(self) -> int:
        return len(self.rows) * self.units

    def rank_of(self, code: int) -> int:
        """Return the rank of a node."""
        row, unit = divmod(code, self.units)
        ranks = self.rows[row].ranks
        return ranks[unit % len(ranks)]

    @cached_property
    def number(self) -> tuple[dict[tuple[PassKind, int], int], ...]:
        """For each rank, its rows by kind and stage."""
        found: list[dict[tuple[PassKind, int], int]] = [
            {} for _ in range(self.placement.pipeline_size)
        ]
        for i, row in enumerate(self.rows):
            for rank in row.ranks:
                found[rank][row.kind.kind, row.stage] = i
        return tuple(found)

    def code_of(self, p: Pass, rank: int) -> int:
        """Return the node of a pass of a rank."""
        return self.number[rank][p.kind, p.stage] * self.units + p.microbatch

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each row, the rows that its output is sent to."""
        found: list[list[int]] = [[] for _ in self.rows]
        for row, makers in enumerate(self.inputs):
            for maker in makers:
                found[maker].append(row)
        return tuple(map(tuple, found))

    @cached_property
    def _more_readers(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for code, makers in self.more.items():
            for maker in makers:
                found.setdefault(maker, []).append(code)
        return found

    def makers_of(self, code: int) -> Iterator[int]:
        """Yield the nodes whose output a node waits for."""
        row, unit = divmod(code, self.units)
        for maker in self.inputs[row]:
            if self.rows[maker].has(unit):
                yield maker * self.units + unit
        yield from self.more.get(code, ())

    def others(self, code: int) -> list[int]:
        """Return those of ``more`` that a node waits for: on other ranks."""
        found = self.more.get(code)
        return (
            [] if found is None else [at for at in found if self.rank_of(at) != self.rank_of(code)]
        )

    def readers_of(self, code: int) -> Iterator[int]:
        """Yield the nodes that wait for the output of a node."""
        row, unit = divmod(code, self.units)
        for reader in self.readers[row]:
            if self.rows[reader].has(unit):
                yield reader * self.units + unit
        yield from self._more_readers.get(code, ())

    def reader_ranks(self, code: int) -> tuple[int, ...]:
        """Return the ranks that read the output of a node, of which its own may be one."""
        return tuple(dict.fromkeys(map(self.rank_of, self.readers_of(code))))

    def message_of(self, code: int) -> Message | None:
        """Return the message that carries the output of a node, None if it does not travel."""
        row, unit = divmod(code, self.units)
        stage = self._reading_stages[row]
        if self.work.routes is not None:
            readers = (self.rows[reader] for reader in self.readers[row])
            stage = next((reader.stage for reader in readers if reader.has(unit)), None)
        if stage is None:
            is_read = code in self._more_readers
            return self.work.further_message(self.rows[row], unit) if is_read else None
        kind = self.rows[row].kind
        made_by = kind.kind if kind.is_further else None
        return Message(kind.is_gradient, stage, unit, made_by=made_by)

    @cached_property
    def _reading_stages(self) -> list[int | None]:
        return [
            self._reading_stage(row) if readers else None
            for row, readers in enumerate(self.readers)
        ]

    def _reading_stage(self, row: int) -> int:
        """Return the stage of a message: the reader's, or a number past all stages.

        With S stages and p ranks, S is what all shards read, S + 1 + r is made by the shard of
        rank r, S + p + 1 is what the rank of the first stage sends to all shards, and S + p + 2
        what the first and the last stage send to each other.
        """
        kind, stage, ranks, *_ = self.rows[row]
        beyond = self.placement.num_stages + self.placement.pipeline_size
        for reader in self.readers[row]:
            needs = [need for need in self.rows[reader].kind.needs if need.role in kind.roles]
            places = {need.at for need in needs}
            if any(need.on is not None and need.at in (At.FIRST, At.LAST) for need in needs):
                return beyond + 2
            if At.NEXT in places and self.rows[reader].stage == stage - 1:
                return stage - 1
            from_first = self.placement.rank_of[0] in ranks and stage in (
                0,
                self.placement.num_stages + ranks[0],
            )
            if from_first and places & {At.FIRST, At.READER}:
                return beyond + 1
        return stage + 1

    def pairs_of_ranks(self) -> set[tuple[int, int]]:
        """Return the pairs of ranks that messages of one microbatch travel between."""
        found = set()
        for row, makers in enumerate(self.inputs):
            for maker in makers:
                for unit in range(max(len(self.rows[row].ranks), len(self.rows[maker].ranks))):
                    ends = (
                        self.rows[at].ranks[unit % len(self.rows[at].ranks)] for at in (maker, row)
                    )
                    found.add(tuple(sorted(ends)))
        return {(a, b) for a, b in found if a != b}


@lru_cache(maxsize=_MOST_GRAPHS)
def _graph(
    work: Work, placement: Placement, num_microbatches: int, forward_only: bool
) -> TaskGraph:
    kinds = [kind for kind in work.kinds if kind.due is Due.ALWAYS or not forward_only]
    units = work.units(num_microbatches)
    rows = tuple(
        Row(kind, stage, ranks, work.units_of(kind, units), work.visits(kind, stage))
        for kind in kinds
        for stage, ranks in _stages_of(kind, work, placement)
    )
    number = {(row.kind.kind, row.stage): i for i, row in enumerate(rows)}
    inputs, order_rules = [], []
    for i, row in enumerate(rows):
        waits, before = list[int](), list[int]()
        for need in row.kind.needs:
            for maker in _makers(need, row, (work, placement), rows, number):
                is_near = need.at not in (At.PREVIOUS, At.NEXT) and rows[maker].ranks == row.ranks
                if maker != i:
                    (before if is_near else waits).append(maker)
        inputs.append(tuple(waits))
        order_rules.append(tuple(before))
    roles = tuple(
        tuple(number[role, row.stage] for role in row.kind.plays) or (i,)
        for i, row in enumerate(rows)
    )
    graph = TaskGraph(
        work, placement, units, rows, tuple(inputs), tuple(order_rules), roles, forward_only
    )
    return replace(graph, more=work.more_inputs(graph))


def _stages_of(
    kind: Kind, work: Work, placement: Placement
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the stages that have passes of a kind, each with the ranks that share them."""
    stages, ranks_of = placement.num_stages, placement.ranks_of
    if kind.home in (Home.SHARDS, Home.LOOKUPS):
        ranks = {*work.shard_ranks, *placement.rank_of[: kind.home is Home.LOOKUPS]}
        yield from ((stages + rank, (rank,)) for rank in sorted(ranks))
    elif kind.home is Home.RANKS:
        yield from ((s, (rank,)) for s in range(stages) for rank in ranks_of[s])
    else:
        held = {Home.INNER: range(stages - 1), Home.LAST: range(stages - 1, stages)}
        held[Home.FIRST] = range(1)
        yield from ((s, ranks_of[s]) for s in held.get(kind.home, range(stages)))


def _makers(
    need: Need,
    row: Row,
    of: tuple[Work, Placement],
    rows: Sequence[Row],
    number: Mapping[tuple[PassKind, int], int],
) -> list[int]:
    """Return the rows that make an input of a row: several where units come by several routes."""
    work, placement = of
    stages = placement.num_stages
    if need.on is not None and row.stage != (0 if need.on is At.FIRST else stages - 1):
        return []
    if need.at is At.SHARDS:
        return [i for i, it in enumerate(rows) if it.kind.kind is need.role]
    if work.routes is not None and need.at in (At.PREVIOUS, At.NEXT):
        beside = _beside_on_routes(work.routes, row.stage, need.at)
        return [number[need.role, stage] for stage in beside if (need.role, stage) in number]
    stage = {
        At.PREVIOUS: row.stage - 1,
        At.NEXT: row.stage + 1,
        At.SAME: row.stage,
        At.FIRST: 0,
        At.LAST: stages - 1,
        At.READER: stages + placement.rank_of[0],
    }[need.at]
    found = number.get((need.role, stage))
    return [] if found is None else [found]


def _beside_on_routes(routes: Sequence[tuple[int, ...]], stage: int, at: At) -> list[int]:
    """Return the stages that stand before a stage on a route, or behind it."""
    pairs = {pair for route in dict.fromkeys(routes) for pair in pairwise(route)}
    if at is At.PREVIOUS:
        return sorted(a for a, b in pairs if b == stage)
    return sorted(b for a, b in pairs if a == stage)


class Replay(NamedTuple):
    """Passes of every rank in time, as far as they can run; ``sequence`` is their total order.

    ``start`` and ``end`` are by rank and position, in seconds; ``sequence`` has the rank and the
    position of every pass, each after the passes that it depends on. ``blocked`` has those of the
    first pass of each rank that can never run: empty for a schedule without circular waits.
    """

    start: list[list[float]]
    end: list[list[float]]
    sequence: list[tuple[int, int]]
    blocked: list[tuple[int, int]]
    engines: list[CopyEngines]


@dataclass(frozen=True)
class Orders:
    """Orders of all ranks on a graph: their passes, what is paired, and what is offloaded."""

    graph: TaskGraph
    ranks: Sequence[Sequence[Pass]]
    pairs: Collection[Pass] = ()
    offloaded: Collection[tuple[int, int]] = ()


def replay(orders: Orders, costs: StageCosts | None = None) -> Replay:
    """Run every rank's passes in order, each as early as its inputs allow.

    Without costs, passes take no time, and only ``sequence`` and ``blocked`` mean anything. Sends
    never block. A pair waits for the inputs of both of its passes and makes both outputs at its
    end; a pass that awaits a copy begins once its engine has ended it.
    """
    return _Replaying(orders, costs).replay()


_NEVER = -1.0


class _Replaying:
    """State of a replay: when the output of each node arrives, and which ranks wait for it."""

    def __init__(self, orders: Orders, costs: StageCosts | None) -> None:
        graph, ranks = orders.graph, orders.ranks
        self._graph, self._orders, self._costs = graph, orders, costs
        self._prices = _Prices(graph, costs)
        self._rows = [
            [number[p[0], p[1]] for p in passes]
            for number, passes in zip(graph.number, ranks, strict=True)
        ]
        self._arrival = [_NEVER] * len(graph)
        for i, row in enumerate(graph.rows):
            for unit in () if row.visits is None else {*range(graph.units)} - {*row.visits}:
                self._arrival[i * graph.units + unit] = 0.0  # nobody waits for what is not there
        self._waiting: dict[int, list[int]] = {}
        self._runnable = list(range(len(ranks) - 1, -1, -1))
        start, end = ([list[float]() for _ in ranks] for _ in range(2))
        has_copies = orders.offloaded and costs is not None
        engines = [CopyEngines(costs) for _ in ranks] if has_copies and costs is not None else []
        self._done = Replay(start, end, [], [], engines)

    def replay(self) -> Replay:
        """Run all ranks as far as they can."""
        while self._runnable:
            self._advance(self._runnable.pop())
        lengths = zip(self._done.end, self._orders.ranks, strict=True)
        blocked = [(r, len(ends)) for r, (ends, of) in enumerate(lengths) if len(ends) < len(of)]
        return self._done._replace(blocked=blocked)

    def _advance(self, rank: int) -> None:
        """Run a rank up to the first pass whose input has not been made."""
        graph, arrival, waiting = self._graph, self._arrival, self._waiting
        inputs, roles, units, prices = graph.inputs, graph.roles, graph.units, self._prices
        passes, rows = self._orders.ranks[rank], self._rows[rank]
        starts, ends = self._done.start[rank], self._done.end[rank]
        is_plain = not (graph.more or self._orders.pairs or self._done.engines)
        seconds, latencies = prices.all
        end = ends[-1] if ends else 0.0
        for i in range(len(ends), len(passes)):
            row, unit = rows[i], passes[i][2]
            begin, missing = end, -1
            for maker in inputs[row]:
                at = arrival[maker * units + unit]
                if at > begin:
                    begin = at
                elif at < 0.0:
                    missing = maker * units + unit
                    break
            if prices.of_units:
                seconds, latencies = prices.of_units[unit]
            if is_plain or missing >= 0:
                end = begin + seconds[row]
            else:
                begin, end, missing = self._run(rank, i, begin, seconds[row])
            if missing >= 0:
                waiting.setdefault(missing, []).append(rank)
                return
            starts.append(begin)
            ends.append(end)
            self._done.sequence.append((rank, i))
            for made in roles[row]:
                arrival[made * units + unit] = end + latencies[row]
                if made * units + unit in waiting:
                    self._runnable += waiting.pop(made * units + unit)

    def _run(self, rank: int, i: int, begin: float, seconds: float) -> tuple[float, float, int]:
        """Return the start and end of a pass with further inputs, a partner or a copy.

        ``begin`` is when its rank and its usual inputs are ready. The third number is the first
        input that has not been made yet, or -1.
        """
        passes, rows, graph = self._orders.ranks[rank], self._rows[rank], self._graph
        pairs, p = self._orders.pairs, passes[i]
        if i > 0 and passes[i - 1] in pairs:  # with the pass before
            return self._done.start[rank][-1], self._done.end[rank][-1], -1
        node, lag = rows[i] * graph.units + p[2], self._prices.lag[rows[i]]
        more = list(graph.others(node))
        if p in pairs:
            more += graph.makers_of(rows[i + 1] * graph.units + passes[i + 1][2])
        for code in more:
            if self._arrival[code] < 0.0:
                return begin, begin, code
            begin = max(begin, self._arrival[code])
        if lag:  # what follows a pass of its own rank takes that time, too
            begin = max(begin, self._behind_lags(graph.more.get(node, ()), lag))
        if p in pairs and self._costs is not None:
            seconds = self._costs.pair_seconds(Pair(p, passes[i + 1]))
        if not self._done.engines or p[1:] not in self._orders.offloaded:
            return begin, begin + seconds, -1
        engine, kind = self._done.engines[rank], graph.rows[rows[i]].kind
        begin = max(begin, engine.awaited_by(kind, p))
        engine.follow(kind, p, begin + seconds)
        return begin, begin + seconds, -1

    def _behind_lags(self, codes: Sequence[int], lag: float) -> float:
        """Return when every rank is through with the lags behind some passes, one after another."""
        ends = [0.0] * len(self._done.end)
        for arrival, rank in sorted((self._arrival[it], self._graph.rank_of(it)) for it in codes):
            ends[rank] = max(ends[rank], arrival) + lag
        return max(ends)


class _Prices:
    """Seconds of every row and of the message that it sends, by unit where these differ."""

    def __init__(self, graph: TaskGraph, costs: StageCosts | None) -> None:
        self._graph = graph
        none = [0.0] * len(graph.rows)
        self.all = (none, none) if costs is None else self._of(costs)
        self.lag = none if costs is None else self._each(costs.lag)
        self.of_units: list[tuple[list[float], list[float]]] = []
        if costs is not None and costs.microbatches:
            distinct = {id(row): row for row in costs.microbatches}
            found = {key: self._of(row) for key, row in distinct.items()}
            self.of_units = [found[id(row)] for row in costs.microbatches]

    def _of(self, costs: StageCosts) -> tuple[list[float], list[float]]:
        """Return the seconds and latencies of each row."""
        return self._each(costs.seconds), self._each(costs.latency)

    def _each(self, table: Mapping[PassKind, Sequence[float]]) -> list[float]:
        """Return the price of each row, 0 for a kind that a table does not have."""
        priced = ((table.get(row.kind.kind), row.stage) for row in self._graph.rows)
        return [of[stage] if of and stage < len(of) else 0.0 for of, stage in priced]
