"""The launcher, but a rank raises in the 4th optimizer step of its process, and never again.

nvidia-resiliency-ext restarts jobs of GPUs: its hook into CUDA, and NCCL's abort, which gloo has
not, have stand-ins here. All else is real.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from optimizer_steps import before_step, launch

RANK, STEP = 2, 4


def fail() -> None:
    raise RuntimeError("a fault of this rank")


def restart_without_gpus() -> None:
    abort: Any = import_module("nvidia_resiliency_ext.inprocess.abort")
    torch.cuda.is_initialized = lambda: True
    del os.environ["LOCAL_RANK"]  # without it, the device is the current one, which is the CPU
    abort.AbortTorchDistributed.shutdown_all_process_group_backends = staticmethod(cut_connections)


def cut_connections() -> None:
    """Shut the connections to other ranks, which ends the waits of both sides; keep the stores."""
    stores = {int(os.environ["MASTER_PORT"]) + more for more in range(3)}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            between = connection.family in (socket.AF_INET, socket.AF_INET6)
            if between and not stores & {connection.getsockname()[1], connection.getpeername()[1]}:
                connection.shutdown(socket.SHUT_RDWR)


def prepare() -> None:
    before_step(STEP, RANK, fail)
    restart_without_gpus()


if __name__ == "__main__":
    launch(prepare)
