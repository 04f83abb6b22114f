"""Two directions: every rank holds stages of two copies of the model, and pipelines run both ways.

Even microbatches go *down*: along the ranks in the first copy. Odd ones go *up*, through the second
copy, which lies on the ranks in mirror image. So both ends of the pipeline begin at once. Every
stage has a copy on another rank: the weights take twice the memory, and once a stage has run its
last W, its gradient is added to that of its copy.

- **Chimera** (arXiv 2107.06925) has p stages: rank r has stage r down and stage p - 1 - r up.
- **BitPipe** (arXiv 2410.19367) has a V of 2p stages down, and its mirror image up.

Example::

    build("bitpipe", pipeline_size=8, num_microbatches=8, costs=costs)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import truediv
from typing import ClassVar, TypeVar

from megatron_zb.errors import UsageError
from megatron_zb.schedules.bounds import shortest
from megatron_zb.schedules.costs import Costs, Feature, check_table
from megatron_zb.schedules.kinds import At, Kind, Need
from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.placement import Placement, looped, wave
from megatron_zb.schedules.request import Limit, Request, keeps
from megatron_zb.schedules.rules import Sizes
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.placement_search import PlacementSearch
from megatron_zb.schedules.simulator import Timeline, simulate
from megatron_zb.schedules.stage_costs import Priced, StageCosts, Table
from megatron_zb.schedules.task_graph import Row, TaskGraph
from megatron_zb.schedules.units import UnitRules, Units

_F, _B, _W, _BW = PassKind.F, PassKind.B, PassKind.W, PassKind.BW

X = PassKind.add("X", "gradient for the copy")
Y = PassKind.add("Y", "sum of both copies", ("#1E1E1E", "#8A8A8A"))

EXCHANGE = (
    Kind(X, needs=(Need(_W, At.SAME),), is_further=True),
    Kind(Y, needs=(Need(X, At.SAME),), is_further=True),
)
"""X hands the gradient of a stage over to the rank of its copy, Y adds what has come from there.

Both have one unit on a stage: the last one that visits it, behind whose W they stand.
"""


# --- placement, rules and costs


def both_ways(pipeline_size: int, chunks: int) -> Placement:
    """Return the placement of two copies of the model, one in mirror image of the other.

    Args:
        pipeline_size: ranks p, an even number.
        chunks: of each copy on a rank: 1 for stages along the ranks, 2 for a V.

    Raises:
        UsageError: the number of ranks is odd, so that one rank would hold both copies of a stage.
    """
    p = pipeline_size
    if p % 2:
        raise UsageError(
            f"two directions on {p} ranks: the rank in the middle would hold both copies of a "
            "stage: give an even number of ranks"
        )
    down = (looped(p) if chunks == 1 else wave(p, chunks)).rank_of
    up = tuple(p - 1 - rank for rank in down)
    # Megatron looks for the loss in the last chunk of the last rank
    copies = up + down if down[-1] == p - 1 else down + up
    return Placement("both ways", p, copies, copies=2)


def _routes(placement: Placement) -> list[tuple[int, ...]]:
    """Return the stages of the copy that begins on the first rank, then those of the other."""
    return sorted(placement.ways, key=lambda way: placement.rank_of[way[0]])


def check_one_copy(name: str, copies: int) -> None:
    """Refuse a schedule of several copies of the model where it is to be run.

    Raises:
        UsageError: there are several.
    """
    if copies > 1:
        raise UsageError(
            f"{name} needs two copies of every stage, which only the scripts of Megatron-LM train, "
            "and 'megatron-zb show' draws: give v-zb, which has one copy of the weights"
        )


@dataclass(frozen=True)
class BothWaysRules(UnitRules):
    """Rules of a training step in two directions: the route of a microbatch is that of its copy."""

    @classmethod
    def of(cls, placement: Placement, num_microbatches: int) -> BothWaysRules:
        """Return the rules of a placement: even microbatches go down, odd ones up."""
        routes = _routes(placement)
        columns = Units.of([routes[j % len(routes)] for j in range(num_microbatches)])
        return cls(columns, more=EXCHANGE)

    @property
    def _down(self) -> tuple[int, ...]:
        assert self.columns.route is not None
        return self.columns.route[0]

    @cached_property
    def _length(self) -> int:
        """Stages of one copy."""
        return len(self._down)

    def copy_of(self, stage: int) -> int:
        """Return the stage that has the same weights on another rank."""
        return stage + self._length if stage < self._length else stage - self._length

    def last_on(self, stage: int) -> int:
        """Return the last microbatch of a stage, behind whose W its gradient is complete."""
        return self.columns.on(stage)[-1]

    def visits(self, kind: Kind, stage: int) -> tuple[int, ...] | None:
        return (self.last_on(stage),) if kind in EXCHANGE else super().visits(kind, stage)

    def more_inputs(self, graph: TaskGraph) -> Mapping[int, tuple[int, ...]]:
        """Return the additional input of each Y: the X of the copy of its stage."""
        if graph.forward_only:
            return {}

        def code(kind: PassKind, stage: int) -> int:
            return graph.code_of(self.on(kind, stage), graph.placement.rank_of[stage])

        stages = range(graph.placement.num_stages)
        return {code(Y, s): (code(X, self.copy_of(s)),) for s in stages}

    def on(self, kind: PassKind, stage: int) -> Pass:
        """Return the X or Y of a stage."""
        return Pass(kind, stage, self.last_on(stage))

    def further_message(self, row: Row, unit: int) -> Message | None:
        return Message(True, self.copy_of(row.stage), unit, made_by=X)

    def unit_name(self, kind: PassKind) -> str:
        return "microbatch"

    def more_peers(self, placement: Placement) -> set[tuple[int, int]]:
        ranks = placement.rank_of
        pairs = ((rank, ranks[self.copy_of(stage)]) for stage, rank in enumerate(ranks))
        found = super().more_peers(placement) | {(min(pair), max(pair)) for pair in pairs}
        return found - {(min(pair), max(pair)) for pair in placement.peers}

    def _stage_in_words(self, stage: int) -> str:
        way = "downwards" if stage in self._down else "upwards"
        return f"stage {stage % self._length} {way}"

    def pass_in_words(self, p: Pass) -> str:
        """Describe a pass, such as ``F of stage 2 upwards, microbatch 3``."""
        words = f"{p.kind.name} of {self._stage_in_words(p.stage)}"
        return words if p.kind in (X, Y) else f"{words}, microbatch {p.microbatch}"

    def message_in_words(self, placement: Placement | None, message: Message) -> str:
        """Describe a message, such as ``the gradient for stage 1 upwards, microbatch 3``."""
        at = self._stage_in_words(message.stage)
        if message.made_by is X:
            return f"the weight gradient of the copy of {at}"
        kind = "the gradient" if message.is_gradient else "the activation"
        return f"{kind} for {at}, microbatch {message.microbatch}"

    def unit_costs(self, schedule: Sizes, costs: Priced) -> Priced:
        return of_both_copies(costs) if isinstance(costs, Costs) else costs

    def least_seconds(self, placement: Placement, costs: StageCosts) -> float:
        """Return the least seconds of any rank: its work between the first and the last message.

        1. Until the first F of a rank, a microbatch is on its way there, in either direction.
        2. After the last B, one is on its way back. Meanwhile the rank may run W and Y: all of
           them, at most.
        """
        units = [costs.of(j) for j in range(len(self.columns))]
        rows = {id(row): shortest(row) for row in units}

        def ahead(held: Sequence[int]) -> Iterator[range]:
            """Yield the stages of each direction that stand before those of a rank."""
            for way in placement.ways:
                yield range(way[0], min(stage for stage in held if stage in way))

        found = 0.0
        for held in placement.stages_of:
            passes = [rows[id(units[j])].seconds for s in held for j in self.columns.on(s)]
            stages = [s for s in held for _ in self.columns.on(s)]
            by_kind = {
                kind: sum(of[kind][s] for of, s in zip(passes, stages, strict=True))
                for kind in (_F, _B, _W)
            }
            later = by_kind[_W] + sum(costs.seconds[Y][s] for s in held)
            there = min(
                sum(row.seconds[_F][s] + row.latency[_F][s] for s in before)
                for row in rows.values()
                for before in ahead(held)
            )
            back = min(
                sum(row.seconds[_B][s] + row.latency[_B][s + 1] for s in before)
                for row in rows.values()
                for before in ahead(held)
            )
            found = max(found, there + by_kind[_F] + by_kind[_B] + max(back, later))
        return found


@dataclass(frozen=True)
class TwoDirections(Feature):
    """Costs of two copies of the model.

    Args:
        exchange: seconds in which a rank adds the gradients of the copies of all its stages.
    """

    name: ClassVar[str] = "two directions"

    exchange: float = 0.0

    def completed(self, costs: Costs) -> TwoDirections:
        check_table("exchange", (self.exchange,), 1)
        return self

    def placed(self, costs: Costs, placement: Placement, table: StageCosts) -> StageCosts:
        """Return the costs of the stages of both copies; those of one copy stay as they are."""
        if placement.copies == 1:
            return table
        alone = replace(
            costs.without(lambda feature: isinstance(feature, TwoDirections)), microbatches=()
        )
        each = [
            alone.for_placement(
                replace(placement, rank_of=tuple(placement.rank_of[s] for s in way), copies=1)
            )
            for way in placement.ways
        ]
        none = (0.0,) * placement.num_stages
        of_stage = self.exchange / placement.chunks
        joined = replace(
            table,
            seconds=_joined([of.seconds for of in each]),
            latency={**_joined([of.latency for of in each]), X: none},
            memory=_joined([of.memory for of in each]),
        )
        return joined.with_seconds({X: none, Y: (of_stage,) * placement.num_stages})

    def added_to(self, schedule: Schedule, costs: Costs) -> Schedule:
        """Return a schedule with the exchange of gradients, in the faster of two orders.

        1. Behind the last W of each stage stands its X.
        2. Y stands where it can run at the earliest, before the next pass of its rank that has not
           begun; or behind all passes, so that it delays none that others wait for.
        """
        timeline = simulate(schedule, costs)
        orders = [_with_sums(schedule, timeline, early=early) for early in (True, False)]
        return min(orders, key=lambda order: simulate(order, costs).makespan)


_Name = TypeVar("_Name", PassKind, str)


def _joined(tables: Sequence[Mapping[_Name, Table]]) -> dict[_Name, Table]:
    """Return tables of the stages of all copies from those of each."""
    return {name: tuple(x for of in tables for x in of[name]) for name in tables[0]}


def of_both_copies(costs: Costs) -> Costs:
    """Return costs that have those of two directions, if they have not."""
    if costs.feature(TwoDirections) is not None:
        return costs
    rows = {id(row): of_both_copies(row) for row in costs.microbatches}
    return replace(
        costs,
        features=(*costs.features, TwoDirections()),
        microbatches=tuple(rows[id(row)] for row in costs.microbatches),
    )


def _with_sums(schedule: Schedule, timeline: Timeline, *, early: bool) -> Schedule:
    """Return a schedule with X behind the last W of each stage, and Y early or at the end."""
    rules = schedule.rules
    assert isinstance(rules, BothWaysRules)
    complete = dict(_complete(timeline, rules))
    ranks = []
    for passes, starts in zip(schedule.ranks, timeline.start, strict=True):
        stages = {p.stage for p in passes}
        due = sorted((max(complete[s], complete[rules.copy_of(s)]), s) for s in stages)
        found: list[Pass] = []
        for p, start in zip(passes, starts, strict=True):
            while early and due and due[0][0] <= start and rules.on(X, due[0][1]) in found:
                found.append(rules.on(Y, due.pop(0)[1]))
            found.append(p)
            if _completes(rules, p):
                found.append(rules.on(X, p.stage))
        ranks.append((*found, *(rules.on(Y, stage) for _, stage in due)))
    return replace(schedule, ranks=tuple(ranks))


def _completes(rules: BothWaysRules, p: Pass) -> bool:
    """Return whether the gradient of a stage is complete behind a pass."""
    return p.kind in (_W, _BW) and p.microbatch == rules.last_on(p.stage)


def _complete(timeline: Timeline, rules: BothWaysRules) -> Iterator[tuple[int, float]]:
    """Yield when the gradient of each stage is complete."""
    for passes, ends in zip(timeline.schedule.ranks, timeline.end, strict=True):
        yield from (
            (p.stage, end) for p, end in zip(passes, ends, strict=True) if _completes(rules, p)
        )


# --- requests and tables


def directed(request: Request, chunks: int) -> Request:
    """Return a request for microbatches that go both ways.

    Raises:
        UsageError: the ranks, the microbatches, or iterations in a row do not allow it.
    """
    placement = both_ways(request.pipeline_size, chunks)
    if request.num_microbatches < 2:
        raise UsageError(
            "two directions have a microbatch each at least: give 2 or more microbatches"
        )
    if request.back_to_back:
        raise UsageError(
            "two directions: their order is for one iteration at a time: leave back_to_back out"
        )
    rules = BothWaysRules.of(placement, request.num_microbatches)
    return replace(request, costs=of_both_copies(request.costs), rules=rules)


def of_table(schedule: Schedule) -> Schedule:
    """Return the schedule of two directions, not validated, with the passes of a table.

    Raises:
        UsageError: the stages of the table do not lie as two copies of a model.
    """
    found = schedule.placement
    chunks = found.chunks // 2
    placement = both_ways(found.pipeline_size, chunks) if chunks in (1, 2) else None
    if placement is None or placement.rank_of != found.rank_of:
        raise UsageError(
            f"{schedule.name}: X and Y are of two directions, but stages are on rows "
            f"{[rank + 1 for rank in found.rank_of]}: give a table of chimera or bitpipe"
        )
    rules = BothWaysRules.of(placement, schedule.num_microbatches)
    return replace(schedule, placement=placement, rules=rules)


# --- orders


def chimera(request: Request) -> Schedule:
    """Build Chimera: p stages each way (arXiv 2107.06925)."""
    return _searched("chimera", 1, request)


def bitpipe(request: Request) -> Schedule:
    """Build BitPipe: a V of 2p stages each way (arXiv 2410.19367)."""
    return _searched("bitpipe", 2, request)


def _searched(name: str, chunks: int, request: Request) -> Schedule:
    """Return what a search finds from the known order, with whole backwards.

    A rank holds p microbatches at most. Where microbatches have different lengths, it may hold one
    of each direction in any case.
    """
    p = request.pipeline_size
    placement = both_ways(p, chunks)
    search = PlacementSearch(name, placement, request, p, split=False)
    each = replace(request, limit=Limit()).limits(placement, 1.0)
    needed = map(search.problem().smallest_limit, range(p))
    peak = max(float(p), *map(truediv, needed, each))
    limits = request.limits(placement, peak)
    orders = _orders(name, placement, request)
    timelines = (simulate(order, request.costs) for order in orders)
    known = next((it.schedule for it in timelines if keeps(it.peak_memory, limits)), None)
    return replace(search, peak_microbatches=peak, known=[known] if known else []).run()


def _orders(name: str, placement: Placement, request: Request) -> Iterator[Schedule]:
    """Yield orders to start from: the one that the ranks have room for, then smaller ones.

    1. In a group of p microbatches, half go each way. The groups follow one another so closely that
       no rank waits between two of them.
    2. Groups of fewer microbatches follow one another without overlap: so a rank holds no more than
       those of one group. A group of two fits wherever any order does.
    """
    p, length = placement.pipeline_size, len(placement.ways[0])
    groups = [(p, length), *((size, 2 * length + size) for size in range(p, 0, -2))]
    for size, period in groups:
        ranks = _merged(placement, request.num_microbatches, size, period)
        yield request.ordered(name, placement, ranks)


def _merged(
    placement: Placement, num_microbatches: int, group: int, period: int
) -> list[list[Pass]]:
    """Return the order of two pipelines that run into each other, merged by time.

    Time counts passes, as if F took as long as a backward. With S stages in each copy:

    1. The i-th microbatch of a direction and group enters its first stage at ``2 * i``. It runs F
       of stage s at s, and its backward at ``2 * S - 1 - s`` after that: down the stages and
       straight back, as in 1F1B.
    2. The next group enters a ``period`` later.
    3. Every rank runs its passes in the order of these times.

    With an even number of ranks and no more microbatches in a group, no two passes of a rank meet:
    the other direction arrives at odd times where this one has even ones. And as the last F of a
    way leaves a rank, the first pass that comes back arrives.
    """
    timed: list[list[tuple[int, Pass]]] = [[] for _ in range(placement.pipeline_size)]
    for j in range(num_microbatches):
        way = _routes(placement)[j % 2]
        enters = j // group * period + j % group // 2 * 2
        for s, stage in enumerate(way):
            forward, backward = enters + s, enters + 2 * len(way) - 1 - s
            of_rank = timed[placement.rank_of[stage]]
            of_rank += [(forward, Pass(_F, stage, j)), (backward, Pass(_BW, stage, j))]
    return [[p for _, p in sorted(passes, key=_time_and_turn)] for passes in timed]


def _time_and_turn(timed: tuple[int, Pass]) -> tuple[int, int, int]:
    time, p = timed
    return time, p.microbatch, p.stage
