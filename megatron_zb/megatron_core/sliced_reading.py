"""Data of token slices: microbatches cut along the sequence, and whole ones for the loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.sliced_documents import OF_DOCUMENTS, ends_in, starts_of

FLAG = "--pipeline-slices"
_MASK = "attention_mask"
_OF_SAMPLES = frozenset({"context_lengths", "dataset_id", "metadata", "token_count"})
"""What the data has of whole samples, which no forward step reads."""


class ReadingArguments:
    """Arguments by which a script receives a batch; a trainer without them has none to change."""

    def of_batch(self, tokens: int, *, receives: bool) -> AbstractContextManager[None]:
        """Return the context of a forward step that gets a batch, up to its call of the model.

        Args:
            tokens: of a sequence of the batch.
            receives: whether this rank has no data, and receives that of another one.
        """
        return nullcontext()

    def of_user(self) -> AbstractContextManager[None]:
        """Return the context in which the arguments are those of the user, also in a batch's."""
        return nullcontext()

    def restore(self) -> None:
        """End what :meth:`of_batch` has changed, before its context ends."""


class _ReadMicrobatch(NamedTuple):
    """A microbatch as the user's forward step gets it, whole and what is cut into slices."""

    whole: Any
    cut: dict[str, Any]


@dataclass(kw_only=True)
class ReadingOptions:
    """The options of a :class:`SlicedReading`.

    Args:
        has_documents: whether attention keeps within the documents of the data.
        keeps_whole: whether the losses of the microbatches are computed here.
        arguments: put back while the user's iterator runs.
    """

    has_documents: bool = False
    keeps_whole: bool = False
    arguments: ReadingArguments = field(default_factory=ReadingArguments)


class SlicedReading:
    """An iterator over slices of the microbatches of another one.

    Raises:
        UsageError: a microbatch is no dict of tensors by sequence and token.
    """

    def __init__(
        self, whole: Iterator[Any], borders: Sequence[int], options: ReadingOptions | None = None
    ) -> None:
        self._whole, self.borders = whole, borders
        self.options = options or ReadingOptions()
        self._read, self._microbatch = 0, _ReadMicrobatch(None, {})
        self._seen, self._ahead = deque[Any](), deque[_ReadMicrobatch]()
        self.kept: dict[int, Any] = {}
        """Whole microbatches by number, where their losses are computed."""
        self._starts: dict[int, torch.Tensor] = {}

    def read_ahead(self, count: int) -> dict[int, torch.Tensor]:
        """Read ``count`` microbatches; return where each token's document starts, by number."""
        self._ahead.extend(self._checked(self._next(), j) for j in range(count))
        return self._starts

    def check_next(self, unit: int) -> None:
        """Read the microbatch of a slice ahead of the user's forward step, if it is the next one.

        A refusal then ends no context manager of the forward step.
        """
        j, i = divmod(self._read, len(self.borders) - 1)
        if unit == self._read and i == 0 and not self._ahead:
            with suppress(StopIteration):  # the forward step gets it
                self._ahead.append(self._checked(self._next(), j))

    def finds_ends(self) -> bool:
        """Read the first microbatch; return whether it has the ends of documents."""
        self._seen.append(self._next())
        return ends_in(self._seen[0]) is not None

    def again(self, microbatch: int) -> Iterator[Any]:
        """Return an iterator over one whole microbatch that has been kept."""
        return _Once(self.kept[microbatch], self._whole)

    def _next(self) -> Any:
        if self._seen:
            return self._seen.popleft()
        with self.options.arguments.of_user():
            return next(self._whole)

    def __iter__(self) -> SlicedReading:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def __next__(self) -> dict[str, Any]:
        j, i = divmod(self._read, len(self.borders) - 1)
        if i == 0:
            ahead = self._ahead
            self._microbatch = ahead.popleft() if ahead else self._checked(self._next(), j)
            if self.options.keeps_whole:
                self.kept[j] = self._microbatch.whole
        self._read += 1
        start, end = self.borders[i : i + 2]
        # contiguous: Megatron's loss function views the mask as one row
        return {n: tensor[:, start:end].contiguous() for n, tensor in self._microbatch.cut.items()}

    def _checked(self, microbatch: Any, number: int) -> _ReadMicrobatch:
        if microbatch is None:  # of a stage that needs no data
            return _ReadMicrobatch(None, {})
        if not isinstance(microbatch, dict):
            raise UsageError(
                f"{FLAG}: the data has a {type(microbatch).__name__} for a microbatch, but only "
                "dicts of tensors are cut into slices: leave the flag out for this data"
            )
        if self.options.has_documents:
            self._starts[number] = starts_of(microbatch, self.borders[-1])
        elif microbatch.get(_MASK) is not None:
            self._check_causal(microbatch[_MASK])
        left_out = {_MASK} | _OF_SAMPLES
        left_out |= OF_DOCUMENTS if self.options.has_documents else set()
        found = {n: t for n, t in microbatch.items() if n not in left_out and t is not None}
        for name, tensor in found.items():
            if getattr(tensor, "ndim", 0) != 2 or tensor.shape[1] != self.borders[-1]:
                raise UsageError(
                    f"{FLAG}: {name} of a microbatch has no axis of {self.borders[-1]} tokens "
                    "behind its first: leave the flag out for this data"
                )
        # without documents: Megatron-LM counts those that it finds, on all stages or on none
        whole = {n: t for n, t in microbatch.items() if n not in OF_DOCUMENTS}
        return _ReadMicrobatch(whole, found)

    def _check_causal(self, mask: torch.Tensor) -> None:
        """Refuse a mask that keeps attention within documents: slices leave masks out."""
        length = self.borders[-1]
        if mask.shape[-2:] == (length, length) and starts_of({_MASK: mask}, length).any():
            raise UsageError(
                f"{FLAG}: attention_mask of a microbatch keeps attention within documents, which "
                "slices find by the ends of packed samples: pack the data, or leave the flag out"
            )


class _Once:
    """An iterator over one item, with all other attributes of another iterator."""

    def __init__(self, item: Any, others: Iterator[Any]) -> None:
        self._items, self._others = iter([item]), others

    def __iter__(self) -> _Once:
        return self

    def __next__(self) -> Any:
        return next(self._items)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)
