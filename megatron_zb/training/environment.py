"""The rank of this process among those that were started together."""

from __future__ import annotations

import os
from dataclasses import dataclass


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
