"""Several adapters in one pipeline: each trains as in a separate run, in the bubbles of others.

An *adapter* is anything with an optimizer step of its own, such as a LoRA adapter on a frozen base
that all of them share, or one of several small models. A step of an adapter is a number of
microbatches, and then its update on every stage. The next step of the same adapter begins on a
stage when that stage has its update; in the meantime the stage works for others. So with
``p - 1`` microbatches of others between two steps of an adapter the pipeline is never drained.

One step of each adapter, and then a flush, is called a *window*; several steps are a *stream*.

Example::

    adapters = Adapters.equal(4, microbatches=8, steps=4)
    build("1f1b", pipeline_size=8, adapters=adapters, costs=costs)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from megatron_zb.errors import UsageError
from megatron_zb.schedules.bounds import shortest
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.rules import OwnerStep, Sizes
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.stage_costs import Priced, StageCosts
from megatron_zb.schedules.units import UnitRules, Units, Updates, with_columns

_F, _B, _W, _U = PassKind.F, PassKind.B, PassKind.W, PassKind.U


@dataclass(frozen=True)
class Adapter:
    """One of several trainings that share a pipeline.

    Args:
        name: for errors and logs.
        microbatches: of a step.
        steps: of its optimizer.
        lengths: of the microbatches of a step, relative to those of the costs; all 1 if left out.
    """

    name: str
    microbatches: int
    steps: int = 1
    lengths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            UsageError: a number is below 1, or there is not a positive length for each microbatch.
        """
        for name, number in (("microbatches", self.microbatches), ("steps", self.steps)):
            if number < 1:
                raise UsageError(f"adapter {self.name}: {number} {name}: give 1 or more")
        if self.lengths and len(self.lengths) != self.microbatches:
            raise UsageError(
                f"adapter {self.name}: {len(self.lengths)} lengths for {self.microbatches} "
                "microbatches: give one for each"
            )
        if not all(0 < length < math.inf for length in self.lengths):
            raise UsageError(
                f"adapter {self.name}: lengths are {list(self.lengths)}: give positive numbers"
            )


class Turn(NamedTuple):
    """One step of an adapter in the order in which the pipeline takes them.

    Args:
        adapter: its number.
        step: of its optimizer.
        first: the unit that its first microbatch is.
    """

    adapter: int
    step: int
    first: int


@dataclass(frozen=True)
class Adapters:
    """Adapters that share a pipeline.

    Args:
        each: the adapters, with different names.
        update: seconds of an update on a rank, all of its stages together.
    """

    each: tuple[Adapter, ...]
    update: float = 0.0

    def __post_init__(self) -> None:
        """Check the names and the seconds.

        Raises:
            UsageError: there is no adapter, two have one name, or the seconds are no such number.
        """
        names = [it.name for it in self.each]
        if not names:
            raise UsageError("adapters: none is given: give 1 or more")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(f"adapters: two are called {twice}: give each its name")
        if not 0 <= self.update < math.inf:
            raise UsageError(f"adapters: an update takes {self.update} s: give a number of seconds")

    @classmethod
    def equal(
        cls, count: int, *, microbatches: int, steps: int = 1, update: float = 0.0
    ) -> Adapters:
        """Return a number of equal adapters, called 0, 1, and so on."""
        numbered = (Adapter(str(i), microbatches, steps) for i in range(count))
        return cls(tuple(numbered), update)

    @property
    def num_units(self) -> int:
        """Microbatches of all steps of all adapters."""
        return sum(it.microbatches * it.steps for it in self.each)

    def turns(self, pipeline_size: int) -> tuple[Turn, ...]:
        """Return the steps of all adapters in the order in which the pipeline takes them.

        1. Of the adapters with ``pipeline_size - 1`` units or more of others since their last step,
           the next is the one whose steps that are left take longest one after another.
        2. Where there is none, it is the one whose last step is the longest ago.
        """
        ramp, unit = pipeline_size - 1, 0
        left = [it.steps for it in self.each]
        ended = [-math.inf] * len(left)
        found: list[Turn] = []

        def seconds(i: int) -> tuple[float, float]:
            return left[i] * (self.each[i].microbatches + ramp), -ended[i]

        while any(left):
            waiting = [i for i, steps in enumerate(left) if steps]
            free = [i for i in waiting if unit - ended[i] >= ramp]
            i = max(free, key=seconds) if free else min(waiting, key=ended.__getitem__)
            found.append(Turn(i, self.each[i].steps - left[i], unit))
            unit += self.each[i].microbatches
            left[i], ended[i] = left[i] - 1, unit
        return tuple(found)

    def lengths(self, turns: Sequence[Turn]) -> list[float]:
        """Return the length of every unit, relative to the microbatches of the costs."""
        adapters = (self.each[turn.adapter] for turn in turns)
        return [x for it in adapters for x in it.lengths or (1.0,) * it.microbatches]

    def columns(self, turns: Sequence[Turn]) -> Units:
        """Return the table of the units; the owner of a unit is the number of its turn."""
        number = {(turn.adapter, turn.step): n for n, turn in enumerate(turns)}
        owner: list[int] = []
        version: list[int] = []
        for n, (adapter, step, _) in enumerate(turns):
            units = self.each[adapter].microbatches
            owner += [n] * units
            version += [number.get((adapter, step - 1), -1)] * units
        return Units(None, tuple(owner), tuple(version))


@dataclass(frozen=True)
class AdapterRules(UnitRules):
    """Rules of a training of several adapters: ``num_microbatches`` of a schedule counts units.

    ``order`` are the steps of the adapters as the pipeline takes them: the owner of a unit is the
    number of its step there.
    """

    adapters: Adapters = field(kw_only=True)
    order: tuple[Turn, ...] = field(kw_only=True)

    @classmethod
    def of(cls, adapters: Adapters, pipeline_size: int) -> AdapterRules:
        """Return the rules of adapters in the order that suits a pipeline."""
        order = adapters.turns(pipeline_size)
        columns = adapters.columns(order)
        return cls(columns, has_updates=True, adapters=adapters, order=order)

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(adapter.name for adapter in self.adapters.each)

    def owner_of(self, unit: int) -> int:
        return self.order[self.columns.owner[unit]].adapter

    @cached_property
    def spans(self) -> tuple[OwnerStep, ...]:
        names = self.owners
        return tuple(
            OwnerStep(first, adapter, f"step {step} of adapter {names[adapter]}")
            for adapter, step, first in self.order
        )

    def _step_in_words(self, unit: int) -> str:
        return self.spans[self.columns.owner[unit]].words

    def at(self, unit: int) -> tuple[Adapter, int, int]:
        """Return the adapter, the step and the microbatch of the step that a unit is."""
        adapter, step, first = self.order[self.columns.owner[unit]]
        return self.adapters.each[adapter], step, unit - first

    def pass_in_words(self, p: Pass) -> str:
        """Describe a pass, such as ``F of stage 1, step 0 of adapter a, microbatch 3``."""
        words = f"{p.kind.name} of stage {p.stage}, {self._step_in_words(p.microbatch)}"
        return words if p.kind is _U else f"{words}, microbatch {self.at(p.microbatch)[2]}"

    def not_yet(self, p: Pass, needed: Pass) -> str:
        if needed.kind is _U:
            return f"the update of {self._step_in_words(needed.microbatch)} has not run yet"
        return super().not_yet(p, needed)

    def sizes_in_words(self, schedule: Sizes) -> str:
        return f"{len(self.adapters.each)} adapters, {schedule.num_microbatches} microbatches"

    def unit_costs(self, schedule: Sizes, costs: Priced) -> Priced:
        if isinstance(costs, Costs) and costs.feature(Updates) is None:
            return self.costs(costs)
        return costs

    def costs(self, costs: Costs) -> Costs:
        """Return the costs of all units, with those of updates.

        Raises:
            UsageError: the microbatches of the costs have lengths already.
        """
        if costs.microbatches:
            raise UsageError(
                "adapters: the microbatches of the costs have lengths: give them with each adapter"
            )
        found = costs.having(Updates(self.adapters.update))
        lengths = self.adapters.lengths(self.order)
        return found if set(lengths) == {1.0} else found.of_lengths(lengths)

    def least_seconds(self, placement: Placement, costs: StageCosts) -> float:
        return _Chains(self, placement, costs).bound()


def adapter_request(request: Request, adapters: Adapters) -> Request:
    """Return the request for all steps of some adapters in place of one for equal microbatches.

    Raises:
        UsageError: the microbatches of the costs have lengths already.
    """
    rules = AdapterRules.of(adapters, request.pipeline_size)
    costs = rules.costs(request.costs)
    return replace(request, num_microbatches=adapters.num_units, costs=costs, rules=rules)


def of_adapters(schedule: Schedule, adapters: Adapters) -> Schedule:
    """Return the schedule of adapters, not validated, whose table has the passes of another one.

    Raises:
        UsageError: it has other numbers of microbatches.
    """
    rules = AdapterRules.of(adapters, schedule.placement.pipeline_size)
    return replace(with_columns(schedule, rules.columns), rules=rules)


# --- the bound


class _Chains:
    """Least seconds of the steps of adapters on a placement, with no limit of memory.

    Two things bound a training beside what bounds any: between the first F and the update of a
    step on the first stage, its microbatches have passed through every rank and back; and when the
    first step of the last adapter ends on a rank, all adapters have a step behind them there.
    """

    def __init__(self, rules: AdapterRules, placement: Placement, costs: StageCosts) -> None:
        self._rules, self._placement = rules, placement
        rows = [shortest(costs.of(unit)) for unit in range(len(rules.columns))]
        self._rows, self._update = rows, costs.seconds[_U][0]
        self._there = [self._least(_F, s) for s in range(placement.num_stages)]
        self._back = [self._least(_B, s) for s in range(placement.num_stages)]

    def bound(self) -> float:
        """Return the larger of two bounds.

        1. The steps of one adapter, one after another.
        2. On every rank, the work of the first steps of all adapters; after it, the other steps of
           the adapter that ends its first one last there, whichever that is.
        """
        first = {adapter: n for n, (adapter, step, _) in enumerate(self._rules.order) if not step}
        seconds = [self._step(n) for n in range(len(self._rules.order))]
        later = dict.fromkeys(first, 0.0)
        for n, (adapter, step, _) in enumerate(self._rules.order):
            later[adapter] += seconds[n] if step else 0.0
        alone = max(seconds[n] + later[adapter] for adapter, n in first.items())
        ranks = range(self._placement.pipeline_size)
        together = max(self._through(rank, list(first.values())) for rank in ranks)
        return max(alone, together + min(later.values()))

    def _step(self, n: int) -> float:
        """Return the least seconds of a step from its first F to its update on the first stage."""
        ranks = range(self._placement.pipeline_size)
        path = sum(self._there) + sum(self._back)
        weight = min(self._rows[unit].seconds[_W][0] for unit in self._units(n))
        return max(path + weight + self._update, *(self._through(rank, [n]) for rank in ranks))

    def _through(self, rank: int, steps: Sequence[int]) -> float:
        """Return the least seconds until some steps have passed a rank and have an update.

        For any of its stages they are those until the first F arrives there, those of all F and B
        of this stage and later ones of the rank, and those of the way back of the last B.
        """
        units = [unit for n in steps for unit in self._units(n)]
        found = work = 0.0
        for stage in reversed(self._placement.stages_of[rank]):
            for unit in units:
                seconds = self._rows[unit].seconds
                work += seconds[_F][stage] + seconds[_B][stage]
            ways = sum(self._there[:stage]) + sum(self._back[:stage])
            found = max(found, ways + work)
        weight = min(self._rows[unit].seconds[_W][0] for unit in units)
        return found + weight + self._update

    def _units(self, n: int) -> range:
        adapter, _, first = self._rules.order[n]
        return range(first, first + self._rules.adapters.each[adapter].microbatches)

    def _least(self, kind: PassKind, stage: int) -> float:
        """Return the least seconds of a pass of a stage and of its message to or from the next."""
        there = kind is _F and stage + 1 < self._placement.num_stages
        rows = {id(row): row for row in self._rows}.values()
        return min(
            row.seconds[kind][stage]
            + (row.latency[_F][stage] if there else 0.0)
            + (row.latency[_B][stage] if kind is _B else 0.0)
            for row in rows
        )
