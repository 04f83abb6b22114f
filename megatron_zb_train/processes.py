"""This process among the others of its job: its rank, the end of one, and helpers that end with it.

Nothing here imports torch or Megatron: every process that helps a rank reads this first.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from dataclasses import dataclass

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
# As gloo and NCCL say that the other end of a connection is gone.
_LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process exited|Socket closed"
)


@dataclass(frozen=True)
class Environment:
    """This process among those that the launcher started."""

    rank: int
    world_size: int
    local_rank: int
    attempt: str

    @staticmethod
    def read() -> Environment:
        """Read torchrun's variables; a process started without torchrun is the only rank."""
        return Environment(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error means only that another rank has ended."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def end_with(parent: int) -> None:
    """Let this process be killed when its parent, the one of that number, has ended."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(0)
