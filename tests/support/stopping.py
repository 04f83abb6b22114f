"""Stop a rank of a job for good, as SIGSTOP does, without torchrun's half minute at its end.

torchrun asks the other ranks to end when one has failed, and kills those that do not after 30
seconds. A stopped rank cannot: here, a helper kills it as soon as no other rank is left.
"""

from __future__ import annotations

import os
import signal
import time

import psutil


def stop_this_rank() -> None:
    """Send this process SIGSTOP, and SIGKILL once all other children of its parent have ended."""
    me = os.getpid()
    others = [child for child in psutil.Process(os.getppid()).children() if child.pid != me]
    if os.fork() == 0:
        while any(map(_runs, others)):
            time.sleep(0.1)
        os.kill(me, signal.SIGKILL)
        os._exit(0)
    os.kill(me, signal.SIGSTOP)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
