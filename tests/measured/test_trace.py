"""A step as it ran beside what its profile predicts, and where they differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from traced_steps import LATE, M, P, profile, ran

from megatron_zb.cli import main as cli
from megatron_zb.drawing.pictures import draw_below
from megatron_zb.errors import UsageError
from megatron_zb.measured.profile import write_profile
from megatron_zb.measured.trace import compare, read_trace, trace_path, write_trace


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    write_profile(profile(), path)
    write_trace(ran(), path)
    return path


def test_the_difference_and_its_parts(file: Path) -> None:
    found = compare(file)
    assert found.measured.schedule == found.predicted.schedule
    assert found.measured.start[0][0] == 0.0
    first, second = found.differences()
    assert first.measured == pytest.approx(first.predicted)
    assert second.measured == pytest.approx(second.predicted + LATE)
    assert second.compute_measured - second.compute_predicted == pytest.approx(LATE)
    for d in (first, second):
        parts = d.compute_measured + d.waiting_measured + d.host
        assert parts == pytest.approx(d.measured)
        assert d.compute_predicted + d.waiting_predicted == pytest.approx(d.predicted)


def test_a_wait_before_the_first_pass_does_not_count(file: Path) -> None:
    assert compare(file).differences()[1].waiting_measured == 0.0


def test_the_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", str(file)]) == 0
    text = capsys.readouterr().out
    assert "zb-h1: 2 ranks, 4 microbatches" in text
    assert "+50.00" in text


def test_a_trace_for_viewers(file: Path, tmp_path: Path) -> None:
    assert cli.main(["trace", str(file), "--output", str(tmp_path / "step.json")]) == 0
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "measured", 1: "predicted"}
    passes = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in passes} == {0, 1}
    assert len(passes) == 2 * 3 * P * M


@pytest.fixture
def v(tmp_path: Path) -> Path:
    """A step of a V: the late rank, which has the inner stages, is Megatron's pipeline rank 0."""
    path = tmp_path / "v.yaml"
    write_profile(profile("v-half"), path)
    write_trace(ran("v-half"), path)
    return path


def test_ranks_of_a_v_have_megatrons_numbers(
    v: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late, other = compare(v).differences()
    assert (late.rank, other.rank) == (0, 1)
    assert late.compute_measured - late.compute_predicted == pytest.approx(LATE)
    assert cli.main(["trace", str(v)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row and row[0] in "01"] == ["0", "1"]
    assert next(row for row in rows if row and row[0] == "0")[3] == "+50.00"

    json_file = tmp_path / "step.json"
    assert cli.main(["trace", str(v), "--output", str(json_file)]) == 0
    events = json.loads(json_file.read_text())["traceEvents"]
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {0: "rank 0", 1: "rank 1"}
    ends = {e["tid"] for e in events if e["ph"] == "X" and e["args"]["stage"] in (0, 3)}
    assert ends == {1}
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {f"activation memory, rank {rank}" for rank in range(2)}

    assert v.read_text().startswith(
        "# ranks are those of the schedule: rank r is pipeline rank 1 - r"
    )
    found = compare(v)
    for axes in draw_below({"measured": found.measured}).axes[:1]:
        assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 1", "rank 0"]


def test_a_picture_of_both(file: Path, tmp_path: Path) -> None:
    found = compare(file)
    figure = draw_below({"measured": found.measured, "predicted": found.predicted})
    measured, predicted = figure.axes[:2]
    assert measured.get_title(loc="left").startswith("measured: ")
    assert predicted.get_title(loc="left").startswith("predicted: ")
    assert len(measured.patches) == len(predicted.patches) == 3 * P * M
    assert measured.get_xlim() == predicted.get_xlim()
    picture = tmp_path / "step.svg"
    assert cli.main(["trace", str(file), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"<?xml")


def test_a_trace_survives_its_file(file: Path) -> None:
    assert trace_path(file).name == "run.trace.json"
    assert read_trace(trace_path(file)) == ran()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t | {"version": 2}, "version: "),
        (lambda t: t | {"ranks": t["ranks"][:1]}, "ranks: list should have at least 2 items"),
        (lambda t: t | {"more": 1}, "more: extra inputs are not permitted"),
        (lambda t: {"version": 1}, "ranks: field required"),
        (lambda t: t | {"ranks": [t["ranks"][0]] * 2}, "is not of the run of the profile"),
    ],
)
def test_a_broken_trace_is_refused(file: Path, change: Any, said: str) -> None:
    path = trace_path(file)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(UsageError, match=said):
        compare(file)


def test_what_is_no_trace_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace_path(file).write_text("{")
    assert cli.main(["trace", str(file)]) == 2
    assert "run.trace.json: the file: invalid JSON" in capsys.readouterr().err
    trace_path(file).unlink()
    assert cli.main(["trace", str(file)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert cli.main(["trace", str(file), "--output", "step.txt"]) == 2
