"""Processes that help a rank, and must not outlive it.

Nothing here imports torch or Megatron: every such process reads this first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def end_with(parent: int) -> None:
    """Let this process be killed when its parent, the one of that number, has ended."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(0)
