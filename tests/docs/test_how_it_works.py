"""How it works: the figures of its text are those of the pictures, which a script draws."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs"))
make = pytest.importorskip("make_how_it_works", reason="pictures need matplotlib")

PAGE = " ".join((ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8").split())


def test_the_page_shows_every_picture() -> None:
    for path in make.FOLDER.iterdir():
        assert PAGE.count(f"](pictures/how_it_works/{path.name})") == 1
        with Image.open(path) as image:
            assert image.width == round(make.WIDTH * make.DOTS_PER_INCH)
    assert len(list(make.FOLDER.iterdir())) == 5


def test_the_split_backward_saves_what_the_page_says() -> None:
    plain, split = (make.timeline(name, 4, 6) for name in ("1f1b", "zb-h1"))
    assert f"1F1B takes {plain.makespan:g} units of time and idles for" in PAGE
    assert f"for {100 * plain.bubble_rate:.0f} % of it" in PAGE
    assert f"work in {split.makespan:g} units and idles for {100 * split.bubble_rate:.0f} %" in PAGE


def test_a_v_holds_what_the_page_says() -> None:
    plain, half = (make.held(make.timeline(name, 4, 16), 8) for name in ("1f1b", "v-half"))
    times = [each.end - each.start for each in plain]
    assert f"so it waits for the whole pipeline and back: {times[0]:g} units of time" in PAGE
    assert f"holds them for {times[-1]:g} units" in PAGE
    shares = [sum((e.end - e.start) / 2 for e in half if e.rank == rank) for rank in range(4)]
    assert max(shares) == 9 and min(shares) >= 8.5
    assert "9 units of time, which are 9 / 3 = 3 microbatches" in PAGE
    peak = max(make.timeline("v-half", 8, 32).peak_activation)
    assert f"`v-half` holds {peak:g} microbatches, which is {peak / 8:g} of 1F1B's 8" in PAGE


def test_a_limit_costs_what_the_page_says() -> None:
    cells = json.loads(make.QUALITY.read_text(encoding="utf-8"))["grid"]["cells"]
    longer = {
        cell["memory_limit"]: make.longer(cell["makespan"] / 1000, 96)
        for cell in cells
        if (cell["pipeline_size"], cell["num_microbatches"]) == make.LIMITED
        and cell["costs"] == [1000 * cost for cost in make.LIMITED_COSTS]
    }
    assert f"its step is {longer[1.0]:.1f} % longer than one without idle time" in PAGE
    assert f"In 0.75 it is {longer[0.75]:.1f} % longer, in half {longer[0.5]:.1f} % longer" in PAGE
    plain = make.timeline("1f1b", *make.LIMITED, make.LIMITED_COSTS)
    assert f"1F1B itself is {make.longer(plain.makespan, 96):.1f} % longer" in PAGE


@pytest.mark.parametrize("stage", [0, 3])
def test_weight_gradients_are_added_in_the_order_of_microbatches(stage: int) -> None:
    for name in ("1f1b", "zb-h1", "v-half", "v-zb"):
        added = sorted(make.weight_gradients(make.timeline(name, 4, 8), stage))
        assert [microbatch for *_, microbatch in added] == list(range(8)), name
