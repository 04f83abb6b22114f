"""Search for the best setting of every schedule: formulas order the settings, simulation decides.

Each schedule, Megatron's own included, gets its best division of the GPUs, microbatch,
recomputation, number of chunks and layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.measured.units import gib
from megatron_zb.planner import estimate
from megatron_zb.planner.candidate import (
    MEGATRON_OVERLAP,
    NO_PIPELINE,
    ScheduleCandidate,
    of_overlap,
    with_those_of_auto,
)
from megatron_zb.planner.device import DeviceConfig
from megatron_zb.planner.estimate import EvenSplit
from megatron_zb.planner.model import ModelConfig
from megatron_zb.planner.prediction import IterationSettings, Ordered, Prediction, ordered
from megatron_zb.planner.stages import StageWorkload, cut_into_stages
from megatron_zb.planner.step import at_least
from megatron_zb.planner.strategy import Choices, Strategy, said_of_none, strategies
from megatron_zb.planner.vocabulary import can_be_shared, why_not_cut
from megatron_zb.planner.work import Workload
from megatron_zb.planner.workers import Each
from megatron_zb.schedules import Costs, Schedule
from megatron_zb.schedules.bounds import lower_bound, period_bound
from megatron_zb.schedules.placement import Placement

# Skip settings whose memory by formula exceeds the GPU's by more: schedules save less than that.
_SLACK = 1.25
WORTH_A_CHANGE = 0.01  # of the tokens per second; predictions are not better than that
# Skip settings whose rate by formula is below this share of the best simulated one.
_HOPELESS = 0.97
# Most schedules to try with vocabulary parallelism or pairs, and settings of each: these searches
# take seconds.
_VARIANTS = 3
_VARIANT_TRIES = 2
# Most settings in which auto searches, and the least lead that a setting must allow.
_SEARCHES = 3
_WORTH_A_SEARCH = 1.001
# Most settings to search with recomputation or offload, and most forwards of one.
_SEARCHES_OF_STATES = 2
_FORWARDS_WITH_STATES = 1100
# Largest memory limit of auto, as a fraction of 1F1B's activations.
_MOST_FRACTION = 2.0
# Settings of each schedule whose layouts refine the formula before some are simulated.
_REFINED = 40


@dataclass(frozen=True)
class PlanJob:
    """A training job: model, GPUs, bytes of memory per GPU, batch and allowed choices.

    With ``post_validation``, schedules are built for iterations back to back, unless
    ``back_to_back`` is False. ``vocabulary`` parallelism over the pipeline ranks is in every
    schedule of this package ("on"), in none ("off"), or where a schedule is faster by more than
    the error of predictions ("auto"). ``drops`` allows ``auto`` to recompute activations, and
    ``moves`` to offload them to the host.
    """

    model: ModelConfig
    device: DeviceConfig
    gpus: int
    memory: float
    global_batch: int
    sequence: int
    choices: Choices = field(default_factory=Choices)
    post_validation: bool = False
    back_to_back: bool = True
    snapshot: bool = False
    vocabulary: str = "auto"
    drops: bool = False
    moves: bool = False

    def iteration(self, m: int, *, splits: bool = True) -> IterationSettings:
        """Return an iteration of m microbatches; steps are taken back where backwards are split."""
        return IterationSettings(
            m, self.post_validation and splits, self.back_to_back, self.snapshot and splits
        )

    @property
    def why_not_cut(self) -> str | None:
        """Why the output layer cannot be cut, None if it can."""
        return why_not_cut(self.model, post_validation=self.post_validation)


@dataclass(frozen=True)
class TooLarge:
    """A promising setting that does not fit into the memory."""

    strategy: Strategy
    needed: float

    def __str__(self) -> str:
        return f"a faster setting, {self.strategy}, needs {gib(self.needed)} and does not fit"


@dataclass(frozen=True)
class Plan:
    """The best setting of each schedule, fastest first.

    Attributes:
        job: the training job.
        ranked: the best setting of each schedule.
        too_large: for each schedule, the most promising setting that does not fit.
        nothing_for: why a schedule is not in the table.
        settings: number of settings counted by formula.
        simulated: number of settings whose schedule was built.
        without_cut: for each row with vocabulary parallelism, the best setting without.
        cut: the best with vocabulary parallelism, in the table or not.
        with_states: the best that recomputes or offloads activations.
        all_kept: the best of ``auto`` that does neither.
    """

    job: PlanJob
    ranked: tuple[Prediction, ...]
    too_large: dict[str, TooLarge]
    nothing_for: dict[str, str]
    settings: int
    simulated: int
    without_cut: dict[str, Prediction] = field(default_factory=dict)
    cut: Prediction | None = None
    with_states: Prediction | None = None
    all_kept: Prediction | None = None


@dataclass(frozen=True)
class _Setting:
    load: Workload
    candidate: ScheduleCandidate
    chunks: int | None
    m: int
    seconds: float
    memory: float
    counted: float  # seconds of a microbatch on a rank that the formula counts with

    @property
    def rate(self) -> float:
        """Tokens per second on all GPUs, by formula."""
        strategy = self.load.strategy
        return self.m * self.load.tokens * strategy.data / self.seconds


Watch = Callable[[str, int, int], None]
_Value = TypeVar("_Value")


def search(
    job: PlanJob,
    candidates: Sequence[ScheduleCandidate],
    *,
    tries: int = 3,
    watch: Watch = lambda text, done, of: None,
    each: Each = map,
) -> Plan:
    """Find the best setting of each schedule.

    Args:
        job: the model and the GPUs.
        candidates: the schedules.
        tries: settings of each schedule to simulate, the most promising ones by formula.
        watch: called with the current schedule, the number of schedules done, and the total.
        each: map over the schedules: one after the other, or with ``workers`` in parallel. The
            plan is the same.

    Raises:
        UsageError: the sizes cannot be divided, or nothing fits into the memory.
    """
    if job.vocabulary == "on" and (why := job.why_not_cut) is not None:
        raise UsageError(
            f"--vocabulary on: the output layer of {job.model.name} cannot be cut, because {why}: "
            "give --vocabulary auto"
        )
    splits = _EvenSplits.of(job)
    alone = ScheduleCandidate(NO_PIPELINE, "1f1b", megatron=True)
    everyone = [alone, *with_those_of_auto(candidates)]
    overlaps = not job.post_validation and any(_exchanges(split.load) for split in splits.whole)
    if overlaps:
        everyone.insert(0, of_overlap())
    if job.vocabulary == "on":
        everyone = [c if c.megatron else replace(c, cuts_vocabulary=True) for c in everyone]
    asked = {candidate.name for candidate in (alone, *candidates)} | {everyone[0].name}
    named = [candidate for candidate in everyone if not candidate.takes_the_best]
    found = _Everything(job, {}, [], {}, {})
    tries_cuts = job.vocabulary == "auto" and job.why_not_cut is None
    total = len(everyone) + tries_cuts + overlaps
    watch(named[0].name, 0, total)
    for done, looked in enumerate(each(partial(_look_at, job, splits, tries), named), start=1):
        found.enter(looked)
        watch(everyone[min(done, len(everyone) - 1)].name, done, total)
    for candidate in everyone:
        if candidate.takes_the_best:
            watch(candidate.name, len(named), total)
            found.take_the_best(candidate, each)
    if tries_cuts:
        watch("vocabulary parallelism", len(everyone), total)
        cuttable = [candidate for candidate in named if not candidate.overlaps_exchange]
        found.cut_where_it_pays(_promising(job, splits, cuttable, cuts=True), asked, each)
    if overlaps:
        watch("pairs", total - 1, total)
        paired = [candidate for candidate in named if candidate.finds_pairs]
        found.pair_where_it_pays(_promising(job, splits, paired, cuts=False), each)
    watch("", total, total)
    return found.plan(asked)


@dataclass(frozen=True)
class _Tried:
    """A simulated setting; ``prediction`` is None where it does not fit."""

    setting: _Setting
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


@dataclass
class _Everything:
    """Results of all schedules so far, by their names."""

    job: PlanJob
    best: dict[str, Prediction]
    tried: list[_Tried]
    too_large: dict[str, TooLarge]
    nothing: dict[str, str]
    smallest: dict[str, tuple[float, str]] = field(default_factory=dict)
    settings: int = 0
    simulated: int = 0
    without_cut: dict[str, Prediction] = field(default_factory=dict)
    cut: Prediction | None = None
    with_states: Prediction | None = None
    all_kept: Prediction | None = None

    def plan(self, asked: Collection[str]) -> Plan:
        """Return the rows of the schedules that were asked for.

        Raises:
            UsageError: nothing fits into the memory.
        """

        def of_asked(found: dict[str, _Value]) -> dict[str, _Value]:
            return {name: value for name, value in found.items() if name in asked}

        rows, too_large = list(of_asked(self.best).values()), of_asked(self.too_large)
        if not rows:
            smallest = list(of_asked(self.smallest).values())
            raise UsageError(_describe_too_small(self.job, smallest, too_large))
        nothing = of_asked(self.nothing)
        nothing.pop(NO_PIPELINE, None)
        return Plan(
            job=self.job,
            ranked=tuple(sorted(rows, key=lambda row: -row.tokens_per_gpu)),
            too_large=too_large,
            nothing_for=nothing,
            settings=self.settings,
            simulated=self.simulated,
            without_cut=of_asked(self.without_cut),
            cut=self.cut,
            with_states=self.with_states,
            all_kept=self.all_kept,
        )

    def enter(self, found: _Found) -> None:
        """Add the results of one schedule."""
        name = found.candidate.name
        self._count(found)
        self.tried += found.tried
        if found.smallest is not None:
            self.smallest[name] = found.smallest
        self._enter(name, found.prediction, found.too_large, found.settings > 0)
        if found.candidate.cuts_vocabulary:
            self._note_cut(found.prediction)

    def _count(self, found: _Found) -> None:
        self.settings += found.settings
        self.simulated += len(found.tried)

    def _note_cut(self, row: Prediction | None) -> None:
        self.cut = _fastest(filter(None, (self.cut, row)))

    def cut_where_it_pays(
        self, promising: Sequence[Sequence[_Setting]], asked: Collection[str], each: Each
    ) -> None:
        """Let schedules with vocabulary parallelism take the place of those without.

        One does where it is ahead of every row by more than predictions are off. ``asked`` are the
        names of rows.
        """
        reached = [row.tokens_per_gpu for name, row in self.best.items() if name in asked]
        floor = max(reached, default=0.0) * (1 + WORTH_A_CHANGE)
        for found in each(partial(_simulated_variant, self.job, floor), promising):
            self._count(found)
            row, name = found.prediction, found.candidate.name
            self._note_cut(row)
            if row is not None and row.tokens_per_gpu >= floor:
                self._replace(name, row)
                self.nothing.pop(name, None)
        auto, cut = self.best.get("auto"), self.cut
        if auto and cut and cut.tokens_per_gpu >= max(floor, auto.tokens_per_gpu):
            self._replace("auto", replace(cut, candidate="auto"))

    def pair_where_it_pays(self, promising: Sequence[Sequence[_Setting]], each: Each) -> None:
        """Let schedules whose pairs hide the expert all-to-all take the place of slower rows."""
        if (own := self.best.get(MEGATRON_OVERLAP)) is not None:
            self._enter_if_faster("auto", own)  # in this package's order of the same
        for found in each(partial(_simulated_variant, self.job, 0.0), promising):
            self._count(found)
            if found.prediction is not None:
                self._enter_if_faster(found.candidate.name, found.prediction)
                self._enter_if_faster("auto", found.prediction)

    def _enter_if_faster(self, name: str, row: Prediction) -> None:
        before = self.best.get(name)
        known = name in self.best or name in self.nothing
        if known and (before is None or row.tokens_per_gpu > before.tokens_per_gpu):
            self.best[name] = replace(row, candidate=name)
            self.nothing.pop(name, None)

    def _replace(self, name: str, row: Prediction) -> None:
        if name in self.best:
            self.without_cut[name] = self.best[name]
        self.best[name] = row

    def take_the_best(self, candidate: ScheduleCandidate, each: Each) -> None:
        """Add ``auto``: the best of all others, or of the searches in their best settings."""
        best = self._best_of_the_others(candidate)
        promising = self._promising()[:_SEARCHES]
        if best is not None:
            enough = best.tokens_per_gpu * _WORTH_A_SEARCH
            promising = [entry for entry in promising if entry[0] >= enough]
        found = iter(each(partial(_searched, self.job, candidate), promising))
        for optimistic, _, _ in promising:
            reached = best.tokens_per_gpu if best else 0.0
            if optimistic < reached * _WORTH_A_SEARCH:
                break
            searched = next(found)
            self.simulated += 1
            if searched is not None and searched.tokens_per_gpu > reached:
                best = searched
        settings = self._promising_with_states(best)
        rows = each(partial(_searched, self.job, candidate), settings)
        fitting = [row for row in rows if row is not None]
        self.simulated += len(settings)
        known = [best, *(row for row in fitting if not (row.dropped or row.moved))]
        self.all_kept = best = _fastest(filter(None, known))
        self.with_states = _fastest(row for row in fitting if row.dropped or row.moved)
        if self.with_states is not None:
            enough = best.tokens_per_gpu * (1 + WORTH_A_CHANGE) if best else 0.0
            best = self.with_states if self.with_states.tokens_per_gpu > enough else best
        self._enter(candidate.name, best, None, bool(self.tried))

    def _promising_with_states(
        self, best: Prediction | None
    ) -> list[tuple[float, StageWorkload, int]]:
        """Return the most promising settings for recomputation or offload."""
        job, found = self.job, []
        for _, kept, m in self._promising() if job.drops or job.moves else ():
            drops = job.drops and kept.load.strategy.recompute != "full"  # it drops them already
            staged = replace(kept, drops=drops, moves=job.moves)
            if (drops or job.moves) and staged.placement.num_stages * m <= _FORWARDS_WITH_STATES:
                found.append((_optimistic(job, staged, m), staged, m))
        enough = best.tokens_per_gpu * (1 + WORTH_A_CHANGE) if best else 0.0
        found.sort(key=lambda entry: -entry[0])
        return [entry for entry in found if entry[0] >= enough][:_SEARCHES_OF_STATES]

    def _best_of_the_others(self, candidate: ScheduleCandidate) -> Prediction | None:
        """Return the best of the others as ``auto`` runs it.

        For Megatron's own schedules, that is this package's order of the same.
        """
        found: list[Prediction] = []
        blocking: dict[str, _Tried] = {}
        for tried in self.tried:
            if tried.prediction is None or tried.staged.placement.pipeline_size == 1:
                continue
            if tried.staged.cuts_vocabulary is not candidate.cuts_vocabulary:
                continue
            if tried.staged.overlaps_exchange:
                continue  # the searches for pairs are those of the named schedules
            if not tried.setting.candidate.blocking:
                found.append(tried.prediction)
            elif self.best[tried.setting.candidate.name] is tried.prediction:
                blocking[tried.setting.candidate.name] = tried
        for tried in blocking.values():
            ours = replace(tried.setting.candidate, blocking=False)
            setting = replace(tried.setting, candidate=ours)
            found.append(_ordered(self.job, setting, tried.staged).predicted())
        if not found:
            return None
        best = max(found, key=lambda row: row.tokens_per_gpu)
        return replace(best, candidate=candidate.name)

    def _promising(self) -> list[tuple[float, StageWorkload, int]]:
        """Return every setting once, with a bound on its tokens per second and GPU, best first."""
        seen: dict[
            tuple[Strategy, Placement, tuple[int, ...]], tuple[float, StageWorkload, int]
        ] = {}
        for tried in self.tried:
            staged = tried.staged
            key = (staged.load.strategy, staged.placement, staged.layout)
            if staged.cuts_vocabulary or staged.overlaps_exchange:
                continue  # the search for an order with shards is that of the named schedules
            if staged.placement.pipeline_size > 1 and key not in seen:
                rate = _optimistic(self.job, staged, tried.setting.m)
                seen[key] = (rate, staged, tried.setting.m)
        return sorted(seen.values(), key=lambda entry: -entry[0])

    def _enter(
        self, name: str, best: Prediction | None, too_large: TooLarge | None, has_settings: bool
    ) -> None:
        if best is not None:
            self.best[name] = best
        elif has_settings:
            least = f": {too_large}" if too_large is not None else ""
            self.nothing[name] = f"nothing fits{least}"
        else:
            self.nothing[name] = "no setting has layers and microbatches that divide"
        if too_large is not None:
            self.too_large[name] = too_large


def _fastest(rows: Iterable[Prediction]) -> Prediction | None:
    return max(rows, key=lambda row: row.tokens_per_gpu, default=None)


def _searched(
    job: PlanJob, candidate: ScheduleCandidate, setting: tuple[float, StageWorkload, int]
) -> Prediction | None:
    _, staged, m = setting
    return searched_by_auto(job, candidate, staged, m)


def searched_by_auto(
    job: PlanJob, candidate: ScheduleCandidate, staged: StageWorkload, m: int
) -> Prediction | None:
    """Predict the order that ``auto`` finds in a setting within its memory limit; None if none."""
    costs = staged.costs(blocking=False)
    limit = memory_fraction(job, staged, costs)
    if limit is None:
        return None

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
        )

    chunks = staged.placement.chunks
    try:
        chosen = chunks if chunks > 1 else None
        order = ordered(staged, candidate, job.iteration(m), chosen, build)
    except UsageError:
        return None
    if order.memory.total > job.memory:
        return None
    return replace(order.predicted(), memory_limit=limit)


def memory_fraction(job: PlanJob, staged: StageWorkload, costs: Costs) -> float | None:
    """Return the memory left for activations on the fullest rank, for ``--pipeline-memory-limit``.

    It is a fraction of 1F1B's peak, rounded down to hundredths, or to thousandths where little may
    do; None where nothing is left.
    """
    ranks = range(staged.placement.pipeline_size)
    in_backward = max(held.in_backward for held in staged.held)
    snapshots = [staged.states[r].optimizer if job.snapshot else 0.0 for r in ranks]
    left = min(job.memory - costs.fixed[r] - snapshots[r] - in_backward for r in ranks)
    steps = 1000 if staged.drops or staged.moves else 100
    limit = math.floor(steps * left / costs.one_f_one_b_peak()) / steps
    return min(limit, _MOST_FRACTION) if limit > 0 else None


def _optimistic(job: PlanJob, staged: StageWorkload, m: int) -> float:
    """Return the tokens per second and GPU that no order of passes exceeds in a setting."""
    costs = staged.costs(blocking=False)
    table = costs.for_placement(staged.placement)
    left = [job.memory - fixed for fixed in costs.fixed]
    if min(left) <= 0:
        return 0.0
    bound = period_bound if job.post_validation else lower_bound
    seconds = bound(staged.placement, m, table, left)
    seconds += at_least(staged, post_validation=job.post_validation)
    strategy = staged.load.strategy
    gpus = strategy.tensor * strategy.pipeline * strategy.data
    return m * staged.load.tokens * strategy.data / seconds / gpus


@dataclass(frozen=True)
class _EvenSplits:
    """Every strategy with an even split of the model: without and with vocabulary parallelism."""

    whole: list[EvenSplit]
    cut: list[EvenSplit]

    @classmethod
    def of(cls, job: PlanJob) -> _EvenSplits:
        """Return the splits of a job.

        Raises:
            UsageError: the sizes cannot be divided.
        """
        sizes = job.model, job.device, job.gpus, job.global_batch, job.choices
        found = [
            EvenSplit(Workload(job.model, job.device, strategy, job.sequence))
            for strategy in strategies(*sizes, job.sequence)
        ]
        if not found:
            raise UsageError(said_of_none(*sizes))
        shared = [s.load for s in found if can_be_shared(job.model, s.load.strategy)]
        cut = [] if job.vocabulary == "off" or job.why_not_cut else shared
        return cls(found, [EvenSplit(load, cuts_vocabulary=True) for load in cut])

    def for_schedule(self, candidate: ScheduleCandidate) -> list[EvenSplit]:
        """Return the splits that a schedule can have."""
        return self.cut if candidate.cuts_vocabulary else self.whole


def _settings(splits: _EvenSplits, candidate: ScheduleCandidate, job: PlanJob) -> list[_Setting]:
    out = []
    for split in splits.for_schedule(candidate):
        strategy = split.load.strategy
        m = strategy.num_microbatches(job.global_batch)
        if (strategy.pipeline == 1) != (candidate.name == NO_PIPELINE):
            continue
        if strategy.pipeline == 1:
            seconds = estimate.seconds(split, candidate, m, None)
            needed = split.states.total + job.device.reserved_bytes + split.held.activation
            out.append(_Setting(split.load, candidate, None, m, seconds, needed, split.rank.total))
            continue
        if candidate.megatron and candidate.takes_chunks and m % strategy.pipeline:
            continue  # Megatron's interleaved schedule takes only whole groups of p
        if candidate.overlaps_exchange and not _exchanges(split.load):
            continue
        for chunks in candidate.chunk_counts(job.model.layers, strategy.pipeline):
            seconds = estimate.seconds(split, candidate, m, chunks)
            if candidate.overlaps_exchange:
                seconds *= _share_left(split)
            needed = estimate.memory(split, candidate, m, chunks)
            counted = split.rank_with(candidate.placement(strategy.pipeline, chunks)).total
            out.append(_Setting(split.load, candidate, chunks, m, seconds, needed, counted))
    return out


def _exchanges(load: Workload) -> bool:
    """Return whether there is an expert all-to-all that Megatron can hide behind a pass."""
    exchange = load.exchange(load.model.layers - 1)
    return load.strategy.expert > 1 and load.strategy.recompute != "full" and exchange > 0


def _share_left(split: EvenSplit) -> float:
    """Return the share of a rank's seconds that is left at best with a hidden all-to-all."""
    load, whole = split.load, split.rank.total
    layers = load.model.layers
    exchange = 2 * sum(map(load.exchange, range(layers))) / load.strategy.pipeline
    return min(1.0, max(whole - exchange, exchange) / whole)


def _look_at(job: PlanJob, splits: _EvenSplits, tries: int, candidate: ScheduleCandidate) -> _Found:
    """Find the best setting of a schedule."""
    ordered = sorted(_settings(splits, candidate, job), key=lambda s: -s.rate)
    least = min(ordered, key=lambda s: s.memory, default=None)
    found = _Found(candidate, len(ordered))
    if least is not None:
        found.smallest = (least.memory, f"{candidate.name} with {least.load.strategy}")
    _simulate_first(job, _refined(job, ordered), tries, found)
    return found


def _promising(
    job: PlanJob, splits: _EvenSplits, named: Sequence[ScheduleCandidate], *, cuts: bool
) -> list[list[_Setting]]:
    """Return the settings of the schedules that formulas promise most of, the best setting first.

    The schedules have vocabulary parallelism, or else pairs. With more than two chunks, the search
    for an order with shards falls behind the formula.
    """
    found = []
    for candidate in named:
        if candidate.megatron or candidate.takes_chunks:
            continue
        variant = replace(candidate, cuts_vocabulary=cuts, overlaps_exchange=not cuts)
        settings = _settings(splits, variant, job)
        ordered = _refined(job, sorted(settings, key=lambda s: -s.rate))
        fitting = [s for s in ordered if s.memory <= _SLACK * job.memory]
        if fitting:
            found.append(fitting)
    return sorted(found, key=lambda settings: -settings[0].rate)[:_VARIANTS]


def _simulated_variant(job: PlanJob, floor: float, settings: Sequence[_Setting]) -> _Found:
    """Simulate the settings of one schedule that may reach ``floor``."""
    found = _Found(settings[0].candidate, len(settings))
    _simulate_first(job, settings, _VARIANT_TRIES, found, floor)
    return found


def _simulate_first(
    job: PlanJob, ordered: Sequence[_Setting], tries: int, found: _Found, floor: float = 0.0
) -> None:
    """Simulate the most promising settings that may fit, until ``tries`` of them do.

    Settings whose tokens per second and GPU no order could bring to ``floor`` are left out.
    """
    fitting = 0
    for setting in ordered:
        reached = found.prediction.tokens_per_gpu * job.gpus if found.prediction else 0.0
        if fitting >= tries or setting.rate < _HOPELESS * reached:
            break
        if setting.memory > _SLACK * job.memory:
            _note(found, setting, setting.memory)
            continue
        staged = cut_into_stages(setting.load, setting.candidate, setting.chunks)
        if staged is None or (floor and _optimistic(job, staged, setting.m) < floor):
            continue
        try:
            order = _ordered(job, setting, staged)
        except UsageError:
            _note(found, setting, setting.memory)
            continue
        if staged.overlaps_exchange and not (order.schedule and order.schedule.pairs):
            continue  # it is a row without pairs
        if order.memory.total > job.memory:
            found.tried.append(_Tried(setting, staged, None))
            _note(found, setting, order.memory.total)
            continue
        prediction = order.predicted()
        found.tried.append(_Tried(setting, staged, prediction))
        fitting += 1
        before = found.prediction
        if before is None or prediction.tokens_per_gpu > before.tokens_per_gpu:
            found.prediction = prediction


def _refined(job: PlanJob, ordered: Sequence[_Setting]) -> list[_Setting]:
    """Reorder the first settings that may fit by the steady state of their layouts."""
    out: list[_Setting] = []
    fitting = 0
    for setting in ordered:
        if fitting >= _REFINED:
            break
        if setting.memory > _SLACK * job.memory:
            out.append(setting)
            continue
        staged = cut_into_stages(setting.load, setting.candidate, setting.chunks)
        if staged is None:
            continue
        fitting += 1
        steady = staged.interval(in_groups=setting.candidate.in_groups)
        longer = max(0.0, steady - setting.counted)
        out.append(replace(setting, seconds=setting.seconds + setting.m * longer))
    return sorted(out, key=lambda s: -s.rate)


def _note(found: _Found, setting: _Setting, needed: float) -> None:
    """Record a setting that does not fit, if it comes before all settings that do."""
    if found.too_large is None and found.prediction is None:
        found.too_large = TooLarge(setting.load.strategy, needed)


def _ordered(job: PlanJob, setting: _Setting, staged: StageWorkload) -> Ordered:
    iteration = job.iteration(setting.m, splits=setting.candidate.splits)
    return ordered(staged, setting.candidate, iteration, setting.chunks)


def _describe_too_small(
    job: PlanJob, smallest: Sequence[tuple[float, str]], too_large: dict[str, TooLarge]
) -> str:
    counted = [(large.needed, f"{name} with {large.strategy}") for name, large in too_large.items()]
    needed, what = min([*smallest, *counted])
    return (
        f"nothing fits into {gib(job.memory)} on {job.gpus} GPUs: the least that would do is about "
        f"{gib(needed)}, for {what}; give more GPUs or --gpu-memory"
    )
