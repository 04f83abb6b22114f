"""A job that suffers a fault ends, says why, leaves no process behind, and resumes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from jobs import run_job

from faults.conftest import VARIABLE
from faults.matrix import (
    AT_THE_START,
    FAULTS,
    ITERATIONS,
    LOADING,
    RANKS,
    SAVED,
    START,
    TIMEOUT,
    Fault,
)
from megatron_zb import schedules
from megatron_zb.runtime.watchdog import EXIT_CODE
from megatron_zb.schedules import interchange

ROOT = Path(__file__).resolve().parents[2]
UNDISTURBED = ["-m", "megatron_zb.train"]
FAULTY = Path(__file__).with_name("faulty.py")
SECONDS = 150.0
"""No fault takes longer than this to be noticed; torchrun waits half a minute for its ranks."""
MICROBATCHES = 5
SCHEDULE = ("--pipeline-schedule", "v-half")
GRACE = 20
"""Seconds in which the helpers of a rank that was killed may end."""
TRAINING = f"""
--cpu --pipeline-model-parallel-size {RANKS} --num-layers 4 --hidden-size 32
--num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --global-batch-size {MICROBATCHES}
--train-iters {ITERATIONS} --lr 0.01 --eval-interval 100
--save-interval {SAVED} --pipeline-timeout {TIMEOUT} --distributed-timeout-minutes 0.5
""".split()


@dataclass(frozen=True)
class Ended:
    """How a job has ended; ``left`` are the processes of its own that were still there."""

    code: int
    output: str
    at: float
    left: list[int]


def run(
    program: list[str],
    log: Path,
    *more: str,
    schedule: Sequence[str] = SCHEDULE,
    ranks: int = RANKS,
    of_torchrun: bool = False,
) -> Ended:
    """Start ranks and wait for their end; what is given in ``more`` counts.

    They are torchrun's where a test asks for it, or all faults are tried.
    """
    if not (os.environ.get(VARIABLE) or of_torchrun):
        name, *words = program[program[0] == "-m" :]
        words += [*TRAINING, *schedule, "--log-file", str(log), *more]
        job = run_job(ranks, name, words, SECONDS)
        return Ended(job.code, job.stdout + job.stderr, time.time(), list(job.left))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *program, *TRAINING, *schedule]
    command += ["--log-file", str(log), *more]
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
    deadline = time.monotonic() + GRACE
    while (left := list(_processes_of(mark))) and time.monotonic() < deadline:
        time.sleep(0.2)
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
def undisturbed_run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without any fault: its log, and its checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run(
        UNDISTURBED,
        folder / "log.jsonl",
        *("--data-path", corpus, "--save", str(folder / "checkpoints")),
    )
    assert ended.code == 0, ended.output
    return folder


@pytest.fixture(scope="module")
def undisturbed(undisturbed_run: Path) -> dict[int, Any]:
    return losses(undisturbed_run / "log.jsonl")


def parameters(faults: Sequence[Fault]) -> Iterator[Any]:
    for fault in faults:
        marks = [] if fault.ordinary else [pytest.mark.all_faults]
        yield pytest.param(
            fault, id=fault.name.replace(", ", "-").replace(" ", "-").replace("'", ""), marks=marks
        )


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(parameters(FAULTS)))
def test_a_fault(fault: Fault, undisturbed: dict[int, Any], corpus: str, tmp_path: Path) -> None:
    struck = tmp_path / "struck"
    save = ("--data-path", corpus, "--save", str(tmp_path / "checkpoints"))
    of_torchrun = (fault.what, fault.phase) == ("SIGKILL", "steady state")
    ended = run(faulty(fault, struck), tmp_path / "faulty.jsonl", *save, of_torchrun=of_torchrun)
    assert ended.code != 0, ended.output
    assert fault.says in ended.output, ended.output
    if fault.what == "SIGKILL":
        assert "RuntimeError" not in ended.output  # of those that have lost it
    assert ended.left == []
    seconds = ended.at - float(struck.read_text(encoding="utf-8"))

    latest = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    good = int(latest.read_text(encoding="utf-8"))
    assert good == ITERATIONS - SAVED
    load = ("--data-path", corpus, "--load", str(tmp_path / "checkpoints"), *save[2:])
    resumed = run(UNDISTURBED, tmp_path / "resumed.jsonl", *load)
    assert resumed.code == 0, resumed.output
    found = losses(tmp_path / "resumed.jsonl")
    assert found == {i: v for i, v in undisturbed.items() if i > good}
    _note(fault, seconds)


def faulty(fault: Fault, struck: Path) -> list[str]:
    """The program that suffers a fault."""
    return [str(FAULTY), json.dumps({**asdict(fault), "iteration": fault.iteration}), str(struck)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(parameters(AT_THE_START)))
def test_a_fault_at_the_start(
    fault: Fault, undisturbed_run: Path, undisturbed: dict[int, Any], corpus: str, tmp_path: Path
) -> None:
    """A run that would resume is refused, and resumes once that has been mended."""
    checkpoints, struck = tmp_path / "checkpoints", tmp_path / "struck"
    shutil.copytree(undisturbed_run / "checkpoints", checkpoints)
    good = ITERATIONS - SAVED
    latest = checkpoints / "latest_checkpointed_iteration.txt"
    schedule: Sequence[str] = SCHEDULE
    if fault.phase == START:
        latest.write_text(f"{good}\n", encoding="utf-8")
        schedule = ("--pipeline-schedule-file", str(tables(tmp_path)))
    load = ("--data-path", corpus, "--load", str(checkpoints), "--save", str(tmp_path / "new"))
    log = tmp_path / "faulty.jsonl"
    ended = run(faulty(fault, struck), log, *load, schedule=schedule)
    assert ended.code != 0, ended.output
    assert fault.says in ended.output, ended.output
    assert ended.left == []
    seconds = ended.at - float(struck.read_text(encoding="utf-8"))
    if fault.phase == LOADING:
        sentence = f"write its iteration into {latest}"
        assert sentence in ended.output
        latest.write_text(f"{good}\n", encoding="utf-8")
    else:
        assert f"on rank 0, but {TABLE} " in ended.output
        assert " on rank 1; start every rank with the same" in ended.output

    resumed = run(UNDISTURBED, tmp_path / "resumed.jsonl", *load, schedule=schedule)
    assert resumed.code == 0, resumed.output
    assert losses(tmp_path / "resumed.jsonl") == {i: v for i, v in undisturbed.items() if i > good}
    _note(fault, seconds)


TABLE = "a table with the digest"


def tables(folder: Path) -> Path:
    """The schedule of the other runs as a table, and beside it one of another schedule."""
    table = folder / "table.csv"
    for name, suffix in ((SCHEDULE[1], ".csv"), ("v-min", ".altered")):
        schedule = schedules.build(name, pipeline_size=RANKS, num_microbatches=MICROBATCHES)
        interchange.write_csv(schedule, table.with_suffix(suffix))
    return table


@pytest.mark.all_faults
def test_a_slow_rank_is_waited_for(
    undisturbed: dict[int, Any], corpus: str, tmp_path: Path
) -> None:
    """It takes longer for its checkpoint than the watchdog has: that is nobody's fault."""
    slow = Fault("slow", "checkpoint", 0, "so the job goes on: rank 0 is between two steps")
    save = ("--data-path", corpus, "--save", str(tmp_path / "checkpoints"))
    log = tmp_path / "log.jsonl"
    ended = run(faulty(slow, tmp_path / "struck"), log, *save)
    assert ended.code == 0, ended.output
    assert slow.says in ended.output, ended.output
    assert losses(log) == undisturbed


@pytest.mark.all_faults
def test_a_stopped_rank_of_another_pipeline_is_named(corpus: str, tmp_path: Path) -> None:
    """Two pipelines of two ranks: those of one wait for the other with the gradients."""
    fault = Fault("SIGSTOP", "optimizer step", 3, "rank 3 holds up all others: it does not answer")
    save = ("--data-path", corpus, "--save", str(tmp_path / "checkpoints"))
    two = ("--global-batch-size", str(2 * MICROBATCHES))
    log = tmp_path / "log.jsonl"
    ended = run(faulty(fault, tmp_path / "struck"), log, *save, *two, ranks=2 * RANKS)
    assert ended.code != 0, ended.output
    assert ended.output.count(fault.says) == 3, ended.output  # by all that are there
    assert ended.left == []


@pytest.mark.all_faults
def test_a_stopped_rank_that_holds_the_store(corpus: str, tmp_path: Path) -> None:
    """Without torchrun, the store of the job is in rank 0: nothing can be asked without it."""
    fault = Fault("SIGSTOP", "optimizer step", 0, "the store of the job at ")
    program = [sys.executable, *faulty(fault, tmp_path / "struck"), *TRAINING, *SCHEDULE]
    program += ["--data-path", corpus, "--save", str(tmp_path / "checkpoints")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        **{n: v for n, v in os.environ.items() if not n.startswith(("TORCHELASTIC", "OMP"))},
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "LOCAL_RANK": "0",
    }
    ranks = [
        subprocess.Popen(
            program,
            env={**environment, "RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        _, said = ranks[1].communicate(timeout=SECONDS)
    finally:
        for process in ranks:
            process.kill()
    assert ranks[1].returncode == EXIT_CODE, said
    assert f"{fault.says}127.0.0.1:{port}, rank 0's, does not answer for" in said


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


def test_a_damaged_checkpoint(undisturbed_run: Path, corpus: str, tmp_path: Path) -> None:
    """Its common part, which every rank reads before it meets the others."""
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(undisturbed_run / "checkpoints", checkpoints)
    latest = checkpoints / f"iter_{ITERATIONS:07d}"
    # Newer versions of Megatron keep the common part with the tensors, found by the index.
    parts = (latest / "common.pt", latest / ".metadata")
    damaged = next(part for part in parts if part.is_file())
    os.truncate(damaged, damaged.stat().st_size // 2)
    load = ("--data-path", corpus, "--load", str(checkpoints), "--save", str(tmp_path / "new"))
    refused = run(UNDISTURBED, tmp_path / "refused.jsonl", *load)
    assert refused.code != 0
    assert refused.left == []
    if damaged.name == "common.pt":
        assert f"--load: {latest} cannot be read" in refused.output
        assert "a file of it is missing or damaged; to load an earlier checkpoint" in refused.output
    else:
        assert f"--load: {damaged} is damaged: to load an earlier checkpoint" in refused.output
