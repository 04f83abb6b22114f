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

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs
from torch.utils._pytree import tree_map

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.random_streams import WHY_NOT_LAYER_STREAMS
from megatron_zb.megatron_core.step import Step, StepPart
from megatron_zb.megatron_core.versions import Graphs
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.schedule import Schedule

WHY_NOT_LOCAL = (
    "its graphs share tensors, so messages and weight gradients would read what later graphs have "
    "overwritten; use transformer_engine, or full_iteration"
)
WHY_NOT_MEASURED = "a pass of a graph cannot be measured, and its order cannot be changed"
WHY_NOT_TWICE = "a step that is made again runs its passes in another order"
WHY_KNOWN_SHAPES = "the host reads the shape of every message, which no graph can hold"
WHY_ONE_COUNT = "graphs are captured for one number of microbatches"
WHY_A_STEP_BEFORE = "ranks connect in the first step, before a graph is captured"


class GraphsPart(StepPart):
    """Refuses graphs that would be wrong, and another order of passes than the captured one."""

    def __init__(self) -> None:
        self._captured: Schedule | None = None

    def keep_to(self, schedule: Schedule) -> None:
        """Refuse to train in another order than this from now on: graphs have been captured."""
        self._captured = schedule

    def before_step(self, step: Step) -> None:
        schedule = step.program.schedule
        present = {part.why_no_graphs for part in step.parts}
        reasons = (WHY_NOT_LAYER_STREAMS, WHY_NOT_MEASURED, WHY_NOT_TWICE)
        uses = {why: why in present for why in reasons}
        uses[WHY_ONE_COUNT] = self._captured not in (None, schedule) and not step.forward_only
        check(step.config, f"the pipeline schedule {schedule.name}", uses)


def check(config: Any, schedule: str, uses: Mapping[str, bool]) -> None:
    """Refuse CUDA graphs that would be wrong, or what would be wrong with them.

    Args:
        config: of Megatron, or its arguments.
        schedule: the name of the schedule, or the flag that chose it.
        uses: reasons for which no graphs can be had, and whether each holds.

    Raises:
        UsageError: names the setting and the reason.
    """
    for why in reasons_against(config, uses):
        kind = versions.graphs_of(config)
        raise UsageError(f"CUDA graphs ({kind.value}) cannot be combined with {schedule}: {why}")


def reasons_against(config: Any, uses: Mapping[str, bool]) -> list[str]:
    """Return the reasons for which CUDA graphs cannot be had; see :func:`check`."""
    kind = versions.graphs_of(config)
    if kind is Graphs.NONE:
        return []
    whole = kind is Graphs.FULL_ITERATION
    reasons = {WHY_NOT_LOCAL: kind is Graphs.LOCAL, **uses}
    reasons[WHY_KNOWN_SHAPES] = whole and bool(getattr(config, "variable_seq_lengths", False))
    reasons[WHY_A_STEP_BEFORE] = whole and getattr(config, "cuda_graph_warmup_steps", None) == 0
    return [why for why, holds in reasons.items() if holds]


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


def create(capture: Callable[[Any], None], helper: Any, order: Callable[[int], list[int]]) -> None:
    """Capture TE's graphs in the order of a schedule.

    Args:
        capture: Megatron's function that captures; it is given the helper.
        helper: a ``TECudaGraphHelper`` of Megatron.
        order: returns :func:`pass_order` for a number of microbatches.
    """
    with _ordered(order):
        capture(helper)
    for layer in helper.flattened_callables:
        layer.cuda_graphs = [with_memory_of_its_own(graph) for graph in layer.cuda_graphs]


@contextmanager
def _ordered(order: Callable[[int], list[int]]) -> Iterator[None]:
    """Let Megatron take another order than that of its own schedule."""
    usual = cuda_graphs.convert_schedule_table_to_order

    def convert(warmup: int, num_chunks: int, table: list[Any]) -> list[int]:
        return order(len(table) // num_chunks)

    cuda_graphs.convert_schedule_table_to_order = convert
    try:
        yield
    finally:
        cuda_graphs.convert_schedule_table_to_order = usual


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
