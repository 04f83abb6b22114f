"""The capture of a whole iteration on the CPU: what is captured runs, and may ask nothing.

A CPU has no graph, so what stands in for one runs while it is captured, and has nothing left to do
when it is replayed. Meanwhile it raises for whatever would end a capture on a GPU: asking whether
something has ended, reading a tensor on the host, waiting on the host, using another stream.
Waiting for a message stays allowed: on a GPU the stream waits for it, and the host does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import hostile
import torch
import torch.distributed as dist

from megatron_zb.megatron_core import graphs
from megatron_zb.runtime.progress import RankProgress


class Asked(AssertionError):
    """Something was asked of the device during a capture."""


_NOT_CAPTURED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch.Tensor, ("item", "tolist", "cpu", "record_stream", "__bool__", "__float__", "__int__")),
    (torch.cuda, ("Event", "stream", "synchronize")),
    (dist.Work, ("is_completed",)),
    (hostile._Sent, ("is_completed",)),
    (hostile._Open, ("is_completed",)),
    (RankProgress, ("step", "running", "waiting")),
)


HOST_TENSORS = "megatron.core.tensor_parallel.random"
"""Compares states of the CPU's generator, which lie on the host on a GPU, too."""
PLANS = (
    "megatron.core.models.common.model_chunk_schedule_plan",
    "megatron.core.models.common.utils",
    "megatron.core.models.gpt.fine_grained_callables",
    "megatron.core.pipeline_parallel.utils",
    "megatron_zb.megatron_core.experts",
)
STREAMS = ("Event", "stream", "record_stream")
"""What joins the streams of Megatron's plans, which is captured, too."""


def _raising(name: str, usual: Any) -> Callable[..., Any]:
    def asked(*arguments: Any, **keywords: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller == HOST_TENSORS or (name in STREAMS and caller in PLANS):
            return usual(*arguments, **keywords)
        raise Asked(f"{name} during a capture")

    return asked


@contextmanager
def asking_nothing() -> Iterator[None]:
    """Raise for whatever a capture would not survive."""
    with ExitStack() as stack:
        for owner, names in _NOT_CAPTURED:
            for name in names:
                raising = _raising(name, getattr(owner, name))
                stack.enter_context(patch.object(owner, name, raising))
        yield


class CUDAGraph:
    """In place of torch's; it has run when it was captured."""

    def register_generator_state(self, state: Any) -> None: ...

    def replay(self) -> None: ...


@contextmanager
def _capture(graph: CUDAGraph, **options: Any) -> Iterator[None]:
    with asking_nothing(), patch.object(graphs, "is_capturing", lambda device: True):
        yield


@contextmanager
def installed() -> Iterator[None]:
    """Let Megatron's ``FullCudaGraphWrapper`` find the stand-ins, and begin anew."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

    for state in ("cuda_graph", "result"):
        setattr(FullCudaGraphWrapper, state, {"training": None, "validation": None})
    FullCudaGraphWrapper.curr_iteration = {"training": 0, "validation": 0}
    StaticBufferLoader.static_buffers = {"training": [], "validation": []}
    with (
        patch.object(torch.cuda, "CUDAGraph", CUDAGraph),
        patch.object(torch.cuda, "graph", _capture),
    ):
        yield
