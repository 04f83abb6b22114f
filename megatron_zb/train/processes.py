"""This process among the others of its job: its rank, and the end of another.

Nothing here imports torch or Megatron: every process that helps a rank reads this first.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

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
