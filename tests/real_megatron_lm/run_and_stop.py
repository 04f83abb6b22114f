"""The launcher, but a rank is stopped in its 3rd optimizer step, where no message is under way."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from megatron_zb.launch import main

RANK, STEP = 2, 3


def stop_in_the_optimizer() -> None:
    from megatron.core.optimizer import optimizer

    steps = 0
    prepare_grads = optimizer.FP32Optimizer.prepare_grads

    def counted(self: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == STEP and int(os.environ["RANK"]) == RANK:
            os.kill(os.getpid(), signal.SIGSTOP)
        return prepare_grads(self)

    optimizer.FP32Optimizer.prepare_grads = counted


if __name__ == "__main__":
    # Megatron is imported when the script has been found: the launcher hooks it before it runs.
    import runpy

    run_path = runpy.run_path

    def run(*arguments: Any, **keywords: Any) -> Any:
        stop_in_the_optimizer()
        return run_path(*arguments, **keywords)

    runpy.run_path = run
    main(sys.argv[1:])
