"""The launcher, but a rank raises in the 4th optimizer step of its process, and never again.

nvidia-resiliency-ext restarts jobs of GPUs: its hook into CUDA, and NCCL's abort, which gloo has
not, have stand-ins here. All else is real.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from megatron_zb.launch import main

RANK, STEP = 2, 4


def raise_in_the_optimizer() -> None:
    from megatron.core.optimizer import optimizer

    steps = 0
    prepare_grads = optimizer.FP32Optimizer.prepare_grads

    def counted(self: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == STEP and int(os.environ["RANK"]) == RANK:
            raise RuntimeError("a fault of this rank")
        return prepare_grads(self)

    optimizer.FP32Optimizer.prepare_grads = counted


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


if __name__ == "__main__":
    # Megatron is imported when the script has been found: the launcher hooks it before it runs.
    run_path = runpy.run_path

    def run(*arguments: Any, **keywords: Any) -> Any:
        raise_in_the_optimizer()
        restart_without_gpus()
        return run_path(*arguments, **keywords)

    runpy.run_path = run
    main(sys.argv[1:])
