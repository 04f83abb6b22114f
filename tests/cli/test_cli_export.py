"""megatron-zb export, and tables in place of names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.schedules.interchange import from_csv

pytestmark = pytest.mark.usefixtures("brief_searches")

SIZES = ["--pipeline-size", "4", "--num-microbatches", "8"]


def export(tmp_path: Path, *arguments: str) -> Path:
    path = tmp_path / "exported"
    assert cli.main(["export", *arguments, "--output", str(path)]) == 0
    return path


@pytest.mark.parametrize("name", schedules.names())
def test_an_exported_table_is_the_schedule(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = export(tmp_path, name, *SIZES, "--weight", "0.5", "--format", "csv")
    assert capsys.readouterr().out == f"{path}\n"
    costs = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1, weight=0.5)
    built = schedules.build(name, pipeline_size=4, num_microbatches=8, costs=costs)
    assert from_csv(path, name=built.name) == built


def test_an_exported_trace_has_the_times_of_the_costs(tmp_path: Path) -> None:
    path = export(tmp_path, "1f1b", *SIZES, "--forward", "0.003", "--format", "chrome-trace")
    passes = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(passes) == 4 * 8 * 2
    forwards = {round(e["dur"], 6) for e in passes if e["cat"] == "F"}
    assert forwards == {3000}


def test_a_table_is_shown_like_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = export(tmp_path, "v-half", *SIZES, "--format", "csv")
    capsys.readouterr()
    assert cli.main(["show", "v-half", *SIZES]) == 0
    by_name = capsys.readouterr().out
    assert cli.main(["show", "--csv", str(path)]) == 0
    assert capsys.readouterr().out == by_name.replace("v-half", path.name, 1)


def test_an_export_keeps_the_memory_limit(tmp_path: Path) -> None:
    path = export(tmp_path, "v-zb", *SIZES, "--memory-limit", "0.75", "--format", "csv")
    built = schedules.build("v-zb", pipeline_size=4, num_microbatches=8, memory_limit=0.75)
    assert from_csv(path, name="v-zb") == built


def test_costs_hold_for_a_table_too(tmp_path: Path) -> None:
    path = export(tmp_path, "1f1b", *SIZES, "--format", "csv")
    trace = export(tmp_path, "--csv", str(path), "--backward", "3", "--format", "chrome-trace")
    ends = [e["ts"] + e["dur"] for e in json.loads(trace.read_text())["traceEvents"] if "dur" in e]
    assert max(ends) == pytest.approx((8 + 4 - 1) * 5e6)


def test_an_export_goes_to_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = export(tmp_path, "zb-h1", *SIZES, "--format", "csv")
    capsys.readouterr()
    assert cli.main(["export", "zb-h1", *SIZES, "--format", "csv", "-o", "-"]) == 0
    assert capsys.readouterr().out == path.read_text()
    assert not (tmp_path / "-").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show"], "no schedule was asked for: give NAME, such as v-half, or --csv FILE"),
        (["show", "v-half", "-p", "4"], "v-half needs --pipeline-size P and --num-microbatches M"),
        (["show", "v-half", "--csv", "x.csv"], "give either v-half or --csv FILE"),
        (["show", "--csv", "x.csv", "-m", "8"], "--csv FILE has its own sizes"),
        (["show", "--csv", "x.csv", "--memory-limit", "1"], "leave --memory-limit out"),
        (["show", "--csv", "x.csv", "--group-size", "4"], "leave --group-size out"),
        (["show", "--csv", "none.csv"], "cannot read 'none.csv': No such file or directory"),
        (["show", "--csv", "broken.csv"], "broken.csv: row 2, column 2: '1Z0' is no pass"),
        (
            ["export", "v-half", *SIZES, "--format", "csv", "--output", "broken.csv/x"],
            "broken.csv' is a file and no folder",
        ),
    ],
)
def test_what_the_user_can_mend_is_one_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.csv").write_text("0F0,0B0\n1F0,1Z0\n")
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("megatron-zb: error: ")
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
