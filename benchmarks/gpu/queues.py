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
    gpu = Gpu()
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

    def __init__(self) -> None:
        self._receiving, self._computing, self._taking = (torch.cuda.Stream() for _ in range(3))
        self._others = [torch.cuda.Stream() for _ in range(MANY_STREAMS)]
        self._values = torch.ones(1 << 16, device="cuda")
        self._result = torch.empty_like(self._values)
        self._matrix = torch.ones(256, 256, device="cuda")
        self._product = torch.empty_like(self._matrix)
        self._compute(self._computing)
        self._cycles = self._cycles_of(SPINNING_MS)
        torch.cuda.synchronize()

    def questions(self) -> Iterator[tuple[str, Question]]:
        """Those about queues, then those about the host."""
        yield "kernel on another stream", self._kernel_elsewhere
        yield "kernel on another stream, a second receive queued", self._kernel_beside_two_receives
        yield "kernel on another stream, a third stream waits", self._kernel_beside_a_waiting_stream
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
            "new device memory": partial(torch.empty, 1 << 28, dtype=torch.uint8, device="cuda"),
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

    def _spin(self, more: int = 0) -> tuple[Any, float]:
        """Start the spinning kernel and ``more`` short ones after it; its event, and when."""
        torch.cuda.synchronize()
        arrived = torch.cuda.Event()
        begin = time.perf_counter()
        with torch.cuda.stream(self._receiving):
            torch.cuda._sleep(self._cycles)
            arrived.record()
            for _ in range(more):
                torch.cuda._sleep(1000)
        return arrived, begin

    def _kernel_elsewhere(self, more: int = 0) -> dict[str, Any]:
        arrived, begin = self._spin(more)
        return _waited(self._compute(self._computing), arrived, begin)

    def _kernel_beside_two_receives(self) -> dict[str, Any]:
        return self._kernel_elsewhere(more=1)

    def _kernel_beside_a_waiting_stream(self) -> dict[str, Any]:
        arrived, begin = self._spin()
        self._taking.wait_event(arrived)
        self._compute(self._taking)
        return _waited(self._compute(self._computing), arrived, begin)

    def _kernels_on_many_streams(self) -> dict[str, Any]:
        arrived, begin = self._spin()
        events = [self._compute(stream) for stream in self._others]
        time.sleep(SPINNING_MS / 3000)
        still_spins = not arrived.query()
        held_up = sum(not event.query() for event in events)
        torch.cuda.synchronize()
        return {"held_up": held_up, "of": len(events), **_spun(begin, still_spins)}

    def _host(self, call: Callable[[], object]) -> dict[str, Any]:
        """How long a call on the computing stream holds up the host while the kernel spins."""
        arrived, begin = self._spin()
        with torch.cuda.stream(self._computing):
            called = time.perf_counter()
            kept = call()
            returned = time.perf_counter()
        still_spins = not arrived.query()
        torch.cuda.synchronize()
        del kept
        return {
            "host_ms": round(1000 * (returned - called), 2),
            "held_up": not still_spins,
            **_spun(begin, still_spins),
        }

    def _first_launch_alone(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.copysign(self._values, self._values, out=self._result)
        return {"host_ms": round(1000 * (time.perf_counter() - begin), 2)}


def _waited(done: Any, arrived: Any, begin: float) -> dict[str, Any]:
    """Until a kernel was done, and whether the other one still spun then."""
    done.synchronize()
    milliseconds = round(1000 * (time.perf_counter() - begin), 2)
    still_spins = not arrived.query()
    torch.cuda.synchronize()
    return {"done_ms": milliseconds, "held_up": not still_spins, **_spun(begin, still_spins)}


def _spun(begin: float, still_spins: bool) -> dict[str, Any]:
    """How long the question took with the spinning to its end, to judge the answer by."""
    return {"still_spins": still_spins, "all_ms": round(1000 * (time.perf_counter() - begin), 2)}


if __name__ == "__main__":
    one_device.run(main)
