"""A step as it ran beside what its profile predicts, and where they differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_zb import cli, schedules
from megatron_zb.errors import UsageError
from megatron_zb.pictures import draw_below
from megatron_zb.planner.profile import Profile, write_profile
from megatron_zb.planner.trace import (
    Trace,
    compare,
    of_spans,
    read_trace,
    trace_path,
    write_trace,
)
from megatron_zb.schedules.fusing import split_all
from megatron_zb.schedules.passes import PassKind

P, M = 2, 4
SECONDS = {PassKind.F: 0.1, PassKind.B: 0.2, PassKind.W: 0.1}
LATE = 0.05  # seconds by which rank 1's third pass is longer than its median


def profile() -> Profile:
    stage = {
        "forward": 0.1,
        "backward": 0.2,
        "weight": 0.1,
        "activation": 100,
        "held_for_weight": 50,
    }
    model = {
        "layers": 2,
        "hidden_size": 32,
        "sequence_length": 16,
        "microbatch": 1,
        "tensor": 1,
        "context": 1,
    }
    return Profile.model_validate(
        {
            "version": 1,
            "device": "CPU",
            "schedule": "zb-h1",
            "pipeline_size": P,
            "num_microbatches": M,
            "message": 8,
            "model": model,
            "stages": [
                {"rank": 0, "layers": "Et", **stage},
                {"rank": 1, "layers": "tL", **stage},
            ],
            "links": [],
        }
    )


def ran() -> Trace:
    """As predicted, but rank 1 is late in one pass and all that follows is later by so much."""
    schedule = split_all(schedules.build("zb-h1", pipeline_size=P, num_microbatches=M))
    timeline = schedules.simulate(schedule, profile().costs(schedule.placement))
    ranks: list[list[Any]] = []
    for rank, passes in enumerate(schedule.ranks):
        spans = []
        for number, (p, start, end) in enumerate(
            zip(passes, timeline.start[rank], timeline.end[rank], strict=True)
        ):
            later = LATE if rank == 1 and number > 2 else 0.0
            longer = LATE if rank == 1 and number == 2 else 0.0
            spans.append((p, 7 + start + later, 7 + end + later + longer))
        waits = [(None, 7.0, 7.0 + timeline.start[rank][0])] if rank else []
        ranks.append([*waits, *spans])
    return of_spans(ranks)


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
