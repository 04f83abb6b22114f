"""``megatron-zb plan --profile``: schedules and layer layouts for costs that a run has measured.

The costs of a layer, the embedding and the output layer are derived from the stages that ran, so
that other placements and layouts can be predicted; what is left is the speed of each rank.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.measured.fit import Fit
from megatron_zb.measured.profile import Profile, read_profile
from megatron_zb.parsing import GIB
from megatron_zb.plan.features.catalog import FEATURES, VARIANTS, features_of, with_features
from megatron_zb.plan.features.feature import PlanFeature, VariantFeature
from megatron_zb.plan.rows import PlanRow
from megatron_zb.plan.search import MOST_VARIANTS, PlanSearch, Watch, silent
from megatron_zb.plan.strategy import (
    MEGATRON_INTERLEAVED,
    ScheduleCandidate,
    candidates_of,
    names_in,
)
from megatron_zb.plan.table import schedule_flags, with_pattern
from megatron_zb.schedules import Timeline, layout
from megatron_zb.schedules.layout import Layers, Layout
from megatron_zb.schedules.lowering import peak_with_messages
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Limit, LimitTooSmall

_LARGE = 20_000  # passes: more are not lowered for their messages

# Fields of a row in JSON, and the attributes whose names differ.
_IN_JSON = (
    "schedule runs chunks layout is_even seconds seconds_even bubble activation_bytes rank "
    "megatron has_by_default"
).split()
_ATTRIBUTES = {"schedule": "candidate", "runs": "family", "layout": "written"}


@dataclass(frozen=True)
class ProfileRequest:
    """Request of the command line; ``features`` are all features, with what is asked of them."""

    profile: Profile
    num_microbatches: int
    memory_limit: float | None
    post_validation: bool
    features: tuple[PlanFeature, ...] = FEATURES

    name: ClassVar[str] = "the profiled model"
    frozen: ClassVar[bool] = False

    def is_back_to_back(self, candidate: ScheduleCandidate) -> bool:
        """Return whether iterations of a schedule follow one another with no barrier."""
        return self.post_validation and candidate.splits

    def seconds(self, candidate: ScheduleCandidate, timeline: Timeline) -> float:
        """Return the seconds of an iteration, with those outside of its passes."""
        seconds = timeline.seconds(back_to_back=self.is_back_to_back(candidate))
        return seconds + self.profile.outside


@dataclass(frozen=True, kw_only=True)
class MeasuredRow(PlanRow):
    """A schedule with its best layout; ``seconds_even`` are those of the even layout."""

    asked: ProfileRequest
    timeline: Timeline
    seconds_even: float

    @property
    def written(self) -> str:
        """Layers of the stages, as Megatron's flag has them; of a hybrid model, its pattern."""
        pattern = self.asked.profile.model.pattern
        if pattern is not None:
            return layout.placed_pattern(pattern, self.layout)
        return layout.text(layout.lettered(self.layout, self.asked.profile.multi_token))

    @property
    def is_even(self) -> bool:
        """Whether the layers are spread evenly."""
        placement = self.timeline.schedule.placement
        return self.layout == layout.spread(Layers(sum(self.layout)), placement)

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        return self.asked.seconds(self.runs, self.timeline)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they run nothing."""
        timeline, back_to_back = self.timeline, self.asked.is_back_to_back(self.runs)
        return timeline.bubble_rate_back_to_back if back_to_back else timeline.bubble_rate

    @property
    def activation_bytes(self) -> float:
        """Most bytes of activations and messages on any rank."""
        return max(self._peaks)

    @property
    def rank(self) -> int:
        """Megatron's pipeline rank that holds the most."""
        rank = max(range(len(self._peaks)), key=self._peaks.__getitem__)
        return self.timeline.schedule.placement.pipeline_rank(rank)

    @property
    def name(self) -> str:
        """Name in the table, with what the schedule runs, its chunks and its variant."""
        said = (f", {it.words}" for it in VARIANTS if it.is_in(self) and not self.megatron)
        return super().name + "".join(said)

    @property
    def flags(self) -> list[str]:
        """Arguments for a pretrain script of Megatron-LM."""
        asked = self.asked
        words = schedule_flags(self, asked.memory_limit, asked.profile.multi_token)
        if asked.profile.model.pattern is not None:
            words = with_pattern(words, self.written)
        ranks = f"--pipeline-model-parallel-size {asked.profile.pipeline_size}"
        words.insert(0 if self.megatron else 1, ranks)
        if not self.megatron and asked.is_back_to_back(self.runs):
            words.append("--enable-optimizer-post-validation")
        return words

    @cached_property
    def _peaks(self) -> Sequence[float]:
        timeline, schedule = self.timeline, self.timeline.schedule
        if sum(map(len, schedule.ranks)) > _LARGE:
            return timeline.peak_memory
        program, message = schedules.lower(schedule, timeline), self.asked.profile.message
        ranks = range(schedule.placement.pipeline_size)
        return [peak_with_messages(program, rank, timeline.costs, message) for rank in ranks]


def rows(
    asked: ProfileRequest,
    candidates: Sequence[ScheduleCandidate],
    watch: Watch = silent,
) -> tuple[list[MeasuredRow], dict[str, str]]:
    """Return every schedule, the fastest first, and why others are missing.

    Raises:
        UsageError: the output layer cannot be sharded as requested, or there is no row.
    """
    search = _MeasuredSearch(asked, [candidate.name for candidate in candidates], watch)
    search.run(candidates)
    found = [row for row in search.found if row.candidate in search.asked]
    if not found and search.limits:
        raise min(search.limits, key=lambda error: error.needed)
    if not found:
        raise UsageError(next(iter(search.missing.values()), "no schedule can be had"))
    return sorted(found, key=lambda row: row.seconds), search.missing


class _MeasuredSearch(PlanSearch):
    """Rows of all schedules so far, and why some are missing."""

    AUTO_IS_LAST = True

    def __init__(self, request: ProfileRequest, asked: Collection[str], watch: Watch) -> None:
        super().__init__(request, watch)
        self.measured, self.fit, self.asked = request, Fit.of(request.profile), set(asked)
        self.found: list[MeasuredRow] = []
        self.missing: dict[str, str] = {}
        self.limits: list[LimitTooSmall] = []

    def tries(self, feature: VariantFeature) -> bool:
        """Return whether schedules are tried with a feature: not those that have one."""
        return super().tries(feature) and all(it.choice != "on" for it in self.variants)

    def look(self, named: Sequence[ScheduleCandidate]) -> Iterator[ScheduleCandidate]:
        for candidate in named:
            rows, errors = self._rows(candidate)
            self.found += rows
            if candidate.name in self.asked:
                self.missing |= {name: str(error) for name, error in errors.items()}
                self.limits += [e for e in errors.values() if isinstance(e, LimitTooSmall)]
            yield candidate

    def _rows(
        self, candidate: ScheduleCandidate, chosen: Collection[int | None] = (None, 2, 4, 8)
    ) -> tuple[list[MeasuredRow], dict[str, UsageError]]:
        """Return a row for each of the chosen numbers of chunks, and why others are missing."""
        found, errors, profile = [], {}, self.measured.profile
        for chunks in candidate.chunk_counts(profile.model.layers, profile.pipeline_size):
            if chunks not in chosen:
                continue
            try:
                found.append(self._row(candidate, chunks))
            except UsageError as error:
                name = candidate.name if chunks is None else f"{candidate.name} ×{chunks}"
                errors[name] = error
        return found, errors

    def _row(self, candidate: ScheduleCandidate, chunks: int | None) -> MeasuredRow:
        """Return the fastest layout of a schedule.

        Raises:
            UsageError: the schedule cannot be built within the limit.
        """
        asked, p = self.measured, self.measured.profile.pipeline_size
        m = asked.num_microbatches
        if candidate.needs_whole_groups and m % p:
            raise UsageError(f"it needs whole groups of {p} microbatches, and there are {m}")
        placement = candidate.placement(p, chunks)
        found = {
            counts: self._simulated(candidate, chunks, placement, counts)
            for counts in self.fit.layouts(placement, candidate)
        }
        seconds = {counts: asked.seconds(candidate, timeline) for counts, timeline in found.items()}
        best = min(found, key=seconds.__getitem__)
        return MeasuredRow(
            asked=asked,
            candidate=candidate.name,
            runs=candidate,
            chunks=chunks,
            layout=best,
            has_by_default=candidate.has_by_default(best, placement),
            timeline=found[best],
            seconds_even=seconds[layout.spread(Layers(asked.profile.model.layers), placement)],
        )

    def _simulated(
        self, candidate: ScheduleCandidate, chunks: int | None, placement: Placement, counts: Layout
    ) -> Timeline:
        """Build and simulate a schedule with a layout.

        Raises:
            UsageError: it cannot be built within the limit.
        """
        costs, is_auto = self.fit.costs(placement, counts, candidate), candidate.takes_the_best
        schedule = schedules.build(
            candidate.family,
            pipeline_size=placement.pipeline_size,
            num_microbatches=self.measured.num_microbatches,
            # a run builds only auto for measured costs, and every other one for equal costs
            costs=costs if is_auto else self._costs_of_a_run(candidate),
            memory_limit=self.measured.memory_limit,
            chunks=chunks,
            placement=placement if is_auto else None,
            back_to_back=self.measured.is_back_to_back(candidate),
            quick=is_auto,
        )
        return schedules.simulate(schedule, costs)

    def _costs_of_a_run(self, candidate: ScheduleCandidate) -> schedules.Costs | None:
        """Return the costs for which a run builds a named schedule; None where all are equal."""
        features = [it for it in self.variants if it.in_variant(candidate)]
        if not features:
            return None
        costs = schedules.Costs.uniform(
            pipeline_size=self.fit.profile.pipeline_size, forward=1.0, backward=1.0, weight=1.0
        )
        for feature in features:
            costs = feature.costs_of_a_run(costs, self.fit)
        return costs

    def try_variants(self, feature: VariantFeature, named: Sequence[ScheduleCandidate]) -> None:
        """Add rows of the fastest schedules of one or two chunks, and of Megatron's own."""
        small = [row for row in self._ranked() if not row.megatron and row.chunks in (None, 2)]
        able = [row for row in small if feature.is_able(row.runs)][:MOST_VARIANTS]
        found = []
        for candidate in named:
            if chunks := [row.chunks for row in able if row.candidate == candidate.name]:
                found += self._rows(with_features(candidate, [feature]), chunks)[0]
        if feature.own is not None and MEGATRON_INTERLEAVED in self.asked:
            self.asked.add(feature.own.name)
            found += self._rows(feature.own)[0]
        self.found += [row for row in found if feature.is_used(row.schedule)]

    def _ranked(self) -> list[MeasuredRow]:
        return sorted(self.found, key=lambda row: row.seconds)

    def take_the_best(self, candidate: ScheduleCandidate) -> None:
        """Add the fastest row, or the order that ``auto`` finds for its placement, if faster."""
        found = [row for row in self.found if not row.megatron]
        if not found:
            return
        best = replace(min(found, key=lambda row: row.seconds), candidate=candidate.name)
        placement = best.timeline.schedule.placement
        auto = with_features(candidate, features_of(best.runs))
        with suppress(UsageError):
            timeline = self._simulated(auto, placement.chunks, placement, best.layout)
            searched = replace(best, runs=auto, chunks=placement.chunks, timeline=timeline)
            best = min(best, searched, key=lambda row: row.seconds)
        self.found.append(best)


def read(arguments: argparse.Namespace) -> tuple[ProfileRequest, list[ScheduleCandidate]]:
    """Read the profile and check the sizes.

    Raises:
        UsageError: a field or an argument is wrong.
    """
    profile = read_profile(arguments.profile)
    m = arguments.microbatches
    if m is not None and m < 1:
        raise UsageError(f"--microbatches is {m}: give 1 or more")
    Limit.of(arguments.memory_limit, profile.pipeline_size)  # refuses what is none
    names = None if arguments.schedules is None else names_in(arguments.schedules)
    candidates = candidates_of(names)
    if names is None:
        candidates += candidates_of(["1f1b", "interleaved"])
    unique = {c.name: c for c in candidates}
    return (
        ProfileRequest(
            profile,
            profile.num_microbatches if m is None else m,
            arguments.memory_limit,
            arguments.post_validation,
            tuple(feature.asked(arguments) for feature in FEATURES),
        ),
        list(unique.values()),
    )


def show(
    asked: ProfileRequest,
    found: Sequence[MeasuredRow],
    missing: dict[str, str],
    arguments: argparse.Namespace,
) -> None:
    """Print the result as a table or as JSON."""
    if arguments.format == "json":
        print(json.dumps(_as_json(asked, found, missing), indent=2))
    else:
        _print(asked, found, missing, Console(), arguments.top)


def _as_json(
    asked: ProfileRequest, found: Sequence[MeasuredRow], missing: dict[str, str]
) -> dict[str, Any]:
    return {
        "schedule_of_the_profile": asked.profile.schedule,
        "num_microbatches": asked.num_microbatches,
        "unsplit": [stage.unsplit for stage in asked.profile.stages],
        "ranked": [
            {name: getattr(row, _ATTRIBUTES.get(name, name)) for name in _IN_JSON}
            | {feature.field: feature.is_in(row) for feature in VARIANTS}
            for row in found
        ],
        "not_possible": missing,
    }


def _print(
    asked: ProfileRequest,
    found: Sequence[MeasuredRow],
    missing: dict[str, str],
    console: Console,
    top: int,
) -> None:
    profile = asked.profile
    fit = Fit.of(profile)
    embedding, output = fit.in_layers()
    console.print(
        Text(
            f"{profile.pipeline_size} pipeline ranks of {profile.device}, "
            f"{asked.num_microbatches} microbatches, measured under {profile.schedule}; the "
            f"embedding counts for {embedding:.2f} layers, the output layer for {output:.2f}",
            style="bold",
        )
    )
    if fit.work:
        counts = dict(zip(profile.model.kinds, fit.work, strict=True))
        said = ", ".join(f"{letter} for {count:.2f}" for letter, count in counts.items())
        console.print(Text(f"layers by their letters, where the mean counts for 1: {said}"))
    unsplit = {number: stage.unsplit for number, stage in enumerate(profile.stages)}
    if any(unsplit.values()):
        said = ", ".join(f"{share:.0%} of stage {s}" for s, share in unsplit.items() if share)
        console.print(Text(f"weight gradients in B, of layers that cannot be split: {said}"))
    console.print(_table(found[:top]))
    for name, why in missing.items():
        console.print(Text(f" -  {name}: {why}"), highlight=False)
    tried = (it for it in asked.features if isinstance(it, VariantFeature) and it.refusal)
    for feature in tried:
        reason = feature.why_not(asked) if feature.choice == "auto" else None
        if reason is not None:
            console.print(Text(f" -  no {feature.words}: {reason}"), highlight=False)
    console.print(Text("\nflags of the first:", style="bold"))
    words = " \\\n  ".join(found[0].flags)
    console.print(Text(f"  {words}"), highlight=False, soft_wrap=True)


def _table(found: Sequence[MeasuredRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("#", justify="right")
    table.add_column("schedule", no_wrap=True)
    for title in ("ms", "even layers", "bubble", "activations GiB", "on rank"):
        table.add_column(title, justify="right")
    table.add_column("layers of the stages")
    for number, row in enumerate(found, 1):
        table.add_row(
            str(number),
            row.name,
            f"{1000 * row.seconds:.4g}",
            f"{1000 * row.seconds_even:.4g}",
            f"{row.bubble:.1%}",
            f"{row.activation_bytes / GIB:.3g}",
            str(row.rank),
            "even" if row.is_even else row.written,
        )
    return table
