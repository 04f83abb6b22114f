"""The one kind of error that is the user's to mend."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn


class UsageError(ValueError):
    """Something the user asked for cannot be done.

    The message is one sentence: what is wrong, where, and what would be right. Commands print it
    without a traceback and exit with code 2.
    """


_GRACE = 20.0  # seconds


def end_with(error: UsageError, rank: int) -> NoReturn:
    """End this process of a job with code 2, for a mistake that every rank makes.

    Rank 0 says what is wrong. The launcher ends all processes as soon as one has failed: so the
    others give it the time, and speak only if they are still there.
    """
    if rank != 0:
        time.sleep(_GRACE)
    sys.stdout.flush()
    print(f"megatron_zb: error: {error}", file=sys.stderr, flush=True)
    os._exit(2)
