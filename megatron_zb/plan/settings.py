"""Settings of every schedule, ordered by formula: simulation decides among the first of them.

The first stage of the search has seconds and bytes of each choice by formula. The bubbles are those
of ``docs/schedules.md``, the memory is the peak that the catalog promises.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_zb.errors import UsageError
from megatron_zb.plan import byte_counts
from megatron_zb.plan.byte_counts import ActivationBytes, StateBytes
from megatron_zb.plan.device import DeviceConfig
from megatron_zb.plan.encoder import CountedEncoder
from megatron_zb.plan.ends import WholeEnds
from megatron_zb.plan.features.catalog import FEATURES, features_of, units_of
from megatron_zb.plan.features.feature import FreedActivations, PlanFeature
from megatron_zb.plan.given_run import GivenRun
from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.prediction import IterationSettings
from megatron_zb.plan.stages import StageWorkload, average_layer, ends_of, worth_a_simulation
from megatron_zb.plan.step import at_least, by_formula
from megatron_zb.plan.strategy import (
    Choices,
    ScheduleCandidate,
    Strategy,
    no_strategy_message,
    strategies,
)
from megatron_zb.plan.units import WholeUnits
from megatron_zb.plan.work import PassSeconds, Workload
from megatron_zb.schedules import Costs, catalog
from megatron_zb.schedules.bounds import Grain, lower_bound, period_bound
from megatron_zb.schedules.placement import Placement

# --- estimates by formula


@dataclass(frozen=True)
class EvenSplit:
    """A workload cut evenly, ends included: average work and memory of a rank."""

    load: Workload
    features: tuple[PlanFeature, ...] = ()

    @cached_property
    def ends(self) -> WholeEnds:
        """Embedding and output layer."""
        return ends_of(self.load, self.features)

    @cached_property
    def units(self) -> WholeUnits:
        """Units that passes work on."""
        return units_of(self.load)

    @cached_property
    def _middle(self) -> int:
        return self.load.model.layers - 1

    @cached_property
    def _layer(self) -> PassSeconds:
        return average_layer(self.load)

    @cached_property
    def _stages(self) -> PassSeconds:
        return self.ends.busiest(self._layer, CountedEncoder(self.load).work)

    @cached_property
    def rank(self) -> PassSeconds:
        """Seconds of a microbatch on the slowest rank of the best layout."""
        return self.ends.added_to(self._stages, is_last=True)

    def rank_with(self, placement: Placement) -> PassSeconds:
        """Return :attr:`rank` where every stage but the first and the last has a layer at least."""
        return self.ends.added_to(self.of_stages(placement), is_last=True)

    def of_stages(self, placement: Placement) -> PassSeconds:
        """Return :meth:`rank_with` without what a rank has beside its stages, which fills waits."""
        fullest = self.ends.fullest(self._layer, placement)
        return max(self._stages, fullest, key=lambda w: w.total)

    @cached_property
    def share_left(self) -> float:
        """Share of a rank's seconds that is left at best with what features hide."""
        whole, layers = self.rank.total, range(self.load.model.layers)
        hidden = 2 * sum(of.hidden(self.load, layer) for of in self.features for layer in layers)
        hidden /= self.load.strategy.pipeline
        return min(1.0, max(whole - hidden, hidden) / whole)

    @cached_property
    def held(self) -> ActivationBytes:
        """Bytes of a microbatch on one rank."""
        model, pipeline = self.load.model, self.load.strategy.pipeline
        alike = model.alike(range(model.layers)) if model.kinds else {self._middle: model.layers}
        held = [(byte_counts.layer_held(self.load, i), n / pipeline) for i, n in alike.items()]
        parts = (
            ActivationBytes(one.activation * n, one.for_weight * n, one.in_backward)
            for one, n in held
        )
        return sum(parts, ActivationBytes())

    @cached_property
    def states(self) -> StateBytes:
        """States of a rank with its share of the layers, the last ones, and the embedding."""
        layers = self.load.model.layers
        count = math.ceil(layers / self.load.strategy.pipeline)
        states = byte_counts.rank_states(
            self.load,
            range(layers - count, layers),
            embedding=True,
            output=False,
            ends_apart=self.ends.are_apart,
        )
        return states + self.ends.states


def estimated_seconds(
    split: EvenSplit, candidate: ScheduleCandidate, m: int, chunks: int | None
) -> float:
    """Estimate the seconds of an iteration by formula."""
    p = split.load.strategy.pipeline
    if p == 1:
        return m * split.rank.total + by_formula(split.load, split.states, split.rank)
    placement = candidate.placement(p, chunks)
    n = split.units.count
    work, latency, v = split.rank_with(placement), split.load.latency(False), placement.chunks
    stages = split.of_stages(placement)
    if candidate.blocking:
        work = stages = work + PassSeconds(v * latency, v * latency)
    family = catalog.family(candidate.family)
    steady = m * max(work.total, family.interval(stages))
    step = by_formula(split.load, split.states, work)
    bubble = family.bubble(p, stages, v) * split.load.slowest_slice
    return steady + bubble + 2 * (p - 1) * latency / n + step


def estimated_memory(
    split: EvenSplit, candidate: ScheduleCandidate, m: int, chunks: int | None
) -> float:
    """Estimate the bytes of the first rank, by the peak that the catalog promises."""
    p = split.load.strategy.pipeline
    n = split.units.count
    peak = (_peak(candidate, p, m * n, chunks) + n - 1) / n  # all units are held before B
    peak = min(m, peak + split.ends.more_held / n)
    fixed = split.states.total + split.load.device.reserved_bytes
    fixed += split.units.kept(split.load.model.attending // p)
    held = split.held.activation
    if n > 1 and candidate.splits:  # orders of many units take too long to try what cannot fit
        held = max(held, split.held.for_weight)
    return fixed + peak * held


def _peak(candidate: ScheduleCandidate, p: int, m: int, chunks: int | None) -> float:
    if candidate.family == "interleaved" and chunks:
        return p + (p - 1) / chunks
    return catalog.family(candidate.family).peak_microbatches(p, m) if m > 1 else 1


# --- settings


# Skip settings whose memory by formula exceeds the GPU's by more: schedules save less than that.
SLACK = 1.1
# Settings of each schedule whose layouts refine the formula before some are simulated.
_REFINED = 40
# Settings that fit only without some activations whose layouts are looked for.
_OF_FREED = 4
# Relative difference of rates by formula that decides nothing between numbers of chunks.
_TIE = 0.002
# Largest memory limit of auto, as a fraction of 1F1B's activations.
_MOST_FRACTION = 2.0


@dataclass(frozen=True)
class PlanJob:
    """A training job: model, GPUs, bytes of memory per GPU, batch and allowed choices.

    With ``post_validation``, schedules are built for iterations back to back, unless
    ``back_to_back`` is False. ``features`` are all features, with what is asked of them. Of a
    ``frozen`` model only adapters are trained. ``given`` is the run of a training's arguments;
    ``why_not_given`` says why a plan has none.
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
    features: tuple[PlanFeature, ...] = FEATURES
    frozen: bool = False
    given: GivenRun | None = None
    why_not_given: str = ""

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.name

    @property
    def profile(self) -> None:
        """No run has been measured."""

    def iteration(self, m: int, *, splits: bool = True) -> IterationSettings:
        """Return an iteration of m microbatches; steps are taken back where backwards are split."""
        return IterationSettings(
            m, self.post_validation and splits, self.back_to_back, self.snapshot and splits
        )

    @property
    def freeing(self) -> tuple[FreedActivations, ...]:
        """Features by which ``auto`` may free activations."""
        of_kind = (it for it in self.features if isinstance(it, FreedActivations))
        return tuple(it for it in of_kind if it.choice != "off")

    def of_single_samples(self, tokens: int) -> PlanJob:
        """Return the job with microbatches of one sample that has ``tokens`` tokens."""
        return replace(self, sequence=tokens, choices=replace(self.choices, microbatch=(1,)))

    def optimistic(self, staged: StageWorkload, m: int) -> float:
        """Return the tokens per second and GPU that no order of passes exceeds in a setting."""
        costs, units = staged.costs(blocking=False), staged.units
        left = [self.memory - fixed for fixed in costs.fixed]
        if min(left) <= 0:
            return 0.0
        table = units.costs(costs, m).for_placement(staged.placement)
        bound = period_bound if self.post_validation else lower_bound
        seconds = bound(staged.placement, m * units.count, table, left, Grain(units.count))
        seconds += at_least(staged, post_validation=self.post_validation)
        strategy = staged.load.strategy
        gpus = strategy.tensor * strategy.pipeline * strategy.data
        return m * staged.load.tokens * strategy.data / seconds / gpus

    def memory_fraction(
        self, staged: StageWorkload, costs: Costs, *, less: float = 0.0
    ) -> float | None:
        """Return the memory left for activations on the fullest rank, a ``memory_limit``.

        ``less`` bytes are left free.

        It is a fraction of 1F1B's peak, rounded down to hundredths, or to thousandths where little
        may do; None where nothing is left.
        """
        ranks = range(staged.placement.pipeline_size)
        in_backward = max(held.in_backward for held in staged.held_by_units)
        snapshots = [staged.states[r].optimizer if self.snapshot else 0.0 for r in ranks]
        left = min(self.memory - costs.fixed[r] - snapshots[r] for r in ranks) - in_backward - less
        steps = 1000 if staged.frees_activations or staged.units.count > 1 else 100
        limit = math.floor(steps * left / costs.one_f_one_b_peak()) / steps
        return min(limit, _MOST_FRACTION) if limit > 0 else None


@dataclass(frozen=True)
class CountedSetting:
    """A schedule with a strategy and chunks: seconds and bytes by formula.

    ``counted`` are the seconds of a microbatch on a rank that the formula counts with.
    """

    load: Workload
    candidate: ScheduleCandidate
    chunks: int | None
    m: int
    seconds: float
    memory: float
    counted: float

    @property
    def rate(self) -> float:
        """Tokens per second on all GPUs, by formula."""
        strategy = self.load.strategy
        return self.m * self.load.tokens * strategy.replicas / self.seconds

    def staged(self) -> list[StageWorkload]:
        """Cut the workload into stages by the layouts that are worth it; none if layers are few."""
        return worth_a_simulation(self.load, self.candidate, self.chunks)


@dataclass(frozen=True)
class CountedSettings:
    """Every strategy of a job, with an even split."""

    job: PlanJob
    loads: list[Workload]

    @classmethod
    def of(cls, job: PlanJob) -> CountedSettings:
        """Return the splits of a job.

        Raises:
            UsageError: the sizes cannot be divided.
        """
        for feature in job.features:
            feature.check(job)
        sizes = job.model, job.device, job.gpus, job.global_batch, job.choices
        found: list[Workload] = []
        for strategy in strategies(*sizes, job.sequence):
            whole = Workload(job.model, job.device, strategy, job.sequence, job.frozen)
            found += [whole, *(load for of in job.features for load in of.loads(whole))]
        if not found:
            raise UsageError(no_strategy_message(*sizes))
        for feature in job.features:
            feature.check_loads(found)
        return cls(job, found)

    def have(self, feature: PlanFeature) -> bool:
        """Return whether a setting can have a feature."""
        return any(map(feature.is_possible, self.loads))

    def _splits(self, candidate: ScheduleCandidate) -> list[EvenSplit]:
        """Return the settings that can have the features of a schedule."""
        features = features_of(candidate)
        if features not in self._of_features:
            self._of_features[features] = [
                EvenSplit(load, features)
                for load in self.loads
                if all(feature.is_possible(load) for feature in features)
            ]
        return self._of_features[features]

    @cached_property
    def _of_features(self) -> dict[tuple[PlanFeature, ...], list[EvenSplit]]:
        """Splits with features, those that have been asked for so far."""
        return {}

    def ordered(self, candidate: ScheduleCandidate) -> list[CountedSetting]:
        """Return the settings of a schedule, the fastest by formula first."""
        splits = self._splits(candidate)
        found = (setting for split in splits for setting in self._of_split(split, candidate))
        return sorted(found, key=lambda setting: -setting.rate)

    def if_freed(self, candidate: ScheduleCandidate) -> list[tuple[StageWorkload, int]]:
        """Return the workloads and microbatches of ``auto`` that fit only without activations.

        The fastest are first by a formula in which forwards of the share that does not fit run
        twice. Their placement is the V.
        """
        of_v = replace(candidate, family="v-zb")
        found = []
        for split in self._splits(candidate):
            fixed = split.states.total + split.load.device.reserved_bytes
            for setting in self._of_split(split, of_v):
                held = setting.memory - fixed
                share = (setting.memory - self.job.memory) / held
                if 0 < share < 1 and not split.load.strategy.drops_all:
                    again = share * setting.m * split.rank.forward
                    found.append(replace(setting, seconds=setting.seconds + again))
        found.sort(key=lambda setting: -setting.rate)
        staged = ((setting.staged(), setting.m) for setting in found[:_OF_FREED])
        return [(first[0], m) for first, m in staged if first]

    def _of_split(self, split: EvenSplit, candidate: ScheduleCandidate) -> Iterator[CountedSetting]:
        load, strategy = split.load, split.load.strategy
        m = strategy.num_microbatches(self.job.global_batch)
        if not candidate.takes(strategy):
            return
        if strategy.pipeline == 1:
            seconds = estimated_seconds(split, candidate, m, None)
            needed = split.states.total + load.device.reserved_bytes + split.held.activation
            yield CountedSetting(load, candidate, None, m, seconds, needed, split.rank.total)
            return
        if candidate.needs_whole_groups and m % strategy.pipeline:
            return
        for chunks in candidate.chunk_counts(load.model.layers, strategy.pipeline):
            seconds = split.share_left * estimated_seconds(split, candidate, m, chunks)
            needed = estimated_memory(split, candidate, m, chunks)
            counted = split.rank_with(candidate.placement(strategy.pipeline, chunks)).total
            yield CountedSetting(load, candidate, chunks, m, seconds, needed, counted)

    def refined(self, ordered: Sequence[CountedSetting]) -> list[CountedSetting]:
        """Reorder the first settings that may fit by the steady state of their layouts."""
        out: list[CountedSetting] = []
        fitting = 0
        for setting in ordered:
            if fitting >= _REFINED:
                break
            if setting.memory > SLACK * self.job.memory:
                out.append(setting)
                continue
            if not (staged := setting.staged()):
                continue
            fitting += 1
            steady = staged[0].interval(in_groups=setting.candidate.in_groups)
            longer = max(0.0, steady - setting.counted)
            out.append(replace(setting, seconds=setting.seconds + setting.m * longer))
        return _fewest_chunks_first(out)

    def promising(self, variants: Sequence[ScheduleCandidate]) -> list[list[CountedSetting]]:
        """Return the settings of each schedule that may fit; first those of which most is promised.

        With more than two chunks, the search for an order with features falls behind the formula.
        """
        found = []
        for candidate in variants:
            if candidate.megatron or candidate.takes_chunks:
                continue
            ordered = self.refined(self.ordered(candidate))
            fitting = [s for s in ordered if s.memory <= SLACK * self.job.memory]
            if fitting:
                found.append(fitting)
        return sorted(found, key=lambda settings: -settings[0].rate)


def _fewest_chunks_first(settings: Sequence[CountedSetting]) -> list[CountedSetting]:
    """Sort settings by their rate; among those that differ only in chunks, a tie has few first.

    The formula counts no gap to the bound, which grows with the number of chunks.
    """
    best: dict[Strategy, float] = {}
    for setting in settings:
        strategy = setting.load.strategy
        best[strategy] = max(best.get(strategy, 0.0), setting.rate)

    def place(setting: CountedSetting) -> tuple[float, int]:
        most = best[setting.load.strategy]
        if setting.candidate.megatron or setting.rate < most * (1 - _TIE):
            return -setting.rate, 0
        return -most, setting.chunks or 0

    return sorted(settings, key=place)
