"""A plan's chart of speed over memory: the points, the front, and what is drawn of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pages import Element, Page
from small_models import SMALL, WHOLE, a100, small

from megatron_zb.cli import main as cli
from megatron_zb.parsing import GIB
from megatron_zb.plan import chart, page, table
from megatron_zb.plan.chart import Axis, Point, is_on_front, points
from megatron_zb.plan.search import Plan, search
from megatron_zb.plan.settings import PlanJob
from megatron_zb.plan.strategy import Choices, candidates_of

pytestmark = pytest.mark.usefixtures("brief_searches")

SIZES = st.tuples(st.floats(0.5, 300), st.floats(1, 90_000))


@pytest.fixture(scope="module")
def plan() -> Plan:
    choices = Choices(tensor=(1,), pipeline=(4,), microbatch=(1, 2), recompute=("none",))
    job = PlanJob(small(), a100(), 4, 20 * GIB, 32, 1024, choices, features=WHOLE)
    return search(job, candidates_of(["zb-h1", "v-zb", "v-half"]))


def made_up(sizes: list[tuple[float, float]]) -> list[Point]:
    """Points of made-up sizes, fastest first, with the front by its definition."""
    ordered = sorted(sizes, key=lambda size: -size[1])
    return [
        Point(place, f"name {place}", "TP1", gib, tokens, on_front=front(gib, tokens, sizes))
        for place, (gib, tokens) in enumerate(ordered, 1)
    ]


def front(gib: float, tokens: float, sizes: list[tuple[float, float]]) -> bool:
    beaten = [(g < gib and t >= tokens) or (g <= gib and t > tokens) for g, t in sizes]
    return not any(beaten)


# --- the points -----------------------------------------------------------------------------------


def test_points_are_the_rows_of_the_table(plan: Plan) -> None:
    first = plan.ranked[0]
    both = replace(plan, ranked=(first, replace(first, candidate="auto"), *plan.ranked[1:]))
    found = points(both)
    assert [(p.place, p.name) for p in found] == [
        (place, table.name_in(both, both.ranked[index])) for place, index in table.places(both)
    ]
    sizes = [(row.memory.total / GIB, row.tokens_per_gpu) for row in plan.ranked]
    assert [(p.gib, p.tokens) for p in found] == sizes
    assert [p.on_front for p in found] == [front(*size, sizes) for size in sizes]
    assert found[0].on_front
    assert f"{sizes[0][1]:.0f} tokens/s/GPU in {sizes[0][0]:.1f} GiB" in found[0].sentence


def test_a_row_that_is_equal_in_one_and_worse_in_the_other_is_not_on_the_front() -> None:
    sizes = [(10.0, 900.0), (10.0, 800.0), (12.0, 900.0), (12.0, 950.0), (12.0, 950.0)]
    assert [is_on_front(size, sizes) for size in sizes] == [True, False, False, True, True]


@given(values=st.lists(st.floats(0.01, 1e6), min_size=1, max_size=9), about=st.integers(2, 9))
def test_an_axis_has_room_for_its_values(values: list[float], about: int) -> None:
    axis = Axis.around(values, about)
    assert 2 <= len(axis.ticks) <= 2 * about + 3
    assert all(-1e-6 <= axis.share(value) <= 1 + 1e-6 for value in values)
    assert (axis.share(axis.ticks[0]), axis.share(axis.ticks[-1])) == (0, 1)


# --- in the terminal ------------------------------------------------------------------------------


def rows_of(text: str) -> list[str]:
    """The cells of the chart right of its axis."""
    return [line[8:].ljust(72) for line in text.splitlines() if line[7:8] == "|"]


@given(sizes=st.lists(SIZES, min_size=1, max_size=16, unique=True), spare=st.floats(1, 2))
@example(sizes=[(1.0, 2.0), (1.0, 2.00001)], spare=1.0)  # labels of many digits
@example(sizes=[(180.65049911180174, 1.0)], spare=1.0000000000000002)  # a span of rounding
def test_the_text_has_each_point_in_its_cell(
    sizes: list[tuple[float, float]], spare: float
) -> None:
    found = made_up(sizes)
    limit = max(p.gib for p in found) * spare
    text = chart.plan_chart(found, limit)
    assert max(map(len, text.splitlines())) <= chart.WIDTH
    assert text.isascii()
    rows = rows_of(text)
    gib = Axis.around([*(p.gib for p in found), limit])
    tokens = Axis.around([p.tokens for p in found])

    def cell(p: Point) -> tuple[int, int]:
        return round((1 - tokens.share(p.tokens)) * (len(rows) - 1)), round(gib.share(p.gib) * 67)

    for point in found:
        row, column = cell(point)
        together = [p for p in found if cell(p) == (row, column)]
        assert rows[row][column] == ("*" if any(p.on_front for p in together) else "o")
    marks = sum(row.count("*") + row.count("o") for row in rows)
    assert marks == len({cell(p) for p in found})
    said = re.sub(r"\s+", " ", text.split("worst rank", 1)[1])
    for point in found:
        words = f"{point.place}. {point.sentence}" if point.on_front else point.name
        assert words in said


def test_points_apart_have_their_numbers_beside_them() -> None:
    found = made_up([(10, 900), (40, 1000), (70, 800)])
    rows = rows_of(chart.plan_chart(found, 80))
    assert [re.sub("[ :]", "", row) for row in rows if re.search(r"\d", row)] == ["*1", "*2", "o3"]
    assert {row[67] for row in rows} == {":"}  # the limit, at the last tick


def test_the_command_prints_the_chart_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(SMALL, encoding="utf-8")
    choices = ["--pipeline", "1,4", "--schedules", "zb-h1", "--tries", "1"]
    command = ["plan", "--config", str(model), "--gpus", "4", *choices]
    printed = []
    for more in ([], ["--chart"], ["--format", "json"]):
        assert cli.main([*command, *more]) == 0
        printed.append(capsys.readouterr().out)
    without, with_chart, told = printed
    assert with_chart.startswith(without)
    drawn = with_chart.removeprefix(without)
    assert max(map(len, drawn.splitlines())) <= chart.WIDTH
    ranked = json.loads(told)["ranked"]
    sizes = [(row["memory"]["total"] / GIB, row["tokens_per_second_per_gpu"]) for row in ranked]
    for place, (gib, tokens) in enumerate(sizes, 1):
        said = f"{tokens:.0f} tokens/s/GPU in {gib:.1f} GiB"
        assert bool(re.search(rf"^  {place}\. .*: {said}$", drawn, re.M)) is front(
            gib, tokens, sizes
        )
    assert f": all of a GPU, {json.loads(told)['gpu_memory'] / GIB:.1f} GiB" in drawn


# --- on the page ----------------------------------------------------------------------------------


def drawn(found: list[Point], limit: float) -> Element:
    return Page(str(page.draw_chart(found, limit, "speed"))).root.one("svg", of="chart")


def place_of(point: Element) -> tuple[float, float]:
    circle = point.one("circle").attributes
    return float(circle["cx"]), float(circle["cy"])


@given(sizes=st.lists(SIZES, min_size=1, max_size=16, unique=True), spare=st.floats(1, 2))
def test_the_picture_has_each_point_in_its_place(
    sizes: list[tuple[float, float]], spare: float
) -> None:
    found = made_up(sizes)
    limit = max(p.gib for p in found) * spare
    svg = drawn(found, limit)
    groups = [g for g in svg.all("g") if "data-place" in g.attributes]
    assert [g.one("text").text for g in groups] == [str(p.place) for p in found]
    for group, point in zip(groups, found, strict=True):
        assert ("best" in group.attributes["class"].split()) is point.on_front
        assert point.sentence in group.one("title").text
        x, y = place_of(group)
        assert 0 <= x <= page.WIDTH
        assert 0 <= y <= page.HEIGHT
        written = group.one("text").attributes
        assert abs(float(written["x"]) - x) < 24
        assert abs(float(written["y"]) - y) < 24
    at_limit = re.match(r"M([\d.]+),", svg.one("path", of="limit").attributes["d"])
    assert at_limit is not None
    assert all(place_of(g)[0] <= float(at_limit.group(1)) + 0.1 for g in groups)
    by_memory = sorted(zip(found, groups, strict=True), key=lambda pair: pair[0].gib)
    places = [place_of(group)[0] for _, group in by_memory]
    assert places == sorted(places)
    heights = [place_of(group)[1] for group in groups]
    assert heights == sorted(heights)


def test_the_front_is_joined_in_steps() -> None:
    found = made_up([(10, 800), (20, 900), (25, 850), (40, 1000)])
    svg = drawn(found, 80)
    front_line = svg.one("path", of="front").attributes["d"]
    corners = [tuple(map(float, corner.split(","))) for corner in front_line[1:].split("L")]
    best = sorted(place_of(g) for g in svg.all("g", of="point best"))
    assert len(best) == 3
    assert corners[::2] == best
    assert [y for _, y in corners[1::2]] == [y for _, y in corners[::2]]
    assert [x for x, _ in corners[1::2]][:-1] == [x for x, _ in best[1:]]


def test_a_number_lies_on_nothing_where_there_is_room() -> None:
    sizes = [(57.0, 1016), (58.8, 1010), (68.0, 1008), (69.9, 997), (46.4, 958), (75.0, 951)]
    sizes += [(33.0, 938), (54.8, 934), (32.7, 920), (76.2, 916), (75.0, 892), (31.2, 812)]
    found = made_up([(gib, float(tokens)) for gib, tokens in sizes])
    svg = drawn(found, 79.1)
    groups = [g for g in svg.all("g") if "data-place" in g.attributes]
    boxes = []
    for group in groups:
        at = group.one("text").attributes
        half = 4 * len(group.one("text").text)
        x, y = float(at["x"]), float(at["y"]) - 4.5
        boxes.append((x - half, x + half, y - 5, y + 5))
    for i, (left, right, top, bottom) in enumerate(boxes):
        for x, y in map(place_of, groups):
            assert not (left - 5 < x < right + 5 and top - 5 < y < bottom + 5), i
        for a, b, c, d in boxes[:i]:
            assert right <= a or b <= left or bottom <= c or d <= top, i
