"""The slice that a chunk works on, and documents, within which attention stays.

Megatron has documents as a mask of whole sequences, or as the ends of packed sequences. A slice
needs less: where the document of each of its tokens starts. Attention then runs for one document at
a time, and the first one may begin in an earlier slice. No mask of whole sequences is kept, and no
kernel for packed sequences is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.sliced_context import ContextShare
from megatron_zb.megatron_core.step import Step, device

MASK, ENDS = "mask", "ends"
OF_DOCUMENTS = frozenset({"attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen"})
"""What the data has of documents, which is not cut along the sequence."""


def starts_of(microbatch: Mapping[str, Any], length: int) -> torch.Tensor:
    """Return where the document of each token starts, by sequence and token.

    Raises:
        UsageError: the data has neither the ends of documents nor a mask.
    """
    ends = microbatch.get("cu_seqlens_padded")
    ends = microbatch.get("cu_seqlens") if ends is None else ends
    if ends is not None:
        places = torch.arange(length, device=ends.device)
        borders = [row.long().unique() for row in ends.view(-1, ends.shape[-1])]
        return torch.stack([b[torch.bucketize(places, b, right=True) - 1] for b in borders])
    if (mask := microbatch.get("attention_mask")) is None:
        raise UsageError(
            "a microbatch has neither cu_seqlens nor attention_mask, where --pipeline-slices looks "
            "for the documents of its samples: leave the flag out for this data"
        )
    starts: torch.Tensor = (~mask).int().argmax(dim=-1)  # the first token that one attends to
    return starts.flatten(0, 1)


class Documents:
    """Starts of documents in the microbatches of a step, the same on all tensor ranks.

    Made before the passes, since what tensor ranks exchange is waited for. Collective over them.

    Args:
        read: starts by microbatch, where this rank reads data.
        restarts: whether positions count from the start of a document.

    Raises:
        UsageError: the first tensor rank reads no data.
    """

    def __init__(
        self, read: Mapping[int, torch.Tensor] | None, step: Step, *, restarts: bool
    ) -> None:
        self.restarts = restarts
        self._starts = _shared(read or {}, step)
        if bool((self._starts < 0).any()):
            raise UsageError(
                "--pipeline-slices needs the documents of samples on every stage: leave the flag "
                "out for a script that reads them only on the first and the last"
            )

    def starts(self, microbatch: int) -> torch.Tensor:
        """Return where the document of each token starts, by sequence and token, on the CPU."""
        return self._starts[microbatch]

    def positions(self, microbatch: int, start: int, end: int) -> torch.Tensor:
        """Return positions of tokens in their documents, by token and sequence."""
        return (torch.arange(start, end) - self.starts(microbatch)[:, start:end]).t()

    def attend(
        self,
        one: Callable[..., torch.Tensor],
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        microbatch: int,
        start: int,
    ) -> torch.Tensor:
        """Run attention to the tokens of the same document.

        Args:
            one: runs causal attention of the last queries of so many keys.
            tensors: queries of a slice, and keys and values up to its end.
            start: the place of the first query.
        """
        query, key, value = tensors
        outputs = []
        for row, starts in enumerate(self.starts(microbatch)[:, start : len(key)]):
            first, *others = starts.unique().tolist()
            places = [start, *others, len(key)]
            lengths = [b - a for a, b in pairwise(places)]
            reach = [first, places[1] - first, *lengths[1:]]
            queries = query[:, row : row + 1].split(lengths)
            keys, values = (x[:, row : row + 1].split(reach)[1:] for x in (key, value))
            outputs.append(torch.cat(list(map(one, queries, keys, values))))
        return torch.cat(outputs, dim=1)


def _shared(read: Mapping[int, torch.Tensor], step: Step) -> torch.Tensor:
    """Return what the first tensor rank has read by microbatch, on the CPU; -1 for nothing."""
    group = step.pg_collection.tp
    whole = torch.full((step.num_microbatches, step.micro_batch_size, step.seq_length), -1)
    for microbatch, starts in read.items() if group.rank() == 0 else ():
        whole[microbatch] = starts
    if group.size() == 1:
        return whole
    shared = whole.to(device())
    dist.broadcast(shared, dist.get_global_rank(group, 0), group=group)
    return shared.cpu()


@dataclass
class Cut:
    """Borders of the slices in tokens, and the slice that a chunk works on."""

    borders: tuple[int, ...]
    unit: int = 0
    forward_only: bool = False
    documents: Documents | None = None
    """Those to which attention keeps, if any."""
    context: ContextShare = field(default_factory=ContextShare)
    storages: set[int] = field(default_factory=set)
    """Addresses of the storages that keep keys and values, which later slices read, too."""

    @property
    def slices(self) -> int:
        return len(self.borders) - 1

    @property
    def microbatch(self) -> int:
        return self.unit // self.slices

    @property
    def slice(self) -> int:
        return self.unit % self.slices

    @property
    def tokens(self) -> tuple[int, int]:
        """Return where the slice starts and ends in its sequence."""
        return self.borders[self.slice], self.borders[self.slice + 1]
