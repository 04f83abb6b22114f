"""The launcher, but a rank raises in the 4th optimizer step of its process, and never again."""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

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


if __name__ == "__main__":
    # Megatron is imported when the script has been found: the launcher hooks it before it runs.
    run_path = runpy.run_path

    def run(*arguments: Any, **keywords: Any) -> Any:
        raise_in_the_optimizer()
        return run_path(*arguments, **keywords)

    runpy.run_path = run
    main(sys.argv[1:])
