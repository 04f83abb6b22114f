"""A job that suffers a fault ends, says why, leaves no process behind, and resumes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from faults.conftest import VARIABLE
from faults.matrix import FAULTS, ITERATIONS, RANKS, SAVED, TIMEOUT, Fault

ROOT = Path(__file__).resolve().parents[2]
FAULTY = Path(__file__).with_name("faulty.py")
SECONDS = 150.0
"""No fault takes longer than this to be noticed; a process group waits half a minute."""
GRACE = 20
"""Seconds in which the helpers of a rank that was killed may end."""
TRAINING = f"""
--cpu --pipeline-model-parallel-size {RANKS} --num-layers 4 --hidden-size 32
--num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --global-batch-size 5
--train-iters {ITERATIONS} --lr 0.01 --eval-interval 100 --pipeline-schedule v-half
--save-interval {SAVED} --pipeline-timeout {TIMEOUT} --distributed-timeout-minutes 0.5
""".split()


@dataclass(frozen=True)
class Ended:
    """How a job has ended; ``left`` are the processes of its own that were still there."""

    code: int
    output: str
    at: float
    left: list[int]


def run(program: list[str], log: Path, *more: str) -> Ended:
    """Start torchrun's ranks and wait for the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), *program, *TRAINING, "--log-file", str(log), *more]
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "FAULTY_JOB": mark,
            },
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            process.wait(SECONDS)
        finally:
            at = time.time()
            left = _left_of(mark)
            for number in left:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Ended(process.returncode, output.read(), at, left)


def _left_of(mark: str) -> list[int]:
    """What is still there after a while in which an orderly end may take place."""
    for _ in range(GRACE):
        if not (left := list(_processes_of(mark))):
            break
        time.sleep(1)
    return left


def _processes_of(mark: str) -> Iterator[int]:
    """Living processes that have the mark in their environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"FAULTY_JOB={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def losses(log: Path) -> dict[int, Any]:
    """Loss and norm of each iteration, every digit."""
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return {r["iteration"]: (r["lm_loss"], r["grad_norm"]) for r in records if "lm_loss" in r}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    prepare = [sys.executable, str(ROOT / "scripts/prepare_text.py"), "--max-bytes", "400000"]
    subprocess.run([*prepare, "--output-prefix", str(prefix)], check=True, capture_output=True)
    return str(prefix)


@pytest.fixture(scope="module")
def undisturbed_run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without any fault: its log, and its checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run(
        ["-m", "megatron_zb.pretrain_gpt"],
        folder / "log.jsonl",
        *("--data-path", corpus, "--save", str(folder / "checkpoints")),
    )
    assert ended.code == 0, ended.output
    return folder


@pytest.fixture(scope="module")
def undisturbed(undisturbed_run: Path) -> dict[int, Any]:
    return losses(undisturbed_run / "log.jsonl")


def parameters() -> Iterator[Any]:
    for fault in FAULTS:
        marks = [] if fault.ordinary else [pytest.mark.all_faults]
        yield pytest.param(fault, id=fault.name.replace(", ", "-").replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("fault", list(parameters()))
def test_a_fault(fault: Fault, undisturbed: dict[int, Any], corpus: str, tmp_path: Path) -> None:
    struck = tmp_path / "struck"
    told = json.dumps({**asdict(fault), "iteration": fault.iteration})
    save = ("--data-path", corpus, "--save", str(tmp_path / "checkpoints"))
    ended = run([str(FAULTY), told, str(struck)], tmp_path / "faulty.jsonl", *save)
    assert ended.code != 0, ended.output
    assert fault.says in ended.output, ended.output
    assert ended.left == []
    seconds = ended.at - float(struck.read_text(encoding="utf-8"))

    latest = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    good = int(latest.read_text(encoding="utf-8"))
    assert good == ITERATIONS - SAVED
    load = ("--data-path", corpus, "--load", str(tmp_path / "checkpoints"), *save[2:])
    resumed = run(["-m", "megatron_zb.pretrain_gpt"], tmp_path / "resumed.jsonl", *load)
    assert resumed.code == 0, resumed.output
    found = losses(tmp_path / "resumed.jsonl")
    assert found == {i: v for i, v in undisturbed.items() if i > good}
    _note(fault, seconds)


def _note(fault: Fault, seconds: float) -> None:
    """One line of the table in docs/reliability.md; only of a test that has passed so far."""
    path = os.environ.get(VARIABLE)
    if path:
        line = {
            "fault": fault.what,
            "phase": fault.phase,
            "rank": fault.rank,
            "seen": fault.says,
            "seconds": round(seconds, 1),
            "resume": "equal",
        }
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@pytest.mark.parametrize("damaged", ["__0_0.distcp", "common.pt"])
def test_a_damaged_checkpoint(
    damaged: str, undisturbed_run: Path, undisturbed: dict[int, Any], corpus: str, tmp_path: Path
) -> None:
    """It is refused in a sentence, which says how to load the one before it."""
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(undisturbed_run / "checkpoints", checkpoints)
    latest = checkpoints / f"iter_{ITERATIONS:07d}"
    os.truncate(latest / damaged, (latest / damaged).stat().st_size // 2)
    load = ("--data-path", corpus, "--load", str(checkpoints), "--save", str(tmp_path / "new"))
    program = ["-m", "megatron_zb.pretrain_gpt"]
    refused = run(program, tmp_path / "refused.jsonl", *load)
    assert refused.code != 0
    assert refused.left == []
    sentence = f"--load: {latest} cannot be read"
    assert sentence in refused.output
    assert "a file of it is missing or damaged; to load an earlier checkpoint" in refused.output
    if damaged == "common.pt":
        return
    good = ITERATIONS - SAVED
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(f"{good}\n", encoding="utf-8")
    resumed = run(program, tmp_path / "resumed.jsonl", *load)
    assert resumed.code == 0, resumed.output
    assert losses(tmp_path / "resumed.jsonl") == {i: v for i, v in undisturbed.items() if i > good}
