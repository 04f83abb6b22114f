"""An update delay in the real pretrain_gpt.py, against the same training without a schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_megatron_lm.runs import MODEL, PIPELINE, PIPELINE_OF_TWO, Logged, pretrain

LATE = "--pipeline-update-delay 1"
SAVING = "--save-interval 5"
STEPS = "--eval-interval 4"
_ORACLE = Path(__file__).with_name("run_late_oracle.py")
_KILLED = Path(__file__).with_name("run_and_kill_late.py")


@pytest.fixture(scope="module")
def oracle(
    checkout: Path, upstream_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Logged:
    """Steps 3 to 7 from a checkpoint, saved behind step 5."""
    files = f"--load {upstream_checkpoint} --save {tmp_path_factory.mktemp('oracle')}"
    flags = (MODEL, PIPELINE, STEPS, files, SAVING)
    run = pretrain(checkout, *flags, program=_ORACLE)
    assert run.code == 0, run.output
    assert list(run.losses) == list(range(3, 8))
    return run


def check(run: Logged, oracle: Logged) -> None:
    """Losses and evaluations as texts; norms are those of the update before."""
    assert run.code == 0, run.output
    assert run.losses == oracle.losses
    assert run.evaluations == oracle.evaluations
    for step, norm in run.norms.items():
        assert float(norm) == pytest.approx(float(oracle.norms[step - 1]), abs=1.01e-3)
    first, *later = oracle.norms
    assert list(run.norms) == later, first


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "v-half", "v-zb"])
def test_losses_are_those_of_weights_before_the_last_update(
    checkout: Path, upstream_checkpoint: Path, tmp_path: Path, oracle: Logged, schedule: str
) -> None:
    files = f"--load {upstream_checkpoint} --save {tmp_path} {SAVING}"
    ours = f"--pipeline-schedule {schedule}"
    run = pretrain(checkout, MODEL, PIPELINE, STEPS, files, LATE, ours)
    check(run, oracle)
    assert "every update comes one step late" in run.output
    assert "arXiv 2606.30634" in run.output


@pytest.mark.parametrize("schedule", ["zb-h1", "v-half"])
def test_a_saved_run_goes_on_as_if_it_had_not_been_stopped(
    checkout: Path, upstream_checkpoint: Path, tmp_path: Path, oracle: Logged, schedule: str
) -> None:
    flags = (MODEL, PIPELINE, STEPS, LATE, f"--pipeline-schedule {schedule}")
    files = f"--load {upstream_checkpoint} --save {tmp_path} {SAVING}"
    first = pretrain(checkout, *flags, files, "--exit-interval 5")
    assert first.code == 0, first.output
    assert first.losses == {step: oracle.losses[step] for step in (3, 4, 5)}
    then = pretrain(checkout, *flags, f"--load {tmp_path} --save {tmp_path} {SAVING}")
    assert then.code == 0, then.output
    assert list(then.losses) == [6, 7]
    assert then.losses[6] == oracle.losses[6]  # the line of 7 has the mean of both
    assert then.evaluations == {
        name: loss for name, loss in oracle.evaluations.items() if name.endswith("after 7")
    }


@pytest.mark.parametrize("schedule", ["1f1b", "v-half"])
def test_a_killed_run_goes_on_as_if_it_had_not_been_stopped(
    checkout: Path, upstream_checkpoint: Path, tmp_path: Path, oracle: Logged, schedule: str
) -> None:
    flags = (MODEL, PIPELINE, STEPS, LATE, f"--pipeline-schedule {schedule}")
    files = f"--load {upstream_checkpoint} --save {tmp_path} {SAVING}"
    killed = pretrain(checkout, *flags, files, program=_KILLED)
    assert killed.code != 0
    assert list(killed.losses) == [3, 4, 5, 6]
    then = pretrain(checkout, *flags, f"--load {tmp_path} --save {tmp_path} {SAVING}")
    assert then.code == 0, then.output
    assert list(then.losses) == [6, 7]
    assert then.losses[6] == oracle.losses[6] == killed.losses[6]
    assert then.evaluations == {
        name: loss for name, loss in oracle.evaluations.items() if name.endswith("after 7")
    }


def test_replicas_with_the_distributed_optimizer(
    checkout: Path, checkpoint_of_two: Path, tmp_path: Path
) -> None:
    flags = (MODEL, PIPELINE_OF_TWO, STEPS, SAVING, f"--load {checkpoint_of_two}")
    precision = "--bf16 --use-distributed-optimizer --no-load-optim"
    overlap = "--overlap-grad-reduce --overlap-param-gather"
    theirs = pretrain(checkout, *flags, precision, f"--save {tmp_path / 'theirs'}", program=_ORACLE)
    assert theirs.code == 0, theirs.output
    ours = f"--save {tmp_path / 'ours'} --pipeline-schedule v-half"
    run = pretrain(checkout, *flags, precision, overlap, ours, LATE)
    check(run, theirs)
    assert "turns --overlap-grad-reduce and --overlap-param-gather off" in run.output


def test_loss_scales(checkout: Path, upstream_checkpoint: Path, tmp_path: Path) -> None:
    """The first updates are skipped: the gradients of two or three steps are infinite."""
    flags = (MODEL, PIPELINE, STEPS, f"--load {upstream_checkpoint} --save-interval 100")
    precision = "--fp16 --no-load-optim --initial-loss-scale 2e5 --hysteresis 1"
    runs = [
        pretrain(checkout, *flags, precision, f"--save {tmp_path / name}", more, program=program)
        for name, more, program in (
            ("theirs", "", _ORACLE),
            ("ours", f"--pipeline-schedule v-half {LATE}", None),
        )
    ]
    assert [run.code for run in runs] == [0, 0], runs[1].output
    theirs, ours = runs
    logged = [step for step, loss in ours.losses.items() if float(loss)]  # 0 in a line of a skip
    both = [step for step in logged if step in theirs.losses]
    assert 7 in both
    assert "skipped iterations:   1" in ours.output
    assert all(ours.losses[step] == theirs.losses[step] for step in both)
    assert ours.evaluations == theirs.evaluations


@pytest.mark.parametrize("prediction", ["linear", "momentum"])
def test_predicted_weights(
    checkout: Path, upstream_checkpoint: Path, tmp_path: Path, oracle: Logged, prediction: str
) -> None:
    """The first three steps know of no update or of one, the fourth is of predicted weights."""
    files = f"--load {upstream_checkpoint} --save {tmp_path} {SAVING}"
    ours = f"--pipeline-schedule v-half --pipeline-update-prediction {prediction}"
    run = pretrain(checkout, MODEL, PIPELINE, STEPS, files, LATE, ours)
    assert run.code == 0, run.output
    assert f"groups compute with weights of {prediction} prediction" in run.output
    assert [run.losses[it] for it in (3, 4)] == [oracle.losses[it] for it in (3, 4)]
    assert run.losses[5] != oracle.losses[5]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (
            "--pipeline-update-feedback on --pipeline-update-prediction linear",
            "--pipeline-update-prediction",
        ),
        ("--pipeline-verify", "--pipeline-verify"),
        ("--rampup-batch-size 4 4 16", "--rampup-batch-size"),
        ("--pipeline-schedule dualpipe-v", "its order does not repeat from step to step"),
    ],
)
def test_what_cannot_be_late_is_refused(checkout: Path, flags: str, named: str) -> None:
    run = pretrain(checkout, MODEL, PIPELINE, LATE, f"--pipeline-schedule v-half {flags}")
    assert run.code != 0
    assert run.error.count("\n") == 0
    assert named in run.error
