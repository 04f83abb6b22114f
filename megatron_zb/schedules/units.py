"""Units of a training step that differ in their route, their owner, or the update they wait for.

A *unit* is what a pass works on: a microbatch, if nothing else is said. The table of this module
has a row for each unit, in the order in which F takes them, and these columns:

- *route*: the stages that the unit visits, in the order of F. All units visit all stages in a usual
  step. Two directions are two routes over two copies of the stages.
- *owner*: the optimizer step that the unit counts for, such as that of one of several adapters. An
  update U of a stage follows the last W of its owner there.
- *version*: the owner whose update a stage must have seen before it runs F of the unit, -1 for
  none. So one table can have several steps of an optimizer, with no flush between them.

Whoever walks the task graph reads its edges, and knows none of these columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_zb.errors import UsageError
from megatron_zb.schedules.kinds import At, Kind, Need
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.rules import TrainingRules
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.task_graph import TaskGraph

_F, _W, _U = PassKind.F, PassKind.W, PassKind.U

UPDATE = Kind(_U, needs=(Need(_W, At.SAME),))
"""The update of a stage by one owner: its unit is the first one of the owner on that stage."""


@dataclass(frozen=True)
class Units:
    """Columns of the units of a step, each with a row for every unit in the order of F.

    Raises:
        UsageError: the columns have different lengths, a route is empty or visits a stage twice, or
            a version is an owner that has no units before.
    """

    route: tuple[tuple[int, ...], ...]
    owner: tuple[int, ...]
    version: tuple[int, ...]

    @classmethod
    def of(
        cls,
        route: Sequence[Sequence[int]],
        owner: Sequence[int] | None = None,
        version: Sequence[int] | None = None,
    ) -> Units:
        """Build the table; without owners, all units count for one step."""
        n = len(route)
        return cls(
            tuple(map(tuple, route)),
            (0,) * n if owner is None else tuple(owner),
            (-1,) * n if version is None else tuple(version),
        )

    def __post_init__(self) -> None:
        """Check the columns."""
        n = len(self.route)
        if not n or {len(self.owner), len(self.version)} != {n}:
            raise UsageError(
                f"units: there are {n} routes, {len(self.owner)} owners and {len(self.version)} "
                "versions: give one of each for every unit"
            )
        for unit, (route, version) in enumerate(zip(self.route, self.version, strict=True)):
            if not route or len(set(route)) < len(route) or min(route) < 0:
                raise UsageError(
                    f"units: the route of unit {unit} is {list(route)}: name each stage that it "
                    "visits once, in the order of F"
                )
            if version >= 0 and version not in self.owner[:unit]:
                raise UsageError(
                    f"units: unit {unit} waits for an update of owner {version}, which has no "
                    "units before it"
                )

    def __len__(self) -> int:
        return len(self.route)

    @cached_property
    def visits(self) -> dict[int, tuple[int, ...]]:
        """Units of every stage, in the order of F."""
        found: dict[int, list[int]] = {}
        for unit, route in enumerate(self.route):
            for stage in route:
                found.setdefault(stage, []).append(unit)
        return {stage: tuple(units) for stage, units in found.items()}

    def of_owner(self, stage: int) -> dict[int, tuple[int, ...]]:
        """Return the units of every owner on a stage; the first one stands for its update."""
        found: dict[int, list[int]] = {}
        for unit in self.visits.get(stage, ()):
            found.setdefault(self.owner[unit], []).append(unit)
        return {owner: tuple(units) for owner, units in found.items()}


@dataclass(frozen=True)
class UnitRules(TrainingRules):
    """Rules of a training step on units with columns; ``has_updates``, every stage has U."""

    columns: Units
    has_updates: bool = False

    @cached_property
    def by_kind(self) -> Mapping[PassKind, Kind]:
        """Entries of the table, with U where stages have updates."""
        kinds = {it.kind: it for it in (*self.table, *self.more)}
        return {**kinds, _U: UPDATE} if self.has_updates else kinds

    @property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        return self.columns.route

    def visits(self, kind: Kind, stage: int) -> tuple[int, ...]:
        if kind.kind is not _U:
            return self.columns.visits.get(stage, ())
        return tuple(units[0] for units in self.columns.of_owner(stage).values())

    def more_inputs(self, graph: TaskGraph) -> Mapping[int, tuple[int, ...]]:
        """Return what an update waits for beside its own W, and which F wait for an update.

        U waits for the last W of its owner on the stage, since W run in turn.
        """
        if not self.has_updates or graph.forward_only:
            return {}
        stages = enumerate(graph.placement.rank_of)
        return {k: v for stage, rank in stages for k, v in self._updates(graph, stage, rank)}

    def _updates(
        self, graph: TaskGraph, stage: int, rank: int
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        def code(kind: PassKind, unit: int) -> int:
            return graph.code_of(Pass(kind, stage, unit), rank)

        yield from ((code(_U, unit), (code(_W, last),)) for unit, last in self.updates_on(stage))
        yield from ((code(_F, unit), (code(_U, by),)) for unit, by in self.waits_on(stage))

    def updates_on(self, stage: int) -> Iterator[tuple[int, int]]:
        if self.has_updates:
            for units in self.columns.of_owner(stage).values():
                yield units[0], units[-1]

    def waits_on(self, stage: int) -> Iterator[tuple[int, int]]:
        of_owner = self.columns.of_owner(stage) if self.has_updates else {}
        for unit in self.columns.visits.get(stage, ()):
            awaited = of_owner.get(self.columns.version[unit])
            if awaited is not None:
                yield unit, awaited[0]

    def more_peers(self, placement: Placement) -> set[tuple[int, int]]:
        usual = {tuple(sorted(pair)) for pair in placement.peers}
        return TaskGraph.of(self, placement, len(self.columns)).pairs_of_ranks() - usual

    def unit_name(self, kind: PassKind) -> str:
        return "unit"

    def not_yet(self, p: Pass, needed: Pass) -> str:
        if needed.kind is _U:
            return f"the update of owner {self.columns.owner[needed.microbatch]} has not run yet"
        if p.kind is _U:
            return f"not every W of owner {self.columns.owner[p.microbatch]} has run yet"
        return super().not_yet(p, needed)


def with_columns(schedule: Schedule, columns: Units) -> Schedule:
    """Return a schedule, not validated, under the rules of the columns of its units.

    As ``change`` of :func:`interchange.from_csv` it gives the passes of a table their columns,
    which a table has no place for.

    Raises:
        UsageError: the schedule has units without columns.
    """
    if schedule.num_microbatches > len(columns):
        raise UsageError(
            f"{schedule.name}: {schedule.num_microbatches} units are listed, and {len(columns)} "
            "have columns: give a row of the table to each"
        )
    has_updates = any(p.kind is _U for rank in schedule.ranks for p in rank)
    rules = UnitRules(columns, has_updates)
    return replace(schedule, num_microbatches=len(columns), rules=rules)
