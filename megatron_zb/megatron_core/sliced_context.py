"""Context parallelism of token slices: the ranks of a group share the tokens of every slice.

Scripts cut what they read, here a slice, as Megatron's ``get_batch_on_this_cp_rank`` does: into two
chunks per rank, of which a rank has one from either end. So causal attention costs all ranks alike.
Keys and values of a slice are gathered over the group and kept by every rank in the order of
tokens. Attention runs once for each chunk, to all keys up to its end: Transformer-Engine's is
called without a group. Gradients of keys and values are summed over the group in B of their slice.
Tests have stand-ins for its kernels: only a GPU shows what they and the gathers take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_CHUNKS = 2
"""Chunks of a slice on each rank."""


@dataclass(frozen=True)
class ContextShare:
    """The share of this rank in the tokens of a slice.

    Args:
        group: the context-parallel group; None, or one of a single rank, has whole slices.
    """

    group: Any = None

    @property
    def size(self) -> int:
        return 1 if self.group is None else int(self.group.size())

    @property
    def multiple(self) -> int:
        """Return what divides the tokens of a slice."""
        return 1 if self.size == 1 else _CHUNKS * self.size

    def runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the start and end of every run of tokens that this rank has of a slice."""
        if self.size == 1:
            return [(start, end)]
        length, rank = (end - start) // self.multiple, self.group.rank()
        places = (rank, self.multiple - 1 - rank)
        return [(start + n * length, start + (n + 1) * length) for n in places]

    def own(self, whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's tokens of a slice."""
        runs = self.runs(0, whole.shape[dim])
        parts = [whole.narrow(dim, start, end - start) for start, end in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def gather(self, own: torch.Tensor, place: torch.Tensor) -> None:
        """Write the tokens that all ranks have of a slice, in order. Collective over the group."""
        if self.size == 1:
            place.copy_(own)
            return
        parts = torch.empty_like(place, memory_format=torch.contiguous_format)
        dist.all_gather_into_tensor(parts, own.contiguous(), group=self.group)
        first, second = parts.view(self.size, _CHUNKS, -1, *own.shape[1:]).unbind(1)
        halves = place.view(_CHUNKS, *first.shape)
        halves[0].copy_(first)
        halves[1].copy_(second.flip(0))

    def summed(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of what they have for a slice, for this rank's tokens.

        Collective over the group.
        """
        if self.size == 1:
            return whole
        first, second = whole.view(_CHUNKS, self.size, -1, *whole.shape[1:])
        parts = torch.stack((first, second.flip(0)), dim=1).view(whole.shape)
        own = whole.new_empty(len(whole) // self.size, *whole.shape[1:])
        dist.reduce_scatter_tensor(own, parts, group=self.group)
        return own
