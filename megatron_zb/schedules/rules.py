"""Rules of a kind of work: its kinds of passes, the words of messages, and what violates them.

The table of kinds defines inputs, outputs, memory and valid orders (see :mod:`kinds`); the rules
add what a table cannot say. A schedule holds its rules, for all code that iterates over it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

from megatron_zb.schedules.bounds import Grain
from megatron_zb.schedules.kinds import TRAINING_KINDS, Due, Home, Kind
from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.stage_costs import Priced, StageCosts
from megatron_zb.schedules.task_graph import Row, TaskGraph

Moment: TypeAlias = tuple[float, ...]
"""A place in an order: compared from the first number on."""


class Sizes(Protocol):
    """Sizes and orders of a :class:`~schedule.Schedule`, as far as rules read them."""

    @property
    def placement(self) -> Placement: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def ranks(self) -> tuple[tuple[Pass, ...], ...]: ...


class OwnerStep(NamedTuple):
    """One optimizer step of a training: consecutive units that begin with ``first``.

    Args:
        first: number of the first unit.
        owner: index of the training.
        words: description of the step, such as ``step 2 of adapter french``.
    """

    first: int
    owner: int
    words: str


class Rules:
    """Rules of the passes of a kind of work."""

    table: ClassVar[tuple[Kind, ...]] = ()
    """Kinds that all work of this class has."""

    name: ClassVar[str] = "a training step"

    has_steps = False
    """Whether one schedule goes through several steps of the optimizer, one after the other."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of the passes."""
        return tuple(self.by_kind.values())

    @cached_property
    def by_kind(self) -> Mapping[PassKind, Kind]:
        """Entries of the table, or those that replace them, by kind."""
        return {it.kind: it for it in self.table}

    number_word: ClassVar[str] = "microbatch"
    """What the number of a pass in a drawing counts."""

    owner_word: ClassVar[str] = "adapter"
    """What stands before the names of :attr:`owners`, if anything."""

    @property
    def owners(self) -> tuple[str, ...]:
        """Names of the trainings that share the pipeline; none where there is one."""
        return ()

    def owner_of(self, unit: int) -> int:
        """Return the index of the training that a unit is of, among :attr:`owners`."""
        return 0

    def microbatch_of(self, unit: int) -> int:
        """Return the number of a unit in a drawing."""
        return unit

    @property
    def spans(self) -> tuple[OwnerStep, ...]:
        """Steps of the trainings that share the pipeline, in the order of their units."""
        return ()

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """Ranks that hold a shard of the vocabulary."""
        return ()

    @property
    def routes(self) -> tuple[tuple[int, ...], ...] | None:
        """Stages that each unit visits, None where all units visit all stages in turn."""
        return None

    def visits(self, kind: Kind, stage: int) -> tuple[int, ...] | None:
        """Return the units that a kind of pass has on a stage, None for all."""
        return None

    @property
    def send_slots(self) -> int:
        """The most sends of a channel that are left untaken in a program."""
        return 2

    @property
    def forward_kinds(self) -> tuple[PassKind, ...]:
        """Kinds of the passes of an evaluation."""
        return tuple(it.kind for it in self.kinds if it.due is Due.ALWAYS)

    def kind(self, kind: PassKind) -> Kind | None:
        """Return the entry of a kind, None if this work has no such passes."""
        return self.by_kind.get(kind)

    def units(self, num_microbatches: int) -> int:
        """Return the number of units that passes of a kind and stage work on."""
        return num_microbatches

    def units_of(self, kind: Kind, units: int) -> int:
        """Return the number of units of a kind, of all ``units``."""
        return units

    def whole_microbatches(self, schedule: Sizes) -> int:
        """Return the number of microbatches, whatever the passes of a schedule count."""
        return schedule.num_microbatches

    def step_microbatches(self, schedule: Sizes) -> int:
        """Return the number of microbatches of one step of a training that runs a schedule."""
        return self.whole_microbatches(schedule)

    def unit_costs(self, schedule: Sizes, costs: Priced) -> Priced:
        """Return the costs of what passes count, from those of whole microbatches."""
        return costs

    def turns(self, kind: Kind, units: Sequence[int]) -> Sequence[int]:
        """Return the units of a row that a rank has, in the order in which it runs them."""
        return units

    def backward_of(self, unit: int) -> PassKind:
        """Return the kind of a backward that is not split: a B where another unit has its W."""
        return PassKind.BW

    @property
    def units_at_once(self) -> int:
        """Units of a stage that F must have run before the first B: those of one microbatch."""
        return 1

    def unit_name(self, kind: PassKind) -> str:
        """Name the unit that a pass of a kind works on."""
        return "microbatch"

    def unit_in_words(self, kind: PassKind, unit: int) -> str:
        """Describe the unit that a pass of a kind works on."""
        return f"{self.unit_name(kind)} {unit}"

    def units_in_words(self, units: int) -> str:
        """Describe all units of a schedule."""
        return f"{units} microbatches"

    def more_inputs(self, graph: TaskGraph) -> Mapping[int, tuple[int, ...]]:
        """Return inputs of nodes that the table of kinds does not have."""
        return {}

    def further_message(self, row: Row, unit: int) -> Message | None:
        """Return the message that carries an output to nodes of :meth:`more_inputs`."""
        return None

    def more_peers(self, placement: Placement) -> set[tuple[int, int]]:
        """Return pairs of ranks that messages travel between beside those of the placement."""
        usual = {tuple(sorted(pair)) for pair in placement.peers}
        return TaskGraph.of(self, placement, 1).pairs_of_ranks() - usual

    def memory_change(self, p: Pass, costs: StageCosts, *, recomputed: bool = False) -> float:
        """Return the memory that a pass takes at its start, or frees at its end if negative.

        ``recomputed`` is whether the pass's unit has an R.
        """
        change = self.by_kind[p.kind].change(recomputed=recomputed)
        return costs.of(p.microbatch).change(change, p.stage)

    def together(self, placement: Placement, rank: int, p: Pass) -> tuple[int, ...]:
        """Return the ranks that run a pass as one, so that none of them gets past it first."""
        return (rank,)

    def step_of(self, p: Pass) -> int:
        """Return the step that a pass belongs to."""
        return 0

    def counts_as(self, p: Pass, *, recomputed: bool) -> int:
        """Return by how many activations a pass changes those that its rank holds."""
        return self.by_kind[p.kind].change_of_count(recomputed=recomputed)

    def chunks(self, placement: Placement) -> int:
        """Return the number of chunks of a rank that hold one microbatch together."""
        return placement.chunks_of_copy

    def moments(self, schedule: Sizes) -> list[list[tuple[Moment, Moment]]] | None:
        """Return the place of every pass of every rank, and of its messages, in the total order.

        None for the order of a simulation.
        """
        return None

    def not_yet(self, p: Pass, needed: Pass) -> str:
        """Describe why a pass cannot run before another one of its rank."""
        return f"its {needed.kind} has not run yet"

    def awaits_in_words(self, p: Pass) -> str:
        """Describe what a pass waits for beside the passes of its unit, if anything."""
        return ""

    def pass_in_words(self, p: Pass) -> str:
        """Describe a pass, such as ``F of stage 1, microbatch 3``."""
        kind = self.kind(p.kind)
        if kind is not None and kind.home in (Home.SHARDS, Home.LOOKUPS):
            return f"{p.kind} of its rows of the vocabulary, microbatch {p.microbatch}"
        return f"{p.kind.name} of stage {p.stage}, {self.unit_in_words(p.kind, p.microbatch)}"

    def message_in_words(self, placement: Placement | None, message: Message) -> str:
        """Describe a message, such as ``the gradient for stage 1, microbatch 3``.

        ``placement`` is None where nobody knows it yet.
        """
        kind = "the gradient" if message.is_gradient else "the activation"
        if message.made_by is not None:
            kind = f"what {message.made_by} sends"
        return f"{kind} for stage {message.stage}, microbatch {message.microbatch}"

    def awaited_in_words(self, placement: Placement | None, message: Message, sender: str) -> str:
        """Describe a message to a rank that waits for it: what comes, and from which rank."""
        return f"{self.message_in_words(placement, message)}, from {sender}"

    def sizes_in_words(self, schedule: Sizes) -> str:
        """Describe the amount of work of a schedule."""
        return f"{schedule.num_microbatches} microbatches"


@dataclass(frozen=True)
class TrainingRules(Rules):
    """Rules of a training step."""

    more: tuple[Kind, ...] = field(default=(), kw_only=True)
    """Entries of :mod:`parts`: further kinds, and those that they change."""

    table: ClassVar[tuple[Kind, ...]] = TRAINING_KINDS

    @cached_property
    def by_kind(self) -> Mapping[PassKind, Kind]:
        """Entries of the table, or those that replace them, by kind."""
        return {it.kind: it for it in (*self.table, *self.more)}

    def joins(self) -> Sequence[tuple[Pass, Pass]]:
        """Return the passes of other units that passes need: the maker and the reader of each."""
        return ()

    def updates_on(self, stage: int) -> Iterator[tuple[int, int]]:
        """Yield the units of the updates of a stage, each with the last unit that it waits for."""
        yield from ()

    def waits_on(self, stage: int) -> Iterator[tuple[int, int]]:
        """Yield the units of a stage whose F waits for an update, each with that of the update."""
        yield from ()

    def in_units(
        self, placement: Placement, ranks: Sequence[Sequence[Pass]]
    ) -> Sequence[Sequence[Pass]]:
        """Return an order of microbatches, in turns, as one of what passes work on."""
        return ranks

    def of_turns(self, ranks: Sequence[Sequence[Pass]]) -> Sequence[Sequence[Pass]]:
        """Return an order whose passes count turns as one of what passes work on, as it is."""
        return ranks

    def completed(self, ranks: Sequence[Sequence[Pass]]) -> Sequence[Sequence[Pass]]:
        """Return an order of F, B and W, or BW, with the passes that follow from it, in place."""
        return ranks

    def least_seconds(self, placement: Placement, costs: StageCosts) -> float:
        """Return a lower bound in seconds that follows from what these rules add."""
        return 0.0

    @property
    def joins_weight(self) -> bool:
        """Whether one W runs for several units."""
        return False

    def regrouped(self, costs: StageCosts) -> StageCosts:
        """Return costs of units that have changed, with what a pass of several units has of all."""
        return costs

    @property
    def grain(self) -> Grain:
        """How units make microbatches."""
        return Grain(self.units_at_once, self.joins_weight)

    def over(self, whole: TrainingRules) -> TrainingRules:
        """Return the rules of these units for work whose whole microbatches have other rules."""
        return whole


@dataclass(frozen=True)
class LastFirstRules(TrainingRules):
    """Rules of a training step whose backwards begin with the last microbatch.

    So torch's ScheduleLoopedBFS has them. Sums of gradients are formed in another order than
    1F1B's: such a schedule is drawn and timed, but a run refuses it.
    """

    def turns(self, kind: Kind, units: Sequence[int]) -> Sequence[int]:
        return units[::-1] if kind.is_gradient else units


TRAINING = TrainingRules()


# --- violations: the first one of a rank's order


class Violation(NamedTuple):
    """A rule that an order breaks: its name, why, and the position or else the stage at fault."""

    rule: str
    why: str
    position: int | None = None
    stage: int | None = None


def violation(
    graph: TaskGraph, rules: Rules, rank: int, passes: Sequence[Pass]
) -> Violation | None:
    """Return the first rule that the order of a rank breaks, None if it breaks none.

    Rules: *placement* (a pass runs on the rank of its stage), *completeness* (every stage and
    microbatch has one pass of each kind that is due; a fused backward counts as B and W), *order*
    (passes come after those of the same rank that they need), *microbatch order* (each kind takes
    units in turn, so that sums are formed in 1F1B's order), and *recomputation* and *offload*
    (a chosen pass runs once, in its place, with what it requires and without what it excludes).
    """
    return _Order(graph, rules, rank).violation(passes)


class _Order:
    """Check of one rank's order, pass by pass."""

    def __init__(self, graph: TaskGraph, rules: Rules, rank: int) -> None:
        self._graph, self._rules, self._rank = graph, rules, rank
        self._rows = graph.number[rank]
        self._turns = {
            row: rules.turns(graph.rows[row].kind, graph.rows[row].units_on(rank))
            for row in self._rows.values()
        }
        self._count = dict.fromkeys(self._rows.values(), 0)
        self._makers = {
            row: [maker for maker in graph.order_rules[row] if rank in graph.rows[maker].ranks]
            for row in self._rows.values()
        }
        self._chosen: set[Pass] = set()

    def violation(self, passes: Sequence[Pass]) -> Violation | None:
        for position, p in enumerate(passes):
            row = self._rows.get((p.kind, p.stage))
            if row is None or not 0 <= p.microbatch < self._graph.units:
                return self._misplaced(p, row, position)
            kind = self._graph.rows[row].kind
            if kind.due is Due.CHOSEN:
                why = self._why_not_chosen(kind, p)
                if why is not None:
                    return Violation(kind.rule, why, position)
                self._chosen.add(p)
                continue
            for role in self._graph.roles[row]:
                if self._expected(role) != p.microbatch:
                    return Violation("microbatch order", self._out_of_turn(role), position)
            needed = self._missing(row, p)
            if needed is not None:
                return Violation(kind.rule, self._rules.not_yet(p, needed), position)
            for role in self._graph.roles[row]:
                self._count[role] += 1
        return self._incomplete()

    def _expected(self, row: int) -> int | None:
        """Return the next unit of a row on this rank, None if there is none left."""
        turns, count = self._turns[row], self._count[row]
        return turns[count] if count < len(turns) else None

    def _has_run(self, row: int, unit: int) -> bool:
        """Return whether a unit of a row has run on this rank."""
        turns, count = self._turns[row], self._count[row]
        return count > 0 and turns.index(unit) < count

    def _misplaced(self, p: Pass, row: int | None, position: int) -> Violation:
        stages, kind = self._graph.placement.num_stages, self._rules.kind(p.kind)
        held = self._graph.placement.stages_of[self._rank]
        if kind is None:
            return Violation("completeness", f"{self._rules.name} has no {p.kind} passes", position)
        if kind.home in (Home.STAGES, Home.INNER) and p.stage not in held:
            why = f"stage {p.stage} does not live on rank {self._rank}"
            return Violation("placement", why, position)
        if row is not None:
            why = f"there are {self._rules.units_in_words(self._graph.units)}"
            return Violation("completeness", why, position)
        if kind.home is Home.INNER and p.stage == stages - 1:
            return Violation(kind.rule, "the last stage's B follows its F at once", position)
        if self._graph.forward_only and kind.due is not Due.ALWAYS:
            kinds = " and ".join(self._rules.forward_kinds)
            why = f"a forward-only schedule has no passes but {kinds}"
            return Violation("completeness", why, position)
        why = f"no {p.kind} of stage {p.stage} is due on rank {self._rank}"
        return Violation("placement", why, position)

    def _out_of_turn(self, row: int) -> str:
        kind, stage, *_ = self._graph.rows[row]
        expected = self._expected(row)
        if expected is None:
            return f"there is no {kind.kind} of stage {stage} left to run on this rank"
        unit = self._rules.unit_in_words(kind.kind, expected)
        return f"the next {kind.kind} of stage {stage} is {unit}"

    def _missing(self, row: int, p: Pass) -> Pass | None:
        """Return a pass of this rank that must have run before, None if all have."""
        units = self._graph.units
        late = [maker for maker in self._makers[row] if not self._has_run(maker, p.microbatch)]
        makers = [maker * units + p.microbatch for maker in late]
        for code in (*makers, *self._graph.more.get(row * units + p.microbatch, ())):
            maker, unit = divmod(code, units)
            if self._graph.rank_of(code) == self._rank and not self._has_run(maker, unit):
                kind, stage, *_ = self._graph.rows[maker]
                return Pass(kind.kind, stage, unit)
        return None

    def _why_not_chosen(self, kind: Kind, p: Pass) -> str | None:
        """Return why a chosen pass cannot run here, None if it can."""
        needs = [need.role for need in kind.needs]
        for role in needs:
            if not self._role_has_run(role, p) and not self._is_chosen(role):
                return f"its {role} has not run yet"
        if kind.before is not None and self._role_has_run(kind.before, p):
            return f"its {kind.before} has run already"
        if p in self._chosen:
            return "it has run before"
        for role in needs:
            if self._is_chosen(role) and p._replace(kind=role) not in self._chosen:
                return f"its {role} has not run yet"
        if any(p._replace(kind=other) in self._chosen for other in kind.excludes):
            return "a unit is either recomputed or offloaded"
        return None

    def _is_chosen(self, role: PassKind) -> bool:
        kind = self._rules.kind(role)
        return kind is not None and kind.due is Due.CHOSEN

    def _role_has_run(self, role: PassKind, p: Pass) -> bool:
        return self._has_run(self._rows[role, p.stage], p.microbatch)

    def _incomplete(self) -> Violation | None:
        for row, count in self._count.items():
            kind, stage, *_ = self._graph.rows[row]
            wanted = len(self._turns[row])
            if kind.due in (Due.ALWAYS, Due.TRAINING) and count != wanted:
                why = f"{count} of {wanted} {kind.kind} passes are listed"
                return Violation("completeness", why, stage=stage)
        for p in sorted(self._chosen):
            kind_of = self._rules.kind(p.kind)
            assert kind_of is not None
            required = kind_of.requires
            if required is not None and p._replace(kind=required) not in self._chosen:
                return Violation(
                    kind_of.rule, f"{p} has no {required} that fetches it", stage=p.stage
                )
        return None


def broken_pair(
    graph: TaskGraph, rank: int, passes: Sequence[Pass], pairs: Collection[Pass]
) -> Violation | None:
    """Return the first pair of a rank that is none, None if all are."""
    rows = graph.number[rank]
    for position, p in enumerate(passes) if pairs else ():
        if p not in pairs:
            continue
        behind = passes[position + 1] if position + 1 < len(passes) else None
        partner = graph.rows[rows[p.kind, p.stage]].kind.pairs_with
        roles = () if behind is None else graph.rows[rows[behind.kind, behind.stage]].kind.roles
        if behind is None or partner not in roles:
            return Violation("pair", "a pair is an F and the B or BW right behind it", position)
        if (p.stage, p.microbatch) == (behind.stage, behind.microbatch):
            return Violation("pair", f"{behind} needs what it makes", position)
    return None
