"""Plans with updates that come one step late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_zb.cli.main import main
from megatron_zb.parsing import GIB

SIZES = (
    "plan --config gpt_1_5b --gpus 8 --device a100_80gb_sxm --tensor 1 --micro-batch-size 1 "
    "--vocabulary off --tries 1"
)
EIGHT = "--pipeline 8 --global-batch-size 16 --schedules 1f1b,zb-h1,v-zb"
pytestmark = pytest.mark.usefixtures("brief_searches")


def planned(capsys: pytest.CaptureFixture[str], more: str) -> dict[str, Any]:
    assert main([*SIZES.split(), "--format", "json", *more.split()]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_rows_without_a_flush_are_faster_and_hold_more(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, f"{EIGHT} --late-updates plain")
    rows = plan["late_updates"]["rows"]
    assert {row["schedule"] for row in rows} == {"1f1b", "zb-h1", "v-zb"}
    for row in rows:
        of = plan["ranked"][row["index"]]
        assert of["schedule"] == row["schedule"]
        assert row["fits"] and row["memory"] > of["memory"]["total"]
        assert row["tokens_per_second_per_gpu"] > of["tokens_per_second_per_gpu"]
    speeds = [row["tokens_per_second_per_gpu"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)


def test_error_feedback_holds_a_tensor_for_each_weight(capsys: pytest.CaptureFixture[str]) -> None:
    plain, feedback = (
        planned(capsys, f"{EIGHT} --schedules 1f1b --late-updates {way}")
        for way in ("plain", "feedback")
    )
    (one,), (other,) = (it["late_updates"]["rows"] for it in (plain, feedback))
    states = plain["ranked"][one["index"]]["memory"]
    assert other["memory"] - one["memory"] == pytest.approx(states["optimizer"] / 3, rel=0.2)
    assert one["memory"] - states["total"] == pytest.approx(
        2 * (states["weights"] + states["gradients"]), rel=0.2
    )
    assert one["seconds"] < other["seconds"], "the update reads and writes it"


TRAINING = (
    "plan --gpus 8 --device a100_80gb_sxm --tries 1 --schedules 1f1b --format json -- "
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 "
    "--seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 8 "
    "--pipeline-schedule 1f1b --bf16 --vocab-size 32000"
)


@pytest.mark.parametrize(
    ("flags", "way"),
    [
        ("", None),
        ("--pipeline-update-delay 1", "plain"),
        ("--pipeline-update-delay 1 --pipeline-update-feedback on", "feedback"),
        ("--pipeline-update-delay 1 --optimizer muon", "feedback"),
        ("--pipeline-update-delay 1 --optimizer muon --pipeline-update-feedback off", "plain"),
        ("--pipeline-update-delay 1 --pipeline-update-prediction linear", "feedback"),
        (
            "--pipeline-update-delay 1 --optimizer muon --pipeline-update-prediction momentum",
            "plain",
        ),
    ],
)
def test_a_training_gives_the_way_of_its_updates(
    capsys: pytest.CaptureFixture[str], flags: str, way: str | None
) -> None:
    found = []
    given = "" if way is None else f"--late-updates {way}"
    for words in (f"{TRAINING} {flags}", TRAINING.replace("--tries", f"{given} --tries")):
        assert main(words.split()) == 0
        found.append(json.loads(capsys.readouterr().out).get("late_updates"))
    assert found[0] == found[1]
    assert (found[0] is None) == (way is None)


def test_a_refusal_names_the_flag_of_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    words = TRAINING.replace("--tries", "--post-validation --tries")
    assert main([*words.split(), "--pipeline-update-delay", "1"]) == 2
    said = capsys.readouterr().err
    assert "--pipeline-update-delay cannot be combined with --post-validation" in said


def test_a_slow_reduction_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    """With data parallelism a step in time waits for it, and a late one does not."""
    of_two = "--pipeline 4 --global-batch-size 32 --schedules 1f1b --no-overlap-data-parallel"
    plan = planned(capsys, f"{of_two} --late-updates plain")
    (late,) = plan["late_updates"]["rows"]
    assert late["seconds"] < plan["ranked"][late["index"]]["seconds"]


def test_the_table_says_what_it_gains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES.split(), *EIGHT.split(), "--late-updates", "plain"]) == 0
    said = capsys.readouterr().out
    assert "Updates one step late, with no flush" in said
    assert "faster than the fastest row in time, but another training" in said
    assert "--pipeline-update-delay 1" in said


def test_rows_without_room_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, f"{EIGHT} --schedules 1f1b --late-updates feedback")
    (late,) = plan["late_updates"]["rows"]
    total = plan["ranked"][late["index"]]["memory"]["total"]
    between = f"{(total + late['memory']) / 2 / GIB:.2f}GiB"
    more = f"{EIGHT} --schedules 1f1b --late-updates feedback --gpu-memory {between}"
    assert main([*SIZES.split(), *more.split()]) == 0
    assert "no row has room for a second copy of its weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    "other", ["--post-validation", "--lora", "--lengths lognormal:512:0.5", "--adapters a.yaml"]
)
def test_what_late_updates_cannot_be_combined_with_is_refused(
    capsys: pytest.CaptureFixture[str],
    other: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("adapters:\n  - {name: a, batch: 8, steps: 1}\n")
    assert main([*SIZES.split(), *EIGHT.split(), "--late-updates", "plain", *other.split()]) != 0
    said = capsys.readouterr().err
    assert f"--late-updates cannot be combined with {other.split()[0]}" in said
    assert said.count("\n") == 1


def test_the_memory_is_that_of_the_order_without_a_flush(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Interleaved then holds microbatches of two steps, which are more than a step has."""
    few = "--pipeline 8 --global-batch-size 8 --schedules interleaved"
    plan = planned(capsys, f"{few} --late-updates plain")
    (late,) = plan["late_updates"]["rows"]
    memory = plan["ranked"][late["index"]]["memory"]
    assert late["memory"] > memory["total"] + 2 * (memory["weights"] + memory["gradients"])


def test_schedules_that_cannot_be_late_are_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--pipeline 8 --global-batch-size 16 --schedules gpipe --late-updates plain"
    assert main([*SIZES.split(), *sizes.split()]) == 0
    assert "no row can have late updates: they need 1f1b" in capsys.readouterr().out
