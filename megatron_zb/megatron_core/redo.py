"""The start of an iteration, to go back to: random states, and the data that forwards read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_zb.megatron_core.random_streams import RandomState


class Replayed:
    """An iterator over data that can go back once to where it started."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._seen: list[Any] | None = []
        self._again: deque[Any] = deque()

    def __iter__(self) -> Replayed:
        return self

    def __next__(self) -> Any:
        if self._again:
            return self._again.popleft()
        item = next(self._iterator)
        if self._seen is not None:
            self._seen.append(item)
        return item

    def go_back(self) -> None:
        """Go back to the start and repeat the items read so far."""
        assert self._seen is not None, "what has been given was not kept"
        self._again.extend(self._seen)
        self._seen = None

    def go_on(self) -> None:
        """Stop recording items, as no return to the start follows."""
        self._seen = None


class Start:
    """The state at the start of an iteration whose chunks read from some iterators, or none."""

    def __init__(self, data_iterators: Sequence[Iterator[Any] | None]) -> None:
        self._random = RandomState()
        self.data_iterators = [it if it is None else Replayed(it) for it in data_iterators]
        """Iterators to read from instead."""

    def go_back(self) -> None:
        """Draw and read again what has been drawn and read since."""
        self._random.restore()
        for data in filter(None, self.data_iterators):
            data.go_back()

    def forget(self) -> None:
        """Stop recording, as no return to the start follows."""
        for data in filter(None, self.data_iterators):
            data.go_on()
