"""The slice that a chunk works on, and documents, within which attention stays.

Megatron has documents as a mask of whole sequences, or as the ends of packed sequences. A slice
needs less: where the document of each of its tokens starts. Attention then runs for one document at
a time, and the first one may begin in an earlier slice. No mask of whole sequences is kept, and no
kernel for packed sequences is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.sliced_context import ContextShare
from megatron_zb.megatron_core.step import Step, device

MASK, ENDS = "mask", "ends"
_ENDS = ("cu_seqlens_q_padded", "cu_seqlens_q", "cu_seqlens_padded", "cu_seqlens")
"""Ends of documents in the data of Megatron-LM and of Megatron-Bridge, padding counted if known."""
OF_DOCUMENTS = frozenset({"attention_mask", *_ENDS}) | frozenset(
    "cu_seqlens_argmin cu_seqlens_kv cu_seqlens_kv_padded cu_seqlens_unpadded total_tokens "
    "cu_seqlens_unpadded_argmin max_seqlen max_seqlen_kv max_seqlen_q".split()
)
"""What the data has of documents, which is not cut along the sequence."""


def ends_in(microbatch: Any) -> torch.Tensor | None:
    """Return the ends of documents in a microbatch, the padding behind each included, if any."""
    if not isinstance(microbatch, Mapping):
        return None
    return next((ends for name in _ENDS if (ends := microbatch.get(name)) is not None), None)


def starts_of(microbatch: Mapping[str, Any], length: int) -> torch.Tensor:
    """Return where the document of each token starts, by sequence and token.

    Ends may be followed by -1, and repeat the last one.

    Raises:
        UsageError: the data has neither the ends of documents nor a mask.
    """
    if (ends := ends_in(microbatch)) is not None:
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
    """Starts of documents in the microbatches of a step, the same on all ranks of some groups.

    Made before the passes, since what ranks exchange is waited for. Collective over the groups.

    Args:
        read: starts by microbatch, where this rank reads data.
        restarts: whether positions count from the start of a document.
        groups: whose ranks have the same microbatches, of which one at least reads them.

    Raises:
        UsageError: no rank reads data, or it has documents of other samples.
    """

    def __init__(
        self,
        read: Mapping[int, torch.Tensor] | None,
        step: Step,
        groups: Sequence[Any],
        *,
        restarts: bool,
    ) -> None:
        self.restarts = restarts
        starts = torch.full((step.num_microbatches, step.micro_batch_size, step.seq_length), -1)
        for microbatch, found in (read or {}).items():
            if found.shape != starts[microbatch].shape:
                raise UsageError(
                    f"a microbatch has the ends of documents of {len(found)} samples, but "
                    f"{step.micro_batch_size} samples: give a row of ends for each sample, or "
                    "leave --pipeline-slices out"
                )
            starts[microbatch] = found
        self._starts = all_reduced_max(starts, groups)
        if bool((self._starts < 0).any()):
            raise UsageError(
                "--pipeline-slices needs the documents of samples on every stage: leave the flag "
                "out for a script that reads them only on the first and the last"
            )

    def starts(self, microbatch: int) -> torch.Tensor:
        """Return where the document of each token starts, by sequence and token, on the CPU."""
        return self._starts[microbatch]

    def ends(self, microbatch: int) -> torch.Tensor:
        """Return the borders of all documents, with the samples put behind each other."""
        starts = self.starts(microbatch)
        samples, length = starts.shape
        borders = (starts + length * torch.arange(samples)[:, None]).unique()
        return torch.cat([borders, borders.new_tensor([starts.numel()])])

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
            one: runs causal attention of queries that are the last ones of the keys.
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


def all_reduced_max(own: torch.Tensor, groups: Sequence[Any]) -> torch.Tensor:
    """Return the elementwise maximum over all ranks of some groups, on the CPU. Collective."""
    shared = [group for group in groups if group.size() > 1]
    if not shared:
        return own
    found = own.to(device())
    for group in shared:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.cpu()


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
