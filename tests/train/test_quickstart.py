"""What the quickstart makes of runs. The runs themselves take minutes: scripts/quickstart.sh."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import run_job
from rich.console import Console

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.train import arguments as training_arguments
from megatron_zb.train import quickstart
from megatron_zb.train.quickstart import (
    NUM_MICROBATCHES,
    UPSTREAM,
    QuickstartFailure,
    Result,
    SleepingStep,
    check,
    read_result,
)
from megatron_zb.train.watched_run import NewRecords

README = Path(__file__).resolve().parents[2] / "README.md"
GOOD = Result(
    losses=[5.5, 4.75, 3.25],
    grad_norms=[2.0, 1.5, 1.0],
    eval_loss=3.5,
    peak_activation_bytes=[400, 300, 200, 100],
    seconds_per_iteration=0.5,
    predicted_bubble_rate=0.25,
)
# The next float32 after 4.75.
ALMOST = 4.75 + 2**-21


def test_equal_losses_that_fall_pass() -> None:
    check({UPSTREAM: GOOD, "v-half": replace(GOOD, peak_activation_bytes=[1, 2, 3, 320])})


def test_one_bit_in_one_iteration_fails() -> None:
    other = replace(GOOD, losses=[5.5, ALMOST, 3.25])
    with pytest.raises(QuickstartFailure, match="v-zb differs from upstream first in iteration 2"):
        check({UPSTREAM: GOOD, "v-zb": other})


def test_another_evaluation_fails() -> None:
    with pytest.raises(QuickstartFailure, match="v-zb differs from upstream in the evaluation"):
        check({UPSTREAM: GOOD, "v-zb": replace(GOOD, eval_loss=3.75)})


def test_a_norm_may_differ_by_rounding_alone() -> None:
    check({UPSTREAM: GOOD, "v-zb": replace(GOOD, grad_norms=[2.0, 1.5 * (1 + 5e-7), 1.0])})
    for norm in (1.5 * (1 + 2e-6), float("nan")):
        other = replace(GOOD, grad_norms=[2.0, norm, 1.0])
        with pytest.raises(QuickstartFailure, match=r"v-zb .* in iteration 2: gradient norm"):
            check({UPSTREAM: GOOD, "v-zb": other})


def test_more_memory_than_promised_fails() -> None:
    other = replace(GOOD, peak_activation_bytes=[100, 400, 325, 200])
    check({UPSTREAM: GOOD, "v-zb": other})
    with pytest.raises(QuickstartFailure, match=r"v-half held 1\.000 of .* more than 0\.8"):
        check({UPSTREAM: GOOD, "v-half": other})
    with pytest.raises(QuickstartFailure, match=r"v-min held 0\.575"):
        check({UPSTREAM: GOOD, "v-min": replace(GOOD, peak_activation_bytes=[230, 1, 1, 1])})


def test_the_table_is_readable_on_80_columns() -> None:
    good = replace(GOOD, peak_activation_bytes=[2**30, 1, 1, 1], seconds_per_iteration=12.3456)
    bad = replace(good, losses=[5.5, ALMOST, 3.25], grad_norms=[2.0, 1.5, 1.1])
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(quickstart.table({UPSTREAM: good, "v-half": bad}))
    printed = capture.get()
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    for word in ("schedule", "final", "losses", "equal", "norms", "MiB", "bubble", "iter."):
        assert word in printed
    (row,) = [line for line in printed.splitlines() if "v-half" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["v-half", "3.250000", "NO", "NO", "1024.0", "1.00", "25.0%", "12.346"]


@pytest.mark.parametrize("last", [5.0, 6.0, float("nan")])
def test_a_loss_that_does_not_fall_fails(last: float) -> None:
    upstream = replace(GOOD, losses=[5.5, 4.75, last])
    with pytest.raises(QuickstartFailure):
        check({UPSTREAM: upstream})


def test_a_log_is_read() -> None:
    records: list[dict[str, Any]] = [
        *(
            {"iteration": i, "lm_loss": loss, "grad_norm": norm}
            for i, (loss, norm) in enumerate(zip(GOOD.losses, GOOD.grad_norms, strict=True))
        ),
        {"iteration": 3, "eval_loss": 3.5},
        {
            "peak_activation_bytes": [400, 300, 200, 100],
            "seconds_per_iteration": 0.5,
            "predicted_bubble_rate": None,
        },
    ]
    assert read_result(records, predicted_bubble_rate=0.25) == GOOD
    records[-1]["predicted_bubble_rate"] = 0.125
    assert read_result(records, 0.25) == replace(GOOD, predicted_bubble_rate=0.125)


@pytest.mark.parametrize("name", [UPSTREAM, *quickstart.SCHEDULES])
def test_the_training_command_is_one_that_the_trainer_takes(name: str, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").touch()
    command = quickstart.training_command(name, str(tmp_path / "text"), 48, tmp_path / "x.jsonl")
    own = command[command.index("megatron_zb.train") + 1 :]
    args = training_arguments.parse(own, world_size=quickstart.PIPELINE_SIZE)
    assert args.pipeline_schedule == (None if name == UPSTREAM else name)
    assert args.num_microbatches == quickstart.NUM_MICROBATCHES
    assert args.train_iters == args.eval_interval == 48


def test_the_compared_schedules_are_in_the_catalog_and_the_readme() -> None:
    cells = re.findall(r"^\| (`[^|]*) \|", README.read_text(), flags=re.MULTILINE)
    assert set(quickstart.SCHEDULES) <= set(re.findall(r"`([^`]+)`", "".join(cells)))
    assert set(quickstart.SCHEDULES) <= set(schedules.names())


def test_steps_that_sleep_are_measured_beside_what_was_predicted(tmp_path: Path) -> None:
    """Real ranks, real messages; a sleep is never too short, so neither is a step."""
    records = tmp_path / "steps.jsonl"
    command = quickstart.sleeping_command(records, ["1f1b", "zb-h1"])
    command[command.index("--repetitions") + 1] = "1"
    module = command.index("megatron_zb.train.sleeping_steps")
    done = run_job(2, command[module], command[module + 1 :], 300)
    assert done.code == 0, done.stderr
    steps = quickstart.read_steps(NewRecords(records)())
    assert list(steps) == ["1f1b", "zb-h1"]
    passes = sum(quickstart.MILLISECONDS) / 1000
    assert steps["1f1b"].predicted_seconds == pytest.approx((NUM_MICROBATCHES + 1) * passes)
    assert steps["1f1b"].predicted_bubble_rate == pytest.approx(1 / (NUM_MICROBATCHES + 1))
    for step in steps.values():
        assert step.measured_seconds >= 0.999 * step.predicted_seconds
        assert step.measured_bubble_rate >= step.predicted_bubble_rate - 0.001
    assert steps["zb-h1"].predicted_bubble_rate < steps["1f1b"].predicted_bubble_rate


def test_the_table_of_steps_is_readable_on_80_columns() -> None:
    upstream = SleepingStep(2.0, 2.5, 0.25)
    ours = SleepingStep(1.6, 1.75, 0.0625)
    assert upstream.measured_bubble_rate == pytest.approx(1 - 1.5 / 2.5)
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(quickstart.table_of_steps({"1f1b": upstream, "v-half": ours}))
    printed = capture.get()
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    (row,) = [line for line in printed.splitlines() if "v-half" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["v-half", "1600", "1750", "0.70", "6.2%", "14.3%"]


def test_why_times_say_nothing_about_bubbles() -> None:
    assert "4 ranks share 2 cores" in quickstart.why_times_tell_little(2)
    assert "4 ranks share 1 core," in quickstart.why_times_tell_little(1)
    assert "share" not in quickstart.why_times_tell_little(8)


def test_a_measured_step_takes_less_than_half_a_minute() -> None:
    """What is slept for in all, with one step of each schedule to warm up."""
    names = ["1f1b", *quickstart.SCHEDULES]
    costs = dict(zip(("forward", "backward", "weight"), quickstart.MILLISECONDS, strict=True))
    total = 0.0
    for name in names:
        given = schedules.Costs.uniform(pipeline_size=quickstart.PIPELINE_SIZE, **costs)
        schedule = schedules.build(
            name,
            pipeline_size=quickstart.PIPELINE_SIZE,
            num_microbatches=NUM_MICROBATCHES,
            costs=given,
        )
        total += schedules.simulate(schedule, given).makespan / 1000
    assert total * (quickstart.REPETITIONS + 1) < 15


def without_torchrun(command: list[str]) -> list[str]:
    """The command of one process."""
    python, *words = command
    return [python, "-m", *words[words.index("megatron_zb.train") :]]


def test_missing_data_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = tmp_path / "text"
    assert cli.main(["quickstart", "--data-path", str(prefix), "--output", str(tmp_path)]) == 2
    assert f"there is no {prefix}.idx: make it with" in capsys.readouterr().err


def test_the_command_prepares_the_text_that_it_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As from an installed package, which has no script beside it."""
    trained = []

    def failing(name: str, arguments: argparse.Namespace, console: Console) -> Result:
        trained.append((name, Path(f"{arguments.data_path}.idx").stat().st_size > 0))
        raise QuickstartFailure("this is a test")

    monkeypatch.setattr(quickstart, "_train", failing)
    monkeypatch.setattr(quickstart, "MOST_BYTES", 1000)
    assert cli.main(["quickstart", "--output", str(tmp_path / "new")]) == 1
    assert trained == [(UPSTREAM, True)]
    said = capsys.readouterr()
    assert said.err.endswith("quickstart: failed: this is a test\n")
    assert "1 documents" in said.out
    assert (tmp_path / "new" / "v-half.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.full)])
def test_a_failed_run_ends_the_quickstart_with_its_words(
    ranks: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of torchrun's own ranks, or of one process, as the launcher's part takes seconds."""
    if ranks == 1:
        command = quickstart.training_command
        sizes = {**quickstart.TRAINING_ARGUMENTS, "--pipeline-model-parallel-size": 1}
        monkeypatch.setattr(quickstart, "TRAINING_ARGUMENTS", sizes)
        monkeypatch.setattr(
            quickstart, "training_command", lambda *given: without_torchrun(command(*given))
        )
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").write_bytes(b"no tokens")
    arguments = ["--data-path", str(tmp_path / "text"), "--output", str(tmp_path / "out")]
    assert cli.main(["quickstart", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("quickstart: failed: upstream: the run ended with exit status")
    assert "is not a Megatron index" in error
    assert not (tmp_path / "out" / "summary.json").exists()
