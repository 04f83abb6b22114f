"""CUDA graphs under a schedule: those of Transformer-Engine, and those of whole iterations.

Transformer-Engine (TE) captures a graph for the forward and one for the backward of every layer and
microbatch. All share one memory pool, and each takes the memory that those captured before it no
longer need, so they have to be replayed in the order of their capture: that of this rank's passes.
What is inside a graph runs without Python, so nothing there is left to W: the graph of a backward
has the weight gradients of its layers, and it runs in B.

A graph of a whole iteration holds all that the step does, messages included. While it is captured,
the host asks nothing of the device, and nothing looks on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import chain, count, zip_longest
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs
from torch.utils._pytree import tree_map

from megatron_zb.megatron_core import refusals
from megatron_zb.megatron_core.step import Step, StepPart
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.schedule import Schedule


class GraphsPart(StepPart):
    """Refuses graphs that would be wrong, and another order of passes than the captured one."""

    def __init__(self) -> None:
        self._captured: Schedule | None = None

    def keep_to(self, schedule: Schedule) -> None:
        """Refuse to train in another order than this from now on: graphs have been captured."""
        self._captured = schedule

    def before_step(self, step: Step) -> None:
        schedule = step.program.schedule
        facts = {part.fact: True for part in step.parts if part.fact}
        facts["has_another_order"] = (
            self._captured not in (None, schedule) and not step.forward_only
        )
        refusals.check_step(step.config, schedule.name, facts=facts)


def pass_order(schedule: Schedule, rank: int) -> list[int]:
    """Return the order of a logical rank's passes as TE's ``make_graphed_callables`` takes it.

    A forward of chunk c is c+1, a B or BW is -(c+1). There is no entry for a W: TE has one only
    directly after its B.
    """
    chunk_of = schedule.placement.chunk_of
    return [
        (chunk_of(p.stage) + 1) * (1 if p.kind is PassKind.F else -1)
        for p in schedule.ranks[rank]
        if p.kind is not PassKind.W
    ]


def layer_order(
    schedule: Schedule, rank: int, is_graphed: Sequence[Sequence[bool]]
) -> tuple[list[int], list[list[int] | None]]:
    """Return the order of single layers, as TE takes it, where pairs run layer by layer.

    In a pair, layers of the forward take turns with those of the backward, which come last first;
    the turns also count layers without a graph.

    Args:
        schedule: what the rank trains with.
        rank: the logical rank.
        is_graphed: for each chunk, whether its layers have graphs.

    Returns:
        Numbers of layers from 1, negative for a backward; and for each forward its chunk and its
        place among the chunk's layers with graphs, as ``TECudaGraphHelper`` wants it.
    """
    number = count(1)
    numbers = [[next(number) if one else None for one in chunk] for chunk in is_graphed]
    place_of = {
        one: [chunk, place]
        for chunk, ones in enumerate(numbers)
        for place, one in enumerate(filter(None, ones))
    }
    order: list[int] = []
    waiting: list[int | None] = []  # the forward that is paired with the next backward
    for p in schedule.ranks[rank]:
        layers = numbers[schedule.placement.chunk_of(p.stage)]
        if p in schedule.pairs:
            waiting = layers
        elif p.kind is PassKind.F:
            order += filter(None, layers)
        elif p.kind is not PassKind.W:
            turns = zip_longest(waiting, (one and -one for one in reversed(layers)))
            order += filter(None, chain.from_iterable(turns))
            waiting = []
    return order, [place_of.get(one) for one in order]


def create(
    capture: Callable[[Any], None], helper: Any, schedule: Callable[[int], Schedule], rank: int
) -> None:
    """Capture TE's graphs in the order of a schedule.

    Args:
        capture: Megatron's function that captures; it is given the helper.
        helper: a ``TECudaGraphHelper`` of Megatron.
        schedule: returns the schedule for a number of microbatches.
        rank: the logical rank.
    """
    with _ordered(helper, schedule, rank):
        capture(helper)
    for layer in helper.flattened_callables:
        layer.cuda_graphs = [with_memory_of_its_own(graph) for graph in layer.cuda_graphs]


@contextmanager
def _ordered(helper: Any, schedule: Callable[[int], Schedule], rank: int) -> Iterator[None]:
    """Let Megatron take another order than that of its own schedule."""
    whole, by_layer = (
        "convert_schedule_table_to_order",
        "get_overlap_moe_expert_parallel_comm_order",
    )
    usual = {name: getattr(cuda_graphs, name) for name in (whole, by_layer)}
    used: list[Schedule] = []

    def convert(warmup: int, num_chunks: int, table: list[Any]) -> list[int]:
        used.append(schedule(len(table) // num_chunks))
        return pass_order(used[-1], rank)

    def convert_layers(order: list[int], layers: list[int], with_w: bool) -> Any:
        return layer_order(used[-1], rank, _is_graphed(helper))

    setattr(cuda_graphs, whole, convert)
    setattr(cuda_graphs, by_layer, convert_layers)
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(cuda_graphs, name, function)


def _is_graphed(helper: Any) -> list[list[bool]]:
    """Return whether the layers of each chunk, in the order of Megatron's plans, have graphs."""
    found = []
    for chunk, with_graphs in zip(
        helper.chunks_with_decoder, helper.callables_per_chunk, strict=True
    ):
        stacks = (getattr(chunk, name, None) for name in ("decoder", "mtp"))
        layers = [layer for stack in stacks if stack is not None for layer in stack.layers]
        graphed = {id(layer) for layer in with_graphs}
        found.append([any(id(m) in graphed for m in layer.modules()) for layer in layers])
    return found


def with_memory_of_its_own(graph: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's graph whose results stay as they are when other graphs are replayed.

    A message may still be on its way then, and a W outside of the graphs still to come: it reads
    what left a graph, or the gradient that entered one.
    """

    @wraps(graph)
    def replay(*args: Any, **keywords: Any) -> Any:
        args, keywords = tree_map(_apart, (args, keywords))
        return tree_map(_copied, graph(*args, **keywords))

    return replay


def _apart(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return _CopyOfGradient.apply(value)
    return value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class _CopyOfGradient(torch.autograd.Function):
    """The identity, whose backward copies."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clone()


def is_capturing(device: Any) -> bool:
    """Return whether what is launched on this device now goes into a graph."""
    return torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing()
