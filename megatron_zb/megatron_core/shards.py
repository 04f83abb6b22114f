"""Shards of the tensors gathered by sequence parallelism, kept from B to W.

Sequence parallelism gathers the input of a column-parallel layer and the output gradient of a
row-parallel one along their first dimension, over the tensor-parallel group. A weight gradient
needs them gathered, but from B to W a rank keeps its own shard alone, and gathers again in W,
beside the weight gradient before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist


class Shard:
    """One rank's part of a tensor that W needs whole; only ``own`` is held until then.

    All ranks of ``group`` run the same W in the same order, so that their gathers meet.
    """

    def __init__(self, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.own = own
        self._group = group
        self._whole: torch.Tensor | None = None
        self._work: Any = None

    @classmethod
    def of(cls, whole: torch.Tensor, group: dist.ProcessGroup) -> Shard:
        """Copy this rank's part of a tensor, so that the whole may be freed or reused."""
        return cls(whole.chunk(group.size())[group.rank()].clone(), group)

    def start(self) -> None:
        """Start the gather, which runs concurrently until :meth:`whole`."""
        if self._whole is None:
            own = self.own.contiguous()
            self._whole = own.new_empty((own.size(0) * self._group.size(), *own.shape[1:]))
            self._work = dist.all_gather_into_tensor(
                self._whole, own, group=self._group, async_op=True
            )

    def whole(self) -> torch.Tensor:
        """Return the gathered tensor, for one use."""
        self.start()
        self._work.wait()
        whole, self._whole, self._work = self._whole, None, None
        assert whole is not None
        return whole


def held(operand: Any) -> Any:
    """Return the part of an operand that is kept until W; other than shards, the operand itself."""
    return operand.own if isinstance(operand, Shard) else operand


def whole(operand: Any) -> Any:
    """Return the operand of a weight gradient, with a shard gathered; others as they are."""
    return operand.whole() if isinstance(operand, Shard) else operand


def gathering(operands: Iterable[Any]) -> Callable[[], None] | None:
    """Return the function that starts to gather the shards among operands; None without any."""
    shards = [operand for operand in operands if isinstance(operand, Shard)]
    return partial(_start, shards) if shards else None


def _start(shards: list[Shard]) -> None:
    for shard in shards:
        shard.start()
