"""``megatron-zb plan --profile``: schedules and layer layouts for costs that a run has measured.

The costs of a layer, the embedding and the output layer are derived from the stages that ran, so
that other placements and layouts can be predicted; what is left is the speed of each rank.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.measured.balance import with_counted_vocabulary
from megatron_zb.measured.exchange import with_exchange
from megatron_zb.measured.fit import Fit
from megatron_zb.measured.profile import Profile, read_profile
from megatron_zb.measured.units import GIB
from megatron_zb.planner.candidate import (
    MEGATRON_INTERLEAVED,
    MEGATRON_OVERLAP,
    ScheduleCandidate,
    candidates_of,
    names_in,
    of_overlap,
    with_those_of_auto,
)
from megatron_zb.planner.flags import flags_of_layout, named, placement_flags
from megatron_zb.schedules import catalog, layout
from megatron_zb.schedules.layout import Layers, Layout
from megatron_zb.schedules.limit import Limit
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.program.memory import peak_with_messages
from megatron_zb.schedules.request import LimitTooSmall

_LARGE = 20_000  # passes: more are not lowered for their messages

# Most schedules to try with vocabulary parallelism, or with pairs: such searches take seconds.
_VARIANTS = 3


@dataclass(frozen=True)
class ProfileRequest:
    """Request of the command line.

    ``vocabulary`` parallelism is in every schedule of this package (on), in none (off), or in the
    fastest ones besides (auto).
    """

    profile: Profile
    num_microbatches: int
    memory_limit: float | None
    post_validation: bool
    vocabulary: str = "auto"

    def is_back_to_back(self, candidate: ScheduleCandidate) -> bool:
        """Return whether iterations of a schedule follow one another with no barrier."""
        return self.post_validation and candidate.splits

    def seconds(self, candidate: ScheduleCandidate, timeline: schedules.Timeline) -> float:
        """Return the seconds of an iteration, with those outside of its passes."""
        seconds = timeline.seconds(back_to_back=self.is_back_to_back(candidate))
        return seconds + self.profile.outside

    @property
    def why_not_cut(self) -> str | None:
        """Why there is no row with a cut vocabulary, None if there can be."""
        profile = self.profile
        rows, p = profile.model.vocabulary, profile.pipeline_size * profile.model.tensor
        if any("m" in stage.layers for stage in profile.stages):
            return "multi-token prediction runs its output layer again"
        if self.post_validation:
            return "the forwards that post-validation runs again have no passes of it"
        if profile.vocabulary is not None:
            return None
        if Fit.of(profile).cutting is None:
            return "the profile lacks its number of rows: profile again"
        if rows is not None and rows % p:
            return f"its {rows} rows cannot be cut evenly for {p} ranks"
        return None


@dataclass(frozen=True)
class MeasuredRow:
    """A schedule with its best layout; seconds of the pipeline's part of an iteration.

    ``schedule`` is its name in the table. For ``auto``, ``candidate`` is the fastest of all.
    """

    asked: ProfileRequest
    schedule: str
    candidate: ScheduleCandidate
    chunks: int | None
    layers: Layout
    timeline: schedules.Timeline
    seconds_even: float

    @property
    def runs(self) -> str:
        """Name of the schedule in the flags."""
        return self.candidate.family

    @property
    def layout(self) -> str:
        """Layers of the stages, as Megatron's flag has them."""
        multi_token = self.asked.profile.stages[-1].layers.count("m")
        return layout.text(layout.lettered(self.layers, multi_token))

    @property
    def is_even(self) -> bool:
        """Whether the layers are spread evenly."""
        return self.layers == layout.spread(Layers(sum(self.layers)), self._placement)

    @property
    def seconds(self) -> float:
        """Seconds of the pipeline's part of an iteration."""
        return self.asked.seconds(self.candidate, self.timeline)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they run nothing."""
        timeline, back_to_back = self.timeline, self.asked.is_back_to_back(self.candidate)
        return timeline.bubble_rate_back_to_back if back_to_back else timeline.bubble_rate

    @property
    def activation_bytes(self) -> float:
        """Most bytes of activations and messages on any rank."""
        return self._peaks[self.rank]

    @property
    def rank(self) -> int:
        """The rank that holds the most."""
        return max(range(len(self._peaks)), key=self._peaks.__getitem__)

    @property
    def megatron(self) -> bool:
        """Whether it is a schedule of Megatron's own."""
        return self.candidate.megatron

    @property
    def has_by_default(self) -> bool:
        """Whether the layout needs no flag."""
        return self.candidate.has_by_default(self.layers, self._placement)

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether output layer and embedding are cut over all ranks."""
        return self.candidate.cuts_vocabulary

    @property
    def overlaps_exchange(self) -> bool:
        """Whether pairs hide the expert all-to-all."""
        return self.candidate.overlaps_exchange

    @property
    def _placement(self) -> Placement:
        return self.timeline.schedule.placement

    @cached_property
    def _peaks(self) -> Sequence[float]:
        timeline, schedule = self.timeline, self.timeline.schedule
        if sum(map(len, schedule.ranks)) > _LARGE:
            return timeline.peak_memory
        program, message = schedules.lower(schedule, timeline), self.asked.profile.message
        ranks = range(schedule.placement.pipeline_size)
        return [peak_with_messages(program, rank, timeline.costs, message) for rank in ranks]


_IN_JSON = (
    "schedule runs chunks layout is_even seconds seconds_even bubble activation_bytes rank "
    "megatron has_by_default cuts_vocabulary overlaps_exchange"
).split()
_Setting = tuple[ScheduleCandidate, int | None]  # a schedule and its chunks per rank
Watch = Callable[[str, int, int], None]


def rows(
    asked: ProfileRequest,
    candidates: Sequence[ScheduleCandidate],
    watch: Watch = lambda text, done, of: None,
) -> tuple[list[MeasuredRow], dict[str, str]]:
    """Return every schedule, the fastest first, and why others are missing."""
    if asked.vocabulary == "on":
        if asked.why_not_cut is not None:
            raise UsageError(
                f"--vocabulary on: the output layer cannot be cut, because {asked.why_not_cut}"
            )
        candidates = [c if c.megatron else replace(c, cuts_vocabulary=True) for c in candidates]
    search = _Search(asked, watch)
    wanted = {candidate.name for candidate in candidates}
    everyone = [c for c in with_those_of_auto(candidates) if c.name in wanted or not c.megatron]
    search.look_at(everyone, wanted)
    if asked.vocabulary == "auto" and asked.why_not_cut is None:
        search.look_at_cut()
    if asked.profile.pairs and asked.vocabulary != "on" and not asked.post_validation:
        if MEGATRON_INTERLEAVED in wanted:
            wanted.add(MEGATRON_OVERLAP)
            search.settings += search.settings_of([of_overlap()])
        search.look_at_pairs()
    for candidate in candidates:
        if candidate.takes_the_best and any(not row.megatron for row in search.found):
            search.watch(candidate.name, len(search.settings), len(search.settings) + 1)
            search.found.append(search.best_of_all(candidate))
    watch("", len(search.settings), len(search.settings))
    found = [row for row in search.found if row.schedule in wanted]
    if not found and search.limits:
        raise min(search.limits, key=lambda error: error.needed)
    if not found:
        raise UsageError(next(iter(search.missing.values()), "no schedule can be had"))
    return sorted(found, key=lambda row: row.seconds), search.missing


class _Search:
    """Search over schedules and layouts for the costs of one profile."""

    def __init__(self, asked: ProfileRequest, watch: Watch) -> None:
        self.asked, self.watch, self.fit = asked, watch, Fit.of(asked.profile)
        self.settings: list[_Setting] = []
        self.found: list[MeasuredRow] = []
        self.missing: dict[str, str] = {}
        self.limits: list[LimitTooSmall] = []

    def settings_of(self, candidates: Sequence[ScheduleCandidate]) -> list[_Setting]:
        """Return the schedules with the numbers of chunks to try."""
        profile = self.asked.profile
        return [
            (candidate, chunks)
            for candidate in candidates
            if not candidate.takes_the_best
            for chunks in candidate.chunk_counts(profile.model.layers, profile.pipeline_size)
            if chunks in (None, 2, 4, 8)
        ]

    def look_at(self, candidates: Sequence[ScheduleCandidate], wanted: Collection[str]) -> None:
        """Find the best layout of each schedule, and why a wanted one is missing."""
        self.settings += self.settings_of(candidates)
        for number, (candidate, chunks) in enumerate(self.settings):
            name = candidate.name if chunks is None else f"{candidate.name} ×{chunks}"
            self.watch(name, number, len(self.settings))
            try:
                self.found.append(self.row(candidate, chunks))
            except UsageError as error:
                if candidate.name in wanted:
                    self.missing[name] = str(error)
                    self.limits += [error] if isinstance(error, LimitTooSmall) else []

    def look_at_cut(self) -> None:
        """Look at the fastest schedules of one or two chunks with vocabulary parallelism."""
        ours = [(row.schedule, row.chunks) for row in self._ranked() if not row.megatron]
        small = [setting for setting in ours if setting[1] in (None, 2)][:_VARIANTS]
        self.found += self._variants(small, "cut vocabulary", cuts_vocabulary=True)

    def look_at_pairs(self) -> None:
        """Look at the fastest schedules with the pairs of a run's search, and Megatron's own."""
        able = {candidate.name for candidate, _ in self.settings if candidate.finds_pairs}
        fastest = [(row.schedule, row.chunks) for row in self._ranked() if row.schedule in able]
        own = [(c.name, chunks) for c, chunks in self.settings if c.name == MEGATRON_OVERLAP]
        found = self._variants([*fastest[:_VARIANTS], *own], "pairs", overlaps_exchange=True)
        self.found += [row for row in found if row.timeline.schedule.pairs]

    def _ranked(self) -> list[MeasuredRow]:
        return sorted(self.found, key=lambda row: row.seconds)

    def _variants(
        self, chosen: Collection[tuple[str, int | None]], what: str, **change: Any
    ) -> list[MeasuredRow]:
        """Return the rows of a variant of the chosen schedules, as limits allow."""
        rows = []
        for candidate, chunks in self.settings:
            if (candidate.name, chunks) in chosen:
                self.watch(f"{candidate.name}, {what}", len(self.settings), len(self.settings) + 1)
                with suppress(UsageError):
                    rows.append(self.row(replace(candidate, **change), chunks))
        return rows

    def row(self, candidate: ScheduleCandidate, chunks: int | None) -> MeasuredRow:
        """Return the fastest layout of a schedule.

        Raises:
            UsageError: the schedule cannot be built within the limit.
        """
        asked, p = self.asked, self.asked.profile.pipeline_size
        m = asked.num_microbatches
        if candidate.megatron and candidate.takes_chunks and m % p:
            raise UsageError(f"it needs whole groups of {p} microbatches, and there are {m}")
        placement = candidate.placement(p, chunks)
        even = layout.spread(Layers(asked.profile.model.layers), placement)
        found = {
            counts: self._simulated(candidate, chunks, placement, counts)
            for counts in self.fit.layouts(placement, candidate)
        }
        seconds = {counts: asked.seconds(candidate, timeline) for counts, timeline in found.items()}
        best = min(found, key=seconds.__getitem__)
        return MeasuredRow(
            asked, candidate.name, candidate, chunks, best, found[best], seconds[even]
        )

    def best_of_all(self, candidate: ScheduleCandidate) -> MeasuredRow:
        """Return the fastest row, or the order that ``auto`` finds for its placement, if faster."""
        best = min((row for row in self.found if not row.megatron), key=lambda row: row.seconds)
        best = replace(best, schedule=candidate.name)
        placement = best.timeline.schedule.placement
        candidate = replace(
            candidate,
            cuts_vocabulary=best.cuts_vocabulary,
            overlaps_exchange=best.overlaps_exchange,
        )
        with suppress(UsageError):
            timeline = self._simulated(candidate, placement.chunks, placement, best.layers)
            chunks = placement.chunks
            searched = replace(best, candidate=candidate, chunks=chunks, timeline=timeline)
            return searched if searched.seconds < best.seconds else best
        return best

    def _simulated(
        self, candidate: ScheduleCandidate, chunks: int | None, placement: Placement, counts: Layout
    ) -> schedules.Timeline:
        costs, is_auto = self.fit.costs(placement, counts, candidate), candidate.takes_the_best
        schedule = schedules.build(
            candidate.family,
            pipeline_size=placement.pipeline_size,
            num_microbatches=self.asked.num_microbatches,
            # a run builds only auto for measured costs, and every other one for equal costs
            costs=costs if is_auto else self._costs_of_a_run(candidate),
            memory_limit=self.asked.memory_limit,
            chunks=chunks,
            placement=placement if is_auto else None,
            back_to_back=self.asked.is_back_to_back(candidate),
            quick=is_auto,
        )
        return schedules.simulate(schedule, costs)

    def _costs_of_a_run(self, candidate: ScheduleCandidate) -> schedules.Costs | None:
        """Return the costs for which a run builds a named schedule; None where all are equal."""
        if not (candidate.cuts_vocabulary or candidate.overlaps_exchange):
            return None
        profile = self.fit.profile
        costs = schedules.Costs.uniform(
            pipeline_size=profile.pipeline_size, forward=1.0, backward=1.0, weight=1.0
        )
        if candidate.overlaps_exchange:
            return with_exchange(costs)
        _, output = self.fit.in_layers()
        return with_counted_vocabulary(costs, profile.model.layers, output)


def read(arguments: argparse.Namespace) -> tuple[ProfileRequest, list[ScheduleCandidate]]:
    """Read the profile and check the sizes.

    Raises:
        UsageError: a field or an argument is wrong.
    """
    profile = read_profile(arguments.profile)
    m = arguments.microbatches
    if m is not None and m < 1:
        raise UsageError(f"--microbatches is {m}: give 1 or more")
    Limit.of(arguments.memory_limit, None, profile.pipeline_size)  # refuses what is none
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
            arguments.vocabulary or "auto",
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
        "ranked": [{name: getattr(row, name) for name in _IN_JSON} for row in found],
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
    embedding, output = Fit.of(profile).in_layers()
    console.print(
        Text(
            f"{profile.pipeline_size} pipeline ranks of {profile.device}, "
            f"{asked.num_microbatches} microbatches, measured under {profile.schedule}; the "
            f"embedding counts for {embedding:.2f} layers, the output layer for {output:.2f}",
            style="bold",
        )
    )
    unsplit = {number: stage.unsplit for number, stage in enumerate(profile.stages)}
    if any(unsplit.values()):
        said = ", ".join(f"{share:.0%} of stage {s}" for s, share in unsplit.items() if share)
        console.print(Text(f"weight gradients in B, of layers that cannot be split: {said}"))
    console.print(_table(found[:top]))
    for name, why in missing.items():
        console.print(Text(f" -  {name}: {why}"), highlight=False)
    if asked.vocabulary == "auto" and (why_not := asked.why_not_cut) is not None:
        console.print(Text(f" -  no cut vocabulary: {why_not}"), highlight=False)
    console.print(Text("\nflags of the first:", style="bold"))
    flags = flags_of(asked, found[0])
    console.print(Text("  " + " \\\n  ".join(flags)), highlight=False, soft_wrap=True)


def flags_of(asked: ProfileRequest, row: MeasuredRow) -> list[str]:
    """Return the arguments of a row for a pretrain script of Megatron-LM."""
    ranks = f"--pipeline-model-parallel-size {asked.profile.pipeline_size}"
    flags = [ranks] if row.megatron else [f"--pipeline-schedule {row.runs}", ranks]
    chunks = row.chunks
    if not row.megatron:
        if row.runs == "auto":
            flags += placement_flags(row.timeline.schedule.placement)
            chunks = None
        if asked.memory_limit is not None:
            flags.append(f"--pipeline-memory-limit {asked.memory_limit:g}")
        if row.cuts_vocabulary:
            flags.append("--pipeline-vocabulary on")
        if asked.post_validation and catalog.family(row.runs).splits_backward:
            flags.append("--enable-optimizer-post-validation")
    if row.overlaps_exchange:
        flags.append("--overlap-moe-expert-parallel-comm")
    written = None if row.has_by_default else row.layout
    return flags + flags_of_layout(chunks, written, megatron=row.megatron)


def name_of(row: MeasuredRow) -> str:
    """Return the name of a row in the table; for ``auto``, with what it runs."""
    chunks = "" if row.chunks is None else f" ×{row.chunks}"
    cut = ", cut vocabulary" if row.cuts_vocabulary else ""
    pairs = ", pairs" if row.overlaps_exchange and not row.megatron else ""
    return named(row.schedule, row.runs) + chunks + cut + pairs


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
            name_of(row),
            f"{1000 * row.seconds:.4g}",
            f"{1000 * row.seconds_even:.4g}",
            f"{row.bubble:.1%}",
            f"{row.activation_bytes / GIB:.3g}",
            str(row.rank),
            "even" if row.is_even else row.layout,
        )
    return table
