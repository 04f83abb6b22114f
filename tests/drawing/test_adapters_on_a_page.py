"""Adapters on a page: their shades, names and steps, and the explorer's other schedules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import MISSING, Browser, find_browser
from explorer import bars, change, comparison, corner, mouse, offered, shares, shown, tip
from pages import EVIL, page_of

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.drawing import html_page
from megatron_zb.drawing.chart import legend_of, title_of
from megatron_zb.drawing.html_drawing import SIZES, decode_order
from megatron_zb.schedules import Costs, PassKind, Report, Timeline
from megatron_zb.schedules.features.adapters import Adapter, Adapters

in_browser = pytest.mark.skipif(find_browser() is None, reason=MISSING)
SHOWN = "show zb-h1 -p 3 -m 3 --adapters 2 --adapter-steps 2 --weight 0.25".split()
UNEQUAL = Adapters(
    (Adapter("french", 3, steps=2), Adapter("german", 2), Adapter(EVIL, 1, steps=3)), update=0.5
)


def uniform(forward: float, backward: float, weight: float, p2p: float) -> Costs:
    return Costs.uniform(
        pipeline_size=3, forward=forward, backward=backward, weight=weight, p2p=p2p
    )


def unequal() -> Timeline:
    costs = uniform(1.0, 1.0, 0.25, 0.1)
    built = schedules.build("zb-h1", pipeline_size=3, adapters=UNEQUAL, costs=costs)
    return schedules.simulate(built, costs)


@pytest.fixture(scope="module")
def equal_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "equal.html"
    assert cli.main([*SHOWN, "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def unequal_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, timeline = tmp_path_factory.mktemp("pages") / "unequal.html", unequal()
    report = Report(timeline.makespan, timeline.makespan)
    html_page.save_schedule(path, timeline, report, uniform(1.0, 1.0, 0.25, 0.1))
    return path


def test_the_still_picture_and_its_legend_have_the_shade_of_each_adapter(
    unequal_path: Path,
) -> None:
    section, timeline = page_of(unequal_path).one("section", id="picture"), unequal()
    keys = section.one("ul", of="keys").all("li")
    words = [text for _, _, text in legend_of(timeline)]
    assert [li.text for li in keys] == [*words, "idle"]
    assert {f"update, adapter {it.name}" for it in UNEQUAL.each} < set(words)
    drawn = {path.attributes["fill"] for path in section.all("path", of="bars")}
    assert drawn == {li.one("rect").attributes["fill"] for li in keys[:-1]}
    assert len(drawn) == len(words)


def test_the_explorer_compares_schedules_of_the_same_adapters(equal_path: Path) -> None:
    page = page_of(equal_path)
    data = json.loads(page.one("script", id="explorer-data").text)
    assert set(data["names"]) == {"zb-h1", *html_page.QUICK}
    assert {(it["order"]["p"], it["order"]["m"]) for it in data["orders"]} == {(3, 12)}
    for entry in data["orders"]:
        assert entry["order"]["owners"]["labels"] == [", adapter 0", ", adapter 1"]
        passes = [p for rank in decode_order(entry["order"]).ranks for p in rank]
        updates = [p for p in passes if p.kind is PassKind.U]
        assert {p.microbatch for p in updates} == {0, 3, 6, 9}
        assert len(updates) == 4 * len(entry["order"]["rank_of"])


def test_a_page_says_which_adapters_it_has(unequal_path: Path) -> None:
    """And no command asks for adapters that the command line cannot describe."""
    page = page_of(unequal_path)
    data = json.loads(page.one("script", id="explorer-data").text)
    assert data["work"] == {
        "flags": None,
        "note": "These are all microbatches of 3 adapters, in 6 steps.",
        "update": 0.5,
    }
    assert all(entry["choices"] is None for entry in data["orders"])
    assert page.one("header").all("p")[0].text == title_of(unequal())
    assert "alert(1)</script>" not in unequal_path.read_text(encoding="utf-8")


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture
def page(browser: Browser, unequal_path: Path) -> Iterator[Browser]:
    browser.open(unequal_path)
    browser.wait_for("document.getElementById('explorer').dataset.redrawn === '1'")
    yield browser
    assert [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"] == []


@in_browser
def test_the_drawn_picture_has_the_bars_and_the_legend_of_the_still_one(
    page: Browser, unequal_path: Path
) -> None:
    text = unequal_path.read_text(encoding="utf-8")
    still = re.search(r'<svg class="schedule".*?</svg>', text, flags=re.DOTALL)
    assert still is not None
    page.evaluate(
        f"document.body.insertAdjacentHTML('beforeend', {json.dumps(still.group())}) || 1"
    )
    timeline = unequal()
    for drawn in ("#picture", "#drawing"):
        ours, theirs = shares(bars(page, drawn)), shares(bars(page, "body > svg"))
        assert len(ours) == len(theirs) == sum(map(len, timeline.schedule.ranks))
        for one, other in zip(ours, theirs, strict=True):
            assert one[:3] + one[5:] == other[:3] + other[5:]
            assert one[3:5] == pytest.approx(other[3:5], abs=1e-4)
    items = (
        "[...document.querySelectorAll('{0} li')].map((li) => [li.textContent,"
        " li.querySelector('rect').getAttribute('fill')])"
    )
    assert page.evaluate(items.replace("{0}", "#drawn-keys")) == page.evaluate(
        items.replace("{0}", "#picture .keys")
    )


@in_browser
def test_a_tooltip_says_the_adapter_its_step_and_its_microbatch(page: Browser) -> None:
    timeline = unequal()
    rules = timeline.schedule.rules
    left, top = corner(page, "#picture svg.schedule")
    per_second = (
        page.evaluate("document.querySelector('#picture .schedule .ground').width.baseVal.value")
        / timeline.makespan
    )
    seen = set()
    for rank, passes in enumerate(timeline.schedule.ranks):
        for p, start, end in zip(passes, timeline.start[rank], timeline.end[rank], strict=True):
            x = left + SIZES.labels + (start + end) / 2 * per_second
            mouse(page, "mouseMoved", x, top + rank * SIZES.row + 12)
            words = rules.pass_in_words(p).removeprefix(f"{p.kind} of ")
            assert tip(page, "#picture").splitlines()[:2] == [
                f"{p.kind}, {p.kind.words}",
                f"rank {rank}, {words}",
            ]
            seen.add(words.partition(", ")[2])
    assert f"step 2 of adapter {EVIL}, microbatch 0" in seen
    assert "step 1 of adapter french" in seen  # an update, which is of all microbatches


@in_browser
@pytest.mark.parametrize("times", [(1.0, 1.0, 0.25, 0.1), (1.5, 0.75, 2.0, 0.5)])
def test_the_readers_costs_give_the_times_of_the_simulator(
    times: tuple[float, float, float, float], page: Browser
) -> None:
    change(page, **dict(zip(("forward", "backward", "weight", "p2p"), times, strict=True)))
    rows = comparison(page)
    assert set(rows) == set(html_page.QUICK) == set(offered(page, "schedule"))
    for name in html_page.QUICK:
        built = schedules.build(
            name, pipeline_size=3, adapters=UNEQUAL, costs=uniform(1.0, 1.0, 0.25, 0.1)
        )
        timeline = schedules.simulate(built, uniform(*times))
        assert float(rows[name][1]) == pytest.approx(timeline.makespan, rel=1e-5)
        assert float(rows[name][3].rstrip("%")) == pytest.approx(
            100 * timeline.bubble_rate, abs=0.051
        )
    assert shown(page, "offered") == (
        "This page has zb-h1 on 3 ranks with 11 microbatches. "
        "These are all microbatches of 3 adapters, in 6 steps."
    )
    assert page.evaluate("document.getElementById('command').parentElement.hidden")


@in_browser
def test_the_command_of_the_explorer_asks_for_the_adapters(
    browser: Browser, equal_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    browser.open(equal_path)
    browser.wait_for("document.getElementById('explorer').dataset.redrawn === '1'")
    assert "The command draws the same" in shown(browser, "kind")
    command = shown(browser, "command").split()
    assert " ".join(command[:3]) == "megatron-zb show zb-h1"
    capsys.readouterr()
    assert cli.main(command[1:]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "3 ranks, 2 adapters, 12 microbatches" in told
    assert f"makespan {shown(browser, 'makespan')}," in told
    updates = [bar for bar in bars(browser, "#picture") if bar[0] == PassKind.U.value]
    assert updates == []  # they take no time
