"""Pictures of schedules: right bars in the right places, numbers that can be read."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import drawn_sizes
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from megatron_zb import schedules
from megatron_zb.drawing import html_drawing
from megatron_zb.drawing.chart import (
    COPY_COLOURS,
    MILLISECONDS,
    bars_of,
    legend_of,
    memory_lines,
    title_of,
)
from megatron_zb.drawing.pictures import draw, draw_below
from megatron_zb.schedules import PassKind, Timeline
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.placement import looped

pytestmark = pytest.mark.usefixtures("brief_searches")


@cache
def timeline_of(name: str, pipeline_size: int, num_microbatches: int) -> Timeline:
    costs = schedules.Costs.uniform(
        pipeline_size=pipeline_size, forward=1.0, backward=1.2, weight=0.9, p2p=0.05
    )
    schedule = schedules.build(
        name, pipeline_size=pipeline_size, num_microbatches=num_microbatches, costs=costs
    )
    return schedules.simulate(schedule, costs)


@cache
def drawn(name: str, pipeline_size: int, num_microbatches: int) -> Figure:
    """Draw a schedule for several tests, which look at it and leave it as it is."""
    figure = draw(timeline_of(name, pipeline_size, num_microbatches))
    FigureCanvasAgg(figure).draw()
    return figure


@pytest.mark.parametrize("name", drawn_sizes.ONE_OF_EACH_SHAPE)
def test_bars_are_where_the_passes_are(name: str) -> None:
    timeline = timeline_of(name, 4, 8)
    axes, _ = drawn(name, 4, 8).axes
    found = [
        (patch.get_x(), patch.get_width(), patch.get_y() + patch.get_height() / 2)
        for patch in axes.patches
        if isinstance(patch, Rectangle)
    ]
    expected = [
        (timeline.start[rank][i], timeline.end[rank][i] - timeline.start[rank][i], rank)
        for rank, passes in enumerate(timeline.schedule.ranks)
        for i in range(len(passes))
    ]
    assert found == [pytest.approx(bar) for bar in expected]
    colours = [to_hex(patch.get_facecolor()).upper() for patch in axes.patches]
    assert colours == [bar.colour for bar in bars_of(timeline)]


@pytest.mark.parametrize("name", drawn_sizes.ONE_OF_EACH_SHAPE)
def test_8_ranks_and_16_microbatches_are_readable(name: str) -> None:
    """Every bar has its number, and every number has room in its bar.

    Four chunks have twice as many bars as two, so fewer of them fit.
    """
    size = (4, 8) if timeline_of(name, 4, 8).schedule.placement.chunks > 2 else (8, 16)
    timeline, figure = timeline_of(name, *size), drawn(name, *size)
    assert figure.get_figwidth() * figure.dpi <= 1920
    axes, memory = figure.axes
    bars = list(bars_of(timeline))
    assert [text.get_text() for text in axes.texts] == [str(bar.microbatch) for bar in bars]
    for text, patch in zip(axes.texts, axes.patches, strict=True):
        number, bar = text.get_window_extent(), patch.get_window_extent()
        assert bar.x0 - 1 <= number.x0 < number.x1 <= bar.x1 + 1
        assert float(text.get_fontsize()) >= 5.5
    for text in [*memory.texts, *memory.get_yticklabels()]:
        assert 0 <= text.get_window_extent().x0 < text.get_window_extent().x1 <= figure.bbox.x1
        assert float(text.get_fontsize()) >= 8
    rows = timeline.schedule.placement.pipeline_size
    assert memory.get_window_extent().height >= 20 * rows
    assert memory.get_window_extent().y1 <= axes.get_window_extent().y0 + 1


@pytest.mark.parametrize("name", drawn_sizes.ONE_OF_EACH_SHAPE)
def test_each_rank_has_a_row_of_memory_with_the_simulators_peak(name: str) -> None:
    timeline = timeline_of(name, 4, 8)
    bars, memory = drawn(name, 4, 8).axes
    heights, baseline = [], []
    for rank, (held, line) in enumerate(zip(memory.collections, memory.get_lines(), strict=True)):
        levels = np.asarray(held.get_paths()[0].vertices, dtype=float)[:, 1]
        assert rank - 0.5 <= levels.min() < levels.max() <= rank + 0.5
        heights.append(levels.max() - levels.min())
        baseline.append(levels.max() - np.asarray(line.get_ydata(), dtype=float)[0])
    found = [4 * height / level for height, level in zip(heights, baseline, strict=True)]
    assert found == pytest.approx(timeline.peak_memory)
    worst = timeline.peak_memory.index(max(timeline.peak_memory))
    said = [f"{peak:.4g}" for peak in timeline.peak_memory]
    said[worst] += " most"
    assert [text.get_text() for text in memory.texts] == said
    assert [text.get_fontweight() == "bold" for text in memory.texts] == [
        rank == worst for rank in range(4)
    ]
    names = [label.get_text() for label in memory.get_yticklabels()]
    assert names == [f"rank {rank}" for rank in range(4)]
    assert "dashed: 1F1B's peak, 4" in memory.get_title(loc="left")
    assert bars.get_xlim() == memory.get_xlim()


def test_the_axis_of_time_has_its_unit() -> None:
    timeline = timeline_of("1f1b", 4, 8)
    _, memory = drawn("1f1b", 4, 8).axes
    assert memory.get_xlabel() == "time, in the unit of the costs"
    figure = draw(timeline, MILLISECONDS)
    FigureCanvasAgg(figure).draw()
    _, memory = figure.axes
    assert memory.get_xlabel() == "time, ms"
    for place, label in zip(memory.get_xticks(), memory.get_xticklabels(), strict=True):
        assert float(label.get_text()) == pytest.approx(1000 * place)
    axes = draw_below({"measured": timeline, "predicted": timeline}).axes
    assert axes[-1].get_xlabel() == "time, s"


@pytest.mark.parametrize("name", schedules.names())
def test_a_memory_line_holds_what_the_passes_before_it_left(name: str) -> None:
    """At any time: what has begun its F and not ended its W or BW, counted here anew."""
    timeline = timeline_of(name, 4, 8)
    chunks = timeline.schedule.placement.chunks
    for line in memory_lines(timeline):
        rank = line.rank
        spans = list(zip(timeline.start[rank], timeline.end[rank], strict=True))
        for time in [(start + end) / 2 for start, end in spans]:
            held = 0
            for p, (start, end) in zip(timeline.schedule.ranks[rank], spans, strict=True):
                held += p.kind is PassKind.F and start <= time
                held -= p.kind in (PassKind.W, PassKind.BW) and end <= time
            step = max(i for i, since in enumerate(line.times) if since <= time)
            assert line.held[step] == pytest.approx(held / chunks)
        assert line.held[-1] == pytest.approx(0)
        assert list(line.times) == sorted(set(line.times))


def test_memory_in_bytes_is_told_in_microbatches_and_b_frees_its_share() -> None:
    costs = schedules.Costs.of_slices(
        pipeline_size=2,
        forward=[1.0, 1.0],
        backward=[1.0, 1.0],
        weight=[1.0, 1.0],
        activation=[100.0, 50.0],
        held_for_weight=[40.0, 20.0],
    )
    kinds = (PassKind.F, PassKind.B, PassKind.W)
    ranks = tuple(tuple(schedules.Pass(kind, stage, 0) for kind in kinds) for stage in (0, 1))
    split = schedules.Schedule("by hand", looped(2), 1, ranks).validate()
    first, second = memory_lines(schedules.simulate(split, costs))
    assert (first.times, first.held) == ((0.0, 4.0, 5.0), (1.0, 0.4, 0.0))
    assert (second.times, second.held) == ((1.0, 3.0, 4.0), (0.5, 0.2, 0.0))


@pytest.mark.parametrize("name", ["zb-h1", pytest.param("v-half", marks=pytest.mark.full)])
def test_64_microbatches_on_16_ranks_have_thin_gaps_and_a_tick_every_few(name: str) -> None:
    (order,) = (
        order
        for order in html_drawing.packaged_orders()
        if (order["name"], order["p"], order["m"]) == (name, 16, 64)
    )
    costs = schedules.Costs.uniform(pipeline_size=16, forward=1, backward=1, weight=1)
    timeline = schedules.simulate(html_drawing.decode_order(order), costs)
    figure = draw(timeline)
    FigureCanvasAgg(figure).draw()
    axes, _ = figure.axes
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert len(bars) == sum(map(len, timeline.schedule.ranks))
    assert len(axes.texts) < len(bars) / 2
    for bar in bars:
        gap = bar.get_linewidth() * figure.dpi / 72
        assert 0 < gap <= 0.15 * bar.get_window_extent().width
    (top,) = axes.child_axes
    assert top.get_xlabel() == "first forward of microbatch"
    starts = {
        p.microbatch: start
        for p, start in zip(timeline.schedule.ranks[0], timeline.start[0], strict=True)
        if p.kind is PassKind.F and p.stage == 0
    }
    labels = [label for label in top.get_xticklabels() if label.get_text()]
    assert len(labels) >= 12
    for place, label in zip(top.get_xticks(), labels, strict=True):
        assert place == starts[int(label.get_text())]
    boxes = [label.get_window_extent() for label in labels]
    assert all(a.x1 <= b.x0 for a, b in pairwise(boxes))


def test_the_legend_has_what_occurs() -> None:
    timeline = timeline_of("v-half", 4, 8)
    (legend,) = drawn("v-half", 4, 8).legends
    words = [text.get_text() for text in legend.get_texts() if text.get_text()]
    assert words == [*(text for _, _, text in legend_of(timeline)), "idle"]
    assert {"forward, chunk 0", "forward, chunk 1", "weight gradient, chunk 1"} <= set(words)
    assert [text for _, _, text in legend_of(timeline_of("1f1b", 4, 8))] == [
        "forward",
        "backward, fused",
    ]


@pytest.mark.parametrize("name", drawn_sizes.ONE_OF_EACH_SHAPE)
def test_each_kind_has_a_column_in_the_legend_and_none_is_cut_off(name: str) -> None:
    timeline, figure = timeline_of(name, 4, 8), drawn(name, 4, 8)
    (legend,) = figure.legends
    places = {
        text.get_text(): text.get_window_extent() for text in legend.get_texts() if text.get_text()
    }
    assert list(places) == [*(words for _, _, words in legend_of(timeline)), "idle"]
    for kind in PassKind.all():
        column = [places[words] for k, _, words in legend_of(timeline) if k is kind]
        assert len({round(place.x0) for place in column}) <= 1
        chunks = [c for k, c, _ in legend_of(timeline) if k is kind]
        assert chunks == sorted(chunks)
        assert column == sorted(column, key=lambda place: -place.y0)
    empty = [
        handle
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True)
        if not text.get_text()
    ]
    assert all(handle is not None and handle.get_alpha() == 0 for handle in empty)
    _, axes = figure.axes
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert 0 <= box.y0 < box.y1 <= axes.get_window_extent().y0


def test_the_title_compares_memory_with_1f1b() -> None:
    assert "peak activation memory 4 microbatches (1.00 of 1F1B's)" in title_of(
        timeline_of("1f1b", 4, 8)
    )
    assert "peak activation memory 2 microbatches (1.00 of 1F1B's)" in title_of(
        timeline_of("1f1b", 4, 2)
    )
    timeline = timeline_of("v-min", 8, 16)
    assert f"({max(timeline.peak_activation) / 8:.2f} of 1F1B's)" in title_of(timeline)
    assert f"bubble rate {timeline.bubble_rate:.1%}" in title_of(timeline)


def test_copies_are_drawn_over_what_the_host_holds() -> None:
    costs = schedules.Costs.uniform(pipeline_size=4, forward=1.0, backward=1.2, weight=0.8)
    costs = costs.having(Offload(seconds=0.9))
    schedule = schedules.build(
        "v-half", pipeline_size=4, num_microbatches=12, costs=costs, memory_limit=0.3
    )
    timeline = schedules.simulate(schedule, costs)
    assert all(timeline.copies)
    *_, axes = draw(timeline).axes
    found = [
        (patch.get_x(), patch.get_width(), patch.get_y(), to_hex(patch.get_facecolor()).upper())
        for patch in axes.patches
        if isinstance(patch, Rectangle)
    ]
    expected = [
        (c.start, c.end - c.start, rank - (0.3 if c.to_host else 0.0), COPY_COLOURS[c.to_host])
        for rank, copies in enumerate(timeline.copies)
        for c in copies
    ]
    for drawn_copy, (*place, colour) in zip(found, expected, strict=True):
        assert drawn_copy == (*map(pytest.approx, place), colour)
    peaks = [text.get_text().removesuffix(" most") for text in axes.texts]
    assert peaks == [f"{held:.4g}" for held in timeline.peak_host]
    assert sum(text.get_text().endswith(" most") for text in axes.texts) == 1
