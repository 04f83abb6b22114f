"""Processes that live: whether one does, those of a session that are left, and how to end them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE = 5.0
"""Seconds in which processes may end by themselves."""


def state_of(pid: int) -> str:
    """The letter that Linux has for the state of a process; nothing if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def is_alive(pid: int) -> bool:
    """Whether the process is there and, where that can be told, more than a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path("/proc/self").exists() or state_of(pid) not in ("", "Z")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.1)


def left_by(leaders: Sequence[int]) -> tuple[int, ...]:
    """Living processes of sessions, after a while in which they may end; they are then ended."""
    deadline = time.monotonic() + PATIENCE
    while (left := tuple(_in_sessions(leaders))) and time.monotonic() < deadline:
        time.sleep(0.1)
    for number in left:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    return left


def end_session(process: subprocess.Popen[Any]) -> None:
    """Terminate a command that runs in its own session, with its child processes.

    torchrun gives every rank a session, and ends them all when it is asked to end.
    """
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(40)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _in_sessions(leaders: Sequence[int]) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if state != "Z" and int(session) in leaders:
                yield int(folder.name)
