"""Parts of all drawings: ticks, memory over time, bars and their colours, titles and labels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_zb.errors import UsageError
from megatron_zb.schedules import Pass, PassKind, Report, Schedule, Timeline

# --- ticks


_STEPS = (1.0, 2.0, 5.0, 10.0)


def ticks(most: float, about: float) -> list[float]:
    """Return round numbers from 0 to ``most``, about ``about`` of them."""
    step = round_step(most, about)
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


def round_step(span: float, about: float) -> float:
    """Return 1, 2 or 5 times a power of ten, of which about ``about`` make ``span``."""
    rough = span / max(about, 1.0)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(s * power for s in _STEPS if s * power >= rough * (1 - 1e-9))


# --- memory over time


@dataclass(frozen=True)
class MemoryLine:
    """Memory of one rank: ``held[i]`` from ``times[i]`` to ``times[i + 1]``, the last for ever.

    Times in seconds; memory in microbatches of 1F1B's first rank (see :func:`microbatch`).
    """

    rank: int
    times: tuple[float, ...]
    held: tuple[float, ...]

    @property
    def peak(self) -> float:
        return max(self.held, default=0.0)


def memory_lines(timeline: Timeline) -> list[MemoryLine]:
    """Return a line for each rank; its highest step is the rank's ``timeline.peak_memory``."""
    return [_line(timeline, rank) for rank in range(len(timeline.start))]


def host_lines(timeline: Timeline) -> list[MemoryLine]:
    """Return a line for what the host holds of each rank, while each pass of the rank runs."""
    unit = timeline.microbatch
    return [
        MemoryLine(rank, start, tuple(held / unit for held in timeline.host_curve(rank)))
        for rank, start in enumerate(timeline.start)
    ]


def worst_of(lines: list[MemoryLine]) -> MemoryLine:
    """Return the first of the lines with the highest peak."""
    return max(lines, key=lambda line: line.peak)


def one_f_one_b_peak(timeline: Timeline) -> int:
    """Count the microbatches on 1F1B's first rank: one for every rank, or all if fewer."""
    schedule = timeline.schedule
    return min(schedule.placement.pipeline_size, schedule.rules.whole_microbatches(schedule))


def _line(timeline: Timeline, rank: int) -> MemoryLine:
    unit = timeline.microbatch
    starts, ends = timeline.start[rank], timeline.end[rank]
    times: list[float] = []
    held: list[float] = []

    def step(time: float, memory: float) -> None:
        if not held or memory / unit != held[-1]:
            times.append(time)
            held.append(memory / unit)

    for i, (within, after) in enumerate(timeline.memory_steps(rank)):
        step(starts[i], within)
        if i + 1 == len(starts) or starts[i + 1] > ends[i]:
            step(ends[i], after)
    return MemoryLine(rank, tuple(times), tuple(held))


# --- bars, colours and words


ONE_SHADE = (PassKind.R, PassKind.O, PassKind.P, PassKind.V)
"""Kinds that look the same for all chunks; of O, P and V a rank runs one for a microbatch."""
# A kind whose ranks have only one chunk has the shade between the two.
_ONE_CHUNK = 0.5
IDLE_COLOUR = "#E9ECF0"
DARK_IDLE_COLOUR = "#6E757F"
MEMORY_SHADES = ("#4B2470", "#8F4FC4", "#CBA9E8")
MEMORY_COLOUR = MEMORY_SHADES[1]
HOST_COLOUR = MEMORY_SHADES[2]
COPY_COLOURS = {True: MEMORY_SHADES[0], False: MEMORY_SHADES[1]}  # to the host, and back
INK = "#000000"


@dataclass(frozen=True)
class TimeUnit:
    """Unit of the times in a drawing.

    ``scale`` converts a timeline's times to this unit, ``symbol`` follows each figure, and
    ``words`` label the axis.
    """

    words: str
    symbol: str = ""
    scale: float = 1.0

    def of(self, time: float, digits: int = 6) -> str:
        """Format a time of the timeline as text, such as ``12.5 ms``."""
        return f"{time * self.scale:.{digits}g} {self.symbol}".rstrip()


COST_UNIT = TimeUnit("time, in the unit of the costs")
SECONDS = TimeUnit("time, s", "s")
MILLISECONDS = TimeUnit("time, ms", "ms", 1000.0)


@dataclass(frozen=True)
class Bar:
    """One pass on the row of its rank.

    ``chunk`` is 0 or 1 for even or odd steps of a relay, and the index of the adapter where several
    share the pipeline.

    The two bars of a pair share its time: ``half`` is 0 for F and 1 for the backward.
    """

    rank: int
    start: float
    end: float
    kind: PassKind
    chunk: int
    microbatch: int
    colour: str
    half: int | None = None


def colour_of(kind: PassKind, chunk: int, chunks: int) -> str:
    """Return the colour of a pass as #RRGGBB; of a rank's model chunks, the first is darkest.

    Raises:
        UsageError: passes of this kind have no colour.
    """
    if kind.shades is None:
        able = ", ".join(it for it in PassKind.all() if it.shades is not None)
        raise UsageError(f"{kind} passes cannot be drawn: there are colours for {able}")
    chunks = 1 if kind in ONE_SHADE else chunks
    return _mixed(*kind.shades, chunk / (chunks - 1) if chunks > 1 else _ONE_CHUNK)


def _mixed(dark: str, light: str, share: float) -> str:
    channels = zip(_channels(dark), _channels(light), strict=True)
    mixed = (round(a + (b - a) * share) for a, b in channels)
    return "#" + "".join(f"{channel:02X}" for channel in mixed)


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def text_colour_on(colour: str) -> str:
    """Return black or white, whichever has the higher contrast (as WCAG 2 defines it)."""
    light = luminance(colour)
    return "#000000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#FFFFFF"


def luminance(colour: str) -> float:
    """Return the relative luminance of #RRGGBB, 0 for black and 1 for white."""
    channels = (channel / 255 for channel in _channels(colour))
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def variants_of(schedule: Schedule) -> int:
    """Count the colours of a kind: one per adapter or model chunk, two for alternating steps."""
    if schedule.rules.has_steps:
        return 2
    return len(schedule.rules.owners) or schedule.placement.chunks


def variant_of(schedule: Schedule, p: Pass) -> int:
    """Return the index of a pass's colour among those of its kind."""
    if schedule.rules.has_steps:
        return schedule.rules.step_of(p) % 2
    if p.kind in ONE_SHADE:
        return 0
    if schedule.rules.owners:
        return schedule.rules.owner_of(p.microbatch)
    return schedule.placement.chunk_of(p.stage)


def bars_of(timeline: Timeline) -> Iterator[Bar]:
    """Yield the bars of all ranks, rank by rank in the order they run.

    Those of a vocabulary-parallel embedding, and D and H, are left out: they take next to no time,
    or none. So are updates of adapters that take none.
    """
    schedule = timeline.schedule
    for rank, passes in enumerate(schedule.ranks):
        half = None
        times = zip(passes, timeline.start[rank], timeline.end[rank], strict=True)
        for position, (p, start, end) in enumerate(times):
            half = 1 if half == 0 else None
            if schedule.pair_at(rank, position) is not None:
                half = 0
            is_no_time = start == end and schedule.rules.owners and p.kind is PassKind.U
            if p.kind.shades is None or is_no_time:
                continue
            chunk = variant_of(schedule, p)
            colour = colour_of(p.kind, chunk, variants_of(schedule))
            number = schedule.rules.microbatch_of(p.microbatch)
            yield Bar(rank, start, end, p.kind, chunk, number, colour, half)


def labels_of(schedule: Schedule) -> list[str]:
    """Return what the legend says of each colour of a kind, behind the words of the kind."""
    if schedule.rules.has_steps:
        return [", even steps", ", odd steps"]
    if schedule.rules.owners:
        word = schedule.rules.owner_word
        return [f", {word} {name}" if word else f", {name}" for name in schedule.rules.owners]
    chunks = schedule.placement.chunks
    return [""] if chunks == 1 else [f", chunk {chunk}" for chunk in range(chunks)]


def legend_of(timeline: Timeline) -> list[tuple[PassKind, int, str]]:
    """Return the kinds and chunks, adapters or even and odd steps that occur, with their labels."""
    found = sorted(
        {(bar.kind, bar.chunk) for bar in bars_of(timeline)},
        key=lambda pair: (PassKind.all().index(pair[0]), pair[1]),
    )
    said = labels_of(timeline.schedule)
    return [
        (kind, chunk, kind.words + ("" if kind in ONE_SHADE else said[chunk]))
        for kind, chunk in found
    ]


def report_of(report: Report) -> str:
    """Describe the distance of a schedule to the lower bound in one sentence."""
    gain = f"at most {report.gap:.1%}" if report.gap >= 5e-4 else "nothing"
    back_to_back = f"; {report.period:.6g} for each of many in a row" if report.period else ""
    return (
        f"makespan {report.makespan:.6g}, lower bound {report.lower_bound:.6g} for this placement "
        f"and memory: {gain} left to gain{back_to_back}"
    )


def ranks_of_job(timeline: Timeline) -> str:
    """Describe which rank of a job a drawn one is, where their numbers differ; else nothing."""
    placement = timeline.schedule.placement
    if timeline.of_job or not placement.mirrored:
        return ""
    last = placement.pipeline_size - 1
    return f"in a job, ranks 0 to {last} of this drawing are Megatron's pipeline ranks {last} to 0"


def title_of(timeline: Timeline) -> str:
    """Return the name, the sizes, the bubble rate and the peak activation memory in one line.

    Where passes belong to steps, as in a relay, the memory is left out.
    """
    schedule = timeline.schedule
    ranks = schedule.placement.pipeline_size
    sizes = (
        f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {schedule.rules.sizes_in_words(schedule)}"
    )
    bubble = f"{schedule.name}: {sizes}; bubble rate {timeline.bubble_rate:.1%}"
    if schedule.rules.has_steps:
        return bubble
    baseline, peak = one_f_one_b_peak(timeline), max(timeline.peak_microbatches)
    share = f"{peak / baseline:.2f} of 1F1B's"
    return f"{bubble}; peak activation memory {peak:.6g} microbatches ({share})"
