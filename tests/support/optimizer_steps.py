"""Trials that begin in an optimizer step of one rank, in the launcher's place."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

from megatron_zb.launch import main


def before_step(number: int, rank: int, act: Callable[[], None]) -> None:
    """Let one rank act at the beginning of an optimizer step, counted from 1 in its process."""
    from megatron.core.optimizer import optimizer

    steps = 0
    prepare_grads = optimizer.FP32Optimizer.prepare_grads

    def counted(self: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == number and int(os.environ["RANK"]) == rank:
            act()
        return prepare_grads(self)

    optimizer.FP32Optimizer.prepare_grads = counted


def launch(prepare: Callable[[], None]) -> None:
    """Run the launcher; prepare once Megatron can be imported, and the launcher has hooked it."""
    run_path = runpy.run_path

    def run(*arguments: Any, **keywords: Any) -> Any:
        prepare()
        return run_path(*arguments, **keywords)

    runpy.run_path = run
    main(sys.argv[1:])
