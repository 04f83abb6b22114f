"""The launcher, but each step computes with the weights before the last update.

That is what an update delay of one means, without a schedule for it: the weights are exchanged
before a step of Megatron's own loop and back before its update, and so are loss scales. Behind a
step that is saved it goes on from the newest weights, as a run that loads them.
"""

from __future__ import annotations

import inspect
import runpy
import sys
from functools import partial
from typing import Any

from megatron_zb.launch import main


class _Oracle:
    def __init__(self) -> None:
        self.before: list[Any] | None = None
        self.scales: list[Any] | None = None

    def train_step(self, original: Any, *arguments: Any, **keywords: Any) -> Any:
        from megatron.training import get_args

        call = inspect.signature(original).bind(*arguments, **keywords).arguments
        parameters = [it for chunk in call["model"] for it in chunk.parameters()]
        optimizer = call["optimizer"]
        newest = [it.detach().clone() for it in parameters]
        for parameter, older in zip(parameters, self.before or newest, strict=True):
            parameter.data.copy_(older)
        each = getattr(optimizer, "chained_optimizers", [optimizer])
        scalers = [it.grad_scaler for it in each if getattr(it, "grad_scaler", None) is not None]
        scales = [it._scale for it in scalers]
        for scaler, newest_scale, older in zip(scalers, scales, self.scales or scales, strict=True):
            scaler._scale = older
            scaler.update = partial(_update, scaler, newest_scale)
        step = type(optimizer).step

        def on_the_newest() -> Any:
            for parameter, new in zip(parameters, newest, strict=True):
                parameter.data.copy_(new)
            return step(optimizer)

        optimizer.step = on_the_newest
        try:
            return original(*arguments, **keywords)
        finally:
            del optimizer.step
            for scaler in scalers:
                del scaler.update
            args = get_args()
            is_saved = args.save_interval and (args.curr_iteration + 1) % args.save_interval == 0
            self.before, self.scales = (None, None) if is_saved else (newest, scales)


def _update(scaler: Any, newest: Any, found: bool) -> None:
    """Change the newest scale by whether gradients are finite that an older one has scaled."""
    scaler._scale = newest
    type(scaler).update(scaler, found)


def prepare() -> None:
    from megatron.training import training

    oracle, original = _Oracle(), training.train_step

    def train_step(*arguments: Any, **keywords: Any) -> Any:
        return oracle.train_step(original, *arguments, **keywords)

    training.train_step = train_step


def launch() -> None:
    run_path = runpy.run_path

    def run(*arguments: Any, **keywords: Any) -> Any:
        prepare()
        return run_path(*arguments, **keywords)

    runpy.run_path = run
    main(sys.argv[1:])


if __name__ == "__main__":
    launch()
