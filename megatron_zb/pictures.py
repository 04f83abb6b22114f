"""Draw a schedule as a PNG or SVG picture: a row for each rank, a bar for each pass.

Below the bars, on the same axis of time, is the activation memory that each rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_zb.errors import UsageError
from megatron_zb.memory_lines import MemoryLine, memory_lines, one_f_one_b_peak, worst_of
from megatron_zb.palette import (
    REFERENCE_COLOUR,
    WORST_RANK_COLOUR,
    bars_of,
    colour_of,
    legend_of,
    rank_colour,
    text_colour_on,
    title_of,
    variants_of,
)
from megatron_zb.schedules import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
DOTS_PER_INCH = 100
# Inches: a picture of 8 ranks and 16 microbatches fills a common screen without being scaled.
ROW_HEIGHT = 0.42
WIDTH_OF_SHORTEST_PASS = 0.17
MARGINS = (0.8, 1.5)
LEGEND_ROW_HEIGHT = 0.2
MEMORY_HEIGHT = 1.5
WIDTH_OF_RANK_NAME = 1.1
WIDTHS = (9.0, 19.0)
NUMBER_SIZE = 8.0
# The width of one digit, as a share of its size; a point is 1/72 inch.
DIGIT_WIDTH = 0.64 / 72


def save_picture(timeline: Timeline, path: Path) -> None:
    """Write a picture of a schedule; the ending of the path, .png or .svg, is its format.

    Raises:
        UsageError: another ending, a folder that cannot be written, or matplotlib is missing.
    """
    _save(lambda: draw(timeline), path)


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise UsageError(f"cannot write '{path}': {error.strerror}") from error


def draw(timeline: Timeline) -> Figure:
    """Draw a schedule.

    Raises:
        UsageError: matplotlib is missing.
    """
    if timeline.schedule.relay is not None:
        return _draw_relay(timeline)
    placement = timeline.schedule.placement
    width = _width(timeline)
    rows = placement.pipeline_size * ROW_HEIGHT
    names_in_a_row = int((width - MARGINS[0]) / WIDTH_OF_RANK_NAME)
    rows_of_names = -(-placement.pipeline_size // names_in_a_row)
    below = MEMORY_HEIGHT + rows_of_names * LEGEND_ROW_HEIGHT
    height = rows + below + MARGINS[1] + (placement.chunks - 1) * LEGEND_ROW_HEIGHT
    figure = _figure(width, height)
    bars, memory = figure.subplots(2, 1, sharex=True, height_ratios=(rows, MEMORY_HEIGHT))
    _draw_bars(bars, timeline, inches_per_second=(width - MARGINS[0]) / timeline.makespan)
    _label(bars, timeline)
    _draw_memory(memory, timeline, names_in_a_row)
    return figure


def _draw_relay(timeline: Timeline) -> Figure:
    """Bars alone; the share of the time in which a rank computes is beside its name."""
    width = _width(timeline)
    rows = timeline.schedule.placement.pipeline_size
    figure = _figure(width, rows * ROW_HEIGHT + MARGINS[1] + LEGEND_ROW_HEIGHT)
    axes = figure.subplots()
    _draw_bars(axes, timeline, inches_per_second=(width - MARGINS[0]) / timeline.makespan)
    _label(axes, timeline)
    named = [f"rank {rank}: {share:.1%}" for rank, share in enumerate(timeline.utilisation)]
    axes.set_yticks(range(rows), named)
    axes.tick_params(axis="x", length=3, labelbottom=True)
    axes.set_xlabel("time")
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
    axes[-1].tick_params(axis="x", length=3, labelbottom=True)
    axes[-1].set_xlabel("seconds")
    return figure


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
    bars = list(bars_of(timeline))
    axes.barh(
        y=[bar.rank for bar in bars],
        width=[bar.end - bar.start for bar in bars],
        left=[bar.start for bar in bars],
        height=0.86,
        color=[bar.colour for bar in bars],
        edgecolor="white",
        linewidth=0.6,
    )
    for bar in bars:
        number = str(bar.microbatch)
        room = (bar.end - bar.start) * inches_per_second
        size = min(NUMBER_SIZE, room / (DIGIT_WIDTH * len(number)))
        if size >= NUMBER_SIZE * 0.7:
            axes.text(
                (bar.start + bar.end) / 2,
                bar.rank,
                number,
                size=size,
                color=text_colour_on(bar.colour),
                ha="center",
                va="center_baseline",
            )


def _label(axes: Axes, timeline: Timeline, title: str = "", *, legend: bool = True) -> None:
    rows = timeline.schedule.placement.pipeline_size
    axes.set_title(title or title_of(timeline), size=11, loc="left")
    axes.set_yticks(range(rows), [f"rank {rank}" for rank in range(rows)])
    axes.set_ylim(rows - 0.5, -0.5)
    first = min(times[0] for times in timeline.start if times)
    axes.set_xlim(first, first + timeline.makespan)
    axes.set_facecolor("#F2F2F2")
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
    axes.figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(kinds),
        frameon=False,
        fontsize=9,
    )


def _draw_memory(axes: Axes, timeline: Timeline, names_in_a_row: int) -> None:
    """One line for each rank, the one with the most memory on top, and 1F1B's peak."""
    lines = memory_lines(timeline)
    worst, stock = worst_of(lines), one_f_one_b_peak(timeline)
    for line in lines:
        _draw_line(axes, line, len(lines), is_worst=line is worst)
    axes.axhline(stock, color=REFERENCE_COLOUR, linewidth=1.0, linestyle=(0, (6, 3)), zorder=1)
    axes.annotate(
        f"1F1B's peak: {stock:g}",
        (1, stock),
        xytext=(-3, -3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        size=NUMBER_SIZE,
        ha="right",
        va="top",
    )
    axes.set_ylim(0, 1.06 * max(stock, worst.peak))
    axes.set_ylabel("microbatches held", size=9)
    axes.locator_params(axis="y", integer=True, nbins=5)
    axes.set_xlabel("time")
    axes.set_facecolor("#F2F2F2")
    axes.spines[["top", "right"]].set_visible(False)
    _name_ranks(axes, worst.rank, names_in_a_row)


def _draw_line(axes: Axes, line: MemoryLine, ranks: int, *, is_worst: bool) -> None:
    axes.step(
        line.times,
        line.held,
        where="post",
        color=WORST_RANK_COLOUR if is_worst else rank_colour(line.rank, ranks),
        linewidth=2.4 if is_worst else 1.1,
        zorder=3 if is_worst else 2,
        label=f"rank {line.rank}: {line.peak:.4g}",
    )


def _name_ranks(axes: Axes, worst: int, columns: int) -> None:
    """The names of the lines with their peaks, above the panel."""
    legend = axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        frameon=False,
        fontsize=NUMBER_SIZE,
        handlelength=1.2,
        columnspacing=1.2,
        borderaxespad=0.2,
        title="activation memory of each rank over time, and its peak, in microbatches of a rank",
        title_fontproperties={"size": 9},
        alignment="left",
    )
    legend.get_texts()[worst].set_fontweight("bold")
