"""One rank of a real pretrain script that notes where its time goes, for ``beside_megatron.py``.

Started as ``megatron_zb.launch`` is, with the file to write in ACCOUNT. The seconds of every pass
are noted by kind, under a schedule and under Megatron's own; those of an F and a BW of Megatron's
include nothing of its communication.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_zb import launch

_events: list[tuple[str, float, float]] = []


def main() -> None:
    prepare = launch._prepare

    def prepare_and_listen(arguments: Sequence[str], on_cpu: bool) -> Path:
        script = prepare(arguments, on_cpu)
        _listen()
        return script

    launch._prepare = prepare_and_listen
    atexit.register(_write)
    launch.main(sys.argv[1:])


def _listen() -> None:
    from megatron.core.pipeline_parallel import schedules

    from megatron_zb.runtime.executor import Execution

    usual = Execution._run_pass

    def run_pass(self: Execution, run: Any) -> None:
        _noted(str(run.work.kind), usual, self, run)

    patched: Any = Execution
    patched._run_pass = run_pass
    if "--pipeline-schedule" not in sys.argv:
        for name, kind in (("forward_step", "F"), ("backward_step", "BW")):
            setattr(schedules, name, _noting(kind, getattr(schedules, name)))


def _noting(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: _noted(kind, function, *arguments, **options)


def _noted(kind: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    start = time.perf_counter()
    try:
        return function(*arguments, **options)
    finally:
        _events.append((kind, start, time.perf_counter()))


def _write() -> None:
    Path(f"{os.environ['ACCOUNT']}.{os.environ['RANK']}").write_text(json.dumps(_events))


if __name__ == "__main__":
    main()
