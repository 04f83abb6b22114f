"""megatron-zb show pipefusion, as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_zb.cli import main as cli
from megatron_zb.cli.patches import timeline
from megatron_zb.drawing.chart import bars_of, legend_of
from megatron_zb.drawing.pictures import draw
from megatron_zb.schedules import Timeline

SIZES = "pipefusion --pipeline-size 4 --patches 8 --time-steps 4".split()


def drawn(*more: str) -> Timeline:
    return timeline(cli.parser().parse_args(["show", *SIZES, *more]))


@pytest.mark.parametrize(
    ("p", "patches", "bubble"), [(4, 8, "8.6"), (8, 8, "17.9"), (8, 4, "54.3"), (1, 8, "0.0")]
)
def test_the_bubble_rate_stands_beside_that_of_the_formula(
    p: int, patches: int, bubble: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--pipeline-size", str(p), "--patches", str(patches), "--time-steps", "4"]
    assert cli.main(["show", "pipefusion", *sizes]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{patches} patches in 4 time steps; bubble rate {bubble}%" in said
    assert f"by formula, the bubble rate is {bubble}% if messages take no time" in said
    assert "nothing left to gain" in said


def test_every_patch_is_drawn_with_its_number_and_time_steps_take_turns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "130")
    assert cli.main(["show", *SIZES]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^rank \d ([^█\n]*)$", printed, flags=re.MULTILINE)
    even, odd = ([f"{letter}{k}" for k in range(8)] for letter in "Ff")
    assert [re.findall(r"[Ff]\d", row) for row in rows] == [(even + odd) * 2] * 4
    assert "capital letter: even steps, small: odd; number: patch; · idle" in printed
    assert {words for *_, words in legend_of(drawn())} == {
        "forward, even steps",
        "forward, odd steps",
    }
    assert {bar.microbatch for bar in bars_of(drawn())} == {*range(8)}


def test_a_picture_has_a_bar_for_each_pass(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (axes,) = draw(drawn()).axes
    assert len(axes.patches) == 4 * 8 * 4
    for name, begins in (("x.png", b"\x89PNG"), ("x.svg", b"<?xml")):
        path = tmp_path / name
        assert cli.main(["show", *SIZES, "--output", str(path)]) == 0
        assert path.read_bytes().startswith(begins)


def test_a_picture_of_many_patches_numbers_some(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (axes,) = draw(drawn("--patches", "64", "--time-steps", "8")).axes
    (top,) = axes.child_axes
    assert top.get_xlabel() == "first forward of patch"


def test_a_trace_has_every_pass(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    command = ["export", *SIZES, "--format", "chrome-trace", "--output", str(path)]
    assert cli.main(command) == 0
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in events] == [str(p) for rank in drawn().schedule.ranks for p in rank]


@pytest.mark.parametrize(
    "given",
    ["", "--pipeline-size 4", "--patches 8 --time-steps 4", "--pipeline-size 4 --patches 8"],
)
def test_sizes_that_are_missing_are_named(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "pipefusion", *given.split()]) == 2
    said = capsys.readouterr().err
    assert "pipefusion needs --pipeline-size P, --patches M and --time-steps T" in said


@pytest.mark.parametrize(
    "flag",
    "num-microbatches memory-limit chunks group-size attention backward weight forward-comm "
    "backward-comm recompute offload cut-output".split(),
)
def test_flags_of_a_training_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", *SIZES, f"--{flag}", "3"]) == 2
    assert f"--{flag}: pipefusion does not take it: leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["show", *SIZES, "--slices", "2"], "pipefusion has no slices: leave --slices out"),
        (["show", *SIZES, "--adapters", "2"], "pipefusion has no adapters: leave --adapters out"),
        (["show", *SIZES, "--adapter-steps", "2"], "--adapter-steps is for adapters"),
        (["show", *SIZES, "--encoder", "2"], "pipefusion has no encoder: leave --encoder out"),
        (["show", *SIZES, "--teacher", "2"], "only pipe-bd takes it, not pipefusion"),
        (["show", *SIZES, "--output", "x.html"], "there is no page for pipefusion"),
        (["show", *SIZES, "--patches", "0"], "'0' is not a whole number of 1 or more"),
        (["show", *SIZES, "--forward", "0"], "forward is zero: give a positive time"),
        (
            ["export", *SIZES, "--format", "csv", "--output", "x.csv"],
            "a csv table has no passes of pipefusion: give --format chrome-trace",
        ),
        (
            ["show", "v-half", "-p", "4", "-m", "8", "--patches", "8"],
            "--patches: only pipefusion takes it, not v-half: leave it out",
        ),
        (
            ["show", "v-half", "-p", "4", "-m", "8", "--time-steps", "8"],
            "--time-steps: only pipefusion takes it, not v-half: leave it out",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    command: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1
