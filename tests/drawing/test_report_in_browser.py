"""Pages in a real browser: what they compute is the simulator's, and nothing is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import drawn_sizes
import pytest
from browser import MISSING, Browser, find_browser
from explorer import bars, change, comparison, corner, mouse, offered, shares, shown, tip
from packaged_orders import packaged

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.drawing import html_drawing, html_page
from megatron_zb.schedules import Costs, PassKind, Timeline

pytestmark = pytest.mark.skipif(find_browser() is None, reason=MISSING)

NAMES = html_drawing.order_names()
EVIL = "</title></script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "1f1b.html"
    assert cli.main(["show", "1f1b", "-p", "4", "-m", "8", "--p2p", "0.1", "-o", str(path)]) == 0
    return path


@pytest.fixture
def page(browser: Browser, path: Path) -> Browser:
    browser.open(path)
    browser.wait_for("document.getElementById('explorer').dataset.redrawn === '1'")
    return browser


def costs_of(p: int, costs: tuple[float, float, float, float]) -> Costs:
    forward, backward, weight, p2p = costs
    return Costs.uniform(
        pipeline_size=p, forward=forward, backward=backward, weight=weight, p2p=p2p
    )


def in_python(name: str, p: int, m: int, costs: tuple[float, float, float, float]) -> Timeline:
    """The package's order, carried out with the reader's costs."""
    if name in ("zb-h1", "zb-h2") and (p, m) == (4, 8):  # built for the page's costs: see `path`
        built = schedules.build(
            name, pipeline_size=p, num_microbatches=m, costs=costs_of(p, (1.0, 1.0, 1.0, 0.1))
        )
        return schedules.simulate(built, costs_of(p, costs))
    return schedules.simulate(packaged(name, p, m), costs_of(p, costs))


# --- the controls ---------------------------------------------------------------------------------


def check_readings(page: Browser, timeline: Timeline, baseline: int) -> None:
    assert float(shown(page, "makespan")) == pytest.approx(timeline.makespan, rel=1e-5)
    assert float(shown(page, "bubble").rstrip("%")) == pytest.approx(
        100 * timeline.bubble_rate, abs=0.051
    )
    peak = max(timeline.peak_activation)
    assert float(shown(page, "peak")) == pytest.approx(peak, rel=1e-3)
    assert float(shown(page, "share").rstrip("%")) == pytest.approx(
        100 * peak / baseline, abs=0.051
    )


@pytest.mark.parametrize("name", drawn_sizes.one_of_each_shape(NAMES))
def test_the_controls_change_what_is_shown(name: str, page: Browser) -> None:
    check_readings(page, in_python("1f1b", 4, 8, (1.0, 1.0, 1.0, 0.1)), 4)
    change(page, schedule=name)
    check_readings(page, in_python(name, 4, 8, (1.0, 1.0, 1.0, 0.1)), 4)
    change(page, p=8)
    check_readings(page, in_python(name, 8, 8, (1.0, 1.0, 1.0, 0.1)), 8)
    change(page, m=16, forward=1.25, backward="1.5", weight=0.75, p2p="0.05")
    last = (1.25, 1.5, 0.75, 0.05)
    timeline = in_python(name, 8, 16, last)
    check_readings(page, timeline, 8)
    gain = in_python("1f1b", 8, 16, last).makespan / timeline.makespan - 1
    assert float(shown(page, "gain").rstrip("%")) == pytest.approx(100 * gain, abs=0.051)
    drawn = page.evaluate(
        "[...document.querySelectorAll('#drawing .bars')]"
        ".map((path) => path.getAttribute('d').split('M').length - 1)"
    )
    assert sum(drawn) == sum(map(len, timeline.schedule.ranks))
    assert page.evaluate("document.querySelectorAll('#drawing .held').length") == 8


def test_a_row_of_the_comparison_can_be_chosen(page: Browser) -> None:
    rows = comparison(page)
    assert set(rows) == set(NAMES)
    for name in NAMES:
        timeline = in_python(name, 4, 8, (1.0, 1.0, 1.0, 0.1))
        assert float(rows[name][1]) == pytest.approx(timeline.makespan, rel=1e-5)
    page.click("#comparison tr[data-schedule=zb-h2] button")
    page.wait_for("document.getElementById('explorer').dataset.redrawn === '2'")
    assert page.evaluate("document.getElementById('schedule').value") == "zb-h2"
    check_readings(page, in_python("zb-h2", 4, 8, (1.0, 1.0, 1.0, 0.1)), 4)


@pytest.mark.parametrize("name", drawn_sizes.one_of_each_shape(NAMES))
def test_every_size_that_is_offered_answers(name: str, page: Browser) -> None:
    """The choices are those of the sentence, and each has an order of the package."""
    change(page, schedule=name)
    said: dict[str, list[str]] = {}
    words = shown(page, "offered").removeprefix(f"This page has {name} on ").rstrip(".")
    for part in words.replace(" ranks", "").replace(" microbatches", "").split("; "):
        p, _, listed = part.partition(" with ")
        said[p] = listed.split(", ")
    assert list(said) == offered(page, "p")
    assert [(int(p), int(m)) for p, ms in said.items() for m in ms] == sorted(
        html_drawing.ORDER_SIZES
    )
    for p, ms in said.items():
        change(page, p=p)
        assert offered(page, "m") == ms
        for m in ms:
            change(page, m=m)
            assert set(comparison(page)) == set(NAMES)
            timeline = in_python(name, int(p), int(m), (1.0, 1.0, 1.0, 0.1))
            check_readings(page, timeline, min(int(p), int(m)))


def test_what_is_listed_is_offered_in_every_size_of_the_page(
    browser: Browser, tmp_path: Path
) -> None:
    """At a size that the package has no orders for, a page offers what its script builds itself."""
    path = tmp_path / "odd.html"
    assert cli.main(["show", "v-min", "-p", "5", "-m", "7", "--output", str(path)]) == 0
    browser.open(path)
    assert set(comparison(browser)) == {"v-min", *html_page.QUICK}
    for name in offered(browser, "schedule"):
        change(browser, schedule=name)
        assert ("5" in offered(browser, "p")) is (name in ("v-min", *html_page.QUICK))
        assert float(shown(browser, "makespan")) > 0


@pytest.mark.parametrize(
    ("element", "value", "words"),
    [
        ("forward", "0", "forward, F: give a number above 0, such as 1.0"),
        ("forward", "", "forward, F: give a number above 0, such as 1.0"),
        ("weight", "-1", "weight gradient, W: give a number of 0 or more, such as 1.0"),
        ("limit", "0", "memory limit: give a number above 0, such as 1.0"),
    ],
)
def test_what_the_reader_can_mend_is_a_sentence_without_figures(
    element: str, value: str, words: str, page: Browser
) -> None:
    figures = (
        "({outputs: [...document.querySelectorAll('#explorer output')].map((e) => e.textContent),"
        " drawn: document.querySelectorAll('#drawing svg > *').length,"
        " rows: document.querySelectorAll('#comparison tbody tr').length,"
        " said: document.getElementById('kind').textContent"
        " + document.getElementById('command').textContent,"
        " seen: document.getElementById('results').getClientRects().length})"
    )
    before = page.evaluate(figures)
    assert all(before["outputs"])
    assert before["drawn"] and before["rows"] and before["said"] and before["seen"]
    change(page, **{element: value})
    assert not page.evaluate("document.getElementById('problem').hidden")
    assert shown(page, "problem") == words
    nothing = {"outputs": [""] * 5, "drawn": 0, "rows": 0, "said": "", "seen": 0}
    assert page.evaluate(figures) == nothing
    change(page, **{element: "" if element == "limit" else 1})
    assert page.evaluate("document.getElementById('problem').hidden")
    check_readings(page, in_python("1f1b", 4, 8, (1.0, 1.0, 1.0, 0.1)), 4)
    assert page.evaluate(figures) == before


def makespan_of(command: str, capsys: pytest.CaptureFixture[str]) -> float:
    words = command.split()
    assert words[0] == "megatron-zb"
    capsys.readouterr()
    assert cli.main(words[1:]) == 0
    found = re.search(r"makespan ([\d.]+),", " ".join(capsys.readouterr().out.split()))
    assert found is not None
    return float(found.group(1))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("1f1b", {}),
        ("zb-h1", {}),
        ("zb-h2", {}),
        ("interleaved", {"p2p": 0.4}),
        ("v-half", {"p2p": 0}),
        ("v-min", {"p": 2, "m": 4, "p2p": 0}),
        ("zb-1p", {"p2p": 0}),
    ],
)
def test_the_command_draws_the_same_where_the_page_says_so(
    name: str, more: dict[str, float], page: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    change(page, schedule=name, **more)
    told = makespan_of(shown(page, "command"), capsys)
    assert "The command draws the same" in shown(page, "kind")
    assert told == pytest.approx(float(shown(page, "makespan")), rel=1e-5)


def test_an_order_for_other_costs_says_so(page: Browser) -> None:
    change(page, schedule="v-half", p2p=0.2)
    assert "was built for F, B, W and transfer of 1, 1, 1, 0;" in shown(page, "kind")
    assert comparison(page)["v-half"][-1] == "1, 1, 1, 0"
    assert comparison(page)["zb-h1"][-1] == "1, 1, 1, 0.1"
    assert comparison(page)["1f1b"][-1] == "any costs"


def test_a_memory_limit_is_drawn_and_what_does_not_keep_it_is_named(page: Browser) -> None:
    assert page.evaluate("document.querySelectorAll('#drawing .limit').length") == 0
    change(page, limit=0.8)
    assert page.evaluate("document.querySelectorAll('#drawing .limit').length") == 4
    assert shown(page, "kind").startswith("It holds 100.0% of 1F1B's memory, more than the limit.")
    assert shown(page, "command").endswith("--memory-limit 0.8")
    rows = comparison(page)
    for name in NAMES:
        timeline = schedules.simulate(packaged(name, 4, 8), costs_of(4, (1.0, 1.0, 1.0, 0.0)))
        peak = max(timeline.peak_activation)
        assert rows[name][5].endswith(", over the limit") == (peak > 0.8 * 4), name


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "v-half", "-p", "4", "-m", "8"],
        ["show", "v-half", "-p", "3", "-m", "5", "--backward", "1.23456", "--memory-limit", "0.7"],
        ["show", "interleaved", "-p", "3", "-m", "7", "--chunks", "3", "--group-size", "4"],
    ],
)
def test_the_explorer_agrees_with_the_table_and_with_its_command(
    arguments: list[str],
    browser: Browser,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "page.html"
    assert cli.main([*arguments, "--output", str(path)]) == 0
    browser.open(path)
    facts: dict[str, str] = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.facts tr')]"
        ".map((tr) => [tr.cells[0].textContent, tr.cells[1].textContent]))"
    )
    assert shown(browser, "makespan") == facts["makespan"]
    assert shown(browser, "bubble") == facts["bubble rate"]
    row = comparison(browser)[arguments[1]]
    assert row[1] == facts["makespan"]
    assert row[3] == facts["bubble rate"]
    assert "The command draws the same" in shown(browser, "kind")
    told = makespan_of(shown(browser, "command"), capsys)
    assert f"{told:.6g}" == facts["makespan"]


def test_the_explorer_of_a_plan_agrees_with_its_table(browser: Browser, tmp_path: Path) -> None:
    model, path = tmp_path / "model.yaml", tmp_path / "plan.html"
    model.write_text(
        "name: small\nsource: test\nlayers: 8\nhidden_size: 1024\n"
        "attention_heads: 16\nvocabulary: 2000\nsequence_length: 1024\nglobal_batch_size: 32\n",
        encoding="utf-8",
    )
    arguments = ["--gpus", "4", "--pipeline", "4", "--schedules", "zb-h1,1f1b", "--tries", "1"]
    assert cli.main(["plan", "--config", str(model), *arguments, "--html", str(path)]) == 0
    browser.open(path)
    sentence = browser.evaluate("document.querySelector('#pictures h3 + p').textContent")
    found = re.match(r"bubble ([\d.]+%);.*; ([\d.]+) ms", sentence)
    assert found is not None
    assert shown(browser, "bubble") == found.group(1)
    assert float(shown(browser, "makespan")) == pytest.approx(float(found.group(2)), abs=0.051)
    assert "This is the order of the page's table" in shown(browser, "kind")
    browser.open(path, width=1280)
    wider = browser.evaluate(
        "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth)"
        ".map((e) => e.outerHTML.slice(0, 80))"
    )
    assert wider == []
    clipped = browser.evaluate(
        "[...document.querySelectorAll('svg.schedule text')].filter((e) =>"
        " e.getBoundingClientRect().right > e.ownerSVGElement.getBoundingClientRect().right"
        " || e.getBoundingClientRect().left < e.ownerSVGElement.getBoundingClientRect().left)"
        ".map((e) => e.textContent)"
    )
    assert clipped == []


# --- the pictures ---------------------------------------------------------------------------------


def test_the_drawn_picture_has_the_bars_of_the_still_one(page: Browser, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    still = re.search(r'<svg class="schedule".*?</svg>', text, flags=re.DOTALL)
    assert still is not None
    page.evaluate(
        f"document.body.insertAdjacentHTML('beforeend', {json.dumps(still.group())}) || 1"
    )

    ours, theirs = shares(bars(page, "body > svg")), shares(bars(page, "#picture"))
    assert len(ours) == len(theirs) == 64
    for one, other in zip(ours, theirs, strict=True):
        assert one[:3] + one[5:] == other[:3] + other[5:]
        assert one[3:5] == pytest.approx(other[3:5], abs=1e-4)


def test_each_pass_has_a_tooltip(page: Browser) -> None:
    """With kind, stage, microbatch, start and end; and so has idle time, and memory."""
    timeline = in_python("1f1b", 4, 8, (1.0, 1.0, 1.0, 0.1))
    left, top = corner(page, "#picture svg.schedule")
    per_second = (
        page.evaluate("document.querySelector('#picture .schedule .ground').width.baseVal.value")
        / timeline.makespan
    )
    words = {PassKind.F: "F, forward", PassKind.BW: "BW, backward, fused"}
    for rank, passes in enumerate(timeline.schedule.ranks):
        for p, start, end in zip(passes, timeline.start[rank], timeline.end[rank], strict=True):
            x = left + html_drawing.SIZES.labels + (start + end) / 2 * per_second
            mouse(page, "mouseMoved", x, top + rank * html_drawing.SIZES.row + 12)
            assert tip(page, "#picture") == (
                f"{words[p.kind]}\nrank {rank}, stage {p.stage}, microbatch {p.microbatch}\n"
                f"{start:.6g} to {end:.6g}: {end - start:.6g}"
            )
    mouse(
        page,
        "mouseMoved",
        left + html_drawing.SIZES.labels + 2,
        top + 3 * html_drawing.SIZES.row + 12,
    )
    assert tip(page, "#picture").startswith("rank 3, idle\n0 to 3.3")
    memory = top + 4 * html_drawing.SIZES.row + html_drawing.SIZES.gap + 10
    mouse(page, "mouseMoved", left + html_drawing.SIZES.labels + 3.5 * per_second, memory)
    assert tip(page, "#picture").startswith("rank 0 holds 4 microbatches at 3.5")
    mouse(page, "mouseMoved", left + 4, memory)
    assert tip(page, "#picture") == ""


def window(page: Browser) -> tuple[float, float]:
    first, last = re.findall(
        r"[\d.]+", page.evaluate("document.querySelector('#picture .shown').textContent")
    )
    return float(first), float(last)


def test_buttons_keys_wheel_and_mouse_move_the_window(page: Browser) -> None:
    makespan = in_python("1f1b", 4, 8, (1.0, 1.0, 1.0, 0.1)).makespan
    assert window(page) == pytest.approx((0, makespan), abs=1e-3)
    page.click("#picture button[title='zoom in']")
    assert window(page) == pytest.approx((makespan / 4, makespan * 3 / 4), abs=1e-3)
    page.click("#picture button[title=later]")
    assert window(page) == pytest.approx((makespan * 3 / 8, makespan * 7 / 8), abs=1e-3)
    some = bars(page, "#picture")
    assert 0 < len(some) < 64
    assert all(b[2] >= html_drawing.SIZES.labels - 0.01 for b in some)
    page.click("#picture button[title='show all of it']")
    assert len(bars(page, "#picture")) == 64
    left, top = corner(page, "#picture svg.schedule")
    wheel = {"x": left + 300, "y": top + 30, "deltaX": 0, "deltaY": -120}
    page.call("Input.dispatchMouseEvent", type="mouseWheel", **wheel, modifiers=2)  # Ctrl
    page.wait_for(
        f"!document.querySelector('#picture .shown').textContent.endsWith('{makespan:g}')"
    )
    first, last = window(page)
    assert last - first == pytest.approx(0.8 * makespan, rel=1e-3)
    page.evaluate("document.querySelector('#picture .view').focus()")
    for key, code in (("+", 187), ("End", 35)):
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code)
    assert window(page) == pytest.approx((0.6 * makespan, makespan), rel=1e-3)
    mouse(page, "mousePressed", left + 300, top + 30, button="left", clickCount=1)
    mouse(page, "mouseMoved", left + 400, top + 30, button="left", buttons=1)
    mouse(page, "mouseReleased", left + 400, top + 30, button="left", clickCount=1)
    assert window(page)[0] < 0.6 * makespan - 0.1
    page.call("Input.dispatchKeyEvent", type="keyDown", key="0", windowsVirtualKeyCode=48)
    assert window(page) == pytest.approx((0, makespan), abs=1e-3)


def test_a_page_scrolls_under_the_wheel_until_a_picture_is_asked(page: Browser) -> None:
    left, top = corner(page, "#picture svg.schedule")
    before = window(page)
    mouse(page, "mouseWheel", left + 300, top + 30, deltaX=0, deltaY=120)
    page.evaluate("1")
    assert window(page) == before


def test_16_ranks_and_64_microbatches_have_numbers_once_looked_at(
    browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "big.html"
    assert cli.main(["show", "zb-h1", "-p", "16", "-m", "64", "--output", str(path)]) == 0
    browser.open(path, width=1280)
    numbers = "document.querySelectorAll('#picture .numbers text').length"
    whole, drawn = browser.evaluate(numbers), len(bars(browser, "#picture"))
    assert drawn >= 16 * 64 * 2
    assert whole < drawn / 4
    assert browser.evaluate("document.querySelectorAll('#picture .thin').length") > 0
    for _ in range(3):
        browser.click("#picture button[title='zoom in']")
    shown_bars = len(bars(browser, "#picture"))
    assert 0 < shown_bars < drawn / 4
    assert browser.evaluate(numbers) > shown_bars / 2


def test_dark_mode_changes_the_paper_and_keeps_the_bars(page: Browser, path: Path) -> None:
    def look() -> dict[str, Any]:
        found: dict[str, Any] = page.evaluate(
            "({paper: getComputedStyle(document.body).backgroundColor,"
            " ink: getComputedStyle(document.body).color,"
            " name: getComputedStyle(document.querySelector('#picture .name')).fill,"
            " idle: getComputedStyle(document.querySelector('#picture .schedule .ground')).fill})"
        )
        return {name: [int(v) for v in re.findall(r"\d+", text)] for name, text in found.items()}

    light, colours = look(), {b[5] for b in bars(page, "#picture")}
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.call("Emulation.setEmulatedMedia", features=features)
    try:
        dark = look()
        assert {b[5] for b in bars(page, "#picture")} == colours
    finally:
        page.call("Emulation.setEmulatedMedia", features=[])
    assert sum(light["paper"]) > 700 > 100 > sum(dark["paper"])
    assert sum(light["ink"]) < 120 < 600 < sum(dark["ink"])
    assert dark["name"] == dark["ink"]
    assert dark["idle"] != light["idle"]


# --- the page -------------------------------------------------------------------------------------


def test_nothing_is_asked_of_any_network_and_nothing_fails(page: Browser, path: Path) -> None:
    change(page, schedule="v-half", p=8, m=16)
    asked = [
        event["params"]["request"]["url"]
        for event in page.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert asked == [path.resolve().as_uri()]
    said = [e for e in page.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
    assert said == []


@pytest.mark.parametrize("width", [1500, 1280, 700, 400])
def test_nothing_is_clipped_in_a_window(width: int, page: Browser, path: Path) -> None:
    """The page is as wide as the window; what is wider scrolls in a box of its own."""
    page.open(path, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        "[...document.querySelectorAll('main *')]"
        ".filter((e) => !e.closest('.scroll, .tip, datalist')"
        f" && e.getBoundingClientRect().right > {width} + 0.5).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
    for box in ("#picture", "#drawing"):
        wide, held = page.evaluate(
            f"[document.querySelector('{box} .view').scrollWidth,"
            f" Math.max(...[...document.querySelectorAll('{box} svg.schedule text')].map((e) =>"
            f" e.getBoundingClientRect().right - e.ownerSVGElement.getBoundingClientRect().left))]"
        )
        assert held <= wide
        assert wide <= width or width < 600


def test_a_strange_name_and_a_foreign_script_do_not_run(browser: Browser, tmp_path: Path) -> None:
    model, path = tmp_path / "model.yaml", tmp_path / "plan.html"
    model.write_text(
        f"name: {json.dumps(EVIL)}\nsource: test\nlayers: 8\nhidden_size: 1024\n"
        "attention_heads: 16\nvocabulary: 32000\nsequence_length: 1024\nglobal_batch_size: 32\n",
        encoding="utf-8",
    )
    arguments = ["--gpus", "4", "--pipeline", "4", "--schedules", "zb-h1", "--tries", "1"]
    assert cli.main(["plan", "--config", str(model), *arguments, "--html", str(path)]) == 0
    browser.open(path)
    assert EVIL in browser.evaluate("document.querySelector('h1').textContent")
    browser.evaluate(
        "document.body.append(Object.assign(document.createElement('script'),"
        " {textContent: 'window.foreign = 1'}))"
    )
    assert browser.evaluate("window.foreign === undefined")
    assert not any(e["method"] == "Page.javascriptDialogOpening" for e in browser.events)
    assert browser.evaluate("document.getElementById('explorer').dataset.redrawn") == "1"
    assert float(shown(browser, "makespan")) > 0
