"""What stands in pictures: every bar, line and text, where it stands and in which colour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from matplotlib import colors
from matplotlib.collections import Collection
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from recorded import assert_as_recorded

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.distill.cli import timeline as blockwise
from megatron_zb.drawing import html_drawing, pictures
from megatron_zb.drawing.chart import COST_UNIT
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.vocabulary import Vocabulary

RECORDED = Path(__file__).parent / "recorded"
TIMES = {"forward": 1.0, "backward": 1.2, "weight": 0.8, "p2p": 0.1}


@cache
def timeline_of(name: str) -> schedules.Timeline:
    """Simulate a small schedule; a name such as v-zb+offload adds a feature to it."""
    family, _, feature = name.partition("+")
    costs = schedules.Costs.uniform(pipeline_size=2, **TIMES)
    limit = None
    if feature == "pairs":
        costs = costs.having(Communication(forward=0.4, backward=0.3))
    if feature == "recomputation":
        costs, limit = costs.having(Recomputation(kept_input=0.1)), 0.6
    if feature == "offload":
        costs, limit = costs.having(Offload(seconds=0.4)), 0.6
    if feature == "vocabulary":
        costs = costs.having(Vocabulary(output=1.5, weight=0.7))
    sizes: dict[str, Any] = {"pipeline_size": 2, "num_microbatches": 4}
    return schedules.simulate(
        schedules.build(family, costs=costs, memory_limit=limit, **sizes), costs
    )


NAMES = (
    "1f1b",
    "interleaved",
    "zb-h1",
    "v-half",
    "dualpipe-v+pairs",
    "v-zb+recomputation",
    "v-zb+offload",
    "v-half+vocabulary",
)


def at(*numbers: float) -> str:
    return ",".join(f"{number:.4g}" for number in numbers)


def look(text: Any) -> str:
    return f"{text.get_color()} {text.get_size()} {text.get_ha()} {text.get_va()}"


def bar(artist: Any) -> str:
    place = (*artist.get_xy(), artist.get_width(), artist.get_height())
    return f"  bar {at(*place)} {colors.to_hex(artist.get_facecolor(), keep_alpha=True)}"


def line(artist: Any) -> str:
    ends = artist.get_xydata()
    colour = colors.to_hex(artist.get_color(), keep_alpha=True)
    style = f"{artist.get_linewidth()} {artist.get_linestyle()} {artist.get_zorder()}"
    return f"  line {len(ends)} {at(*map(float, ends.sum(axis=0)))} {colour} {style}"


def shapes(artist: Any) -> str:
    paths = artist.get_paths()
    corners = sum(float(path.vertices.sum()) for path in paths)
    hexes = sorted({colors.to_hex(colour) for colour in artist.get_facecolor()})
    return f"  shapes {len(paths)} {at(corners)} {' '.join(hexes)}"


ARTISTS: dict[type, Callable[[Any], str]] = {Rectangle: bar, Line2D: line, Collection: shapes}


def described(figure: Any) -> Iterator[str]:
    """Describe what a figure draws; ticks and spines are matplotlib's own."""
    figure.draw_without_rendering()
    yield f"figure {at(*figure.get_size_inches())}"
    for axes in figure.axes:
        yield f"axes {at(*axes.get_xlim(), *axes.get_ylim())} {axes.get_title()!r}"
        yield f"  labels {axes.get_xlabel()!r} {axes.get_ylabel()!r} {axes.xaxis.label.get_size()}"
        for axis in (axes.xaxis, axes.yaxis):
            places, texts = axis.get_majorticklocs(), axis.get_ticklabels()
            words = [at(*places), *(f"{text.get_text()!r} {text.get_size()}" for text in texts)]
            yield f"  ticks {'; '.join(words)} {axis.get_tick_params()}"
        for artist in axes.get_children():
            for kind, describe in ARTISTS.items():
                if isinstance(artist, kind) and artist is not axes.patch:
                    yield describe(artist)
        for text in axes.texts:
            yield f"  text {at(*text.get_position())} {text.get_text()!r} {look(text)}"
        legend = axes.get_legend()
        if legend is not None:
            words = [f"{text.get_text()!r} {look(text)}" for text in legend.get_texts()]
            yield f"  legend of {legend._ncols} columns {legend.get_frame_on()} {'; '.join(words)}"
    for text in figure.texts:
        yield f"text {text.get_text()!r}"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_picture_has_what_it_had(name: str) -> None:
    lines = described(pictures.draw(timeline_of(name)))
    assert_as_recorded("\n".join(lines), RECORDED / f"{name}.picture.txt")


def test_pictures_below_one_another_have_what_they_had() -> None:
    first, second = (timeline_of(name) for name in ("zb-h1", "1f1b"))
    lines = described(pictures.draw_below({"one": first, "another": second}))
    assert_as_recorded("\n".join(lines), RECORDED / "below.txt")


def test_a_picture_of_steps_has_what_it_had() -> None:
    words = "show pipe-bd -p 2 -m 3 --teacher 1 2 1 --student 3 4 3 --update 0.5 --steps 2"
    steps = blockwise(cli.parser().parse_args(words.split()))
    lines = described(pictures.draw(steps))
    assert_as_recorded("\n".join(lines), RECORDED / "steps.txt")


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_of_a_page_has_what_it_had(name: str) -> None:
    timeline = timeline_of(name)
    svg = html_drawing.draw(timeline, name, COST_UNIT)
    assert_as_recorded(str(svg).replace("><", ">\n<"), RECORDED / f"{name}.svg.txt")
