"""Every kind of page in a browser: in narrow and wide windows, on light and dark paper."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import measured_runs
import pytest
import traced_steps
from browser import MISSING, Browser, find_browser
from small_models import SMALL

from megatron_zb.cli import main as cli
from megatron_zb.measured.profile import Profile, write_profile
from megatron_zb.measured.trace import write_trace

pytestmark = pytest.mark.skipif(find_browser() is None, reason=MISSING)

WIDTHS = (400, 1280)
SCHEMES = ("light", "dark")


def write_schedule(path: Path) -> None:
    assert cli.main(["show", "v-half", "-p", "4", "-m", "8", "-o", str(path)]) == 0


def write_step(path: Path) -> None:
    """Of a run that takes about twice as long as predicted."""
    profile = path.with_suffix(".yaml")
    values = traced_steps.profile().model_dump()
    for stage in values["stages"]:
        stage |= {name: stage[name] / 2 for name in ("forward", "backward", "weight")}
    write_profile(Profile.model_validate(values), profile)
    write_trace(traced_steps.ran(), profile)
    assert cli.main(["trace", str(profile), "-o", str(path)]) == 0


def write_measured_plan(path: Path) -> None:
    profile = path.with_suffix(".yaml")
    write_profile(measured_runs.profile(), profile)
    names = ["--schedules", "zb-h1,v-half"]
    assert cli.main(["plan", "--profile", str(profile), *names, "--html", str(path)]) == 0


def write_plan(path: Path) -> None:
    model = path.with_suffix(".yaml")
    model.write_text(SMALL, encoding="utf-8")
    choices = ["--pipeline", "1,4", "--schedules", "zb-h1,zb-h2,wave", "--tries", "1"]
    arguments = ["plan", "--config", str(model), "--gpus", "4", *choices, "--html", str(path)]
    assert cli.main([*arguments, "--format", "json"]) == 0


WRITERS: dict[str, Callable[[Path], None]] = {
    "schedule": write_schedule,
    "step": write_step,
    "measured plan": write_measured_plan,
    "plan": write_plan,
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {kind: folder / f"{kind.replace(' ', '_')}.html" for kind in WRITERS}
    for kind, write in WRITERS.items():
        write(found[kind])
    return found


@pytest.fixture
def shown(browser: Browser, pages: dict[str, Path]) -> Iterator[Callable[[str, int, str], Browser]]:
    def show(kind: str, width: int = 1280, scheme: str = "light") -> Browser:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.call("Emulation.setEmulatedMedia", features=[feature])
        browser.open(pages[kind], width=width)
        browser.wait_for("document.getElementById('explorer').dataset.redrawn === '1'")
        # Sizes are observed, and boxes marked, before the frame after the next is drawn.
        browser.evaluate(
            "requestAnimationFrame(() => requestAnimationFrame(() => { window.drawn = true; }))"
        )
        browser.wait_for("window.drawn === true")
        return browser

    yield show
    browser.call("Emulation.setEmulatedMedia", features=[])


# Ratios of WCAG 2 between the colour of each text and what it is written on, those below 4.5.
_FAINT = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const groundOf = (e) => {
    for (let at = e; at; at = at.parentElement) {
      const ground = parse(getComputedStyle(at).backgroundColor);
      if (ground.length === 3 || ground[3] === 1) return ground;
    }
    return null;
  };
  const faint = [], words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (words.nextNode()) {
    const e = words.currentNode.parentElement;
    // Numbers on bars have the bars' colours, which tests of the palette measure.
    if (!words.currentNode.data.trim() || e.closest(".numbers")) continue;
    if (!e.getClientRects().length) continue;
    seen += 1;
    const style = getComputedStyle(e);
    const ink = parse(e.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(ink), light(groundOf(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) faint.push([e.textContent.slice(0, 40), ink, groundOf(e)]);
  }
  return { seen, faint };
})()
"""


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_page_can_be_read(
    kind: str,
    width: int,
    scheme: str,
    shown: Callable[..., Browser],
    pages: dict[str, Path],
) -> None:
    """It is no wider than the window, nothing fails or is loaded, and all text has contrast."""
    page = shown(kind, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    failed = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
    assert [e for e in page.events if e["method"] in failed] == []
    asked = [e for e in page.events if e["method"] == "Network.requestWillBeSent"]
    assert [e["params"]["request"]["url"] for e in asked] == [pages[kind].resolve().as_uri()]
    found = page.evaluate(_FAINT)
    assert found["seen"] > 50
    assert found["faint"] == []
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_wider_than_the_window_scrolls_and_says_so(
    kind: str, width: int, shown: Callable[..., Browser]
) -> None:
    page = shown(kind, width)
    outside = page.evaluate(
        "[...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroll, .tip')"
        " && e.getBoundingClientRect().right > innerWidth + 0.5).map((e) => e.outerHTML)"
    )
    assert outside == []
    boxes = page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter((e) => e.getClientRects().length)"
        ".map((e) => [e.scrollWidth > e.clientWidth,"
        " getComputedStyle(e, '::before').content.includes('scroll sideways')])"
    )
    assert boxes
    for is_wider, says_so in boxes:
        assert is_wider is says_so
    if width == 400:
        assert any(is_wider for is_wider, _ in boxes)


# --- a step beside its prediction -----------------------------------------------------------------

_SCALES = """
[...document.querySelectorAll('#step svg.schedule')].map((svg) => {
  const all = (name) => [...svg.querySelectorAll(name)];
  const height = (path) => Number(path.getAttribute('d').match(/M[\\d.]+,([\\d.]+)/)[1]);
  return {
    width: Number(svg.querySelector('.ground').getAttribute('width')),
    ticks: all('.tick').map((e) => [e.textContent, e.getAttribute('x')]),
    baseline: all('.reference').map((e, i) => height(all('.held')[i]) - height(e)),
  };
})
"""


@pytest.mark.parametrize("width", WIDTHS)
def test_both_pictures_of_a_step_have_one_scale(width: int, shown: Callable[..., Browser]) -> None:
    page = shown("step", width)
    measured, predicted = page.evaluate(_SCALES)
    cells = page.evaluate(
        "[...document.querySelectorAll('#step h3 + p')].map((e) => e.textContent)"
    )
    seconds = [float(text.split("; ")[-1].split(" ms")[0]) for text in cells]
    assert seconds[0] > 1.5 * seconds[1]
    assert measured["width"] / predicted["width"] == pytest.approx(seconds[0] / seconds[1], 1e-3)
    assert measured["ticks"] == predicted["ticks"]
    assert len(measured["ticks"]) > 3
    assert measured["baseline"] == predicted["baseline"]
    page.click("#step .picture button[title='zoom in']")
    page.click("#step .picture button[title='later']")
    again = page.evaluate(_SCALES)
    assert again[0]["ticks"] == again[1]["ticks"] != measured["ticks"]
    windows = page.evaluate(
        "[...document.querySelectorAll('#step .shown, #drawn .shown')].map((e) => e.textContent)"
    )
    assert windows[0] == windows[1] != windows[2]


def test_both_pictures_of_a_step_scroll_together(shown: Callable[..., Browser]) -> None:
    page = shown("step", 400)
    page.evaluate("document.querySelector('#step .view').scrollLeft = 90")
    page.wait_for("document.querySelectorAll('#step .view')[1].scrollLeft === 90")
    assert page.evaluate("document.querySelector('#drawn .view').scrollLeft") == 0


# --- a plan ---------------------------------------------------------------------------------------


def test_the_chart_has_the_rows_of_the_plan_and_their_front(
    shown: Callable[..., Browser],
    pages: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    again = tmp_path / "plan.html"
    capsys.readouterr()
    write_plan(again)
    told = json.loads(capsys.readouterr().out)
    assert again.read_text(encoding="utf-8") == pages["plan"].read_text(encoding="utf-8")
    rows = [
        (row["memory"]["total"] / 2**30, row["tokens_per_second_per_gpu"]) for row in told["ranked"]
    ]
    page = shown("plan")
    found: list[dict[str, Any]] = page.evaluate(
        "[...document.querySelectorAll('#chart .point')].map((e) => ({...e.dataset,"
        " best: e.classList.contains('best'), title: e.querySelector('title').textContent,"
        " fill: getComputedStyle(e.querySelector('circle')).fill}))"
    )
    assert [int(point["place"]) for point in found] == list(range(1, len(rows) + 1))
    for point, (gib, tokens) in zip(found, rows, strict=True):
        assert float(point["gib"]) == pytest.approx(gib, rel=1e-5)
        assert float(point["tokens"]) == pytest.approx(tokens, rel=1e-5)
        beaten = any((g < gib and t >= tokens) or (g <= gib and t > tokens) for g, t in rows)
        assert point["best"] is not beaten
        assert f"{tokens:.0f} tokens/s/GPU in {gib:.1f} GiB" in point["title"]
    assert len({point["fill"] for point in found if point["best"]}) == 1
    assert {point["fill"] for point in found if not point["best"]} == {"rgb(255, 255, 255)"}
    listed = page.evaluate("[...document.querySelectorAll('#chart li')].map((e) => e.value)")
    assert listed == [int(point["place"]) for point in found if point["best"]]
    limit = page.evaluate("document.querySelector('#chart .limit').dataset.gib")
    assert float(limit) == pytest.approx(told["gpu_memory"] / 2**30, rel=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_words_of_the_chart_can_be_read(width: int, shown: Callable[..., Browser]) -> None:
    """They lie within the picture and are no smaller than those of other pictures."""
    page = shown("plan", width)
    outside = page.evaluate(
        "[...document.querySelectorAll('#chart svg text')].filter((e) => {"
        " const box = e.getBoundingClientRect(), all = e.ownerSVGElement.getBoundingClientRect();"
        " return box.left < all.left || box.right > all.right + 0.5 || box.top < all.top"
        " || box.bottom > all.bottom; }).map((e) => e.textContent)"
    )
    assert outside == []
    scale = page.evaluate(
        "document.querySelector('svg.chart').getBoundingClientRect().width"
        " / document.querySelector('svg.chart').viewBox.baseVal.width"
    )
    assert 12 * scale >= 10.5
