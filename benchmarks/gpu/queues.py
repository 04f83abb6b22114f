#!/usr/bin/env python3
"""What stands still on a GPU while a kernel spins, as a receive does until its message comes?

A kernel spins for a third of a second on a stream of its own. Meanwhile another stream gets work
that does not depend on it, and the host does what it may have to do at any moment: launch a kernel
for the first time, allocate memory, free it. What is over long before the spinning ends is free;
what lasts as long is held up. On a GPU whose receives hold up independent work, ranks that wait for
one another can deadlock.

CUDA_DEVICE_MAX_CONNECTIONS (how many hardware queues there are) and CUDA_MODULE_LOADING (LAZY or
EAGER) decide it and are read when CUDA starts, so run it once with each. Prints a JSON line after
every question, each with all answers so far.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import one_device
import torch

SPINNING_MS = 300.0
MANY_STREAMS = 16
SETTINGS = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING")

Question = Callable[[], dict[str, Any]]


def main() -> None:
    args = _arguments()
    device = one_device.choose(args.device)
    if device.type != "cuda":
        print(json.dumps({"benchmark": "queues", "not_measured": "a CPU has no queues of kernels"}))
        return
    gpu = Gpu(device)
    line: dict[str, Any] = {
        "benchmark": "queues",
        "machine": one_device.describe(device),
        "environment": {name: os.environ.get(name) for name in SETTINGS},
        "spinning_ms": SPINNING_MS,
        "answers": {},
    }
    for name, ask in gpu.questions():
        line["answers"][name] = ask()
        print(json.dumps(line), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser.parse_args()


class Gpu:
    """The streams and tensors of all questions; whatever they use is loaded before they begin."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._receiving, self._computing, self._taking = (torch.cuda.Stream() for _ in range(3))
        self._others = [torch.cuda.Stream() for _ in range(MANY_STREAMS)]
        self._values = torch.ones(1 << 16, device=device)
        self._result = torch.empty_like(self._values)
        self._matrix = torch.ones(256, 256, device=device)
        self._product = torch.empty_like(self._matrix)
        self._compute(self._computing)
        self._cycles = self._cycles_of(SPINNING_MS)
        torch.cuda.synchronize()

    def questions(self) -> Iterator[tuple[str, Question]]:
        """Those about queues, then those about the host."""
        yield "kernel elsewhere, nothing else queued", self._kernel_elsewhere
        for after in ("an event", "a second receive", "a stream that waits"):
            yield f"kernel elsewhere, {after} queued", partial(self._kernel_elsewhere, after)
        yield f"kernels on {MANY_STREAMS} other streams", self._kernels_on_many_streams
        for name, call in self._calls().items():
            yield name, partial(self._host, call)
        yield "first launch of copysign while nothing spins", self._first_launch_alone

    def _calls(self) -> dict[str, Callable[[], object]]:
        """What the host may have to do at any moment; results have their memory already."""
        x, matrix = self._values, self._matrix
        heaviside = partial(torch.heaviside, x, x, out=self._result)
        return {
            "launch of a loaded kernel": partial(torch.add, x, x, out=self._result),
            "first launch of heaviside": heaviside,
            "second launch of heaviside": heaviside,
            "first launch of nextafter": partial(torch.nextafter, x, x, out=self._result),
            "first matrix product": partial(torch.mm, matrix, matrix, out=self._product),
            "new device memory": partial(
                torch.empty, 1 << 28, dtype=torch.uint8, device=self._device
            ),
            "freed device memory": torch.cuda.empty_cache,
            "new pinned host memory": partial(torch.empty, 1 << 24, pin_memory=True),
        }

    def _cycles_of(self, milliseconds: float) -> int:
        """How long to spin, measured when the kernel is loaded and the GPU's clock has risen."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cycles = 100_000_000
        for _ in range(3):
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            torch.cuda.synchronize()
        return int(cycles * milliseconds / begin.elapsed_time(end))

    def _compute(self, stream: Any) -> Any:
        """A kernel that depends on nothing, and the event after it."""
        done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            torch.add(self._values, self._values, out=self._result)
            done.record()
        return done

    def _spin(self, after: str = "nothing") -> float:
        """Start the spinning kernel and what is queued after it; returns the moment before."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.cuda.stream(self._receiving):
            torch.cuda._sleep(self._cycles)
            if after == "a second receive":
                torch.cuda._sleep(1000)
            elif after != "nothing":
                arrived = torch.cuda.Event()
                arrived.record()
        if after == "a stream that waits":
            self._taking.wait_event(arrived)
            self._compute(self._taking)
        return begin

    def _kernel_elsewhere(self, after: str = "nothing") -> dict[str, Any]:
        begin = self._spin(after)
        self._compute(self._computing).synchronize()
        return _answer("done_ms", begin, time.perf_counter())

    def _kernels_on_many_streams(self) -> dict[str, Any]:
        begin = self._spin()
        events = [self._compute(stream) for stream in self._others]
        time.sleep(SPINNING_MS / 3000)
        held_up = sum(not event.query() for event in events)
        return {**_answer("asked_ms", begin, time.perf_counter()), "held_up": held_up}

    def _host(self, call: Callable[[], object]) -> dict[str, Any]:
        """How long a call on the computing stream holds up the host while the kernel spins."""
        self._spin()
        with torch.cuda.stream(self._computing):
            begin = time.perf_counter()
            kept = call()
            answer = _answer("host_ms", begin, time.perf_counter())
        del kept
        return answer

    def _first_launch_alone(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.copysign(self._values, self._values, out=self._result)
        return {"host_ms": round(1000 * (time.perf_counter() - begin), 2)}


def _answer(what: str, begin: float, end: float) -> dict[str, Any]:
    """Whether something lasted nearly as long as the spinning; ``all_ms`` shows that it spun."""
    milliseconds = 1000 * (end - begin)
    torch.cuda.synchronize()
    return {
        what: round(milliseconds, 2),
        "held_up": milliseconds > SPINNING_MS / 2,
        "all_ms": round(1000 * (time.perf_counter() - begin), 2),
    }


if __name__ == "__main__":
    one_device.run(main)
