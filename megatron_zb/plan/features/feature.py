"""What every feature of a plan may do, and a workload cut into stages, which features change."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from megatron_zb.measured.fit import Fit, Variant
from megatron_zb.measured.profile import Profile
from megatron_zb.plan.device import DeviceConfig
from megatron_zb.plan.ends import WholeEnds
from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.rows import PlanRow, Prediction
from megatron_zb.plan.strategy import ScheduleCandidate, Strategy
from megatron_zb.plan.units import WholeUnits
from megatron_zb.plan.work import Workload
from megatron_zb.schedules import Costs, Schedule
from megatron_zb.schedules.layout import Layout
from megatron_zb.schedules.placement import Placement

_Self = TypeVar("_Self", bound="PlanFeature")


class Described(NamedTuple):
    """Model and device of a plan.

    ``flags`` has, by the name of a value, the argument of the training that it was read from.
    """

    model: ModelConfig
    device: DeviceConfig
    flags: Mapping[str, str]


@dataclass(frozen=True)
class CutWorkload:
    """A workload cut into the stages of a placement."""

    load: Workload
    placement: Placement
    layout: Layout

    @cached_property
    def layers_of(self) -> tuple[range, ...]:
        """Layers of each stage."""
        out, first = [], 0
        for count in self.layout:
            out.append(range(first, first + count))
            first += count
        return tuple(out)


class PlanRequest(Protocol):
    """A request of a plan, as features and every search read it.

    ``profile`` is that of a measured run, None where costs are counted.
    """

    @property
    def name(self) -> str: ...
    @property
    def features(self) -> tuple[PlanFeature, ...]: ...
    @property
    def frozen(self) -> bool: ...
    @property
    def post_validation(self) -> bool: ...
    @property
    def profile(self) -> Profile | None: ...


class CountedRequest(PlanRequest, Protocol):
    """A request of a plan whose costs are counted."""

    @property
    def model(self) -> ModelConfig: ...


@dataclass(frozen=True, kw_only=True)
class RankedRows:
    """The best setting of each schedule, fastest first.

    Attributes:
        ranked: the rows of a plan.
        replaced: for each row with a feature that took the place of another, that other one.
        best_with: the best row with each kind of feature, in the table or not.
    """

    ranked: tuple[Prediction, ...]
    replaced: dict[str, Prediction] = field(default_factory=dict)
    best_with: dict[type[PlanFeature], Prediction] = field(default_factory=dict)


WORTH_A_CHANGE = 0.01  # of the tokens per second; predictions are not better than that


@dataclass
class Ranking:
    """The best row of each schedule so far by its name, or why there is none."""

    best: dict[str, Prediction] = field(default_factory=dict)
    nothing: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, Prediction] = field(default_factory=dict)

    def take_if_faster(self, name: str, row: Prediction) -> None:
        """Let a row take the place of a slower one, or of none that fits."""
        before = self.best.get(name)
        known = name in self.best or name in self.nothing
        if known and (before is None or row.tokens_per_gpu > before.tokens_per_gpu):
            self.best[name] = replace(row, candidate=name)
            self.nothing.pop(name, None)

    def replace(self, name: str, row: Prediction) -> None:
        """Let a row take the place of another, and keep that."""
        if name in self.best:
            self.replaced[name] = self.best[name]
        self.best[name] = replace(row, candidate=name)
        self.nothing.pop(name, None)


@dataclass(frozen=True)
class PlanFeature:
    """Something that a schedule may have beside F, B and W: what it does to a plan.

    A subclass stands in a file of this package, and one of it in the list of :mod:`catalog`. It
    overrides only the methods that it needs. The search, the table and the page walk the list.

    Attributes:
        choice: whether schedules have it: where that is faster (auto), all of them (on), none
            (off).
        changes_work: whether ranks run other passes than those of the workload by it.
        hides: whether a part of the work may be hidden by it.
        stands_apart: whether passes work on parts of microbatches: rows of both kinds are shown,
            and only those of whole ones are drawn.
        argument: name of the argument of a plan that has the choice.
        field: name of the field of a candidate that says whether it always has the feature.
        flag: flag of a row that has it, with its value.
        mark: word in the setting of a row that has it.
    """

    choice: str = "off"

    changes_work: ClassVar[bool] = False
    hides: ClassVar[bool] = False
    stands_apart: ClassVar[bool] = False
    argument: ClassVar[str] = ""
    field: ClassVar[str] = ""
    flag: ClassVar[str] = ""
    mark: ClassVar[str] = ""

    # --- of the command line

    def asked(self: _Self, arguments: argparse.Namespace, of: Described | None = None) -> _Self:
        """Return it as the arguments request it; a measured run has no description.

        Raises:
            UsageError: a value is wrong, or does not go with the device.
        """
        choice = getattr(arguments, self.argument) if self.argument else None
        return self if choice is None else replace(self, choice=choice)

    def check_lengths(self, arguments: argparse.Namespace) -> None:
        """Raise an error if it does not go with sequences of unequal lengths."""

    def check_training(self, args: argparse.Namespace, plans: argparse.Namespace | None) -> None:
        """Raise an error if arguments of a training do not go with it; ``plans`` are the others."""

    def read(self, given: argparse.Namespace) -> dict[str, tuple[str, str]]:
        """Return the values, with their flags, that a training gives to arguments of the plan.

        Raises:
            UsageError: a plan does not count them.
        """
        return {}

    def given_strategy(
        self, args: argparse.Namespace, strategy: Strategy, sequence: int
    ) -> Strategy | None:
        """Return the strategy of a training with the feature, None if it cannot have it."""
        return strategy

    def given(self, args: argparse.Namespace, candidate: ScheduleCandidate) -> ScheduleCandidate:
        """Return the schedule of a training, with the feature if its arguments have it."""
        return candidate

    # --- in a setting

    def check(self, job: CountedRequest) -> None:
        """Raise an error if a job requests it and cannot have it."""

    def check_loads(self, loads: Sequence[Workload]) -> None:
        """Raise an error if it is requested, and none of the settings has it."""

    def loads(self, load: Workload) -> Iterable[Workload]:
        """Yield a workload in the ways that have it."""
        return ()

    def candidates(self, found: list[ScheduleCandidate], *, named: bool) -> list[ScheduleCandidate]:
        """Return schedules with those that have it; ``named`` are those that the user names."""
        return found

    def of_these(
        self, found: Iterable[ScheduleCandidate], *, named: bool
    ) -> list[ScheduleCandidate]:
        """Return further candidates that always have the feature, made of those that can."""
        return []

    def in_variant(self, variant: Variant) -> bool:
        """Return whether a candidate always has the feature."""
        return bool(self.field) and bool(getattr(variant, self.field, False))

    def is_possible(self, load: Workload) -> bool:
        """Return whether a workload can have it."""
        return True

    def units(self, load: Workload) -> WholeUnits | None:
        """Return the units of passes, where it changes them."""
        return None

    def ends(self, load: Workload) -> WholeEnds | None:
        """Return the ends of the model, where it changes them."""
        return None

    def hidden(self, load: Workload, layer: int) -> float:
        """Return the seconds of a layer, in F and as many in B, that may be hidden."""
        return 0.0

    def costs(self, cut: CutWorkload, costs: Costs) -> Costs:
        """Return the costs of a workload with those of the feature."""
        return costs

    # --- output of a row

    def is_in(self, row: PlanRow) -> bool:
        """Return whether the schedule of a row has it."""
        return self.in_variant(row.runs)

    def flags(self, row: PlanRow) -> list[str]:
        """Return the flags for it, each with its value, if a row has it."""
        return [self.flag] if self.flag and self.is_in(row) else []

    def as_json(self, rows: RankedRows, row: Prediction) -> dict[str, Any]:
        """Return the fields of a row in JSON."""
        return {}

    def cell(self, rows: RankedRows, row: Prediction) -> str:
        """Return the cell of its column. A table has the column if any cell has a text."""
        return ""

    def strategy_flags(self, strategy: Strategy) -> list[str]:
        """Return the flags of Megatron's own for what a strategy has of it."""
        return []

    # --- of the whole plan

    def said(self, job: PlanRequest, rows: RankedRows) -> dict[str, str]:
        """Return a sentence on what it brings, by its name in JSON."""
        return {}


class VariantFeature(PlanFeature):
    """A feature that the fastest schedules are tried with once all have been looked at.

    Attributes:
        words: what the progress of the search calls it.
        own: the schedule of Megatron that has it.
        refusal: error where all schedules are to have it, and a model (name) cannot (why).
    """

    words: ClassVar[str]
    own: ClassVar[ScheduleCandidate | None] = None
    refusal: ClassVar[str] = ""

    def set_in(self, candidate: ScheduleCandidate, on: bool = True) -> ScheduleCandidate:
        """Return a schedule with the feature, or without."""
        changed: dict[str, Any] = {self.field: on}
        return replace(candidate, **changed)

    def as_json(self, rows: RankedRows, row: Prediction) -> dict[str, Any]:
        return {self.field: self.is_in(row)}

    def why_not(self, job: PlanRequest) -> str | None:
        """Return why no setting of a job can have it, None if one can."""
        return None

    def is_able(self, candidate: ScheduleCandidate) -> bool:
        """Return whether a schedule of this package is tried with it."""
        return True

    def is_used(self, schedule: Schedule | None) -> bool:
        """Return whether a schedule that was built for it has it."""
        return True

    def floor(self, reached: Sequence[float]) -> float:
        """Return the tokens per second and GPU below which a row is not worth a simulation.

        ``reached`` are those of the rows without it.
        """
        return 0.0

    def take(
        self, ranking: Ranking, found: Iterator[tuple[str, Prediction | None]], floor: float
    ) -> None:
        """Let rows with it take the place of those without.

        Args:
            ranking: the rows so far.
            found: names of schedules with their rows, None where none fits.
            floor: as from :meth:`floor`.
        """

    def costs_of_a_run(self, costs: Costs, fit: Fit) -> Costs:
        """Return costs with those of the feature by which a run builds a named schedule."""
        return costs


class FreedActivations(PlanFeature):
    """A feature by which ``auto`` frees activations of some units between F and B.

    Attributes:
        freed: name of the units in a schedule whose activations it frees.
    """

    freed: ClassVar[str]

    def share(self, row: PlanRow) -> float:
        """Return the share of the forwards of a row whose activations it frees."""
        if (schedule := row.schedule) is None:
            return 0.0
        forwards = schedule.num_microbatches * schedule.placement.num_stages
        return len(getattr(schedule, self.freed)) / forwards

    def is_in(self, row: PlanRow) -> bool:
        return self.share(row) > 0

    def as_json(self, rows: RankedRows, row: Prediction) -> dict[str, Any]:
        return {self.freed: self.share(row)}

    def done(self, row: Prediction) -> str:
        """Return what the schedule of a row does, such as "offloads 8% to the host"."""
        return ""
