"""What the benchmarks on one device share: the device, its clock, and how its memory is counted.

Imports no Megatron, which decides while it is imported whether it runs on a CPU: call :func:`start`
first.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_zb.errors import UsageError
from megatron_zb.runtime.activation_memory import ActivationMemory

REPEATABLE = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # sums in the same order on every stream
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # likewise in attention
}
"""Variables of the environment with which two runs on a GPU give equal bits."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def run(main: Callable[[], None]) -> None:
    """Run a benchmark; what its user can mend ends it with one sentence and exit code 2."""
    try:
        main()
    except UsageError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)


def choose(name: str) -> torch.device:
    """The device of ``--device auto``, ``cpu`` or ``cuda``.

    Raises:
        UsageError: a GPU was asked for, and torch sees none.
    """
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise UsageError("--device cuda needs a GPU and torch sees none: give --device cpu")
    return torch.device("cuda" if found and name != "cpu" else "cpu")


def at_least_one(text: str) -> int:
    """An argparse type."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def start(device: torch.device) -> None:
    """Let Megatron run on this device as the only rank of a job."""
    if device.type == "cpu":
        from megatron_zb.cpu_ranks import run_on_cpu

        run_on_cpu()
        torch.set_num_threads(1)  # see CpuClock
    else:
        torch.cuda.set_device(0)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)


def finish() -> None:
    """End what :func:`start` began."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def describe(device: torch.device) -> dict[str, Any]:
    """What was measured on, for the JSON line."""
    machine: dict[str, Any] = {"device": device.type, "python": platform.python_version()}
    for package in ("torch", "megatron-core", "transformer-engine"):
        try:
            machine[package] = version(package)
        except PackageNotFoundError:
            machine[package] = None
    machine["torch"] = torch.__version__
    if device.type == "cuda":
        machine["name"] = torch.cuda.get_device_name()
        machine["cuda"] = torch.version.cuda
        machine["apex"] = find_spec("fused_weight_gradient_mlp_cuda") is not None
    else:
        machine["name"] = _processor()
        machine["cores"] = os.cpu_count()
    return machine


def _processor() -> str:
    """The processor's name, which Linux tells in one place."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


class Clock(Protocol):
    """Moments on a device; the times between them are known after :meth:`wait`."""

    measures: str

    def mark(self) -> Any: ...

    def wait(self) -> None: ...

    def seconds(self, begin: Any, end: Any) -> float: ...


class CpuClock:
    """The processor time of one thread: what else runs on the machine does not count."""

    measures = "processor time of one thread"

    def mark(self) -> float:
        return time.process_time()

    def wait(self) -> None:
        """Everything is over when a call returns."""

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class CudaClock:
    """CUDA events: the host runs ahead and is not part of what is measured."""

    measures = "time between CUDA events"

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1000


def clock_of(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else CpuClock()


class Meter(Protocol):
    """Counts bytes from the moment that :meth:`watching` is entered; ``counts`` says which."""

    counts: str
    activation_memory: ActivationMemory | None

    def watching(self) -> Any: ...

    @property
    def held_bytes(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...


class CudaMeter:
    """Everything that torch's allocator gives out, beyond what it had given out before."""

    counts = "allocated bytes"
    activation_memory: ActivationMemory | None = None

    def __init__(self) -> None:
        self._before = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        gc.collect()
        torch.cuda.synchronize()
        self._before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield

    @property
    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated() - self._before

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before


class SavedMeter:
    """What is kept for a backward, a message or a weight gradient, without weights.

    Serves where there is no allocator to ask. What an operation needs only while it runs is not
    counted. Whoever keeps tensors outside autograd counts them in ``activation_memory``.
    """

    counts = "bytes saved for backward"
    activation_memory: ActivationMemory | None

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._memory = ActivationMemory(exclude=weights)
        self.activation_memory = self._memory

    @contextmanager
    def watching(self) -> Iterator[None]:
        with self._memory.watching():
            yield

    @property
    def held_bytes(self) -> int:
        return self._memory.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self._memory.peak_bytes


def meter_of(device: torch.device, models: Iterable[torch.nn.Module]) -> Meter:
    if device.type == "cuda":
        return CudaMeter()
    return SavedMeter([weight for model in models for weight in model.parameters()])
