"""Units of a training step that differ in their route, their owner, or the update they wait for.

A *unit* is what a pass works on: a microbatch, if nothing else is said. The table of this module
has a row for each unit, in the order in which F takes them, and these columns:

- *route*: the stages that the unit visits, in the order of F. All units visit all stages in a usual
  step, and the table has no such column. Two directions are two routes over two copies of the
  stages.
- *owner*: the optimizer step that the unit counts for, such as that of one of several adapters. An
  update U of a stage follows the last W of its owner there.
- *version*: the owner whose update a stage must have seen before it runs F of the unit, -1 for
  none. So one table can have several steps of an optimizer, with no flush between them.

Whoever walks the task graph reads its edges, and knows none of these columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_zb.errors import UsageError
from megatron_zb.schedules.bounds import Grain
from megatron_zb.schedules.costs import Costs, Feature
from megatron_zb.schedules.kinds import At, Kind, Need
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.rules import TrainingRules
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.stage_costs import StageCosts
from megatron_zb.schedules.task_graph import TaskGraph

_F, _B, _W, _BW, _U = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.U

UPDATE = Kind(_U, needs=(Need(_W, At.SAME),))
"""The update of a stage by one owner: its unit is the first one of the owner on that stage."""


@dataclass(frozen=True)
class Units:
    """Columns of the units of a step, each with a row for every unit in the order of F.

    Args:
        route: of each unit; None if all of them visit all stages in turn.
        owner: of each unit.
        version: of each unit.

    Raises:
        UsageError: the columns have different lengths, a route is empty or visits a stage twice, or
            a version is an owner that has no units before.
    """

    route: tuple[tuple[int, ...], ...] | None
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
        n = len(self)
        of_routes = n if self.route is None else len(self.route)
        if not n or {of_routes, len(self.version)} != {n}:
            raise UsageError(
                f"units: there are {of_routes} routes, {n} owners and {len(self.version)} "
                "versions: give one of each for every unit"
            )
        for unit, route in enumerate(self.route or ()):
            if not route or len(set(route)) < len(route) or min(route) < 0:
                raise UsageError(
                    f"units: the route of unit {unit} is {list(route)}: name each stage that it "
                    "visits once, in the order of F"
                )
        owners: set[int] = set()
        for unit, (owner, version) in enumerate(zip(self.owner, self.version, strict=True)):
            if version >= 0 and version not in owners:
                raise UsageError(
                    f"units: unit {unit} waits for an update of owner {version}, which has no "
                    "units before it"
                )
            owners.add(owner)

    def __len__(self) -> int:
        return len(self.owner)

    @cached_property
    def _visits(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for unit, route in enumerate(self.route or ()):
            for stage in route:
                found.setdefault(stage, []).append(unit)
        return {stage: tuple(units) for stage, units in found.items()}

    def on(self, stage: int) -> Sequence[int]:
        """Return the units that visit a stage, in the order of F."""
        return range(len(self)) if self.route is None else self._visits.get(stage, ())

    @cached_property
    def _of_all(self) -> dict[int, tuple[int, ...]]:
        return self._by_owner(range(len(self)))

    def of_owner(self, stage: int) -> dict[int, tuple[int, ...]]:
        """Return the units of every owner on a stage; the first one stands for its update."""
        return self._of_all if self.route is None else self._by_owner(self.on(stage))

    def _by_owner(self, units: Iterable[int]) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for unit in units:
            found.setdefault(self.owner[unit], []).append(unit)
        return {owner: tuple(units) for owner, units in found.items()}


@dataclass(frozen=True)
class Updates(Feature):
    """Costs of an update.

    Args:
        seconds: of a rank, all of its stages together.
        reduction: seconds in which a rank reduces its gradients beside other passes, before the
            update. It reduces those of each of its chunks behind the last W there.
        gathering: seconds in which a rank gathers the updated weights beside other passes, before
            the first F that computes with them.
    """

    name = "updates"

    seconds: float
    reduction: float = 0.0
    gathering: float = 0.0

    def placed(self, costs: Costs, placement: Placement, table: StageCosts) -> StageCosts:
        of_stage = self.seconds / placement.chunks
        table = table.with_seconds({_U: (of_stage,) * placement.num_stages})
        lags = ((_U, self.reduction / placement.chunks), (_F, self.gathering))
        lag = {kind: (seconds,) * placement.num_stages for kind, seconds in lags}
        return replace(table, lag={**table.lag, **lag})


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
    def routes(self) -> tuple[tuple[int, ...], ...] | None:
        return self.columns.route

    @property
    def grain(self) -> Grain:
        return Grain(routes=self.columns.route)

    def visits(self, kind: Kind, stage: int) -> tuple[int, ...] | None:
        if kind.kind is not _U:
            return None if self.columns.route is None else tuple(self.columns.on(stage))
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
        for unit in self.columns.on(stage):
            awaited = of_owner.get(self.columns.version[unit])
            if awaited is not None:
                yield unit, awaited[0]

    def completed(self, ranks: Sequence[Sequence[Pass]]) -> Sequence[Sequence[Pass]]:
        """Return an order with an update behind the last W of each owner: :class:`_Completed`."""
        if not self.has_updates:
            return ranks
        stages = {p.stage for rank in ranks for p in rank}
        updates = {(s, last): u for s in stages for u, last in self.updates_on(s)}
        waits = {(s, u): update for s in stages for u, update in self.waits_on(s)}
        return [_Completed(updates, waits).of(rank) for rank in ranks]

    def more_peers(self, placement: Placement) -> set[tuple[int, int]]:
        if self.columns.route is None:
            return set()
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


class _Completed:
    """The order of a rank with updates, in which F waits for the update that it needs.

    For every pass of the given order:

    1. An F whose update has not run, if only W of that owner are left to run on the stage, lets
       these W and the update run first.
    2. A pass is held back if its F waits for an update, or another pass of its row is held back.
    3. The update of an owner runs right behind its last W, and then what it has held back.

    An update is never later than the last B of its owner, so no rank waits for ever if none did in
    the given order.

    Args:
        updates: the unit of the update behind a W, by the stage and the unit of W.
        waits: the unit of the update that an F waits for, by the stage and the unit of F.
    """

    def __init__(
        self, updates: Mapping[tuple[int, int], int], waits: Mapping[tuple[int, int], int]
    ) -> None:
        self._updates, self._waits = updates, waits
        self._last = {(stage, unit): last for (stage, last), unit in updates.items()}
        self._found: list[Pass] = []
        self._has_run: set[Pass] = set()
        self._held_back: list[Pass] = []
        self._weights: dict[int, list[Pass]] = {}

    def of(self, rank: Sequence[Pass]) -> list[Pass]:
        """Return the completed order."""
        for p in reversed(rank):
            if p.kind is _W:
                self._weights.setdefault(p.stage, []).append(p)
        for p in rank:
            if p not in self._has_run:
                self._run_or_hold_back(p)
        assert not self._held_back, "every update follows from the W of units before"
        return self._found

    def _run_or_hold_back(self, p: Pass) -> None:
        if not self._can_run(p):
            self._held_back.append(p)
        elif self._run(p):
            self._go_on()

    def _go_on(self) -> None:
        """Run what was held back and can run now."""
        waiting, self._held_back = self._held_back, []
        for p in waiting:
            if p not in self._has_run:
                self._run_or_hold_back(p)

    def _run(self, p: Pass) -> bool:
        """Run a pass, and return whether others may have waited for it."""
        self._found.append(p)
        self._has_run.add(p)
        done = p.kind in (_W, _BW)
        if done and (p.stage, p.microbatch) in self._updates:
            update = Pass(_U, p.stage, self._updates[p.stage, p.microbatch])
            self._found.append(update)
            self._has_run.add(update)
            return True
        return p.kind is _B and bool(self._held_back)

    def _can_run(self, p: Pass) -> bool:
        if any(it.kind is p.kind and it.stage == p.stage for it in self._held_back):
            return False
        if p.kind is not _F:
            return self._made(p) not in self._held_back
        awaited = self._waits.get((p.stage, p.microbatch))
        if awaited is None or Pass(_U, p.stage, awaited) in self._has_run:
            return True
        last = self._last[p.stage, awaited]
        if not {Pass(_B, p.stage, last), Pass(_BW, p.stage, last)} & self._has_run:
            return False
        for weight in reversed(self._weights.get(p.stage, [])):
            if weight not in self._has_run and weight.microbatch <= last:
                self._run(weight)
        return True

    @staticmethod
    def _made(p: Pass) -> Pass:
        """Return the pass of the same unit that a backward or W needs."""
        return p._replace(kind=_B if p.kind is _W else _F)


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
