"""Blockwise distillation as a user runs it: flags, checkpoints, and what goes wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from training_jobs import MODULE as PRETRAIN
from training_jobs import (
    ROOT,
    SECONDS_TO_REPORT,
    SECONDS_TO_TRAIN,
    check_report,
    checkpoint_of,
    end_of,
    script,
    torchrun,
    written,
)

from megatron_zb.distill.flags import parse
from megatron_zb.errors import UsageError

Flags = Mapping[str, Any]
Record = dict[str, Any]

MODULE = "megatron_zb.distill"
STEPS, SAVED = 6, 3
MODEL: Flags = {
    "--cpu": True,
    "--num-layers": 4,
    "--hidden-size": 32,
    "--num-attention-heads": 4,
    "--seq-length": 32,
    "--micro-batch-size": 2,
    "--global-batch-size": 8,
    "--lr": 1e-2,
    "--eval-iters": 2,
    "--split": "90,10,0",
}
DISTILLATION: Flags = {
    "--cpu": True,
    "--student-config": ROOT / "configs/students/half_mlp.yaml",
    "--micro-batch-size": 2,
    "--global-batch-size": 8,
    "--train-iters": STEPS,
    "--lr": 1e-3,
    "--log-interval": 1,
    "--distribution": "0-1:1,2-3:1",
}

HELD_OUT: Flags = {"--eval-iters": 2, "--split": "90,10,0"}

# Rank 1 sends itself a signal when it comes to the update of that step.
STRUCK = """
import os, signal, sys
from megatron_zb.distill.__main__ import main
from megatron_zb.distill.stage import BlockwiseStage
name, step = sys.argv[1], int(sys.argv[2])
sys.argv[1:] = sys.argv[3:]
update = BlockwiseStage.update

def struck(stage, number):
    if os.environ["RANK"] == "1" and number == step:
        os.kill(os.getpid(), signal.Signals[name])
    update(stage, number)

BlockwiseStage.update = struck
main()
"""


@dataclass(frozen=True)
class Distilled:
    """A run that went well: its lines of JSON, and where it wrote."""

    records: list[Record]
    folder: Path

    @property
    def losses(self) -> dict[int, Any]:
        return {r["iteration"]: r["losses"] for r in self.records if "losses" in r}

    @property
    def held_out(self) -> tuple[float, float]:
        """Teacher's and student's."""
        last = self.records[-1]
        return last["teacher_eval_loss"], last["student_eval_loss"]


@pytest.fixture(scope="module")
def teacher(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT that has learnt a little."""
    folder = tmp_path_factory.mktemp("teacher")
    flags = {**MODEL, "--train-iters": 30, "--data-path": corpus, "--save": folder}
    ended = run_job(None, PRETRAIN, written(flags), SECONDS_TO_TRAIN)
    assert ended.code == 0, ended.stderr
    return folder


def distilled(folder: Path, teacher: Path, corpus: str, flags: Flags) -> Distilled:
    """Distil on two ranks, with `flags` in place of DISTILLATION's."""
    log = folder / "log.jsonl"
    given = {"--teacher-load": teacher, "--data-path": corpus, "--log-file": log}
    words = written({**DISTILLATION, **given, **HELD_OUT, **flags})
    ended = run_job(2, MODULE, words, SECONDS_TO_TRAIN)
    assert ended.code == 0, ended.stderr
    return Distilled([json.loads(line) for line in log.read_text().splitlines()], folder)


@pytest.fixture(scope="module")
def whole(teacher: Path, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Distilled:
    """An uninterrupted run with a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("whole")
    flags = {
        "--save": folder / "run",
        "--save-interval": SAVED,
        "--save-student": folder / "student",
    }
    return distilled(folder, teacher, corpus, flags)


def evaluated(corpus: str, load: Path, folder: Path, flags: Flags) -> float:
    """The loss that megatron_zb.train finds for a checkpoint."""
    log = folder / f"{load.name}.jsonl"
    given = {"--data-path": corpus, "--load": load, "--log-file": log, "--train-iters": 1}
    words = written({**MODEL, **given, "--finetune": True, "--skip-train": True, **flags})
    ended = run_job(None, PRETRAIN, words, SECONDS_TO_TRAIN)
    assert ended.code == 0, ended.stderr
    (record,) = [json.loads(line) for line in log.read_text().splitlines()]
    loss: float = record["eval_loss"]
    return loss


@pytest.mark.slow
def test_a_student_learns_and_megatron_evaluates_it(
    whole: Distilled, teacher: Path, corpus: str, tmp_path: Path
) -> None:
    assert list(whole.losses) == list(range(1, STEPS + 1))
    for block in "0123":
        assert whole.losses[STEPS][block]["half"] < whole.losses[1][block]["half"]
    for record in whole.records[:-1]:
        assert record["samples_per_second"] > 0
        assert len(record["utilisation"]) == 2
        assert all(0 < part <= 1 for part in record["utilisation"])
    taught, learnt = whole.held_out
    assert taught == pytest.approx(evaluated(corpus, teacher, tmp_path, {}), rel=1e-5)
    narrow = {"--ffn-hidden-size": 64}
    student = evaluated(corpus, whole.folder / "student", tmp_path, narrow)
    assert learnt == pytest.approx(student, rel=1e-5)
    assert learnt != taught


def tensors(path: Path) -> dict[str, Any]:
    """Every tensor in a checkpoint, by name, as lists of numbers."""
    reader = FileSystemReader(path)
    kept = {
        name: torch.empty(what.size, dtype=what.properties.dtype)
        for name, what in reader.read_metadata().state_dict_metadata.items()
        if isinstance(what, TensorStorageMetadata)
    }
    checkpoint.load(kept, storage_reader=reader, no_dist=True)
    return {name: tensor.tolist() for name, tensor in kept.items()}


def check_same_end(ours: Path, theirs: Path) -> None:
    """Weights and optimizers at the end, to the last bit."""
    name = f"iter_{STEPS:07d}"
    expected = tensors(theirs / name)
    assert len(expected) > 4 * 12
    assert tensors(ours / name) == expected


@pytest.mark.slow
@pytest.mark.parametrize("distribution", [None, "0-2:1,3:1"], ids=["as-before", "moved"])
def test_a_run_continues_bit_for_bit(
    distribution: str | None,
    whole: Distilled,
    teacher: Path,
    corpus: str,
    tmp_path: Path,
) -> None:
    """From the checkpoint in the middle, also where blocks have moved to other ranks."""
    load = checkpoint_of(whole.folder / "run", SAVED, tmp_path / "load")
    flags = {"--load": load, "--save": tmp_path / "run", "--distribution": distribution}
    continued = distilled(tmp_path, teacher, corpus, flags)
    assert continued.losses == {
        step: losses for step, losses in whole.losses.items() if step > SAVED
    }
    if distribution is None:
        assert continued.held_out == whole.held_out
    check_same_end(tmp_path / "run", whole.folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize("of_torchrun", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_killed_rank_ends_the_job_and_it_continues(
    of_torchrun: bool, whole: Distilled, teacher: Path, corpus: str, tmp_path: Path
) -> None:
    flags: Flags = {
        **DISTILLATION,
        "--teacher-load": teacher,
        "--data-path": corpus,
        "--save": tmp_path / "run",
        "--save-interval": SAVED,
        **HELD_OUT,
    }
    program = script(tmp_path, STRUCK)
    words = ["SIGKILL", str(SAVED + 1), *written(flags)]
    if of_torchrun:
        ended = end_of(torchrun(2, program, *words), SECONDS_TO_TRAIN)
    else:
        ended = run_job(2, program, words, SECONDS_TO_TRAIN)
    assert ended.code != 0
    assert "Signal 9 (SIGKILL)" in ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("megatron_zb: error")]
    for line in said:  # the launcher may have been faster than rank 0
        assert "rank 0 has lost the connection to another rank" in line
        assert f"continue with --load {tmp_path / 'run'}" in line
    assert not re.search(r'File ".*/megatron(_zb)?/', ended.stderr), ended.stderr
    flags = {"--load": tmp_path / "run", "--save": tmp_path / "run"}
    distilled(tmp_path, teacher, corpus, flags)
    check_same_end(tmp_path / "run", whole.folder / "run")


@pytest.mark.long
@pytest.mark.full
def test_a_rank_that_stands_still_is_named(teacher: Path, corpus: str, tmp_path: Path) -> None:
    flags: Flags = {
        **DISTILLATION,
        "--teacher-load": teacher,
        "--data-path": corpus,
        "--pipeline-timeout": 3,
    }
    words = ["SIGSTOP", "1", *written(flags)]
    ended = run_job(2, script(tmp_path, STRUCK), words, SECONDS_TO_TRAIN)
    assert ended.code != 0
    assert "rank 1 holds up all others: it does not answer" in ended.stderr


def test_a_distribution_is_chosen(teacher: Path, corpus: str, tmp_path: Path) -> None:
    """The run is the one that was given the same distribution by hand."""
    flags = {"--distribution": None, "--train-iters": 2}
    chosen = distilled(tmp_path, teacher, corpus, flags)
    assert list(chosen.losses) == [1, 2]
    assert set(chosen.losses[1]) == set("0123")


@pytest.fixture
def refused(teacher: Path, corpus: str) -> Any:
    """Run with flags that cannot be, on one rank, and read what it says."""

    def run(flags: Flags, *parts: str) -> None:
        given = {"--teacher-load": teacher, "--data-path": corpus, "--distribution": "0-3:1"}
        words = written({**DISTILLATION, **given, **flags})
        ended = run_job(None, MODULE, words, SECONDS_TO_REPORT)
        check_report(ended, *parts)
        assert ended.code == 2
        assert ended.stderr.count("megatron_zb:") == 1
        assert ended.stderr.splitlines()[-1].startswith("megatron_zb: error: ")

    return run


def test_a_student_that_does_not_fit_its_teacher(refused: Any, tmp_path: Path) -> None:
    student = tmp_path / "student.yaml"
    text = "name: a\ncandidates: [{name: h}]\nexceptions:\n- {blocks: [4], candidates: [{name: x}]}"
    student.write_text(text)
    refused({"--student-config": student}, "block 4, but the teacher has blocks 0 to 3")


def test_a_student_that_cannot_be_stitched(refused: Any, tmp_path: Path) -> None:
    library = ROOT / "configs/students/library.yaml"
    flags = {"--student-config": library, "--candidate": "no-attention"}
    refused(
        {**flags, "--save-student": tmp_path},
        "a heterogeneous student cannot be stitched to a uniform checkpoint",
        "--normalization RMSNorm",
    )


def test_a_checkpoint_of_another_student(refused: Any, whole: Distilled) -> None:
    library = ROOT / "configs/students/library.yaml"
    refused(
        {"--student-config": library, "--load": whole.folder / "run"},
        "was written with student blocks of other shapes",
    )


def test_a_teacher_that_is_none(refused: Any, whole: Distilled) -> None:
    refused({"--teacher-load": whole.folder / "run"}, "--teacher-load: ", "does not say")


def _damaged(path: Path) -> None:
    """Cut a file off in the middle of the last weight in it, which every run has to read."""
    stored = FileSystemReader(path).read_metadata().storage_data
    weights = [
        where
        for what, where in stored.items()
        if what.fqn.endswith("mlp.linear_fc2.weight") and not what.fqn.startswith("optimizer")
    ]
    last = max(weights, key=lambda where: (where.relative_path, where.offset))
    with (path / last.relative_path).open("r+b") as file:
        file.truncate(last.offset + last.length // 2)


@pytest.mark.parametrize("which", ["teacher", "checkpoint"])
def test_damaged_files_are_named(
    which: str, whole: Distilled, teacher: Path, corpus: str, tmp_path: Path
) -> None:
    """On two ranks, of which one alone may come to the damage."""
    source = teacher if which == "teacher" else whole.folder / "run"
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    iteration = int((copy / "latest_checkpointed_iteration.txt").read_text())
    _damaged(copy / f"iter_{iteration:07d}")
    flag = "--teacher-load" if which == "teacher" else "--load"
    given = {
        "--teacher-load": teacher,
        "--data-path": corpus,
        "--split": HELD_OUT["--split"],
        flag: copy,
    }
    words = written({**DISTILLATION, **given, "--train-iters": STEPS + 1})
    ended = run_job(2, MODULE, words, SECONDS_TO_REPORT)
    assert ended.code != 0
    assert f"megatron_zb: error: {flag}: {copy}" in ended.stderr
    assert "a file of it is missing or damaged" in ended.stderr


def _script(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    command = [str(ROOT / "scripts/distill_gpt.sh"), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def test_the_script_writes_a_command_that_is_understood(teacher: Path, corpus: str) -> None:
    from megatron_zb.distill.flags import parse

    said = _script("--dry-run", "--cpu", TEACHER=str(teacher), DATA_PATH=corpus)
    assert said.returncode == 0, said.stderr
    words = said.stdout.split()
    args = parse(words[words.index("megatron_zb.distill") + 1 :])
    assert (args.global_batch_size, args.cpu, args.save_student) == (8, True, "runs/student")
    assert _script("--help").stdout.startswith("usage: ")


def test_the_script_refuses_words_of_which_the_command_knows_nothing(
    teacher: Path, corpus: str
) -> None:
    for word, sentence in (
        ("--los", "unknown argument '--los': did you mean --loss?"),
        ("--loss=x", "--loss 'x' is unknown: give one of "),
    ):
        said = _script("--cpu", word, TEACHER=str(teacher), DATA_PATH=corpus)
        assert (said.returncode, said.stdout) == (2, "")
        assert said.stderr.startswith(f"distill_gpt.sh: error: {sentence}")
        assert said.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_example_of_the_script_runs(tmp_path: Path) -> None:
    """In an empty folder, with the commands that --help prints."""
    example = _script("--help").stdout.partition("command that it runs.\n")[2]
    example = example.partition("what is trained:")[0]
    for name in ("scripts", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = ["bash", "-euo", "pipefail", "-c", example]
    done = subprocess.run(script, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "student" / "latest_checkpointed_iteration.txt").is_file()


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, "TEACHER is missing"),
        ({"TEACHER": "/no/where"}, "TEACHER is '/no/where', which is no folder"),
        ({"TEACHER": "/", "NNODES": "0"}, "NNODES is '0': give a whole number of 1 or more"),
        ({"TEACHER": "/", "DATA_PATH": "/no/text"}, "there is no /no/text.idx"),
    ],
)
def test_the_script_refuses_in_a_sentence(variables: dict[str, str], sentence: str) -> None:
    said = _script("--dry-run", **variables)
    assert said.returncode == 2
    assert said.stderr.startswith("distill_gpt.sh: error: ")
    assert sentence in said.stderr
    assert said.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--picture", "steps.jpg"], "--picture steps.jpg: give a name that ends in .png or .svg"),
        (["--relay-memory-limit", "much"], "--relay-memory-limit"),
    ],
)
def test_pictures_and_limits_are_checked_first(
    words: list[str], sentence: str, tmp_path: Path
) -> None:
    flags = {**DISTILLATION, "--teacher-load": tmp_path, "--mock-data": True}
    given = {name: value for name, value in flags.items() if name != "--data-path"}
    with pytest.raises(UsageError, match=sentence):
        parse([*written(given), *words])


@pytest.mark.slow
def test_the_last_steps_are_drawn(
    whole: Distilled, teacher: Path, corpus: str, tmp_path: Path
) -> None:
    """With room for a few activations to wait, which changes no loss; without any it is refused."""
    picture = tmp_path / "steps.svg"
    flags = {"--picture": picture, "--distribution": "0-1:1,2-3:1", "--relay-memory-limit": "1MiB"}
    assert distilled(tmp_path, teacher, corpus, flags).losses == whole.losses
    assert picture.exists()
    picture.unlink()
    distilled(tmp_path, teacher, corpus, {**flags, "--exit-interval": SAVED})  # its last steps
    assert picture.read_text().lstrip().startswith("<?xml")
    limit = {**flags, "--relay-memory-limit": "1B"}
    ended = run_job(
        2,
        MODULE,
        written({**DISTILLATION, "--teacher-load": teacher, "--data-path": corpus, **limit}),
        SECONDS_TO_TRAIN,
    )
    assert ended.code != 0
    assert "one activation for every rank of the next stage takes" in ended.stderr
