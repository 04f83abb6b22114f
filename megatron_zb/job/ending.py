"""The end of a process of a job: for arguments that cannot run, or after another rank has ended."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from typing import NoReturn

from megatron_zb.errors import UsageError

_TIME_FOR_OTHERS = 4.0  # seconds: to get as far as this rank has
_TIME_FOR_RANK_0 = 20.0
_SAID = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
"""Parts of gloo's errors where another rank has ended."""


def end_with(error: UsageError, rank: int, *, speaks: bool | None = None) -> NoReturn:
    """End this process of a job with code 2, for a mistake that ends every rank.

    One rank prints the error, at once: rank 0 unless ``speaks`` is given. The launcher ends all
    processes as soon as one has failed, and Megatron has them print their stacks then: so that rank
    waits until the others have come here, where they wait silently and print only if they are left
    alone.
    """
    speaks = rank == 0 if speaks is None else speaks
    if not speaks:
        faulthandler.unregister(signal.SIGTERM)
        time.sleep(_TIME_FOR_RANK_0)
    sys.stdout.flush()
    print(f"megatron_zb: error: {error}", file=sys.stderr, flush=True)
    if speaks and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(_TIME_FOR_OTHERS)
    os._exit(2)


def describe_lost_peer(error: BaseException, rank: int) -> str | None:
    """Return one sentence for an error that follows from the end of another rank, else None."""
    if not isinstance(error, RuntimeError) or not any(said in str(error) for said in _SAID):
        return None
    return (
        f"megatron_zb: error: rank {rank} has lost the connection to another rank, which has "
        "ended: what that one said, or torchrun's report, tells why"
    )
