"""A schedule and the memory of its ranks as SVG, to stand in a page as it is.

The explorer draws with the same sizes and colours (``parts/explorer.js``), which it gets from here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from megatron_zb.memory_lines import MemoryLine, memory_lines, one_f_one_b_peak, worst_of
from megatron_zb.palette import (
    KIND_NAMES,
    REFERENCE_COLOUR,
    WORST_RANK_COLOUR,
    Bar,
    bars_of,
    colour_of,
    legend_of,
    rank_colour,
    text_colour_on,
)
from megatron_zb.schedules import Timeline

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True)
class Sizes:
    """Pixels; times are drawn so that nine passes of ten are at least ``shortest`` wide, or as wide
    as the limits of the whole, ``least`` and ``most``, allow.

    ``labels`` is left of the drawing and ``right`` right of it; a bar is ``bar`` high in its
    ``row``; ``memory`` is the height of the lower panel and ``gap`` what is between the two.
    """

    labels: int = 58
    right: int = 12
    row: int = 24
    bar: int = 21
    gap: int = 30
    memory: int = 120
    axis: int = 34
    shortest: float = 11.5
    least: int = 640
    most: int = 4000
    digit: float = 5.2


SIZES = Sizes()
_STEPS = (1.0, 2.0, 5.0, 10.0)


def colours() -> dict[str, Any]:
    """The colours of passes by kind and chunk (two), those of their numbers, and of memory."""
    bars = {kind.value: [colour_of(kind, chunk) for chunk in range(2)] for kind in KIND_NAMES}
    return {
        "bars": bars,
        "numbers": {kind: [text_colour_on(c) for c in pair] for kind, pair in bars.items()},
        "ranks": [rank_colour(0, 2), rank_colour(1, 2)],
        "worst": WORST_RANK_COLOUR,
        "reference": REFERENCE_COLOUR,
        "kinds": {kind.value: name for kind, name in KIND_NAMES.items()},
    }


def sizes() -> dict[str, float]:
    """The sizes by name, for the explorer."""
    return asdict(SIZES)


def legend(timeline: Timeline) -> list[tuple[str, str]]:
    """Colour and words of each kind of pass that occurs."""
    chunks = timeline.schedule.placement.chunks
    return [(colour_of(kind, chunk, chunks), words) for kind, chunk, words in legend_of(timeline)]


def rank_legend(timeline: Timeline) -> list[dict[str, Any]]:
    """Colour and peak of the line of each rank, in microbatches; the worst is marked."""
    lines = memory_lines(timeline)
    worst = worst_of(lines)
    return [
        {
            "rank": line.rank,
            "colour": _line_colour(line, len(lines), line is worst),
            "peak": line.peak,
            "is_worst": line is worst,
        }
        for line in lines
    ]


def draw(timeline: Timeline, title: str) -> Markup:
    """The picture: bars above, memory below, one axis of time; ``title`` is what it is called."""
    from markupsafe import Markup, escape

    scale = _Scale(timeline)
    height = scale.bottom + SIZES.axis
    body = "".join((*_bars(timeline, scale), *_axis(scale), *_memory(timeline, scale)))
    return Markup(
        f'<svg class="schedule" role="img" width="{scale.width}" height="{height}" '
        f'viewBox="0 0 {scale.width} {height}"><title>{escape(title)}</title>{body}</svg>'
    )


class _Scale:
    """From seconds, ranks and microbatches to pixels."""

    def __init__(self, timeline: Timeline) -> None:
        spans = sorted(bar.end - bar.start for bar in bars_of(timeline) if bar.end > bar.start)
        wanted = timeline.makespan / spans[len(spans) // 10] * SIZES.shortest
        self.inner = round(min(max(wanted, SIZES.least), SIZES.most))
        self.width = SIZES.labels + self.inner + SIZES.right
        self.makespan = timeline.makespan
        self.per_second = self.inner / timeline.makespan
        self.first = min(times[0] for times in timeline.start if times)
        self.top = timeline.schedule.placement.pipeline_size * SIZES.row + SIZES.gap
        self.bottom = self.top + SIZES.memory
        self.most = max(one_f_one_b_peak(timeline), *(m.peak for m in memory_lines(timeline)))

    def x(self, time: float) -> float:
        return SIZES.labels + (time - self.first) * self.per_second

    def y(self, held: float) -> float:
        return self.bottom - held / self.most * (SIZES.memory - 8)


def _number(value: float) -> str:
    """With as many digits as can be seen."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _bars(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    """Names of the ranks, one path for all bars of a colour, and numbers where there is room."""
    ranks = timeline.schedule.placement.pipeline_size
    ground = ranks * SIZES.row
    yield f'<rect class="ground" x="{SIZES.labels}" y="0" width="{scale.inner}" height="{ground}"/>'
    for rank in range(ranks):
        y = rank * SIZES.row + SIZES.row / 2
        yield f'<text class="name" x="{SIZES.labels - 8}" y="{_number(y)}">rank {rank}</text>'
    bars = sorted(bars_of(timeline), key=lambda bar: (bar.kind.value, bar.chunk))
    for _, group in groupby(bars, key=lambda bar: (bar.kind, bar.chunk)):
        yield from _same_colour(list(group), scale)


def _same_colour(bars: Sequence[Bar], scale: _Scale) -> Iterator[str]:
    colour = bars[0].colour
    path = "".join(
        f"M{_number(scale.x(bar.start))},{_number(_top(bar))}"
        f"h{_number(width := (bar.end - bar.start) * scale.per_second)}"
        f"v{SIZES.bar}h-{_number(width)}z"
        for bar in bars
    )
    kind, chunk = bars[0].kind.value, bars[0].chunk
    yield f'<path class="bars" data-kind="{kind}" data-chunk="{chunk}" fill="{colour}" d="{path}"/>'
    yield f'<g class="numbers" fill="{text_colour_on(colour)}">'
    for bar in bars:
        number = str(bar.microbatch)
        if (bar.end - bar.start) * scale.per_second >= len(number) * SIZES.digit + 1:
            x, y = scale.x((bar.start + bar.end) / 2), _top(bar) + SIZES.bar / 2
            yield f'<text x="{_number(x)}" y="{_number(y)}">{number}</text>'
    yield "</g>"


def _top(bar: Bar) -> float:
    return bar.rank * SIZES.row + (SIZES.row - SIZES.bar) / 2


def _axis(scale: _Scale) -> Iterator[str]:
    y = scale.bottom
    yield f'<path class="axis" d="M{SIZES.labels},{scale.top}V{y}h{scale.inner}"/>'
    for time in ticks(scale.makespan, scale.inner / 90):
        x = _number(scale.x(scale.first + time))
        yield f'<path class="axis" d="M{x},{y}v4"/>'
        yield f'<text class="tick" x="{x}" y="{y + 15}">{time:.6g}</text>'
    for held in ticks(scale.most, 4):
        level = _number(scale.y(held))
        yield f'<text class="name" x="{SIZES.labels - 8}" y="{level}">{held:g}</text>'
    yield f'<text class="tick" x="{SIZES.labels + scale.inner / 2:g}" y="{y + 29}">time</text>'
    above = f'x="{SIZES.labels}" y="{scale.top - 8}"'
    yield f'<text class="caption" {above}>activation memory held, in microbatches of a rank</text>'


def ticks(most: float, about: float) -> list[float]:
    """Round numbers from 0 to ``most``, about so many."""
    rough = most / max(about, 1.0)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in _STEPS if s * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


def _memory(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    """The line of each rank, that of the worst on top, and the level of 1F1B."""
    lines = memory_lines(timeline)
    worst, stock = worst_of(lines), one_f_one_b_peak(timeline)
    y = _number(scale.y(stock))
    yield (
        f'<path class="reference" stroke="{REFERENCE_COLOUR}" '
        f'd="M{SIZES.labels},{y}h{scale.inner}"/>'
    )
    for line in sorted(lines, key=lambda line: line is worst):
        yield _line(line, len(lines), line is worst, scale)
    yield (
        f'<text class="level" x="{SIZES.labels + 4}" y="{_number(scale.y(stock) + 12)}">'
        f"1F1B's peak: {stock}</text>"
    )


def _line(line: MemoryLine, ranks: int, is_worst: bool, scale: _Scale) -> str:
    steps = zip(line.times, line.held, strict=True)
    path = "".join(f"H{_number(scale.x(t))}V{_number(scale.y(held))}" for t, held in steps)
    name = "line worst" if is_worst else "line"
    return (
        f'<path class="{name}" data-rank="{line.rank}" data-peak="{line.peak:.6g}" '
        f'stroke="{_line_colour(line, ranks, is_worst)}" '
        f'd="M{SIZES.labels},{_number(scale.y(0))}{path}"/>'
    )


def _line_colour(line: MemoryLine, ranks: int, is_worst: bool) -> str:
    return WORST_RANK_COLOUR if is_worst else rank_colour(line.rank, ranks)
