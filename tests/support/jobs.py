"""Run a program of this package on ranks, as torchrun does, but without importing torch again.

Ranks are forked off the process that has imported torch and Megatron (see ranks.py), so that a job
takes a second and not ten. As under torchrun, the store of the job is not in a rank, and when a
rank fails the others are ended. What torchrun itself does and says, jobs of torchrun's show.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from live_processes import PATIENCE, left_by, state_of
from rank_process import Kind
from ranks import fork


@dataclass(frozen=True)
class Ended:
    """A job that has ended, and what it printed; ``left`` are processes that its ranks left.

    A job hung if no rank had failed when its time was over.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    left: tuple[int, ...] = ()
    hung: bool = False


@dataclass(frozen=True)
class _Program:
    """What a rank runs: a module or a script, its words, where, and with which variables."""

    program: str
    words: list[str]
    folder: str
    environment: dict[str, str]
    stdout: str
    stderr: str


def run_job(ranks: int | None, program: str, words: Sequence[str], timeout: float) -> Ended:
    """Run a module or a script as the main program of every rank, to its end.

    Args:
        ranks: how many; None for one process that nothing tells of ranks.
        program: the name of the module, or the path of the script.
        words: its command line.
        timeout: in seconds; the test fails after it.
    """
    ended = try_job(ranks, program, words, timeout)
    if ended.hung:
        pytest.fail(f"did not end in {timeout:g} s:\n{ended.stdout}\n{ended.stderr}")
    return ended


def try_job(
    ranks: int | None,
    program: str,
    words: Sequence[str],
    timeout: float,
    kind: Kind = Kind.PLAIN,
) -> Ended:
    """Run as `run_job` does, but report a job that hangs; ``kind`` is what its ranks import."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environments = [{}] if ranks is None else [of_rank(r, ranks, store.port) for r in range(ranks)]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="job-") as folder:
        printed = [Path(folder) / name for name in ("stdout", "stderr")]
        for path in printed:
            path.touch()
        processes = [started(program, words, more, printed, kind) for more in environments]
        killed = ""
        try:
            in_time = _wait_for(processes, start + timeout)
            killed = _who_was_killed(processes)
        finally:
            _end(processes)
        stdout, stderr = (path.read_text(encoding="utf-8", errors="replace") for path in printed)
    codes = [process.exitcode for process in processes]
    code = codes[0] if ranks is None else int(any(codes))
    seconds = time.monotonic() - start
    left = left_by([process.pid for process in processes])
    return Ended(code, stdout, stderr + killed, seconds, left, hung=not in_time)


def of_rank(rank: int, ranks: int, port: int, attempt: int = 0) -> dict[str, str]:
    """The variables that torchrun gives a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }


def run_script(program: str | Path, *words: str | Path) -> Ended:
    """Run a script as one process, to its end."""
    return run_job(None, str(program), [str(word) for word in words], 120)


def started(
    program: str,
    words: Sequence[str],
    more: Mapping[str, str],
    printed: Sequence[Path],
    kind: Kind = Kind.PLAIN,
) -> Any:
    """One rank under way: variables of its own, and the files for its stdout and its stderr."""
    as_scripts_do = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if kind is Kind.MEGATRON_LM else {}
    fixed = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = {**as_scripts_do, **os.environ, **fixed, **more}
    stdout, stderr = map(str, printed)
    given = _Program(program, list(words), os.getcwd(), environment, stdout, stderr)
    return fork(kind, _run, given)


def _run(given: _Program) -> None:
    os.setsid()
    # A rank starts child processes by Python's default, not by the fork server of its parent, which
    # would import everything again.
    multiprocessing.set_start_method(None, force=True)
    os.chdir(given.folder)
    os.environ.clear()
    os.environ |= given.environment
    for number, path in ((1, given.stdout), (2, given.stderr)):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), number)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv[:] = [given.program, *given.words]
    if given.program.endswith(".py"):
        runpy.run_path(given.program, run_name="__main__")
    else:
        runpy.run_module(given.program, run_name="__main__", alter_sys=True)


def _wait_for(processes: Sequence[Any], deadline: float) -> bool:
    """Wait until all have ended or one has failed; whether that was before the deadline."""
    left = list(processes)
    while left:
        if not wait([p.sentinel for p in left], timeout=max(0.0, deadline - time.monotonic())):
            return False
        left = [process for process in left if process.is_alive()]
        if any(process.exitcode for process in processes):
            break
    return True


def _who_was_killed(processes: Sequence[Any]) -> str:
    """Lines as torchrun has them in its report, of ranks that a signal has ended.

    The server of the forks may tell of a rank a little later than of another that has noticed.
    """
    if any(process.exitcode for process in processes):
        for process in processes:
            process.join(0.3)
    ended = ((rank, -(process.exitcode or 0)) for rank, process in enumerate(processes))
    return "".join(
        f"rank {rank}: Signal {number} ({signal.Signals(number).name})\n"
        for rank, number in ended
        if number > 0
    )


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
            if state_of(process.pid) == "T":  # stopped, it would never be told
                process.kill()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
