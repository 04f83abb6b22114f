"""Optimizer post-validation in the real pretrain_gpt.py: the log of the synchronous step."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from real_megatron_lm.runs import MODEL, PIPELINE, Logged, pretrain

# Infinite gradients until the loss scale has come down, and some gradients that are clipped.
# Iteration 30 is skipped or clipped, before an evaluation.
TRAINING = """
--fp16 --initial-loss-scale 1048576 --hysteresis 1 --loss-scale-window 4 --clip-grad 1.4
--log-num-zeros-in-grad
--train-iters 60 --lr-decay-iters 80 --eval-interval 15 --tensorboard-log-interval 1
--pipeline-schedule v-half
"""
CLIP = 1.4
MIDDLE = 30
FLAGS = (MODEL, PIPELINE, TRAINING)
VALIDATED = "--enable-optimizer-post-validation"

# Forked ranks print more digits, of which sums in another order differ in the last ones.
torchrun = partial(pretrain, torchrun=True)

_LINE = re.compile(
    r"(iteration +\d+/.*number of nan iterations: +\d+|validation loss at .*PPL: \S+)"
)
_DURATION = re.compile(r"elapsed time per iteration \(ms\): \S+ ")
_PROGRAMS = Path(__file__).parent


def lines_of(run: Logged) -> list[str]:
    """What was logged of iterations and evaluations, but how long they took."""
    return [_DURATION.sub("", line) for line in _LINE.findall(run.output)]


def since(iteration: int, lines: list[str]) -> list[str]:
    """The lines from that of an iteration on."""
    first = next(i for i, line in enumerate(lines) if re.match(rf"iteration +{iteration}/", line))
    return lines[first:]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if not tag.endswith(" vs samples")  # the same values, at other steps
    }


def check_scalars(ours: Path, theirs: Path, since: int) -> None:
    """What TensorBoard was given from an iteration on; a norm may differ in its last digit."""
    found = scalars(ours)
    for tag, values in scalars(theirs).items():
        expected = [(step, value) for step, value in values if step >= since]
        steps, shown = zip(*found[tag], strict=True)
        assert list(steps) == [step for step, _ in expected], tag
        assert shown == pytest.approx([value for _, value in expected], rel=1e-6), tag
        if "norm" not in tag:
            assert list(shown) == [value for _, value in expected], tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("post-validation")


@pytest.fixture(scope="module")
def synchronous(checkout: Path, folder: Path) -> Logged:
    run = torchrun(checkout, *FLAGS, f"--tensorboard-dir {folder / 'synchronous'}")
    assert run.code == 0, run.output
    return run


def test_the_log_is_the_same(checkout: Path, folder: Path, synchronous: Logged) -> None:
    """With a wrong step before an evaluation, a checkpoint and the end; resumed from there."""
    save = f"--save {folder / 'checkpoint'} --save-interval {MIDDLE}"
    tensorboard = f"--tensorboard-dir {folder / 'validated'}"
    end = f"--exit-interval {MIDDLE}"
    first = torchrun(checkout, *FLAGS, VALIDATED, save, tensorboard, end)
    assert first.code == 0, first.output
    expected = lines_of(synchronous)
    rest = since(MIDDLE + 1, expected)
    assert lines_of(first) == expected[: -len(rest)]
    norm = re.search(r"grad norm: (\S+)", since(MIDDLE, expected)[0])
    assert norm is None or float(norm[1]) > CLIP
    assert "rank 0 keeps" in first.output
    load = f"--load {folder / 'checkpoint'}"
    then = torchrun(checkout, *FLAGS, VALIDATED, load, tensorboard)
    assert then.code == 0, then.output
    assert lines_of(then)[2:] == rest[2:]  # the second line of a run has the mean of two losses
    check_scalars(folder / "validated", folder / "synchronous", since=1)


def test_a_rank_killed_before_the_verdict(
    checkout: Path, folder: Path, tmp_path: Path, synchronous: Logged
) -> None:
    """What was not validated is not in the checkpoint: the run goes on as if nothing had been."""
    save = f"--save {tmp_path} --save-interval 2"
    killed = pretrain(checkout, *FLAGS, VALIDATED, save, program=_PROGRAMS / "run_and_kill.py")
    assert killed.code != 0
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    expected = since(5, lines_of(synchronous))
    assert expected[0] not in lines_of(killed)
    tensorboard = f"--tensorboard-dir {tmp_path / 'resumed'}"
    resumed = torchrun(checkout, *FLAGS, VALIDATED, tensorboard, f"--load {tmp_path}")
    assert resumed.code == 0, resumed.output
    assert lines_of(resumed)[2:] == expected[2:]
    check_scalars(tmp_path / "resumed", folder / "synchronous", since=5)


ITERATIONS = 4


def spanning(folder: Path, stages: dict[int, int]) -> list[set[str]]:
    """The collectives between two iterations in which several stages take part, for each time."""
    files = sorted(folder.iterdir())
    assert len(files) == len(stages)
    lines = [file.read_text().splitlines() for file in files]
    return [
        {
            name
            for of_rank in lines
            for name, ranks in json.loads(of_rank[i])
            if len({stages[rank] for rank in ranks}) > 1
        }
        for i in range(ITERATIONS - 1)  # what follows the last is followed by an evaluation
    ]


@pytest.mark.parametrize(
    "flags",
    ["--tensor-model-parallel-size 2", "--use-distributed-optimizer --overlap-grad-reduce --bf16"],
    ids=["tensor-parallel", "distributed-optimizer"],
)
def test_no_collective_spans_the_pipeline_between_iterations(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    stages = {0: 0, 1: 0, 2: 1, 3: 1}
    schedule = "--pipeline-model-parallel-size 2 --pipeline-schedule v-zb"
    iterations = f"--train-iters {ITERATIONS}"
    found = {}
    for name, more in (("synchronous", ""), ("validated", VALIDATED)):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("COLLECTIVES", str(tmp_path / name))
        program = _PROGRAMS / "run_and_count.py"
        run = pretrain(checkout, MODEL, schedule, iterations, flags, more, program=program)
        assert run.code == 0, run.output
        found[name] = spanning(tmp_path / name, stages)
    assert all("all_reduce" in names for names in found["synchronous"])
    # once in a job, all ranks sum up what of the weight gradients W cannot compute
    assert found["validated"] == [{"all_reduce"}, *[set()] * (ITERATIONS - 2)]
