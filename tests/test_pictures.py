"""Pictures of schedules: right bars in the right places, numbers that can be read."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from megatron_zb import schedules
from megatron_zb.memory_lines import memory_lines
from megatron_zb.palette import (
    bars_of,
    colour_of,
    legend_of,
    luminance,
    rank_colour,
    text_colour_on,
    title_of,
)
from megatron_zb.pictures import draw
from megatron_zb.schedules import PassKind, Timeline
from megatron_zb.schedules.placement import looped


def timeline_of(name: str, pipeline_size: int, num_microbatches: int) -> Timeline:
    costs = schedules.Costs.uniform(
        pipeline_size=pipeline_size, forward=1.0, backward=1.2, weight=0.9, p2p=0.05
    )
    schedule = schedules.build(
        name, pipeline_size=pipeline_size, num_microbatches=num_microbatches, costs=costs
    )
    return schedules.simulate(schedule, costs)


@pytest.mark.parametrize("name", schedules.names())
def test_bars_are_where_the_passes_are(name: str) -> None:
    timeline = timeline_of(name, 4, 8)
    axes, _ = draw(timeline).axes
    drawn = [
        (patch.get_x(), patch.get_width(), patch.get_y() + patch.get_height() / 2)
        for patch in axes.patches
        if isinstance(patch, Rectangle)
    ]
    expected = [
        (timeline.start[rank][i], timeline.end[rank][i] - timeline.start[rank][i], rank)
        for rank, passes in enumerate(timeline.schedule.ranks)
        for i in range(len(passes))
    ]
    assert drawn == [pytest.approx(bar) for bar in expected]
    colours = [to_hex(patch.get_facecolor()).upper() for patch in axes.patches]
    assert colours == [bar.colour for bar in bars_of(timeline)]


@pytest.mark.parametrize("name", schedules.names())
def test_8_ranks_and_16_microbatches_are_readable(name: str) -> None:
    """Every bar has its number, and every number has room in its bar.

    Four chunks have twice as many bars as two, so fewer of them fit.
    """
    timeline = timeline_of(name, 8, 16)
    if timeline.schedule.placement.chunks > 2:
        timeline = timeline_of(name, 4, 8)
    figure = draw(timeline)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert figure.get_figwidth() * figure.dpi <= 1920
    axes, memory = figure.axes
    bars = list(bars_of(timeline))
    assert [text.get_text() for text in axes.texts] == [str(bar.microbatch) for bar in bars]
    for text, patch in zip(axes.texts, axes.patches, strict=True):
        number, bar = text.get_window_extent(), patch.get_window_extent()
        assert bar.x0 - 1 <= number.x0 < number.x1 <= bar.x1 + 1
        assert float(text.get_fontsize()) >= 5.5
    legend = memory.get_legend()
    assert legend is not None
    for text in legend.get_texts():
        assert text.get_window_extent().x1 <= figure.bbox.x1
        assert float(text.get_fontsize()) >= 8
    assert memory.get_window_extent().height >= 100
    box, above = legend.get_window_extent(), axes.get_window_extent()
    assert memory.get_window_extent().y1 <= box.y0 + 1
    assert box.y1 <= above.y0 + 1


@pytest.mark.parametrize("name", schedules.names())
def test_each_rank_has_its_memory_with_the_simulators_peak(name: str) -> None:
    timeline = timeline_of(name, 4, 8)
    bars, memory = draw(timeline).axes
    *lines, stock = memory.get_lines()
    assert len(lines) == 4
    peaks = [max(np.asarray(line.get_ydata(), dtype=float)) for line in lines]
    assert peaks == pytest.approx(timeline.peak_memory)
    assert list(np.asarray(stock.get_ydata(), dtype=float)) == [4.0, 4.0]
    legend = memory.get_legend()
    assert legend is not None
    named = [text.get_text() for text in legend.get_texts()]
    assert named == [f"rank {r}: {peak:.4g}" for r, peak in enumerate(timeline.peak_memory)]
    worst = timeline.peak_memory.index(max(timeline.peak_memory))
    assert [text.get_fontweight() == "bold" for text in legend.get_texts()] == [
        rank == worst for rank in range(4)
    ]
    assert max(lines, key=lambda line: line.get_linewidth()) is lines[worst]
    assert [text.get_text() for text in memory.texts] == ["1F1B's peak: 4"]
    assert bars.get_xlim() == memory.get_xlim()
    assert memory.get_ylim()[1] >= max(4, *peaks)


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


def test_the_lines_of_ranks_are_told_apart_by_lightness() -> None:
    for ranks in (2, 4, 8, 32):
        lights = [luminance(rank_colour(rank, ranks)) for rank in range(ranks)]
        assert lights == sorted(set(lights))
        assert all(abs(a - luminance("#F2F2F2")) > 0.3 for a in lights)


def test_a_number_without_room_is_left_out() -> None:
    timeline = timeline_of("v-half", 4, 200)
    axes, _ = draw(timeline).axes
    assert len(axes.patches) == sum(map(len, timeline.schedule.ranks))
    assert len(axes.texts) < len(axes.patches) / 2


def test_the_legend_has_what_occurs() -> None:
    timeline = timeline_of("v-half", 4, 8)
    (legend,) = draw(timeline).legends
    words = [text.get_text() for text in legend.get_texts() if text.get_text()]
    assert words == [text for _, _, text in legend_of(timeline)]
    assert {"forward, chunk 0", "forward, chunk 1", "weight gradient, chunk 1"} <= set(words)
    assert [text for _, _, text in legend_of(timeline_of("1f1b", 4, 8))] == [
        "forward",
        "backward, fused",
    ]


@pytest.mark.parametrize("name", schedules.names())
def test_each_kind_has_a_column_in_the_legend_and_none_is_cut_off(name: str) -> None:
    timeline = timeline_of(name, 4, 8)
    figure = draw(timeline)
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    places = {
        text.get_text(): text.get_window_extent() for text in legend.get_texts() if text.get_text()
    }
    assert list(places) == [words for _, _, words in legend_of(timeline)]
    for kind in PassKind:
        column = [places[words] for k, _, words in legend_of(timeline) if k is kind]
        assert len({round(place.x0) for place in column}) <= 1
        assert column == sorted(column, key=lambda place: -place.y0)
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


def test_colours_are_told_apart_and_carry_their_text() -> None:
    for chunks in (2, 3, 4):
        _check_colours([colour_of(kind, c, chunks) for kind in PassKind for c in range(chunks)])


def _check_colours(colours: list[str]) -> None:
    assert len(set(colours)) == len(colours)
    for colour in colours:
        light, dark = sorted((luminance(colour), luminance(text_colour_on(colour))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
