"""``megatron-zb plan --profile``: schedules and layer layouts for costs that a run has measured.

The costs of a layer, the embedding and the output layer are derived from the stages that ran, so
that other placements and layouts can be predicted; what is left is the speed of each rank.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.measured.balance import with_counted_vocabulary
from megatron_zb.measured.cutting import Cutting
from megatron_zb.measured.exchange import with_exchange
from megatron_zb.measured.fit import Fit
from megatron_zb.measured.profile import Profile, read_profile
from megatron_zb.measured.units import GIB
from megatron_zb.planner.candidate import (
    MEGATRON_INTERLEAVED,
    MEGATRON_OVERLAP,
    Candidate,
    candidates_of,
    names_in,
    of_overlap,
    with_those_of_auto,
)
from megatron_zb.planner.flags import flags_of_layout, named, placement_flags
from megatron_zb.schedules import catalog, layout
from megatron_zb.schedules.layout import Layers, Layout
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.program.memory import peak_with_messages
from megatron_zb.schedules.request import LimitTooSmall, MemoryLimit

_LARGE = 20_000  # passes: more are not lowered for their messages

# Schedules that are looked at with a cut vocabulary, or with pairs, too, at most: such searches
# take seconds.
_CUTS = 3


@dataclass(frozen=True)
class Row:
    """A schedule with its best layout; seconds of the pipeline's part of an iteration.

    ``runs`` is the schedule that its flags name: for ``auto``, the fastest of all.
    ``megatron`` marks a schedule of Megatron's own, ``has_by_default`` that no flag is needed for
    the layout, ``cuts_vocabulary`` that output layer and embedding are cut over all ranks,
    ``overlaps_exchange`` that pairs hide what experts exchange.
    """

    schedule: str
    runs: str
    chunks: int | None
    layout: str
    is_even: bool
    seconds: float
    seconds_even: float
    bubble: float
    activation_bytes: float
    rank: int
    megatron: bool
    has_by_default: bool
    timeline: schedules.Timeline
    layers: Layout
    cuts_vocabulary: bool = False
    overlaps_exchange: bool = False


@dataclass(frozen=True)
class ProfileRequest:
    """Request of the command line; ``vocabulary`` is whole and cut (auto), cut (on) or whole (off).

    With ``auto``, the fastest schedules are looked at with a cut one, too.
    """

    profile: Profile
    num_microbatches: int
    memory_limit: float | None
    post_validation: bool
    vocabulary: str = "auto"

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


Watch = Callable[[str, int, int], None]


def rows(
    asked: ProfileRequest,
    candidates: Sequence[Candidate],
    watch: Watch = lambda text, done, of: None,
) -> tuple[list[Row], dict[str, str]]:
    """Return every schedule, the fastest first, and why others are missing."""
    profile = asked.profile
    fit = Fit.of(profile)
    if asked.vocabulary == "on":
        if asked.why_not_cut is not None:
            raise UsageError(
                f"--vocabulary on: the output layer cannot be cut, because {asked.why_not_cut}"
            )
        candidates = [c if c.megatron else replace(c, cuts_vocabulary=True) for c in candidates]
    found: list[Row] = []
    missing: dict[str, str] = {}
    limits: list[LimitTooSmall] = []
    wanted = {candidate.name for candidate in candidates}
    everyone = [c for c in with_those_of_auto(candidates) if c.name in wanted or not c.megatron]
    settings = list(_settings(everyone, profile))
    for number, (candidate, chunks) in enumerate(settings):
        name = candidate.name if chunks is None else f"{candidate.name} ×{chunks}"
        watch(name, number, len(settings))
        try:
            found.append(_row(asked, fit, candidate, chunks))
        except UsageError as error:
            if candidate.name in wanted:
                missing[name] = str(error)
                limits += [error] if isinstance(error, LimitTooSmall) else []
    if asked.vocabulary == "auto" and asked.why_not_cut is None:
        found += _with_cut(asked, fit, settings, found, watch)
    if profile.pairs and asked.vocabulary != "on" and not asked.post_validation:
        if MEGATRON_INTERLEAVED in wanted:
            wanted.add(MEGATRON_OVERLAP)
            settings += _settings([of_overlap()], profile)
        found += _with_pairs(asked, fit, settings, found, watch)
    for candidate in candidates:
        if candidate.takes_the_best and any(not row.megatron for row in found):
            watch(candidate.name, len(settings), len(settings) + 1)
            found.append(_best_of_all(asked, fit, candidate, found))
    watch("", len(settings), len(settings))
    found = [row for row in found if row.schedule in wanted]
    if not found and limits:
        raise min(limits, key=lambda error: error.needed)
    if not found:
        raise UsageError(next(iter(missing.values()), "no schedule can be had"))
    return sorted(found, key=lambda row: row.seconds), missing


def _with_cut(
    asked: ProfileRequest,
    fit: Fit,
    settings: Sequence[tuple[Candidate, int | None]],
    found: Sequence[Row],
    watch: Watch,
) -> list[Row]:
    """Return the fastest schedules of one or two chunks with a cut vocabulary, as limits allow."""
    ranked = sorted(found, key=lambda row: row.seconds)
    fastest = [(row.schedule, row.chunks) for row in ranked if not row.megatron]
    small = [at for at in fastest if at[1] in (None, 2)][:_CUTS]
    rows = []
    for candidate, chunks in settings:
        if (candidate.name, chunks) in small:
            watch(f"{candidate.name}, cut vocabulary", len(settings), len(settings) + 1)
            with suppress(UsageError):
                rows.append(_row(asked, fit, replace(candidate, cuts_vocabulary=True), chunks))
    return rows


def _with_pairs(
    asked: ProfileRequest,
    fit: Fit,
    settings: Sequence[tuple[Candidate, int | None]],
    found: Sequence[Row],
    watch: Watch,
) -> list[Row]:
    """Return the fastest schedules with the pairs that a run's search finds, and Megatron's own."""
    ranked = sorted(found, key=lambda row: row.seconds)
    able = {candidate.name for candidate, _ in settings if candidate.finds_pairs}
    fastest = [row.schedule for row in ranked if row.schedule in able][:_CUTS]
    rows = []
    for candidate, chunks in settings:
        if candidate.name in fastest or candidate.name == MEGATRON_OVERLAP:
            watch(f"{candidate.name}, pairs", len(settings), len(settings) + 1)
            with suppress(UsageError):
                row = _row(asked, fit, replace(candidate, overlaps_exchange=True), chunks)
                rows += [row] if row.timeline.schedule.pairs else []
    return rows


def _settings(
    candidates: Sequence[Candidate], profile: Profile
) -> Iterator[tuple[Candidate, int | None]]:
    for candidate in candidates:
        if candidate.takes_the_best:
            continue
        for chunks in candidate.chunk_counts(profile.model.layers, profile.pipeline_size):
            if chunks is None or chunks in (2, 4, 8):
                yield candidate, chunks


def _check_groups(asked: ProfileRequest, candidate: Candidate) -> None:
    p, m = asked.profile.pipeline_size, asked.num_microbatches
    if candidate.megatron and candidate.takes_chunks and m % p:
        raise UsageError(f"it needs whole groups of {p} microbatches, and there are {m}")


def _row(asked: ProfileRequest, fit: Fit, candidate: Candidate, chunks: int | None) -> Row:
    profile = asked.profile
    _check_groups(asked, candidate)
    placement = candidate.placement(profile.pipeline_size, chunks)
    layers = profile.model.layers
    even = layout.spread(Layers(layers), placement)
    ends = fit.in_layers(cut=candidate.cuts_vocabulary)
    found = {
        counts: _simulated(asked, fit, candidate, chunks, placement, counts)
        for counts in layout.choices(layers, placement, *ends)
    }
    back_to_back = asked.post_validation and candidate.splits

    def seconds(timeline: schedules.Timeline) -> float:
        return timeline.seconds(back_to_back=back_to_back) + profile.outside

    counts, timeline = min(found.items(), key=lambda entry: seconds(entry[1]))
    peaks = _peaks(timeline, profile.message)
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    bubble = timeline.bubble_rate_back_to_back if back_to_back else timeline.bubble_rate
    return Row(
        schedule=candidate.name,
        runs=candidate.family,
        chunks=chunks,
        layout=_layout_text(counts, profile),
        is_even=counts == even,
        seconds=seconds(timeline),
        seconds_even=seconds(found[even]),
        bubble=bubble,
        activation_bytes=peaks[worst],
        rank=worst,
        megatron=candidate.megatron,
        has_by_default=candidate.has_by_default(counts, placement),
        timeline=timeline,
        layers=counts,
        cuts_vocabulary=candidate.cuts_vocabulary,
        overlaps_exchange=candidate.overlaps_exchange,
    )


def _best_of_all(
    asked: ProfileRequest, fit: Fit, candidate: Candidate, found: Sequence[Row]
) -> Row:
    """Return the fastest row, or the order that ``auto`` finds for its placement, if faster."""
    best = min((row for row in found if not row.megatron), key=lambda row: row.seconds)
    placement, counts = best.timeline.schedule.placement, best.layers
    candidate = replace(
        candidate,
        cuts_vocabulary=best.cuts_vocabulary,
        overlaps_exchange=best.overlaps_exchange,
    )
    try:
        timeline = _simulated(
            asked, fit, candidate, placement.chunks, placement, counts, quick=True
        )
    except UsageError:
        return replace(best, schedule=candidate.name)
    seconds = timeline.seconds(back_to_back=asked.post_validation) + asked.profile.outside
    if seconds >= best.seconds:
        return replace(best, schedule=candidate.name)
    peaks = _peaks(timeline, asked.profile.message)
    bubble = timeline.bubble_rate_back_to_back if asked.post_validation else timeline.bubble_rate
    return replace(
        best,
        schedule=candidate.name,
        runs=candidate.family,
        chunks=placement.chunks,
        seconds=seconds,
        bubble=bubble,
        activation_bytes=max(peaks),
        rank=max(range(len(peaks)), key=peaks.__getitem__),
        timeline=timeline,
    )


def _simulated(
    asked: ProfileRequest,
    fit: Fit,
    candidate: Candidate,
    chunks: int | None,
    placement: Placement,
    counts: Layout,
    *,
    quick: bool = False,
) -> schedules.Timeline:
    if candidate.cuts_vocabulary:
        costs = fit.cut_costs(placement, counts, fit.cutting or Cutting())
    else:
        costs = fit.costs(
            placement,
            counts,
            blocking=candidate.blocking,
            overlaps_exchange=candidate.overlaps_exchange,
        )
    schedule = schedules.build(
        candidate.family,
        pipeline_size=placement.pipeline_size,
        num_microbatches=asked.num_microbatches,
        # a run builds only auto for its measured costs, and every other one for equal costs
        costs=costs if candidate.takes_the_best else _costs_of_a_run(fit, candidate),
        memory_limit=asked.memory_limit,
        chunks=chunks,
        placement=placement if quick else None,
        back_to_back=asked.post_validation and candidate.splits,
        quick=quick,
    )
    return schedules.simulate(schedule, costs)


def _costs_of_a_run(fit: Fit, candidate: Candidate) -> schedules.Costs | None:
    """Return the costs for which a run builds a named schedule; None where these are all equal."""
    if not (candidate.cuts_vocabulary or candidate.overlaps_exchange):
        return None
    profile = fit.profile
    costs = schedules.Costs.uniform(
        pipeline_size=profile.pipeline_size, forward=1.0, backward=1.0, weight=1.0
    )
    if candidate.overlaps_exchange:
        return with_exchange(costs)
    _, output = fit.in_layers()
    return with_counted_vocabulary(costs, profile.model.layers, output)


def _peaks(timeline: schedules.Timeline, message: float) -> Sequence[float]:
    schedule = timeline.schedule
    if sum(map(len, schedule.ranks)) > _LARGE:
        return timeline.peak_memory
    program = schedules.lower(schedule, timeline)
    ranks = range(schedule.placement.pipeline_size)
    return [peak_with_messages(program, rank, timeline.costs, message) for rank in ranks]


def _layout_text(counts: Layout, profile: Profile) -> str:
    multi_token = profile.stages[-1].layers.count("m")
    return layout.text(layout.lettered(counts, multi_token))


def read(arguments: argparse.Namespace) -> tuple[ProfileRequest, list[Candidate]]:
    """Read the profile and check the sizes.

    Raises:
        UsageError: a field or an argument is wrong.
    """
    profile = read_profile(arguments.profile)
    m = arguments.microbatches
    if m is not None and m < 1:
        raise UsageError(f"--microbatches is {m}: give 1 or more")
    MemoryLimit.of(arguments.memory_limit, None, profile.pipeline_size)  # refuses what is none
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
    found: Sequence[Row],
    missing: dict[str, str],
    arguments: argparse.Namespace,
) -> None:
    """Print the result as a table or as JSON."""
    if arguments.format == "json":
        print(json.dumps(_as_json(asked, found, missing), indent=2))
    else:
        _print(asked, found, missing, Console(), arguments.top)


def _as_json(
    asked: ProfileRequest, found: Sequence[Row], missing: dict[str, str]
) -> dict[str, Any]:
    return {
        "schedule_of_the_profile": asked.profile.schedule,
        "num_microbatches": asked.num_microbatches,
        "unsplit": [stage.unsplit for stage in asked.profile.stages],
        "ranked": [
            {name: value for name, value in vars(row).items() if name not in ("timeline", "layers")}
            for row in found
        ],
        "not_possible": missing,
    }


def _print(
    asked: ProfileRequest, found: Sequence[Row], missing: dict[str, str], console: Console, top: int
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


def flags_of(asked: ProfileRequest, row: Row) -> list[str]:
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


def name_of(row: Row) -> str:
    """Return the name of a row in the table; for ``auto``, with what it runs."""
    chunks = "" if row.chunks is None else f" ×{row.chunks}"
    cut = ", cut vocabulary" if row.cuts_vocabulary else ""
    pairs = ", pairs" if row.overlaps_exchange and not row.megatron else ""
    return named(row.schedule, row.runs) + chunks + cut + pairs


def _table(found: Sequence[Row]) -> Table:
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
