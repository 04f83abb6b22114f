"""When data parallelism gathers the weights of a chunk and reduces its gradients.

Megatron's own schedules dispatch both: ``config.param_sync_func`` ahead of a chunk's first forward,
``config.grad_sync_func`` after its last backward. Each may be None, a callable or one per chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

# Chunks whose weights are gathered before the first forward; the others go one chunk ahead.
_GATHERED_UP_FRONT = 2


class DataParallelSync:
    """The parameter gathers and gradient reductions of one training step.

    Both are started as early as may be, so that they overlap with the passes of other chunks: the
    gather one chunk ahead, the reduction when a chunk has no B, BW or W left.

    Args:
        chunks: the model chunks of this rank, as data parallelism wraps them.
        order: their indices, in the order of their first forwards.
        passes: weight gradients that each chunk computes in the step.
    """

    def __init__(
        self, config: Any, chunks: Sequence[Any], order: Sequence[int], passes: int
    ) -> None:
        self._config = config
        self._chunks = chunks
        self._left = [passes] * len(chunks)
        self._gathers = one_for_each_chunk(config.param_sync_func, chunks)
        self._reductions = one_for_each_chunk(config.grad_sync_func, chunks)
        self._ungathered = deque(order if self._gathers else ())
        self._reached: set[int] = set()
        for _ in range(_GATHERED_UP_FRONT):
            self._gather_next()

    def before_forward(self, chunk: int) -> None:
        """Called before every F: the first one of a chunk dispatches the next chunk's gather."""
        if self._ungathered and chunk not in self._reached:
            self._reached.add(chunk)
            if len(self._reached) > 1:
                self._gather_next()

    def after_weight_gradient(self, chunk: int) -> None:
        """Called after every BW and W: the last one of a chunk starts the reduction."""
        self._left[chunk] -= 1
        if self._left[chunk]:
            return
        if self._reductions:
            self._reductions[chunk](self._chunks[chunk].parameters())
        elif overlaps_grad_reduce(self._chunks[chunk]):
            self._chunks[chunk].start_grad_sync()

    def _gather_next(self) -> None:
        if self._ungathered:
            chunk = self._ungathered.popleft()
            self._gathers[chunk](self._chunks[chunk].parameters())


def one_for_each_chunk(
    functions: Callable[..., Any] | list[Callable[..., Any]] | None, chunks: Sequence[Any]
) -> list[Callable[..., Any]]:
    """Megatron's way to give None, one function for all chunks, or a list of them."""
    if functions is None:
        return []
    return functions if isinstance(functions, list) else [functions for _ in chunks]


def overlaps_grad_reduce(chunk: Any) -> bool:
    ddp_config = getattr(chunk, "ddp_config", None)
    return ddp_config is not None and bool(ddp_config.overlap_grad_reduce)


@contextmanager
def no_grad_sync(config: Any, chunks: list[Any]) -> Iterator[None]:
    """Keep data parallelism from reducing by itself while any B or W is still to come."""
    functions = config.no_sync_func or []
    with ExitStack() as stack:
        for enter in functions if isinstance(functions, list) else [functions]:
            stack.enter_context(enter())
        for chunk in chunks:
            if overlaps_grad_reduce(chunk) and not functions:
                stack.enter_context(chunk.no_sync())
        yield
