"""Transformer-Engine's CUDA graphs on the CPU: the same calls, order and memory, without a GPU.

:func:`make_graphed_callables` stands in for Transformer-Engine's. What it returns computes as the
layer does, with what a graph has that a layer has not: while it runs, nothing is deferred, since no
Python of the layer runs in a replay; and what it has returned is overwritten once it could be by
the graphs that were captured after it. It notes the order in which graphs are replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs


class Pool:
    """The memory of all graphs: what has been returned from it, and the replays until now."""

    def __init__(self, queues: list[Any]) -> None:
        self.queues = queues
        self.captured: list[int] = []
        self.replayed: list[int] = []
        self.sizes: list[int] = []
        self.outputs: dict[int, list[torch.Tensor]] = {}
        self.gradients: list[torch.Tensor] = []

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """A replay, in which nothing is deferred."""
        deferring = [queue.deferring for queue in self.queues]
        for queue in self.queues:
            queue.deferring = False
        try:
            with torch.enable_grad():
                yield
        finally:
            for queue, before in zip(self.queues, deferring, strict=True):
                queue.deferring = before


def _overwrite(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else 0)
    tensors.clear()


class _Replay(torch.autograd.Function):
    """The forward graph of a layer for one microbatch, and the backward graph."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, count: int, *inputs: torch.Tensor) -> Any:
        statics = [i.detach().clone().requires_grad_(i.requires_grad) for i in inputs[:count]]
        pool = graph.pool
        if graph.is_first:
            pool.replayed.append(graph.chunk + 1)
        with pool.replaying():
            outputs = graph.layer._te_cuda_graph_capture(*statics, **graph.keywords)
        ctx.graph, ctx.outputs, ctx.inputs = graph, outputs, (*statics, *inputs[count:])
        returned = [output.detach().clone() for output in outputs]
        pool.outputs[id(graph)] = list(returned)
        return tuple(returned)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        graph, pool = ctx.graph, ctx.graph.pool
        own = [gradient.clone() for gradient in gradients]
        _overwrite(pool.gradients)  # of the backward before: this one takes their place
        if graph.is_first:
            pool.replayed.append(-(graph.chunk + 1))
        wanted = [i for i in ctx.inputs if i.requires_grad]
        with pool.replaying():
            found = torch.autograd.grad(ctx.outputs, wanted, own, allow_unused=True)
        _overwrite(pool.outputs.pop(id(graph)))
        results = iter(found)
        full = [next(results) if i.requires_grad else None for i in ctx.inputs]
        count = len(ctx.inputs) - len(graph.parameters)
        pool.gradients = [g for g in full[:count] if g is not None]
        return None, None, *full


class Graph:
    """One layer in one microbatch."""

    def __init__(self, pool: Pool, layer: Any, chunk: int, is_first: bool) -> None:
        self.pool, self.layer, self.chunk, self.is_first = pool, layer, chunk, is_first
        self.parameters = [p for p in layer.parameters() if p.requires_grad]
        self.keywords: dict[str, Any] = {}

    def __call__(self, *inputs: torch.Tensor, **keywords: Any) -> Any:
        keywords.pop("is_first_microbatch")
        self.keywords = keywords
        return _Replay.apply(self, len(inputs), *inputs, *self.parameters)


def _maker(pool: Pool) -> Any:
    def make_graphed_callables(
        layers: tuple[Any, ...],
        sample_args: Any,
        *,
        _order: list[int],
        _num_layers_per_chunk: list[int],
        **options: Any,
    ) -> list[Any]:
        """One callable for each chunk, microbatch and layer, in this order."""
        pool.captured, pool.sizes = _order, _num_layers_per_chunk
        counts = Counter(_order)
        first = [0, *accumulate(_num_layers_per_chunk)]
        assert len(sample_args) == sum(
            counts[chunk + 1] * size for chunk, size in enumerate(_num_layers_per_chunk)
        )
        return [
            Graph(pool, layers[first[chunk] + number], chunk, number == 0)
            for chunk, size in enumerate(_num_layers_per_chunk)
            for _ in range(counts[chunk + 1])
            for number in range(size)
        ]

    return make_graphed_callables


@contextmanager
def installed(queues: list[Any], num_microbatches: int) -> Iterator[Pool]:
    """Let Megatron's helper find the stand-in in place of Transformer-Engine."""
    pool = Pool(queues)
    module: Any = cuda_graphs
    stand_ins = {
        "get_num_microbatches": lambda: num_microbatches,
        "make_graphed_callables": _maker(pool),
    }
    usual = {name: getattr(module, name) for name in stand_ins}
    vars(module).update(stand_ins)
    try:
        yield pool
    finally:
        vars(module).update(usual)
