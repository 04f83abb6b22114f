"""Processes that end with the one that has started them, whatever has ended that.

Imports neither torch nor Megatron: every process that helps a rank reads this first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from threading import Thread

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_C = ctypes.CDLL(None)
_EVERY = 1.0  # seconds


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let a signal end this process when its parent, the one of that process number, has ended."""
    if sys.platform == "linux":
        _C.prctl(_SET_PARENT_DEATH_SIGNAL, number)
    else:
        Thread(target=_watch, args=(parent, number), daemon=True).start()
    if os.getppid() != parent:  # it has ended meanwhile
        os.kill(os.getpid(), number)


def _watch(parent: int, number: int) -> None:
    while os.getppid() == parent:
        time.sleep(_EVERY)
    os.kill(os.getpid(), number)


def ending_with_this() -> Callable[[], None] | None:
    """Return the ``preexec_fn`` of a program that gets SIGTERM when this process has ended.

    None where the system has no such signal.
    """
    if sys.platform != "linux":
        return None
    return partial(end_with_parent, os.getpid(), signal.SIGTERM)


def end_with_launcher() -> None:
    """Let a rank of torchrun end with it, also where it is killed; another process goes on."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid())
