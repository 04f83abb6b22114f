"""The CPU as torch's CUDA device: its tensors, streams and random state."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")

# Functions that create tensors and that Megatron calls with device="cuda" or the current device.
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros")


def redirect_devices() -> None:
    """Redirect torch's CUDA calls, and Megatron core's, to the CPU; imports megatron-core."""
    _redirect_compilation()
    _report_the_cpu()
    _redirect_factories()
    _redirect_tensor_methods()
    _redirect_random_state()


def _redirect_compilation() -> None:
    """Run fused functions uncompiled, since compiling them takes minutes and a C++ compiler."""

    def identity(model: Any = None, **_options: Any) -> Any:
        return model if model is not None else lambda function: function

    torch.compile = identity


def _report_the_cpu() -> None:
    """Report the CPU as the only device, which is always ready."""
    cuda: Any = torch.cuda
    # megatron-core passes it on to the functions that create tensors
    cuda.current_device = lambda: _CPU
    # after every exchange of activations, and around timers and checkpoints
    cuda.synchronize = nothing()
    # around the reduction of gradients; everything done on a stream is done at once
    cuda.Stream = _Stream
    cuda.Event = _Stream
    cuda.current_stream = lambda device=None: _Stream()
    cuda.default_stream = lambda device=None: _Stream()
    cuda.stream = _on_stream
    # names of what runs, for a profiler of GPUs
    cuda.nvtx.range_push = nothing()
    cuda.nvtx.range_pop = nothing()


def _redirect_factories() -> None:
    """Let `torch.zeros(..., device="cuda")` and similar functions create the tensor on the CPU."""
    for name in _FACTORIES:
        setattr(torch, name, _with_device_on_cpu(getattr(torch, name)))


def _with_device_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def create(*args: Any, **kwargs: Any) -> Any:
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # for copies to a GPU
        return function(*args, **kwargs)

    return create


def _means_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _redirect_tensor_methods() -> None:
    """Let a move to CUDA leave a tensor where it is, and report its type by the CUDA name."""
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = nothing()
    move, name_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _means_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        result: torch.Tensor = move(self, *args, **kwargs)
        return result

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = name_type(self, *args, **kwargs)
        # the optimizers sort parameters by the names torch.cuda.FloatTensor, HalfTensor, ...
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    tensor.to = to
    tensor.type = type_


def _redirect_random_state() -> None:
    """Use the CPU's random generator as CUDA's."""
    cuda: Any = torch.cuda
    cuda.manual_seed = torch.manual_seed
    cuda.initial_seed = torch.initial_seed
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda new_state, device=None: torch.set_rng_state(new_state)

    # megatron-core reaches past torch.cuda into the generator of the device
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
    # it compares the CPU's generator with CUDA's, which are one here, and warns in every forward
    logging.getLogger(megatron_random.__name__).addFilter(_has_another_message)


def _has_another_message(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("CPU RNG state changed within GPU RNG context")


class _Stream:
    """A CUDA stream or event on a device that executes every call synchronously."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record_event(self, _event: Any = None) -> _Stream:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing()


@contextlib.contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    yield


def nothing() -> Callable[..., None]:
    """Return a new no-op function; torch's compiler needs each to be a distinct object."""

    def do_nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    return do_nothing
