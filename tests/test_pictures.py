"""Pictures of schedules: right bars in the right places, numbers that can be read."""

from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from megatron_zb import schedules
from megatron_zb.palette import bars_of, colour_of, legend_of, luminance, text_colour_on, title_of
from megatron_zb.pictures import draw
from megatron_zb.schedules import PassKind, Timeline


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
    (axes,) = draw(timeline).axes
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
    (axes,) = figure.axes
    bars = list(bars_of(timeline))
    assert [text.get_text() for text in axes.texts] == [str(bar.microbatch) for bar in bars]
    for text, patch in zip(axes.texts, axes.patches, strict=True):
        number, bar = text.get_window_extent(), patch.get_window_extent()
        assert bar.x0 - 1 <= number.x0 < number.x1 <= bar.x1 + 1
        assert float(text.get_fontsize()) >= 5.5


def test_a_number_without_room_is_left_out() -> None:
    timeline = timeline_of("v-half", 4, 200)
    (axes,) = draw(timeline).axes
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
    (axes,) = figure.axes
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
