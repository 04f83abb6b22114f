"""CUDA graphs of layers on the CPU: what was captured is carried out again, in the same memory.

Megatron's helper and Transformer-Engine's ``make_graphed_callables`` are their own: the order of
the capture, what is copied into a graph and out of it, and the flag by which weights are quantised
or not. What stands in is the graph. It notes the operations of torch that run while it is captured,
and a replay runs them again on the same tensors: no Python of a layer runs, so nothing is deferred
or decided anew. What a graph has made is overwritten where one that was captured later could have
taken its place.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import capture_stand_in
import torch
from megatron.core.transformer import cuda_graphs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Pool:
    """All graphs of a rank, and the numbers of those captured, and replayed until now.

    TE makes those of the forwards first, then as many of the backwards, then those of W.
    """

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.captured: list[int] = []
        self.replayed: list[int] = []
        self.quantized: list[weakref.ref[Any]] = []
        self._backward: Graph | None = None

    def new_graph(self) -> Graph:
        self.graphs.append(Graph(self, len(self.graphs)))
        return self.graphs[-1]

    def hold_none(self, layers: tuple[Any, ...]) -> None:
        """Remember where the quantised weights in graphs are: the modules own that memory."""
        parts = [part for layer in layers for part in layer._get_submodules_under_cudagraphs()]
        modules = (module for part in parts for module in part.modules())
        copies = (c for m in modules for c in getattr(m, "_fp8_workspaces", {}).values())
        self.quantized = [weakref.ref(copy) for copy in copies]

    def begin(self, graph: Graph) -> None:
        """Begin a replay; that of a backward takes the memory of the backward before."""
        if any(copy() is None for copy in self.quantized):
            raise AssertionError("a graph quantises weights into memory that has been freed")
        self.replayed.append(graph.number)
        if self._forward_of(graph) is not None:
            if self._backward is not None:
                self._backward.overwrite()
            self._backward = graph

    def end(self, graph: Graph) -> None:
        """End a replay; after that of a backward, nobody needs what its forward has made."""
        forward = self._forward_of(graph)
        if forward is not None:
            forward.overwrite()

    def _forward_of(self, graph: Graph) -> Graph | None:
        count = len(self.graphs) // 3
        return self.graphs[graph.number - count] if graph.number >= count else None


class Graph:
    """In place of ``torch.cuda.CUDAGraph``."""

    def __init__(self, pool: Pool, number: int) -> None:
        self.pool, self.number = pool, number
        self.operations: list[tuple[Any, Any, Any, dict[int, torch.Tensor]]] = []

    def replay(self) -> None:
        self.pool.begin(self)
        with torch.no_grad():
            for function, args, keywords, made in self.operations:
                results = tree_leaves(function(*args, **keywords))
                for place, tensor in made.items():
                    tensor.copy_(results[place])
        self.pool.end(self)

    def overwrite(self) -> None:
        for *_, made in self.operations:
            for tensor in made.values():
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0x7F)  # nan in fp8


class _Capture(TorchDispatchMode):
    """Note all operations, and which of their results are in memory of their own."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), keywords: Any = None
    ) -> Any:
        if function.namespace == "c10d" or (_asks(function) and not _is_of_host()):
            raise AssertionError(f"{function} while a graph is captured")
        result = function(*args, **(keywords or {}))
        args, keywords = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, keywords or {}))
        given = {_memory(t) for t in tree_leaves((args, keywords)) if isinstance(t, torch.Tensor)}
        made = {
            place: tensor.detach()
            for place, tensor in enumerate(tree_leaves(result))
            if isinstance(tensor, torch.Tensor) and _memory(tensor) not in given
        }
        if made or function._schema.is_mutable:
            self._graph.operations.append((function, args, keywords, made))
        return result


def _asks(function: Any) -> bool:
    return function is torch.ops.aten._local_scalar_dense.default


def _is_of_host() -> bool:
    callers = (frame.f_globals["__name__"] for frame, _ in traceback.walk_stack(None))
    return any(name == capture_stand_in.HOST_TENSORS for name in callers)


def _memory(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


@contextmanager
def _capture(graph: Graph, **_options: Any) -> Iterator[None]:
    graph.pool.captured.append(graph.number)
    with _Capture(graph):
        yield


@contextmanager
def installed(num_microbatches: int) -> Iterator[Pool]:
    """Let Transformer-Engine capture stand-ins, for so many microbatches."""
    from transformer_engine.pytorch import graph as te_graph

    pool, stream = Pool(), torch.cuda.Stream()

    def make_graphed_callables(layers: tuple[Any, ...], *args: Any, **options: Any) -> Any:
        made = te_graph.make_graphed_callables(layers, *args, **options)
        pool.hold_none(layers)
        return made

    stand_ins: list[tuple[Any, str, Any]] = [
        (torch.cuda, "CUDAGraph", pool.new_graph),
        (torch.cuda, "graph", _capture),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (te_graph, "graph_pool_handle", lambda: None),
        (cuda_graphs, "get_num_microbatches", lambda: num_microbatches),
        (cuda_graphs, "make_graphed_callables", make_graphed_callables),
    ]
    with ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            stack.enter_context(patch.object(owner, name, stand_in))
        yield pool
