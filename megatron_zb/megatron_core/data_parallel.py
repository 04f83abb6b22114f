"""Data-parallel gathers of a chunk's weights and reductions of its gradients.

Megatron's own schedules dispatch both: ``config.param_sync_func`` ahead of a chunk's first forward,
``config.grad_sync_func`` after its last backward. Each may be None, a callable or one per chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_zb.megatron_core.buckets import BucketReductions, overlaps_grad_reduce

# Chunks whose weights are gathered before the first forward; the others go one chunk ahead.
_GATHERED_UP_FRONT = 2


class DataParallelSync:
    """The parameter gathers and gradient reductions of one training step.

    Both are started as early as possible, so that they overlap with passes: the gather one chunk
    ahead; the reduction of a bucket when its last gradient is there; the reduction of a chunk by a
    function of the user's when it has no B, BW or W left.

    Args:
        chunks: the model chunks of this rank, as data parallelism wraps them.
        order: their indices, in the order of their first forwards.
        passes: the number of W, BW and V of each chunk in the step.
        buckets: for each chunk, None where data parallelism does not overlap its reductions.
    """

    def __init__(
        self,
        config: Any,
        chunks: Sequence[Any],
        order: Sequence[int],
        passes: Sequence[int],
        buckets: Sequence[BucketReductions | None],
    ) -> None:
        self._chunks = chunks
        self._left = list(passes)
        self._gathers = one_for_each_chunk(config.param_sync_func, chunks)
        self._reductions = one_for_each_chunk(config.grad_sync_func, chunks)
        self._buckets = [
            None if bucket is not None and self._has_reduction_of_its_own(i) else bucket
            for i, bucket in enumerate(buckets)
        ]
        for chunk in chunks:
            _gather_experts_later(chunk)
        self._ungathered = deque(order if self._gathers else ())
        self._reached: set[int] = set()
        for _ in range(_GATHERED_UP_FRONT):
            self._gather_next()

    def _has_reduction_of_its_own(self, chunk: int) -> bool:
        """Return whether a chunk's ``grad_sync_func`` is other than data parallelism's own.

        Megatron-LM sets data parallelism's own function, which would start all buckets.
        """
        if not self._reductions:
            return False
        return self._reductions[chunk] != self._chunks[chunk].start_grad_sync

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the gradients while the step runs."""
        with ExitStack() as stack:
            for buckets in self._buckets:
                if buckets is not None:
                    stack.enter_context(buckets.listening())
            yield

    def before_forward(self, chunk: int) -> None:
        """Dispatch the next chunk's gather before the first F of a chunk; called before every F."""
        if self._ungathered and chunk not in self._reached:
            self._reached.add(chunk)
            if len(self._reached) > 1:
                self._gather_next()

    def before_weight_gradients(
        self, chunk: int, brings: Callable[[], Mapping[int, int]] | None
    ) -> None:
        """Prepare for a W or BW; see :meth:`BucketReductions.before_pass`.

        Args:
            brings: returns the number of gradients the W adds to each weight; None for a BW.
        """
        if (buckets := self._buckets[chunk]) is not None:
            final = self._left[chunk] == 1
            if brings is None:
                buckets.before_pass(None, final)
            else:  # counting takes time, and only the last pass is asked
                buckets.before_pass(brings() if final else {}, final)

    def listener(self, chunk: int) -> Callable[[torch.Tensor], None] | None:
        """Return the function to call for every gradient that a W has computed, if any."""
        buckets = self._buckets[chunk]
        return None if buckets is None else buckets.gradient_came

    def after_weight_gradients(self, chunk: int) -> None:
        """Start what has not started after a chunk's last W or BW; called after each of them."""
        self._left[chunk] -= 1
        final = not self._left[chunk]
        if (buckets := self._buckets[chunk]) is not None:
            buckets.after_pass(final)
        elif final and self._reductions:
            self._reductions[chunk](self._chunks[chunk].parameters())

    def _gather_next(self) -> None:
        if self._ungathered:
            chunk = self._ungathered.popleft()
            self._gathers[chunk](self._chunks[chunk].parameters())


def _gather_experts_later(chunk: Any) -> None:
    """Let a gather in the optimizer's step leave out experts that are spread over ranks.

    ``--overlap-param-gather-with-optimizer-step`` gathers a rank's first chunk when its dense
    weights have been stepped, but such experts have an optimizer of their own, which steps last.
    What has not been gathered before the first F that needs it, Megatron gathers there.
    """
    gathers_early = getattr(chunk, "overlap_param_gather_with_optimizer_step", False)
    if not gathers_early or "start_param_sync" in vars(chunk):
        return
    gather = chunk.start_param_sync

    def start_param_sync(*args: Any, force_dispatch: bool = False, **options: Any) -> None:
        experts = chunk.expert_parallel_bucket_groups
        if force_dispatch:
            chunk.expert_parallel_bucket_groups = []
        try:
            gather(*args, force_dispatch=force_dispatch, **options)
        finally:
            chunk.expert_parallel_bucket_groups = experts

    chunk.start_param_sync = start_param_sync


def one_for_each_chunk(
    functions: Callable[..., Any] | list[Callable[..., Any]] | None, chunks: Sequence[Any]
) -> list[Callable[..., Any]]:
    """Return Megatron's None, one function for all chunks or list of them as a list."""
    if functions is None:
        return []
    return functions if isinstance(functions, list) else [functions for _ in chunks]


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
