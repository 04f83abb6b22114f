"""Pages in a real browser: the explorer agrees with the simulator, and nothing is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import MISSING, Browser, find_browser

from megatron_zb import cli, schedules
from megatron_zb.errors import UsageError
from megatron_zb.memory_lines import memory_lines
from megatron_zb.report import explorer
from megatron_zb.schedules import Costs, Pass, PassKind, Schedule, Timeline, v_shape
from megatron_zb.schedules import placement as placements
from megatron_zb.schedules.request import MemoryLimit, Request
from megatron_zb.schedules.squeeze import place_weight_gradients

pytestmark = pytest.mark.skipif(find_browser() is None, reason=MISSING)

EXACT = [choice.name for choice in explorer.CHOICES if choice.group == explorer.EXACT]
BLOCKS = {
    "v-min": (v_shape.v_min_offsets, v_shape.v_min_peak),
    "v-half": (v_shape.v_half_offsets, v_shape.v_half_peak),
    "v-zb": (v_shape.v_zb_offsets, lambda p: p),
}
GREEDY = {"greedy-v": placements.v_shape, "greedy-1": placements.looped}
SHAPES = [(2, 1), (2, 5), (3, 7), (4, 8), (5, 4), (8, 16), (6, 20)]
COSTS = [(1.0, 1.0, 1.0, 0.0), (1.0, 1.2, 0.9, 0.05), (1.3, 1.7, 0.4, 0.3), (1.0, 2.0, 0.0, 0.1)]
KINDS = [PassKind.F, PassKind.B, PassKind.W, PassKind.BW]
EVIL = "</title></script><script>alert(1)</script><img src=x onerror=alert(2)>"

Setting = dict[str, Any]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    command = find_browser()
    assert command is not None
    with Browser(command, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


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


def setting(
    p: int, m: int, costs: tuple[float, float, float, float], limit: float | None = None
) -> Setting:
    forward, backward, weight, p2p = costs
    return {
        "p": p,
        "m": m,
        "forward": forward,
        "backward": backward,
        "weight": weight,
        "p2p": p2p,
        "limit": limit,
    }


SETTINGS = [setting(p, m, costs) for p, m in SHAPES for costs in COSTS]


def costs_of(now: Setting) -> Costs:
    return Costs.uniform(
        pipeline_size=now["p"], **{n: now[n] for n in ("forward", "backward", "weight", "p2p")}
    )


def in_python(name: str, now: Setting) -> Timeline:
    """The schedule as this package has it, without a search."""
    p, m, costs = now["p"], now["m"], costs_of(now)
    if name in BLOCKS:
        offsets, peak = BLOCKS[name]
        block = v_shape.building_block(p, offsets)
        request = Request(p, m, costs, MemoryLimit.of(now["limit"], None, p))
        built = place_weight_gradients(name, block.placement, block.repeat(m), request, peak(p))
    else:
        built = schedules.build(
            name, pipeline_size=p, num_microbatches=m, costs=costs, memory_limit=now["limit"]
        )
    return schedules.simulate(built, costs)


def in_browser(page: Browser, name: str, settings: list[Setting]) -> list[dict[str, Any]]:
    """For each setting the timeline, or what was refused."""
    found = page.evaluate(
        f"{json.dumps(settings)}.map((now) => {{ try {{"
        f"  const t = pipelines.build({json.dumps(name)}, now);"
        "   return {start: t.start, end: t.end, makespan: t.makespan, bubble: t.bubble,"
        "     peaks: t.peaks, lines: t.lines, ranks: t.ranks.map((passes) =>"
        "       passes.map((q) => [q.kind, q.stage, q.microbatch]))};"
        "} catch (error) {"
        "   if (!(error instanceof pipelines.Refused)) throw error;"
        "   return {refused: error.message}; } })"
    )
    assert len(found) == len(settings)
    return list(found)


def passes_of(found: dict[str, Any]) -> tuple[tuple[Pass, ...], ...]:
    return tuple(
        tuple(Pass(KINDS[kind], stage, microbatch) for kind, stage, microbatch in rank)
        for rank in found["ranks"]
    )


# --- the simulator --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*EXACT, *BLOCKS])
def test_fixed_orders_agree_to_the_last_bit(name: str, page: Browser) -> None:
    for now, found in zip(SETTINGS, in_browser(page, name, SETTINGS), strict=True):
        timeline = in_python(name, now)
        assert passes_of(found) == timeline.schedule.ranks, now
        assert found["start"] == [list(times) for times in timeline.start], now
        assert found["end"] == [list(times) for times in timeline.end], now
        assert found["makespan"] == timeline.makespan, now
        assert found["bubble"] == pytest.approx(timeline.bubble_rate, abs=1e-12)
        assert found["peaks"] == list(timeline.peak_activation), now


@pytest.mark.parametrize("name", ["v-half", "zb-h1", "interleaved"])
def test_the_memory_of_the_ranks_agrees(name: str, page: Browser) -> None:
    for now, found in zip(SETTINGS, in_browser(page, name, SETTINGS), strict=True):
        for mine, line in zip(found["lines"], memory_lines(in_python(name, now)), strict=True):
            assert mine["times"] == list(line.times), now
            assert mine["held"] == pytest.approx(line.held, abs=1e-9), now


@pytest.mark.parametrize("name", GREEDY)
@pytest.mark.parametrize("limit", [None, 0.5, 2.0])
def test_greedy_orders_are_valid_and_keep_the_limit(
    name: str, limit: float | None, page: Browser
) -> None:
    settings = [{**now, "limit": limit} for now in SETTINGS]
    for now, found in zip(settings, in_browser(page, name, settings), strict=True):
        placement = GREEDY[name](now["p"])
        ranks = passes_of(found)
        timeline = schedules.simulate(
            Schedule(name, placement, now["m"], ranks).validate(), costs_of(now)
        )
        assert found["start"] == [list(times) for times in timeline.start], now
        assert found["makespan"] == timeline.makespan, now
        assert max(timeline.peak_activation) <= (limit or 1) * now["p"] + 1e-9, now


@pytest.mark.parametrize("name", [*EXACT, *BLOCKS])
@pytest.mark.parametrize("limit", [0.15, 0.4, 0.75, 1.0])
def test_a_limit_is_kept_or_refused_as_the_package_does(
    name: str, limit: float, page: Browser
) -> None:
    settings = [setting(p, m, (1.0, 1.2, 0.9, 0.05), limit) for p, m in SHAPES]
    for now, found in zip(settings, in_browser(page, name, settings), strict=True):
        try:
            timeline = in_python(name, now)
        except UsageError as error:
            assert found.get("refused") == str(error), now
        else:
            assert found.get("makespan") == timeline.makespan, (now, found)


# --- the controls ---------------------------------------------------------------------------------


def redrawn(page: Browser) -> int:
    return int(page.evaluate("document.getElementById('explorer').dataset.redrawn"))


def change(page: Browser, **values: object) -> None:
    """Type into inputs, choose a schedule, and wait until it is drawn."""
    for element, value in values.items():
        before = redrawn(page)
        if element == "schedule":
            page.evaluate(
                "(() => { const s = document.getElementById('schedule');"
                f"s.value = {json.dumps(value)};"
                "s.dispatchEvent(new Event('input', {bubbles: true})); })()"
            )
        else:
            page.type_into(element, str(value))
        page.wait_for(f"Number(document.getElementById('explorer').dataset.redrawn) > {before}")


def shown(page: Browser, element: str) -> str:
    return str(page.evaluate(f"document.getElementById({json.dumps(element)}).textContent"))


def check_readings(page: Browser, timeline: Timeline, stock: int) -> None:
    assert float(shown(page, "makespan")) == pytest.approx(timeline.makespan, rel=1e-5)
    assert float(shown(page, "bubble").rstrip("%")) == pytest.approx(
        100 * timeline.bubble_rate, abs=0.051
    )
    peak = max(timeline.peak_activation)
    assert float(shown(page, "peak")) == pytest.approx(peak, rel=1e-3)
    assert float(shown(page, "share").rstrip("%")) == pytest.approx(100 * peak / stock, abs=0.051)


@pytest.mark.parametrize("name", [*EXACT, *BLOCKS])
def test_the_controls_change_what_is_shown(name: str, page: Browser) -> None:
    start = setting(4, 8, (1.0, 1.0, 1.0, 0.1))
    check_readings(page, in_python("1f1b", start), 4)
    change(page, schedule=name)
    check_readings(page, in_python(name, start), 4)
    change(page, p=6)
    check_readings(page, in_python(name, {**start, "p": 6}), 6)
    change(page, m=20, forward=1.25, backward="1.5", weight=0.75, p2p="0.05")
    last = setting(6, 20, (1.25, 1.5, 0.75, 0.05))
    timeline = in_python(name, last)
    check_readings(page, timeline, 6)
    gain = in_python("1f1b", last).makespan / timeline.makespan - 1
    assert float(shown(page, "gain").rstrip("%")) == pytest.approx(100 * gain, abs=0.051)
    drawn = page.evaluate(
        "[...document.querySelectorAll('#drawing .bars')]"
        ".map((path) => path.getAttribute('d').split('M').length - 1)"
    )
    assert sum(drawn) == sum(map(len, timeline.schedule.ranks))
    lines = page.evaluate("document.querySelectorAll('#drawing .line').length")
    assert lines == 6


def test_a_row_of_the_comparison_can_be_chosen(page: Browser) -> None:
    rows = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#comparison tbody tr')]"
        ".map((tr) => [tr.dataset.schedule, [...tr.cells].map((td) => td.textContent)]))"
    )
    assert set(rows) == {choice.name for choice in explorer.CHOICES}
    start = setting(4, 8, (1.0, 1.0, 1.0, 0.1))
    for name in (*EXACT, *BLOCKS):
        assert float(rows[name][1]) == pytest.approx(in_python(name, start).makespan, rel=1e-5)
    page.click("#comparison tr[data-schedule=zb-h2] button")
    page.wait_for("document.getElementById('explorer').dataset.redrawn === '2'")
    assert page.evaluate("document.getElementById('schedule').value") == "zb-h2"
    check_readings(page, in_python("zb-h2", start), 4)


@pytest.mark.parametrize(
    ("element", "value", "words"),
    [
        ("p", "1", "ranks, p: give a whole number from 2 to 128"),
        ("p", "2.5", "ranks, p: give a whole number from 2 to 128"),
        ("m", "", "microbatches, m: give a whole number from 1 to 1024"),
        ("forward", "0", "forward, F: give a number above 0, such as 1.0"),
        ("weight", "-1", "weight gradient, W: give a number of 0 or more, such as 1.0"),
        ("limit", "0.2", "1f1b cannot keep the memory limit of 0.2 of 1F1B: rank 0 needs at"),
        ("m", "1000", None),
        ("p", "128", None),
    ],
)
def test_what_the_reader_can_mend_is_a_sentence(
    element: str, value: str, words: str | None, page: Browser
) -> None:
    change(page, **{element: value})
    hidden = page.evaluate("document.getElementById('problem').hidden")
    assert hidden == (words is None)
    assert shown(page, "problem").startswith(words or "")
    mended = {"p": 5, "m": 6, "forward": 1, "weight": 1}
    change(page, **mended, **({"limit": ""} if element == "limit" else {}))
    assert page.evaluate("document.getElementById('problem').hidden")
    check_readings(page, in_python("1f1b", setting(5, 6, (1.0, 1.0, 1.0, 0.1))), 5)


def test_too_many_passes_are_refused_before_the_browser_hangs(page: Browser) -> None:
    change(page, p=128, m=1000)
    assert "are too many for this page: give at most 78 microbatches" in shown(page, "problem")
    assert "--pipeline-size 128 --num-microbatches 1000" in shown(page, "command")


@pytest.mark.parametrize("name", [choice.name for choice in explorer.CHOICES])
def test_the_command_below_it_runs(
    name: str, page: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    change(page, schedule=name, m=6, p2p=0.2)
    words = shown(page, "command").split()
    assert words[0] == "megatron-zb"
    assert cli.main(words[1:]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    found = re.search(r"makespan ([\d.]+),", printed)
    assert found is not None
    if name in EXACT:
        assert float(found.group(1)) == pytest.approx(float(shown(page, "makespan")), rel=1e-5)
    else:
        assert float(found.group(1)) <= float(shown(page, "makespan")) * (1 + 1e-5)
        assert "own search does better" in shown(page, "kind")


# --- the page -------------------------------------------------------------------------------------


def test_the_explorer_draws_as_the_page_does(page: Browser) -> None:
    """The same bars, axes and lines, from two drawers."""

    def drawn(svg: str) -> list[list[str]]:
        found: list[list[str]] = page.evaluate(
            f"[...document.querySelector('{svg}').querySelectorAll('path, text, rect')].map((e) =>"
            " [e.tagName, e.getAttribute('class') ?? '', e.getAttribute('d') ?? e.textContent,"
            "  e.getAttribute('x') ?? '', e.getAttribute('y') ?? '',"
            "  getComputedStyle(e).fill, getComputedStyle(e).stroke])"
        )
        return sorted(found)

    def numbers(element: list[str]) -> list[float]:
        return [float(n) for n in re.findall(r"[\d.]+", " ".join(element[2:5]))]

    ours, theirs = drawn("#picture svg.schedule"), drawn("#drawing")
    assert len(ours) == len(theirs) > 50
    for one, other in zip(ours, theirs, strict=True):
        assert one[:2] == other[:2]
        assert one[5:] == other[5:]
        assert numbers(one) == pytest.approx(numbers(other), abs=0.011)


def test_nothing_is_asked_of_any_network_and_nothing_fails(page: Browser, path: Path) -> None:
    change(page, schedule="v-half", p=8)
    asked = [
        event["params"]["request"]["url"]
        for event in page.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert asked == [path.resolve().as_uri()]
    said = [e for e in page.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
    assert said == []


def test_the_page_is_not_wider_than_the_window(page: Browser, path: Path) -> None:
    for width in (1500, 700, 400):
        page.open(path, width=width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


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
