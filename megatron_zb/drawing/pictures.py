"""Draw a schedule as a PNG or SVG picture: a row for each rank, a bar for each pass.

Below the bars, on the same axis of time, is the activation memory that each rank holds, in a row of
its own. Where activations are offloaded, the copies of each rank follow, and what its host holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_zb import files
from megatron_zb.drawing.chart import (
    COPY_COLOURS,
    COST_UNIT,
    HOST_COLOUR,
    IDLE_COLOUR,
    INK,
    MEMORY_COLOUR,
    SECONDS,
    Bar,
    MemoryLine,
    TimeUnit,
    bars_of,
    colour_of,
    host_lines,
    legend_of,
    memory_lines,
    one_f_one_b_peak,
    text_colour_on,
    title_of,
    variants_of,
    worst_of,
)
from megatron_zb.errors import UsageError
from megatron_zb.schedules import PassKind, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
DOTS_PER_INCH = 100
# Inches: a picture of 8 ranks and 16 microbatches fills a common screen without being scaled.
ROW_HEIGHT = 0.42
BAR_HEIGHT = 0.86  # of a row
WIDTH_OF_SHORTEST_PASS = 0.17
MARGINS = (0.8, 1.5)
LEGEND_ROW_HEIGHT = 0.2
MEMORY_ROW_HEIGHT = 0.25
WIDTH_OF_PEAK = 0.6
WIDTHS = (9.0, 19.0)
NUMBER_SIZE = 8.0
# Between bars; of short ones a tenth, so that it does not hide them.
GAP_POINTS = 0.6
GAP_SHARE = 0.1
# The width of one digit, as a share of its size; a point is 1/72 inch.
DIGIT_WIDTH = 0.64 / 72


def save_picture(timeline: Timeline, path: Path, unit: TimeUnit = COST_UNIT) -> None:
    """Write a picture of a schedule; the ending of the path, .png or .svg, is its format.

    Raises:
        UsageError: another ending, a folder that cannot be written, or matplotlib is missing.
    """
    _save(lambda: draw(timeline, unit), path)


def save_pictures(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Write the same schedule carried out in several ways, one below the other on one time axis.

    Raises:
        UsageError: as :func:`save_picture`.
    """
    _save(lambda: draw_below(timelines), path)


def _save(make: Callable[[], Figure], path: Path) -> None:
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"cannot draw into '{path}': give a name that ends in .png or .svg")
    figure = make()
    kind = path.suffix[1:].lower()
    files.replace(path, lambda new: figure.savefig(new, dpi=DOTS_PER_INCH, format=kind))


def draw(timeline: Timeline, unit: TimeUnit = COST_UNIT) -> Figure:
    """Draw a schedule, with its times in a unit.

    Raises:
        UsageError: matplotlib is missing.
    """
    if timeline.schedule.rules.has_steps:
        return _draw_steps(timeline, unit)
    placement = timeline.schedule.placement
    width = _width(timeline)
    rows = (ROW_HEIGHT, *[MEMORY_ROW_HEIGHT] * (2 if timeline.copies else 1))
    heights = [placement.pipeline_size * row for row in rows]
    legend = (variants_of(timeline.schedule) + 1) * LEGEND_ROW_HEIGHT
    figure = _figure(width, sum(heights) + MARGINS[1] + legend)
    panels = figure.subplots(len(rows), 1, sharex=True, height_ratios=heights)
    inner = width - MARGINS[0] - WIDTH_OF_PEAK
    _draw_bars(panels[0], timeline, inches_per_second=inner / timeline.makespan)
    _label(panels[0], timeline)
    _draw_memory(panels[1], timeline)
    if timeline.copies:
        panels[1].tick_params(axis="x", length=0, labelbottom=False)
        _draw_copies(panels[2], timeline)
    _label_time(panels[-1], unit)
    return figure


def _draw_steps(timeline: Timeline, unit: TimeUnit) -> Figure:
    """Draw only bars, with the share of the time in which a rank computes beside its name."""
    width = _width(timeline)
    rows = timeline.schedule.placement.pipeline_size
    figure = _figure(width, rows * ROW_HEIGHT + MARGINS[1] + LEGEND_ROW_HEIGHT)
    axes = figure.subplots()
    _draw_bars(axes, timeline, inches_per_second=(width - MARGINS[0]) / timeline.makespan)
    _label(axes, timeline)
    named = [
        f"rank {timeline.number(rank)}: {share:.1%}"
        for rank, share in enumerate(timeline.utilisation)
    ]
    axes.set_yticks(range(rows), named)
    _label_time(axes, unit)
    return figure


def draw_below(timelines: Mapping[str, Timeline]) -> Figure:
    """Draw bars for each of some timelines of one schedule, each with its name and seconds.

    Raises:
        UsageError: matplotlib is missing.
    """
    longest = max(timelines.values(), key=lambda timeline: timeline.makespan)
    width = _width(longest)
    placement = longest.schedule.placement
    rows = placement.pipeline_size * ROW_HEIGHT
    figure = _figure(width, len(timelines) * (rows + 0.4) + MARGINS[1])
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, timeline) in zip(axes, timelines.items(), strict=True):
        _draw_bars(panel, timeline, (width - MARGINS[0]) / longest.makespan)
        _label(panel, timeline, f"{name}: {timeline.makespan:.4g} s", legend=panel is axes[-1])
        panel.set_xlim(0, longest.makespan)
    _label_time(axes[-1], SECONDS)
    return figure


def _label_time(axes: Axes, unit: TimeUnit) -> None:
    axes.tick_params(axis="x", length=3, labelbottom=True)
    axes.xaxis.set_major_formatter(lambda time, _: f"{time * unit.scale:.6g}")
    axes.set_xlabel(unit.words, size=9)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "pictures need matplotlib: install it with pip install 'megatron-zb[plots]'"
        ) from error
    return Figure((width, height), layout="constrained")


def _width(timeline: Timeline) -> float:
    shortest = min(bar.end - bar.start for bar in bars_of(timeline) if bar.end > bar.start)
    wanted = timeline.makespan / shortest * WIDTH_OF_SHORTEST_PASS + MARGINS[0]
    return min(max(wanted, WIDTHS[0]), WIDTHS[1])


def _draw_bars(axes: Axes, timeline: Timeline, inches_per_second: float) -> None:
    from matplotlib.patches import Rectangle

    bars = list(bars_of(timeline))
    rooms = [(bar.end - bar.start) * inches_per_second for bar in bars]
    for bar, room in zip(bars, rooms, strict=True):  # barh finds limits, which are set, for seconds
        axes.add_artist(
            Rectangle(
                (bar.start, bar.rank - (0.0 if bar.half == 1 else BAR_HEIGHT / 2)),
                bar.end - bar.start,
                BAR_HEIGHT if bar.half is None else BAR_HEIGHT / 2,
                facecolor=bar.colour,
                edgecolor="white",
                linewidth=min(GAP_POINTS, room * 72 * GAP_SHARE),
            )
        )
    numbered = 0
    for bar, room in zip(bars, rooms, strict=True):
        number = str(bar.microbatch)
        size = min(NUMBER_SIZE, room / (DIGIT_WIDTH * len(number)))
        if size >= NUMBER_SIZE * 0.7:
            numbered += 1
            axes.text(
                (bar.start + bar.end) / 2,
                bar.rank + (0.0 if bar.half is None else BAR_HEIGHT * (bar.half - 0.5) / 2),
                number,
                size=size if bar.half is None else size * 0.7,
                color=text_colour_on(bar.colour),
                ha="center",
                va="center_baseline",
                in_layout=False,  # it lies within its bar; asking each where takes half the time
            )
    if numbered < len(bars) / 2:
        _number_some(axes, bars, inches_per_second, timeline.schedule.rules.number_word)


def _number_some(axes: Axes, bars: list[Bar], inches_per_second: float, word: str) -> None:
    """Draw a tick on top where every few microbatches begin, for bars too short for numbers."""
    begins: dict[int, float] = {}
    for bar in bars:
        if bar.kind in (PassKind.F, PassKind.T):
            begins[bar.microbatch] = min(bar.start, begins.get(bar.microbatch, bar.start))
    room = NUMBER_SIZE * DIGIT_WIDTH * (len(str(max(begins))) + 2) / inches_per_second
    top, last = axes.secondary_xaxis("top"), -room
    ticks: dict[int, float] = {}
    for microbatch, start in sorted(begins.items()):
        if start - last >= room:
            ticks[microbatch], last = start, start
    top.set_xticks(list(ticks.values()), [str(microbatch) for microbatch in ticks])
    top.tick_params(length=3, pad=1, labelsize=NUMBER_SIZE)
    top.set_xlabel(f"first forward of {word}", size=NUMBER_SIZE, loc="left", labelpad=1)
    top.spines[:].set_visible(False)


def _label(axes: Axes, timeline: Timeline, title: str = "", *, legend: bool = True) -> None:
    rows = timeline.schedule.placement.pipeline_size
    axes.set_title(title or title_of(timeline), size=11, loc="left")
    axes.set_yticks(range(rows), _names(timeline))
    axes.set_ylim(rows - 0.5, -0.5)
    first = min(times[0] for times in timeline.start if times)
    axes.set_xlim(first, first + timeline.makespan)
    axes.set_facecolor(IDLE_COLOUR)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=0, labelbottom=False)
    if legend:
        _draw_legend(axes, timeline)


def _draw_legend(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    # A column for each kind and a row for each chunk, whether it occurs or not.
    chunks = variants_of(timeline.schedule)
    words = {(kind, chunk): text for kind, chunk, text in legend_of(timeline)}
    kinds = list(dict.fromkeys(kind for kind, _ in words))
    handles = [
        Patch(color=colour_of(kind, chunk, chunks), label=words[kind, chunk])
        if (kind, chunk) in words
        else Patch(alpha=0, label="")
        for kind in kinds
        for chunk in range(chunks)
    ]
    handles += [Patch(color=IDLE_COLOUR, label="idle")]
    handles += [Patch(alpha=0, label="")] * (chunks - 1)
    axes.figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(kinds) + 1,
        frameon=False,
        fontsize=9,
    )


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    """Draw a row for each rank: its memory, 1F1B's peak as a dashed line, its peak at the end."""
    lines = memory_lines(timeline)
    worst, baseline = worst_of(lines), one_f_one_b_peak(timeline)
    top = max(worst.peak, baseline)
    for line in lines:
        _draw_line(axes, line, top, MEMORY_COLOUR, is_worst=line is worst)
        level = _height(line.rank, baseline, top)
        axes.axhline(level, color=INK, linewidth=0.8, linestyle=(0, (5, 3)))
    _label_rows(
        axes,
        timeline,
        "activation memory of each rank over time, and its peak, in microbatches of a rank; "
        f"dashed: 1F1B's peak, {baseline:g}",
    )
    axes.get_yticklabels()[worst.rank].set_fontweight("bold")


def _names(timeline: Timeline) -> list[str]:
    ranks = range(timeline.schedule.placement.pipeline_size)
    return [f"rank {timeline.number(rank)}" for rank in ranks]


def _label_rows(axes: Axes, timeline: Timeline, title: str) -> None:
    rows = timeline.schedule.placement.pipeline_size
    axes.set_yticks(range(rows), _names(timeline), size=NUMBER_SIZE)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_title(title, size=9, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_copies(axes: Axes, timeline: Timeline) -> None:
    """Draw a row for each rank: what its host holds, its copies there and back, and the peak."""
    from matplotlib.patches import Rectangle

    lines = host_lines(timeline)
    top = max(line.peak for line in lines)
    for line, copies in zip(lines, timeline.copies, strict=True):
        _draw_line(axes, line, top, HOST_COLOUR, is_worst=line is worst_of(lines))
        for copy in copies:
            axes.add_artist(
                Rectangle(
                    (copy.start, line.rank - (0.3 if copy.to_host else 0.0)),
                    copy.end - copy.start,
                    0.3,
                    facecolor=COPY_COLOURS[copy.to_host],
                    edgecolor="white",
                    linewidth=GAP_POINTS / 2,
                )
            )
    _label_rows(
        axes,
        timeline,
        "copies to the host (above) and back (below); behind them what the host holds, and the "
        "peak, in microbatches of a rank",
    )


def _height(rank: int, held: float, top: float) -> float:
    """Return the y coordinate of an amount of memory in a rank's row, at most 0.9 of a row high."""
    return rank + 0.46 - 0.9 * held / top


def _draw_line(axes: Axes, line: MemoryLine, top: float, colour: str, *, is_worst: bool) -> None:
    axes.fill_between(
        line.times,
        [_height(line.rank, held, top) for held in line.held],
        _height(line.rank, 0, top),
        step="post",
        color=colour,
        linewidth=0,
    )
    axes.annotate(
        f"{line.peak:.4g}" + (" most" if is_worst else ""),
        (1, line.rank),
        xytext=(4, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        size=NUMBER_SIZE,
        va="center",
        weight="bold" if is_worst else "normal",
    )
