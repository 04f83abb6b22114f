"""Trains as megatron_zb.train does, until a fault strikes: faulty.py FAULT STARTED ...

FAULT is JSON: what, phase, rank, iteration. The file STARTED gets the time at which it struck.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITING = "checkpoint's files"
NUMBERS = {"NaN": math.nan, "infinity": math.inf}
SLOW = 14.0
"""Seconds that a rank takes longer than usual: more than the watchdog has and gives others."""


class Struck:
    """Counts steps, and the passes of this rank in one, and strikes when its time has come."""

    def __init__(self, fault: dict[str, Any], started: Path) -> None:
        self.fault, self._started = fault, started
        self._is_mine = int(os.environ["RANK"]) == fault["rank"]
        self.step = 0
        self.passes = 0
        self.number: float | None = None
        """What is to come into a gradient or an activation, once."""
        self.altered = False
        """Whether the table of this rank is another one."""

    def before_pass(self, kind: str, of: int) -> None:
        """``of`` is how many passes the rank has in a step."""
        self.passes += 1
        phase = self.fault["phase"]
        at = {"warm-up": 1, "activation": 1, "steady state": of // 2, "cool-down": of}.get(phase)
        if self.passes == at or (phase == kind and self.passes > 1):
            self.strike_in_time()

    def strike_in_time(self) -> None:
        """Let it happen, if it is time."""
        if not self._is_mine or self.step != self.fault["iteration"]:
            return
        self._started.write_text(repr(time.time()), encoding="utf-8")
        what = self.fault["what"]
        if what == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif what in NUMBERS:
            self.number = NUMBERS[what]
        elif what == "truncated file":
            truncate(self.fault["rank"])
        elif what == "altered table":
            self.altered = True
        elif what == "slow":
            time.sleep(SLOW)
        else:
            raise RuntimeError(f"broken on purpose: {self.fault['phase']}")


def truncate(rank: int) -> None:
    """Halve the file that a rank has written of the checkpoint which is about to be loaded."""
    folder = Path(sys.argv[sys.argv.index("--load") + 1])
    iteration = int((folder / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8"))
    file = folder / f"iter_{iteration:07d}" / f"__{rank}_0.distcp"
    os.truncate(file, file.stat().st_size // 2)


def poison_activations(struck: Struck, model: list[Any]) -> None:
    """Let the outputs of the layers of a rank take up the number, if there is one."""

    def add(layer: Any, inputs: Any, output: Any) -> Any:
        if struck.number is None:
            return output
        number, struck.number = struck.number, None
        return (output[0] + number, *output[1:])

    for chunk in model:
        for module in chunk.modules():
            if type(module).__name__ == "TransformerLayer":
                module.register_forward_hook(add)


def install(struck: Struck) -> None:
    """Hook the places at which a fault may strike."""
    from megatron_zb.megatron_core.forward_backward import ForwardBackward
    from megatron_zb.megatron_core.vocabulary import HANDLERS
    from megatron_zb.runtime.executor import TRAINING
    from megatron_zb.schedules import interchange
    from megatron_zb.schedules.lowering import Run
    from megatron_zb.schedules.passes import PassKind
    from megatron_zb.train import checkpoint, data, loop

    run = ForwardBackward._run_passes
    compute = TRAINING | HANDLERS
    count = [0]

    def counted_run(self: Any, passes: Any, step: Any) -> None:
        if not step.forward_only:
            struck.step += 1
            struck.passes = 0
            count[0] = sum(isinstance(at, Run) for at in step.program.ranks[step.logical])
            if struck.step == 1 and struck.fault["phase"] == "activation":
                poison_activations(struck, step.model)
        run(self, passes, step)
        if struck.fault["phase"] == "gradient" and not step.forward_only:
            struck.strike_in_time()
            if struck.number is not None:
                step.model[0].buffers[0].grad_data[0] = struck.number

    def counted(kind: PassKind) -> Callable[..., Any]:
        def counted_pass(*arguments: Any) -> Any:
            struck.before_pass(kind.value[0], count[0])
            return compute[kind](*arguments)

        return counted_pass

    def before(original: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def called(*args: Any, **keywords: Any) -> Any:
            if struck.fault["phase"] == phase:
                struck.strike_in_time()
            return original(*args, **keywords)

        return called

    from_csv = interchange.from_csv

    def table(source: str | Path, *, name: str | None = None, **more: Any) -> Any:
        if not isinstance(source, Path):  # what another rank has built
            return from_csv(source, name=name, **more)
        path = source.with_suffix(".altered") if struck.altered else source
        return from_csv(path, name=source.name)

    ForwardBackward._run_passes = counted_run  # type: ignore[method-assign]
    TRAINING.update({kind: counted(kind) for kind in TRAINING})
    HANDLERS.update({kind: counted(kind) for kind in HANDLERS})
    loop._update = before(loop._update, "optimizer step")
    data._collate = before(data._collate, "data")
    save = checkpoint.dist_checkpointing.save
    checkpoint.dist_checkpointing.save = before(save, "checkpoint")
    writer = checkpoint.filesystem_async.FileSystemWriterAsync
    writer.get_save_function_and_args = before(writer.get_save_function_and_args, WRITING)
    load = checkpoint.dist_checkpointing.load
    checkpoint.dist_checkpointing.load = before(load, "loading")
    interchange.from_csv = before(table, "start")


def main() -> None:
    install(Struck(json.loads(sys.argv[1]), Path(sys.argv[2])))
    sys.argv[1:] = sys.argv[3:]
    from megatron_zb.train.__main__ import main as train

    train()


if __name__ == "__main__":
    main()
