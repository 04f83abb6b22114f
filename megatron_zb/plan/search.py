"""Search for the best setting of every schedule: formulas order the settings, simulation decides.

:class:`PlanSearch` has the steps of every search, whether costs are counted or measured. Here, for
counted costs, each schedule, Megatron's own included, gets its best division of the GPUs,
microbatch, recomputation, number of chunks and layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import filterfalse
from typing import TypeVar

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.parsing import gib
from megatron_zb.plan.features.catalog import features_of, stands_apart, units_of, with_features
from megatron_zb.plan.features.feature import (
    WORTH_A_CHANGE,
    PlanFeature,
    PlanRequest,
    RankedRows,
    Ranking,
    VariantFeature,
)
from megatron_zb.plan.prediction import Ordered, ordered
from megatron_zb.plan.rows import Prediction, fastest
from megatron_zb.plan.settings import SLACK, CountedSetting, CountedSettings, PlanJob
from megatron_zb.plan.stages import StageWorkload
from megatron_zb.plan.strategy import (
    NO_PIPELINE,
    ScheduleCandidate,
    Strategy,
    candidates_of,
)
from megatron_zb.plan.work import Workload
from megatron_zb.plan.workers import Each
from megatron_zb.schedules import Costs, Schedule
from megatron_zb.schedules.placement import Placement

# Most schedules to try with a feature: these searches take seconds.
MOST_VARIANTS = 3
# Settings of each of them to simulate.
_VARIANT_TRIES = 2
# Most settings of parts of microbatches to build where none fits: each takes seconds.
_BUILT = 12
# Skip settings whose rate by formula is below this share of the best simulated one.
_HOPELESS = 0.97
# Most settings in which auto searches, and the least lead that a setting must allow.
_SEARCHES = 3
_WORTH_A_SEARCH = 1.001
# Most memory limits to search an order within.
_LIMITS = 3
# Most settings to search in which activations may be freed, and most forwards of one.
_MORE_SEARCHES = 2
_MOST_FORWARDS = 1100

Watch = Callable[[str, int, int], None]
_Step = tuple[str, Callable[[], None]]
_Value = TypeVar("_Value")


def silent(text: str, done: int, of: int) -> None:
    """Show no progress."""


class PlanSearch(ABC):
    """Steps of a search: every schedule, then the most promising ones with each feature.

    ``auto`` is the best of all.

    Attributes:
        own: schedules that are looked at beside the chosen ones.
        request: the request of the plan.
        watch: called with the current schedule, the number of schedules done, and the total.
    """

    AUTO_IS_LAST = False

    own: Sequence[ScheduleCandidate] = ()

    def __init__(self, job: PlanRequest, watch: Watch) -> None:
        self.request, self.watch = job, watch
        self.variants = [it for it in job.features if isinstance(it, VariantFeature)]

    def run(self, chosen: Sequence[ScheduleCandidate]) -> None:
        """Look at the schedules that are chosen, and at those of which ``auto`` takes the best.

        Raises:
            UsageError: all schedules are to have a feature, and none can.
        """
        everyone = [*self.own, *with_those_of_auto(chosen, self.request.features)]
        for feature in self.variants:
            if feature.choice == "on":
                if (why := feature.why_not(self.request)) is not None:
                    raise UsageError(feature.refusal.format(name=self.request.name, why=why))
                everyone = [c if c.megatron else feature.set_in(c) for c in everyone]
        named = [candidate for candidate in everyone if not candidate.takes_the_best]
        autos: list[_Step] = [
            (candidate.name, partial(self.take_the_best, candidate))
            for candidate in everyone
            if candidate.takes_the_best
        ]
        tried: list[_Step] = [
            (feature.words, partial(self.try_variants, feature, named))
            for feature in self.variants
            if self.tries(feature)
        ]
        total = len(everyone) + len(tried)
        self.watch(named[0].name, 0, total)
        for done, _ in enumerate(self.look(named), start=1):
            self.watch(everyone[min(done, len(everyone) - 1)].name, done, total)
        steps = [*tried, *autos] if self.AUTO_IS_LAST else [*autos, *tried]
        for done, (what, step) in enumerate(steps, start=len(named)):
            self.watch(what, done, total)
            step()
        self.watch("", total, total)

    def tries(self, feature: VariantFeature) -> bool:
        """Return whether schedules are tried with a feature."""
        return feature.choice == "auto" and feature.why_not(self.request) is None

    @abstractmethod
    def look(self, named: Sequence[ScheduleCandidate]) -> Iterator[ScheduleCandidate]:
        """Add the results of each schedule, without variants, and yield it."""

    @abstractmethod
    def try_variants(self, feature: VariantFeature, named: Sequence[ScheduleCandidate]) -> None:
        """Look at promising schedules with a feature."""

    @abstractmethod
    def take_the_best(self, candidate: ScheduleCandidate) -> None:
        """Add ``auto``: the best of all others, or what it finds by a search."""


def with_those_of_auto(
    chosen: Sequence[ScheduleCandidate], features: Sequence[PlanFeature]
) -> list[ScheduleCandidate]:
    """Return the chosen ones; with ``auto`` also the usual ones, of which it takes the best."""
    others = [candidate for candidate in candidates_of(None) if not candidate.megatron]
    found = list(chosen)
    for candidate in chosen:
        if candidate.takes_the_best:
            with_it = [
                it.of_these(others, named=False) for it in features if it.in_variant(candidate)
            ]
            found += next(iter(with_it), others)
    return list(dict.fromkeys(found))


# --- counted costs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class TooLarge:
    """A promising setting that does not fit into the memory."""

    strategy: Strategy
    needed: float

    def __str__(self) -> str:
        return f"a faster setting, {self.strategy}, needs {gib(self.needed)} and does not fit"


@dataclass(frozen=True, kw_only=True)
class Plan(RankedRows):
    """The best setting of each schedule for a job.

    Attributes:
        job: the training job.
        too_large: for each schedule, the most promising setting that does not fit.
        nothing_for: why a schedule is not in the table.
        settings: number of settings counted by formula.
        simulated: number of settings whose schedule was built.
        freed: the best that frees activations between F and B.
        all_kept: the best of ``auto`` that does not.
        given: the run of the arguments, whether it fits or not; None without one.
        why_not_given: why there is none.
    """

    job: PlanJob
    too_large: dict[str, TooLarge]
    nothing_for: dict[str, str]
    settings: int
    simulated: int
    freed: Prediction | None = None
    all_kept: Prediction | None = None
    given: Prediction | None = None
    why_not_given: str = ""


def search(
    job: PlanJob,
    candidates: Sequence[ScheduleCandidate],
    *,
    tries: int = 3,
    watch: Watch = silent,
    each: Each = map,
) -> Plan:
    """Find the best setting of each schedule.

    Args:
        job: the model and the GPUs.
        candidates: the schedules.
        tries: settings of each schedule to simulate, the most promising ones by formula.
        watch: as for :class:`PlanSearch`.
        each: map over schedules or settings: one after the other, or with ``workers`` in parallel.
            The plan is the same.

    Raises:
        UsageError: the sizes cannot be divided, or nothing fits into the memory.
    """
    asked = [candidate.name for candidate in candidates]
    found = _CountedSearch(_Looking(CountedSettings.of(job), tries), asked, watch, each)
    found.run(candidates)
    return with_given(found.plan())


def with_given(plan: Plan) -> Plan:
    """Add the prediction for the run of the arguments as they give it."""
    job, run = plan.job, plan.job.given
    if run is None:
        return replace(plan, why_not_given=job.why_not_given)
    load = Workload(job.model, job.device, run.strategy, job.sequence, job.frozen)
    m = run.strategy.num_microbatches(job.global_batch)
    iteration = job.iteration(m, splits=run.candidate.splits)
    try:
        order = ordered(run.staged(load), run.candidate, iteration, run.chunks)
    except UsageError as error:
        return replace(plan, why_not_given=str(error))
    return replace(plan, given=order.predicted())


@dataclass(frozen=True)
class _Tried:
    """A simulated setting; ``prediction`` is None where it does not fit."""

    setting: CountedSetting
    staged: StageWorkload
    prediction: Prediction | None


@dataclass
class _Found:
    """Results of one schedule; ``smallest`` has the least memory that would do, and its setting."""

    candidate: ScheduleCandidate
    settings: int
    smallest: tuple[float, str] | None = None
    prediction: Prediction | None = None
    too_large: TooLarge | None = None
    tried: list[_Tried] = field(default_factory=list)

    def note(self, setting: CountedSetting, needed: float) -> None:
        """Record a setting that does not fit, if it comes before all settings that do."""
        if self.too_large is None and self.prediction is None:
            self.too_large = TooLarge(setting.load.strategy, needed)


@dataclass(frozen=True)
class _Looking:
    """Look at one schedule; ``tries`` of its settings are simulated."""

    settings: CountedSettings
    tries: int

    @property
    def job(self) -> PlanJob:
        return self.settings.job

    def at(self, candidate: ScheduleCandidate) -> _Found:
        """Find the best setting of a schedule."""
        ordered = self.settings.ordered(candidate)
        found = _Found(candidate, len(ordered))
        least = min(ordered, key=lambda s: s.memory, default=None)
        if least is not None:
            found.smallest = (least.memory, f"{candidate.name} with {least.load.strategy}")
        self._simulate_first(self.settings.refined(ordered), self.tries, found)
        return found

    def at_variant(self, floor: float, settings: Sequence[CountedSetting]) -> _Found:
        """Simulate the settings of one schedule that may reach ``floor`` tokens per GPU."""
        found = _Found(settings[0].candidate, len(settings))
        self._simulate_first(settings, _VARIANT_TRIES, found, floor)
        return found

    def _simulate_first(
        self, ordered: Sequence[CountedSetting], tries: int, found: _Found, floor: float = 0.0
    ) -> None:
        """Simulate the most promising settings that may fit, until ``tries`` of them do.

        Settings whose tokens per second and GPU no order could bring to ``floor`` are left out.
        """
        job, fitting = self.job, 0
        for setting in ordered:
            reached = found.prediction.tokens_per_gpu * job.gpus if found.prediction else 0.0
            if fitting >= tries or setting.rate < _HOPELESS * reached:
                break
            if units_of(setting.load).count > 1 and len(found.tried) >= _BUILT:
                break
            if setting.memory > SLACK * job.memory:
                found.note(setting, setting.memory)
                continue
            fits = [self._simulated(setting, staged, found, floor) for staged in setting.staged()]
            fitting += any(fits)

    def _simulated(
        self, setting: CountedSetting, staged: StageWorkload, found: _Found, floor: float
    ) -> bool:
        """Simulate a setting with a layout, and return whether it fits."""
        job = self.job
        if floor and job.optimistic(staged, setting.m) < floor:
            return False
        try:
            order = _ordered(job, setting, staged)
        except UsageError:
            found.note(setting, setting.memory)
            return False
        tried = (it for it in staged.features if isinstance(it, VariantFeature))
        if not all(feature.is_used(order.schedule) for feature in tried):
            return False  # it is a row without the feature
        prediction = order.predicted() if order.memory.total <= job.memory else None
        found.tried.append(_Tried(setting, staged, prediction))
        if prediction is None:
            found.note(setting, order.memory.total)
            return False
        found.prediction = fastest(found.prediction, prediction)
        return True

    def searched(
        self, candidate: ScheduleCandidate, setting: tuple[float, StageWorkload, int]
    ) -> Prediction | None:
        """Predict what ``auto`` finds in a setting, of which the first number is a bound."""
        _, staged, m = setting
        return searched_by_auto(self.job, candidate, staged, m)


def _ordered(job: PlanJob, setting: CountedSetting, staged: StageWorkload) -> Ordered:
    iteration = job.iteration(setting.m, splits=setting.candidate.splits)
    return ordered(staged, setting.candidate, iteration, setting.chunks)


def searched_by_auto(
    job: PlanJob, candidate: ScheduleCandidate, staged: StageWorkload, m: int
) -> Prediction | None:
    """Predict the order that ``auto`` finds in a setting within its memory limit; None if none.

    Costs may count less than an order needs: then it is sought once more, in less memory.
    """
    less = 0.0
    for _ in range(_LIMITS):
        limit = job.memory_fraction(staged, staged.costs(blocking=False), less=less)
        order = None if limit is None else _within(job, candidate, staged, m, limit)
        if order is None or order.memory.total <= job.memory:
            return None if order is None else replace(order.predicted(), memory_limit=limit)
        less += order.memory.total - job.memory
    return None


def _within(
    job: PlanJob, candidate: ScheduleCandidate, staged: StageWorkload, m: int, limit: float
) -> Ordered | None:
    """Return what ``auto`` finds within a limit, a share of 1F1B's activations; None if nothing."""

    def build(costs: Costs, microbatches: int) -> Schedule:
        return schedules.build(
            candidate.family,
            pipeline_size=staged.placement.pipeline_size,
            num_microbatches=microbatches,
            costs=costs,
            memory_limit=limit,
            placement=staged.placement,
            back_to_back=job.back_to_back and job.post_validation,
            quick=True,
            slices=staged.units.cut,
        )

    chunks = staged.placement.chunks
    try:
        chosen = chunks if chunks > 1 else None
        return ordered(staged, candidate, job.iteration(m), chosen, build)
    except UsageError:
        return None


class _CountedSearch(PlanSearch):
    """Results of all schedules so far, by their names."""

    def __init__(self, looking: _Looking, asked: Collection[str], watch: Watch, each: Each) -> None:
        super().__init__(looking.job, watch)
        self.looking, self.each, self.job = looking, each, looking.job
        tried = (feature.own for feature in self.variants if self.tries(feature))
        self.own = [*filter(None, tried), ScheduleCandidate(NO_PIPELINE, "1f1b", megatron=True)]
        self.asked = {*asked, *(candidate.name for candidate in self.own)}
        self.ranking = Ranking()
        self.tried: list[_Tried] = []
        self.too_large: dict[str, TooLarge] = {}
        self.smallest: dict[str, tuple[float, str]] = {}
        self.settings = self.simulated = 0
        self.best_with: dict[type[PlanFeature], Prediction] = {}
        self.freed: Prediction | None = None
        self.all_kept: Prediction | None = None

    def tries(self, feature: VariantFeature) -> bool:
        return super().tries(feature) and self.looking.settings.have(feature)

    def plan(self) -> Plan:
        """Return the rows of the schedules that were requested.

        Raises:
            UsageError: nothing fits into the memory.
        """

        def of_asked(found: dict[str, _Value]) -> dict[str, _Value]:
            return {name: value for name, value in found.items() if name in self.asked}

        rows, too_large = list(of_asked(self.ranking.best).values()), of_asked(self.too_large)
        if not rows:
            smallest = list(of_asked(self.smallest).values())
            raise UsageError(_describe_too_small(self.job, smallest, too_large))
        nothing = of_asked(self.ranking.nothing)
        nothing.pop(NO_PIPELINE, None)
        return Plan(
            job=self.job,
            ranked=tuple(sorted(rows, key=lambda row: -row.tokens_per_gpu)),
            too_large=too_large,
            nothing_for=nothing,
            settings=self.settings,
            simulated=self.simulated,
            replaced=of_asked(self.ranking.replaced),
            best_with=self.best_with,
            freed=self.freed,
            all_kept=self.all_kept,
        )

    def look(self, named: Sequence[ScheduleCandidate]) -> Iterator[ScheduleCandidate]:
        for found in self.each(self.looking.at, named):
            name = found.candidate.name
            self._count(found)
            self.tried += found.tried
            if found.smallest is not None:
                self.smallest[name] = found.smallest
            self._enter(name, found.prediction, found.too_large, found.settings > 0)
            for feature in features_of(found.candidate):
                self._note(feature, found.prediction)
            yield found.candidate

    def _count(self, found: _Found) -> None:
        self.settings += found.settings
        self.simulated += len(found.tried)

    def _enter(
        self, name: str, best: Prediction | None, too_large: TooLarge | None, has_settings: bool
    ) -> None:
        if best is not None:
            self.ranking.best[name] = best
        elif has_settings:
            least = f": {too_large}" if too_large is not None else ""
            self.ranking.nothing[name] = f"nothing fits{least}"
        else:
            self.ranking.nothing[name] = "no setting has layers and microbatches that divide"
        if too_large is not None:
            self.too_large[name] = too_large

    def _note(self, feature: PlanFeature, row: Prediction | None) -> None:
        """Record a row with a feature, if it is the fastest."""
        if (best := fastest(self.best_with.get(type(feature)), row)) is not None:
            self.best_with[type(feature)] = best

    def try_variants(self, feature: VariantFeature, named: Sequence[ScheduleCandidate]) -> None:
        whole = {name: row for name, row in self.ranking.best.items() if not stands_apart(row)}
        reached = [row.tokens_per_gpu for name, row in whole.items() if name in self.asked]
        floor = feature.floor(reached)
        feature.take(self.ranking, self._with(feature, named, floor), floor)

    def _with(
        self, feature: VariantFeature, named: Sequence[ScheduleCandidate], floor: float
    ) -> Iterator[tuple[str, Prediction | None]]:
        """Yield the rows of the schedules that formulas promise most of, with a feature."""
        changed = [with_features(c, [feature]) for c in named if feature.is_able(c)]
        promising = self.looking.settings.promising(changed)[:MOST_VARIANTS]
        for found in self.each(partial(self.looking.at_variant, floor), promising):
            self._count(found)
            self._note(feature, found.prediction)
            yield found.candidate.name, found.prediction

    def take_the_best(self, candidate: ScheduleCandidate) -> None:
        best = self._best_of_the_others(candidate)
        searched = partial(self.looking.searched, candidate)
        promising = self._promising(candidate)[:_SEARCHES]
        if best is not None:
            enough = best.tokens_per_gpu * _WORTH_A_SEARCH
            promising = [entry for entry in promising if entry[0] >= enough]
        found = iter(self.each(searched, promising))
        for optimistic, _, _ in promising:
            if best is not None and optimistic < best.tokens_per_gpu * _WORTH_A_SEARCH:
                break
            self.simulated += 1
            best = fastest(best, next(found))
        settings = self._promising_if_freed(candidate, best)
        fitting = [row for row in self.each(searched, settings) if row is not None]
        self.simulated += len(settings)

        def frees(row: Prediction) -> bool:
            return any(feature.is_in(row) for feature in self.job.freeing)

        best = fastest(best, *filterfalse(frees, fitting))
        freed = fastest(*filter(frees, fitting))
        self.all_kept = fastest(self.all_kept, best)
        self.freed = fastest(self.freed, freed)
        if freed is not None:
            enough = best.tokens_per_gpu * (1 + WORTH_A_CHANGE) if best else 0.0
            best = freed if freed.tokens_per_gpu > enough else best
        self._enter(candidate.name, best, None, bool(self.tried))

    def _promising_if_freed(
        self, candidate: ScheduleCandidate, best: Prediction | None
    ) -> list[tuple[float, StageWorkload, int]]:
        """Return the most promising settings with features that free activations.

        They are some that nearly fit, and some that fit only if activations are freed.
        """
        if not self.job.freeing or any(it.in_variant(candidate) for it in self.variants):  # refused
            return []
        near = [(staged, m) for _, staged, m in self._promising(candidate)]
        far = self.looking.settings.if_freed(candidate)
        enough = best.tokens_per_gpu * (1 + WORTH_A_CHANGE) if best else 0.0
        found = []
        for settings in (near, far):
            entries = [self._freeing(candidate, *setting) for setting in settings]
            able = [entry for entry in entries if entry is not None and entry[0] >= enough]
            ordered = able if settings is far else sorted(able, key=lambda entry: -entry[0])
            found += ordered[:_MORE_SEARCHES]
        return found

    def _freeing(
        self, candidate: ScheduleCandidate, kept: StageWorkload, m: int
    ) -> tuple[float, StageWorkload, int] | None:
        """Return a setting that may free activations, and its bound; None if it cannot."""
        features = tuple(it for it in self.job.freeing if it.is_possible(kept.load))
        is_large = kept.units.count == 1 and m * kept.placement.num_stages > _MOST_FORWARDS
        if not features or is_large:
            return None
        staged = replace(kept, features=(*kept.features, *features))
        return self.job.optimistic(staged, m), staged, m

    def _best_of_the_others(self, candidate: ScheduleCandidate) -> Prediction | None:
        """Return the best of the others as ``auto`` runs it.

        For Megatron's own schedules, that is this package's order of the same.
        """
        found, own = [], []
        for tried in self.tried:
            if tried.prediction is None or tried.staged.placement.pipeline_size == 1:
                continue
            if tried.staged.features != features_of(candidate):
                continue
            of = tried.setting.candidate
            if not of.blocking:
                found.append(tried.prediction)
            elif self.ranking.best[of.name] is tried.prediction:
                setting = replace(tried.setting, candidate=replace(of, blocking=False))
                own.append(_ordered(self.job, setting, tried.staged).predicted())
        best = fastest(*found, *own)
        return None if best is None else replace(best, candidate=candidate.name)

    def _promising(self, candidate: ScheduleCandidate) -> list[tuple[float, StageWorkload, int]]:
        """Return every setting once, with a bound on its tokens per second and GPU, best first.

        The search for an order with a feature that schedules are tried with is that of the named
        schedules.
        """
        own = tuple(it for it in features_of(candidate) if not isinstance(it, VariantFeature))
        seen: dict[
            tuple[Strategy, Placement, tuple[int, ...]], tuple[float, StageWorkload, int]
        ] = {}
        for tried in self.tried:
            staged = tried.staged
            key = (staged.load.strategy, staged.placement, staged.layout)
            if staged.features != own:
                continue
            if staged.placement.pipeline_size > 1 and key not in seen:
                rate = self.job.optimistic(staged, tried.setting.m)
                seen[key] = (rate, staged, tried.setting.m)
        return sorted(seen.values(), key=lambda entry: -entry[0])


def _describe_too_small(
    job: PlanJob, smallest: Sequence[tuple[float, str]], too_large: dict[str, TooLarge]
) -> str:
    counted = [(large.needed, f"{name} with {large.strategy}") for name, large in too_large.items()]
    needed, what = min([*smallest, *counted])
    return (
        f"nothing fits into {gib(job.memory)} on {job.gpus} GPUs: the least that would do is about "
        f"{gib(needed)}, for {what}; give more GPUs or --gpu-memory"
    )
