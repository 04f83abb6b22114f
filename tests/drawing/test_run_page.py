"""The page of a measured run: its tables, its pictures, and what is in them."""

from __future__ import annotations

import re
from pathlib import Path

import measured_runs
import pytest
import traced_steps
from pages import EVIL, Element, Page

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.drawing import html_drawing
from megatron_zb.drawing.chart import COST_UNIT
from megatron_zb.measured.profile import Profile, write_profile
from megatron_zb.measured.trace import compare, write_trace

EQUAL = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1, weight=1)


def page_of(path: Path) -> Element:
    return Page(path.read_text(encoding="utf-8")).root


def cells(table: Element) -> list[list[str]]:
    """The rows of a table's body."""
    return [[cell.text for cell in row.all("td")] for row in table.one("tbody").all("tr")]


def test_a_plan_for_measured_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, html = tmp_path / "run.yaml", tmp_path / "run.html"
    write_profile(measured_runs.profile(), path)
    names = ["v-half", "zb-h1", "1f1b", "v-min"]
    plan = ["plan", "--profile", str(path), "--schedules", ",".join(names), "--html", str(html)]
    assert cli.main(plan) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(html)
    page = page_of(html)
    found = cells(page.one("section", id="ranking").one("table"))
    baseline = ["Megatron 1F1B", "Megatron interleaved ×2", "Megatron interleaved ×4"]
    assert sorted(row[1] for row in found) == sorted([*names, *baseline])
    times = [float(row[2]) for row in found]
    assert times == sorted(times)
    for row in found:  # the same as in the terminal
        assert re.search(rf"{row[0]} +{row[1]} +{re.escape(row[2])} +{re.escape(row[3])} ", printed)
    commands = [pre.text for pre in page.one("section", id="flags").all("pre")]
    flag = "--pipeline-schedule "
    named = [text.split()[1] if text.startswith(flag) else "baseline" for text in commands]
    assert named == ["baseline" if row[1] in baseline else row[1] for row in found]
    stages = cells(page.one("section", id="costs").all("table")[0])
    assert [row[2] for row in stages] == ["Ett", *["tt"] * 6, "ttL"]
    assert stages[1][3:6] == ["2000", "2400", "1600"]
    assert len(page.one("section", id="pictures").all("svg", of="schedule")) == 3
    assert page.all("section", id="step") == []
    assert page.one("section", id="explorer")


def test_the_step_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, html = tmp_path / "run.yaml", tmp_path / "step.html"
    write_profile(traced_steps.profile(), path)
    write_trace(traced_steps.ran(), path)
    assert cli.main(["trace", str(path), "--output", str(html)]) == 0
    assert capsys.readouterr().out == f"{html}\n"
    page = page_of(html)
    step = page.one("section", id="step")
    rows = cells(step.one("table"))
    for row, expected in zip(rows, compare(path).differences(), strict=True):
        assert row[:3] == [
            str(expected.rank),
            f"{1000 * expected.measured:.2f}",
            f"{1000 * expected.predicted:.2f}",
        ]
    assert rows[1][3] == f"{1000 * traced_steps.LATE:+.2f}"  # the pass that was late
    assert len(step.all("svg", of="schedule")) == 2
    assert page.all("section", id="ranking") == []
    both = tmp_path / "both.html"
    arguments = ["--schedules", "zb-h1", "--html", str(both)]
    assert cli.main(["plan", "--profile", str(path), *arguments]) == 0
    assert cells(page_of(both).one("section", id="step").one("table")) == rows


def test_ranks_of_a_v_have_megatrons_numbers(tmp_path: Path) -> None:
    """The first and the last stage are on Megatron's last pipeline rank, as a job prints."""
    path, html = tmp_path / "run.yaml", tmp_path / "step.html"
    write_profile(traced_steps.profile("v-half"), path)
    write_trace(traced_steps.ran("v-half"), path)
    assert cli.main(["trace", str(path), "--output", str(html)]) == 0
    page = page_of(html)
    stages = cells(page.one("section", id="costs").all("table")[0])
    assert [row[:2] for row in stages] == [["0", "1"], ["1", "0"], ["2", "0"], ["3", "1"]]
    step = page.one("section", id="step")
    rows = cells(step.one("table"))
    assert [row[0] for row in rows] == ["0", "1"]
    assert rows[0][3] == f"{1000 * traced_steps.LATE:+.2f}"
    for svg in step.all("svg", of="schedule"):
        names = [text.text for text in svg.all("text", of="name")]
        assert names[:2] == ["rank 1", "rank 0"]
    assert '"ofJob": true' in html.read_text(encoding="utf-8")


def test_both_still_pictures_of_a_step_have_one_scale(tmp_path: Path) -> None:
    """Of time, and of memory: without scripts, too."""
    path, html = tmp_path / "run.yaml", tmp_path / "step.html"
    values = traced_steps.profile().model_dump()
    for stage in values["stages"]:
        stage |= {"forward": stage["forward"] / 4, "backward": stage["backward"] / 4}
    write_profile(Profile.model_validate(values), path)
    write_trace(traced_steps.ran(), path)
    assert cli.main(["trace", str(path), "--output", str(html)]) == 0
    found = compare(path)
    assert found.measured.makespan > 1.5 * found.predicted.makespan
    pictures = page_of(html).one("section", id="step").all("svg", of="schedule")
    scales = []
    for svg, timeline in zip(pictures, (found.measured, found.predicted), strict=True):
        ticks = [(text.text, text.attributes["x"]) for text in svg.all("text", of="tick")]
        ground = float(svg.one("rect", of="ground").attributes["width"])
        levels = [line.attributes["d"] for line in svg.all("path", of="reference")]
        scales.append((ticks, round(ground / timeline.makespan, 1), levels))
    assert scales[0] == scales[1]
    assert len(scales[0][0]) > 3


def test_pictures_of_one_extent_have_one_scale_of_memory() -> None:
    found = [
        schedules.simulate(schedules.build(name, pipeline_size=4, num_microbatches=8), EQUAL)
        for name in ("zb-h2", "1f1b")
    ]

    def levels(extent: html_drawing.Extent | None) -> list[str]:
        """Of 1F1B's peak on the first rank."""
        drawn = [str(html_drawing.draw(timeline, "", COST_UNIT, extent)) for timeline in found]
        svgs = [Page(text).root.one("svg") for text in drawn]
        return [svg.all("path", of="reference")[0].attributes["d"] for svg in svgs]

    assert len(set(levels(html_drawing.Extent.of(found)))) == 1
    assert len(set(levels(None))) == 2


def test_what_a_profile_says_stays_text(tmp_path: Path) -> None:
    path, html = tmp_path / "run.yaml", tmp_path / "run.html"
    values = {**measured_runs.profile().model_dump(), "device": EVIL, "schedule": EVIL[:80]}
    write_profile(Profile.model_validate(values), path)
    plan = ["plan", "--profile", str(path), "--schedules", "zb-h1", "--html", str(html)]
    assert cli.main(plan) == 0
    page = page_of(html)
    assert EVIL[:80] in page.one("h1").text
    assert page.all("img") == []
    assert "alert" not in "".join(script.text for script in page.all("script"))


def test_a_page_has_its_ending(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    write_profile(measured_runs.profile(), path)
    assert cli.main(["plan", "--profile", str(path), "--html", "run.txt"]) == 2
    assert "'run.txt': give a name that ends in .html" in capsys.readouterr().err
