"""Replay of the data that a forward has read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


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
