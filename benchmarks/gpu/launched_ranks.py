"""Processes of a job's ranks, each on a separate GPU or all on the first one."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from one_device import REPEATABLE

ROOT = Path(__file__).resolve().parents[2]
Start = tuple[list[str], dict[str, str]]
"""Arguments of Python before a program, and its variables of the environment."""


def started_ranks(ranks: int, share_gpu: bool) -> list[Start]:
    """Return how to start every process.

    torchrun gives every rank of a machine a separate GPU; ranks that share one start without it.
    """
    if not share_gpu:
        return [(["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"], {})]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(random.randrange(20_000, 30_000)),  # not one that systems hand out
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return [([], {**shared, "RANK": str(rank)}) for rank in range(ranks)]


def run_ranks(starts: Sequence[Start], program: Sequence[str], seconds: float) -> tuple[str, str]:
    """Run a program on all ranks; return what went wrong, or nothing, and all that they printed."""
    with tempfile.TemporaryFile("w+") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, *command, *program],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**REPEATABLE, **os.environ, **environment},
            )
            for command, environment in starts
        ]
        problem = _wait(processes, seconds)
        output.seek(0)
        return problem, output.read()


def reason_of(text: str) -> str:
    """Return the last line that names an error of a rank."""
    said = [
        line for line in text.splitlines() if re.search(r"(?<!ChildFailed)(Error|error):", line)
    ]
    return said[-1][-300:] if said else ""


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> str:
    """Wait for all, and end all when one has failed; return what went wrong, or nothing."""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            statuses = [process.poll() for process in processes]
            if all(status == 0 for status in statuses):
                return ""
            if any(statuses):
                time.sleep(1)  # lets the others say what they saw
                return f"a rank ended with exit status {next(filter(None, statuses))}"
            time.sleep(0.1)
        return f"did not end in {seconds:g} s"
    finally:
        for process in processes:
            process.kill()
