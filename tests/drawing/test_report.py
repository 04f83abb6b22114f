"""Pages in HTML: what is in them, and that nothing is loaded into them or run in them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from brief_searches import briefly
from packaged_orders import packaged
from pages import EVIL, Element, page_of

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.drawing import html_drawing, html_page
from megatron_zb.drawing.chart import memory_lines, report_of, title_of
from megatron_zb.drawing.html_page import SCRIPTS
from megatron_zb.schedules import interchange

SIZES = ["--pipeline-size", "4", "--num-microbatches", "8"]
MODEL = """\
name: {name}
source: test
layers: 8
hidden_size: 1024
attention_heads: 16
vocabulary: 32000
sequence_length: 1024
global_batch_size: 32
"""


@pytest.fixture(scope="module")
def v_half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "v-half.html"
    costs = ["--forward", "1", "--backward", "1.2", "--weight", "0.9", "--p2p", "0.05"]
    assert cli.main(["show", "v-half", *SIZES, *costs, "--output", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose name would do harm if it were taken as HTML."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "model.yaml").write_text(MODEL.format(name=json.dumps(EVIL)), encoding="utf-8")
    arguments = ["--gpus", "4", "--pipeline", "1,4", "--schedules", "v-half,zb-2p,wave"]
    arguments += ["--micro-batch-size", "1", "--recompute", "none", "--tries", "1"]
    path = folder / "plan.html"
    asked = ["plan", "--config", str(folder / "model.yaml"), *arguments, "--html", str(path)]
    assert cli.main(asked) == 0
    return path


@pytest.fixture(params=["v_half", "plan"])
def either(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def v_half_timeline() -> schedules.Timeline:
    costs = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1.2, weight=0.9, p2p=0.05)
    built = schedules.build("v-half", pipeline_size=4, num_microbatches=8, costs=costs)
    return schedules.simulate(built, costs)


# --- nothing comes from elsewhere, and nothing but its own scripts runs ---------------------------


def test_no_address_is_in_a_page(either: Path) -> None:
    text = either.read_text(encoding="utf-8")
    assert not re.search(r"(https?|ftp|wss?):", text, flags=re.IGNORECASE)
    assert not re.search(r"@import|url\((?!#)|srcset|fetch\(|XMLHttpRequest|import\(", text)
    for tag in ("link", "img", "iframe", "object", "embed", "base", "audio", "video", "image"):
        assert page_of(either).all(tag) == [], tag


def test_every_attribute_is_harmless(either: Path) -> None:
    def check(element: Element) -> None:
        for name in element.attributes:
            assert not name.startswith("on"), element
            assert name not in ("src", "href", "xlink:href", "action", "style"), element
        for child in element.children:
            check(child)

    check(page_of(either))


def test_the_policy_allows_the_pages_own_scripts_and_no_others(either: Path) -> None:
    def digest(element: Element) -> str:
        raw = hashlib.sha256(element.text.encode()).digest()
        return f"'sha256-{base64.b64encode(raw).decode()}'"

    page = page_of(either)
    (policy,) = (
        meta.attributes["content"]
        for meta in page.all("meta")
        if meta.attributes.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    run = [s for s in page.all("script") if s.attributes.get("type") != "application/json"]
    assert len(run) == len(SCRIPTS)
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == [digest(script) for script in run]
    assert rules["style-src"].split() == [digest(style) for style in page.all("style")]


def test_a_models_name_is_text(plan: Path) -> None:
    page = page_of(plan)
    assert EVIL in page.one("h1").text
    assert EVIL in page.one("title").text if len(page.all("title")) == 1 else True
    assert "alert(1)</script>" not in plan.read_text(encoding="utf-8")
    assert all("alert" not in script.text for script in page.all("script"))


# --- a schedule -----------------------------------------------------------------------------------


def test_the_page_of_a_schedule_has_its_sentences_and_sizes(v_half: Path) -> None:
    page, timeline = page_of(v_half), v_half_timeline()
    assert page.one("h1").text == "v-half"
    said = [p.text for p in page.one("header").all("p")]
    report = timeline.schedule.report
    assert report is not None
    in_a_job = "in a job, ranks 0 to 3 of this drawing are Megatron's pipeline ranks 3 to 0"
    assert said == [title_of(timeline), report_of(report), in_a_job]
    facts = {tr.one("th").text: tr.one("td").text for tr in page.one("table", of="facts").all("tr")}
    assert facts["pipeline ranks"] == "4"
    assert facts["F, B, W of a microbatch on a rank"] == "1, 1.2, 0.9"
    assert facts["makespan"] == f"{timeline.makespan:.6g}"
    assert facts["bubble rate"] == f"{timeline.bubble_rate:.1%}"


def test_the_picture_has_a_bar_for_each_pass_and_a_line_for_each_rank(v_half: Path) -> None:
    timeline = v_half_timeline()
    svg = page_of(v_half).one("section", id="picture").one("svg", of="schedule")
    chunk_of = timeline.schedule.placement.chunk_of
    for path in svg.all("path", of="bars"):
        kind, chunk = path.attributes["data-kind"], path.attributes["data-chunk"]
        passes = [
            p
            for rank in timeline.schedule.ranks
            for p in rank
            if (p.kind.value, str(chunk_of(p.stage))) == (kind, chunk)
        ]
        assert path.attributes["d"].count("M") == len(passes) > 0
    bars = sum(path.attributes["d"].count("M") for path in svg.all("path", of="bars"))
    assert bars == sum(map(len, timeline.schedule.ranks))
    numbers = [text.text for group in svg.all("g", of="numbers") for text in group.all("text")]
    assert len(numbers) == bars
    names = [text.text for text in svg.all("text", of="name")]
    assert names[:4] == [f"rank {rank}" for rank in range(4)]
    lines = svg.all("path", of="held")
    peaks = {int(line.attributes["data-rank"]): line.attributes["data-peak"] for line in lines}
    assert peaks == {rank: f"{peak:.6g}" for rank, peak in enumerate(timeline.peak_memory)}
    said = [text.text for text in svg.all("text") if "peak" in text.attributes.get("class", "")]
    worst = timeline.peak_memory.index(max(timeline.peak_memory))
    assert said == [
        f"{peak:.4g}" + (" most" if rank == worst else "")
        for rank, peak in enumerate(timeline.peak_memory)
    ]
    assert "dashed: 1F1B's peak, 4" in svg.one("text", of="caption").text
    words = [text.text for text in svg.all("text", of="tick")]
    assert words[-1] == "time, in the unit of the costs"


def test_bars_and_lines_of_the_picture_are_in_their_places(v_half: Path) -> None:
    """Pixels of the bars and of the steps, taken back to times and microbatches."""
    timeline = v_half_timeline()
    svg = page_of(v_half).one("section", id="picture").one("svg", of="schedule")
    ground = svg.one("rect", of="ground").attributes
    left, width = float(ground["x"]), float(ground["width"])
    drawn = sorted(
        (round(float(y) // 24), (float(x) - left) / width * timeline.makespan)
        for path in svg.all("path", of="bars")
        for x, y in re.findall(r"M([\d.]+),([\d.]+)", path.attributes["d"])
    )
    expected = sorted(
        (rank, start) for rank, starts in enumerate(timeline.start) for start in starts
    )
    assert [rank for rank, _ in drawn] == [rank for rank, _ in expected]
    assert [x for _, x in drawn] == pytest.approx([x for _, x in expected], abs=0.01)
    references = svg.all("path", of="reference")
    for line, reference in zip(memory_lines(timeline), references, strict=True):
        found = re.fullmatch(r"M[\d.]+,([\d.]+)h.*", reference.attributes["d"])
        assert found is not None
        (path,) = (p for p in svg.all("path") if p.attributes.get("data-rank") == str(line.rank))
        start = re.match(r"M[\d.]+,([\d.]+)", path.attributes["d"])
        assert start is not None
        bottom, baseline = float(start.group(1)), float(found.group(1))
        steps = re.findall(r"H([\d.]+)V([\d.]+)", path.attributes["d"])
        times = [(float(x) - left) / width * timeline.makespan for x, _ in steps]
        held = [(bottom - float(y)) / (bottom - baseline) * 4 for _, y in steps]
        assert times == pytest.approx(line.times, abs=0.01)
        assert held == pytest.approx(line.held, abs=0.02)


@pytest.mark.parametrize("name", schedules.names())
def test_every_schedule_has_a_page(name: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with briefly():
        assert cli.main(["show", name, "-p", "3", "-m", "5", "--output", str(path)]) == 0
    page = page_of(path)
    assert page.one("h1").text == name
    data = json.loads(page.one("script", id="explorer-data").text)
    assert data["initial"]["p"] == 3
    assert data["initial"]["m"] == 5
    options = page.one("select", id="schedule").all("option")
    names = [option.attributes["value"] for option in options]
    assert names[0] == name
    assert names == data["names"]
    assert set(names) == {name, *html_drawing.order_names()}
    chosen = [option for option in options if "selected" in option.attributes]
    assert [option.attributes["value"] for option in chosen] == [data["initial"]["schedule"]]


def test_a_table_has_a_page_too(tmp_path: Path) -> None:
    table, path = tmp_path / "table.csv", tmp_path / "table.html"
    assert cli.main(["export", "zb-h1", *SIZES, "--format", "csv", "--output", str(table)]) == 0
    assert cli.main(["show", "--csv", str(table), "--output", str(path)]) == 0
    assert "left to gain" in page_of(path).one("header").text


def test_a_page_too_large_to_draw_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    assert cli.main(["show", "1f1b", "-p", "16", "-m", "2000", "--output", str(path)]) == 2
    assert "too many to be drawn: their product can be at most 8192" in capsys.readouterr().err
    assert not path.exists()


def test_16_ranks_and_64_microbatches_are_a_file_below_1_5_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    table = tmp_path / "v-half.csv"
    interchange.write_csv(packaged("v-half", 16, 64), table)
    assert cli.main(["show", "--csv", str(table), "--output", str(path)]) == 0
    assert path.stat().st_size < 1.5e6
    svg = page_of(path).one("section", id="picture").one("svg", of="schedule")
    assert float(svg.attributes["width"]) <= 1280 - 2 * 28


# --- orders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "wave", "interleaved"])
def test_an_order_is_the_same_once_read_again(name: str) -> None:
    built = schedules.build(name, pipeline_size=3, num_microbatches=5)
    again = html_drawing.decode_order(html_drawing.encode_order(built))
    assert again.ranks == built.ranks
    assert again.placement.rank_of == built.placement.rank_of
    assert (again.name, again.num_microbatches) == (name, 5)


@pytest.mark.slow
def test_the_package_has_valid_orders_of_every_schedule_and_size() -> None:
    found = [(order["name"], order["p"], order["m"]) for order in html_drawing.packaged_orders()]
    assert sorted(found) == sorted(
        (name, p, m) for name in html_drawing.order_names() for p, m in html_drawing.ORDER_SIZES
    )
    for order in html_drawing.packaged_orders():
        html_drawing.decode_order(order).validate()


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
@pytest.mark.parametrize("name", html_drawing.order_names())
def test_the_packages_orders_are_what_it_builds_today(name: str, p: int, m: int) -> None:
    (found,) = (
        order
        for order in html_drawing.packaged_orders()
        if (order["name"], order["p"], order["m"]) == (name, p, m)
    )
    assert found == html_drawing.build_order(name, p, m), "run scripts/make_orders.py"


@pytest.mark.parametrize("name", html_page.FIXED)
def test_a_fixed_order_is_the_same_for_all_costs(name: str) -> None:
    for p, m in ((3, 7), (4, 8), (6, 4)):
        costs = schedules.Costs.uniform(
            pipeline_size=p, forward=0.3, backward=2.5, weight=0.1, p2p=0.7
        )
        sizes: dict[str, Any] = {"pipeline_size": p, "num_microbatches": m}
        assert (
            schedules.build(name, **sizes, costs=costs).ranks
            == schedules.build(name, **sizes).ranks
        )


def test_the_explorer_starts_with_the_pages_own_order(v_half: Path) -> None:
    data = json.loads(page_of(v_half).one("script", id="explorer-data").text)
    first = data["orders"][0]
    assert html_drawing.decode_order(first["order"]).ranks == v_half_timeline().schedule.ranks
    costs = {"forward": 1.0, "backward": 1.2, "weight": 0.9, "p2p": 0.05, "limit": None}
    assert first["built"] == costs
    assert data["initial"] == {"schedule": "v-half", "p": 4, "m": 8, **costs}
    keys = [(e["order"]["name"], e["order"]["p"], e["order"]["m"]) for e in data["orders"]]
    assert len(set(keys)) == len(keys)
    picture = json.loads(page_of(v_half).one("div", data_picture="").one("script").text)
    assert picture["order"] == first["order"]
    assert picture["times"] is None


# --- a plan ---------------------------------------------------------------------------------------


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main([*arguments, "--format", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_page_of_a_plan_has_what_the_table_has(
    plan: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "again.html"
    arguments = ["plan", "--config", str(plan.with_name("model.yaml")), "--gpus", "4"]
    arguments += ["--pipeline", "1,4", "--schedules", "v-half,zb-2p,wave", "--tries", "1"]
    arguments += ["--micro-batch-size", "1", "--recompute", "none", "--html", str(other)]
    told = planned(arguments, capsys)
    assert other.read_text(encoding="utf-8") == plan.read_text(encoding="utf-8")
    page = page_of(plan)
    body = page.one("table", of="ranking").one("tbody").all("tr")
    rows = [tr for tr in body if tr.attributes.get("class") != "why"]
    assert len(rows) == len(told["ranked"]) >= 4
    reasons = [tr.all("td")[1].text for tr in body if tr not in rows]
    assert reasons == [row["reason"] for row in told["ranked"]]
    for tr, row in zip(rows, told["ranked"], strict=True):
        cells = [td.text for td in tr.all("td")]
        assert cells[1].startswith(row["schedule"])
        assert cells[3] == f"{row['tokens_per_second_per_gpu']:.0f}"
        assert cells[5] == f"{row['bubble']:.1%}"
        assert cells[6] == f"{row['memory']['total'] / 2**30:.1f}"
        widths = [float(r.attributes["width"]) for r in tr.one("svg").all("rect")[1:]]
        assert sum(widths) == pytest.approx(
            100 * row["memory"]["total"] / told["gpu_memory"], abs=0.02
        )
    pasted = [pre.text for pre in page.one("section", id="flags").all("pre")]
    assert [re.sub(r" \\\n *", " ", text) for text in pasted] == [
        " ".join(row["flags"]) for row in told["ranked"]
    ]
    missing = page.one("section", id="ranking").all("li")
    for name, why in told["not_possible"].items():
        assert f"{name}: {why}" in [li.text for li in missing]
    parts = page.one("section", id="memory").one("tbody").all("tr")
    for tr, row in zip(parts, told["ranked"], strict=True):
        assert tr.all("td")[-1].text == f"{row['memory']['total'] / 2**30:.1f}"


def test_the_page_of_a_plan_draws_the_best_and_megatrons_own(plan: Path) -> None:
    section = page_of(plan).one("section", id="pictures")
    names = [h3.text for h3 in section.all("h3")]
    pictures = section.all("svg", of="schedule")
    assert len(names) == len(pictures)
    assert 3 <= len(names) <= 4
    assert sum("Megatron 1F1B" in name for name in names) == 1
    for picture in pictures:
        bars = sum(p.attributes["d"].count("M") for p in picture.all("path", of="bars"))
        assert bars >= 4 * 2 * 8
        assert len(picture.all("path", of="held")) == 4


def write_plan(folder: Path, *choices: str) -> Element:
    (folder / "model.yaml").write_text(MODEL.format(name="small"), encoding="utf-8")
    path = folder / "plan.html"
    model = ["--config", str(folder / "model.yaml"), "--gpus", "4", "--tries", "1"]
    assert cli.main(["plan", *model, *choices, "--html", str(path)]) == 0
    return page_of(path)


def test_a_plan_without_a_pipeline_has_a_page(tmp_path: Path) -> None:
    page = write_plan(tmp_path, "--pipeline", "1", "--schedules", "v-half")
    assert len(page.one("table", of="ranking").one("tbody").all("tr", of="first")) == 1
    assert len(page.one("svg", of="chart").all("g", of="point best")) == 1
    pictures = page.one("section", id="pictures")
    assert pictures.all("svg", of="schedule") == []
    assert "nothing to draw" in pictures.text
    not_possible = [li.text for li in page.one("section", id="ranking").all("li")]
    assert any(text.startswith("v-half: ") for text in not_possible)
    data = json.loads(page.one("script", id="explorer-data").text)
    assert (data["initial"]["p"], data["initial"]["m"]) == (4, 8)


def test_a_long_schedule_is_drawn_in_part_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_zb.plan.prediction._MOST_PASSES", 1)
    monkeypatch.setattr("megatron_zb.plan.workers.AFTER", float("inf"))  # it is set here alone
    sizes = ["--pipeline", "4", "--micro-batch-size", "1", "--recompute", "none"]
    page = write_plan(tmp_path, *sizes, "--schedules", "zb-h1")
    section = page.one("section", id="pictures")
    assert section.text.count("Drawn with 16 of 32 microbatches") == 3
    for picture in section.all("svg", of="schedule"):
        forwards = [p for p in picture.all("path", of="bars") if p.attributes["data-kind"] == "F"]
        assert sum(p.attributes["d"].count("M") for p in forwards) % (4 * 16) == 0


# --- what the user can mend -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "v-half", *SIZES, "--output", "FOLDER.html"], "is a folder"),
        (["plan", "--config", "none.yaml", "--gpus", "4", "--html", "x.txt"], "ends in .html"),
        (["plan", "--config", "none.yaml", "--gpus", "4", "--html", "FOLDER.html"], "is a folder"),
        (["show", "v-half", *SIZES, "--output", "file/x.html"], "cannot write 'TMP/file/x.html'"),
    ],
)
def test_a_page_that_cannot_be_written_is_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "FOLDER.html").mkdir()
    (tmp_path / "file").write_text("not a folder")
    *most, name = arguments
    assert cli.main([*most, str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words.replace("TMP", str(tmp_path)) in printed.err
    assert printed.err.count("\n") == 1


def test_a_page_without_jinja2_tells_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("jinja2", "markupsafe"):
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["show", "v-half", *SIZES, "--output", str(tmp_path / "x.html")]) == 2
    assert "pip install 'megatron-zb[plots]'" in capsys.readouterr().err


def test_a_page_needs_neither_torch_nor_megatron_nor_matplotlib(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    program = (
        "import sys\n"
        "for name in ('torch', 'megatron', 'matplotlib'): sys.modules[name] = None\n"
        "from megatron_zb.cli.main import main\n"
        f"sys.exit(main({['show', 'v-half', *SIZES, '--output', str(path)]!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert page_of(path).one("h1").text == "v-half"
