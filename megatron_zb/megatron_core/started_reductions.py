"""Reductions of gradients over the replicas that run beside passes, on gradients put aside.

Megatron's data parallelism reduces the buffers into which weight gradients are added. Where passes
of the next group already add theirs there, the reduction has to work on copies. It is Megatron's
own, bucket for bucket, so sums are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.data_parallel import bucket_groups_of, gradients_of


class StartedReductions:
    """Reductions of gradients that have been put aside; creating it starts them.

    Args:
        chunks: wrapped for data parallelism.
        aside: for each chunk by its number, copies of its buffers, which are changed in place.
        force_all_reduce: reduce all gradients on all replicas, as ``finalize_model_grads`` takes
            it.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        aside: Mapping[int, Sequence[torch.Tensor]],
        *,
        force_all_reduce: bool | None = False,
    ) -> None:
        self._chunks, self._handles = list[Any](), list[Any]()
        for number, copies in aside.items():
            chunk = chunks[number]
            if not _can_start(chunk):
                continue
            self._chunks.append(chunk)
            for group in bucket_groups_of(chunk):
                with _on_copies(group, gradients_of(chunk), copies):
                    group.start_grad_sync(force_all_reduce=force_all_reduce)
                    self._handles.append(group.grad_reduce_handle)

    def wait(self) -> None:
        """Wait until the reductions have ended."""
        while self._handles:
            handle = self._handles.pop()
            if handle is not None:
                handle.wait()

    @contextmanager
    def not_again(self) -> Iterator[None]:
        """Let Megatron's ``finish_grad_sync`` of the chunks do nothing."""
        for chunk in self._chunks:
            chunk.finish_grad_sync = _done
        try:
            yield
        finally:
            for chunk in self._chunks:
                del chunk.finish_grad_sync


def _can_start(chunk: Any) -> bool:
    """Return whether the reductions of a chunk can run on copies.

    They cannot where gradients of a higher precision lie elsewhere than in the buffers, nor where
    the distributed optimizer has several instances. Megatron reduces those at once.
    """
    buckets = (bucket for group in bucket_groups_of(chunk) for bucket in group.buckets)
    is_one = chunk.ddp_config.num_distributed_optimizer_instances == 1
    return is_one and not any(map(versions.has_gradients_elsewhere, buckets))


def _done(*arguments: Any, **keywords: Any) -> None:
    """Do nothing: the gradients have been reduced."""


@contextmanager
def _on_copies(
    group: Any, buffers: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Let a bucket group reduce copies of its buffers, with no wait for the end."""
    changed: list[tuple[Any, str, Any]] = [
        (group, "cached_grad_buffer_shard_list", [None] * len(group.buckets)),
        (group, "grad_reduce_handle", None),
        (group.ddp_config, "overlap_grad_reduce", True),
    ]
    for bucket in group.buckets:
        changed.append((bucket, "grad_data", _same_place(bucket.grad_data, buffers, copies)))
    with ExitStack() as stack:
        for owner, name, value in changed:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _same_place(
    view: torch.Tensor, buffers: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the part of a copy that a view is of the buffer."""
    for buffer, copy in zip(buffers, copies, strict=True):
        if buffer.untyped_storage().data_ptr() == view.untyped_storage().data_ptr():
            first = view.storage_offset() - buffer.storage_offset()
            return copy.view(-1)[first : first + view.numel()].view(view.shape)
    raise AssertionError("a bucket is part of a buffer of its chunk")
