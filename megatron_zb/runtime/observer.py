"""What may look on while a rank carries its program out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from megatron_zb.schedules.communication import Channel, Message
from megatron_zb.schedules.passes import Pass


class Observer(Protocol):
    """Is told around every pass and every wait for a message."""

    def running(self, work: Pass) -> AbstractContextManager[None]:
        """Around a pass."""

    def waiting(self, channel: Channel, message: Message) -> AbstractContextManager[None]:
        """Around the wait for a message."""


class Observers:
    """Several that look on at once; the first one is told first and last."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    @contextmanager
    def running(self, work: Pass) -> Iterator[None]:
        """Around a pass."""
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.running(work))
            yield

    @contextmanager
    def waiting(self, channel: Channel, message: Message) -> Iterator[None]:
        """Around the wait for a message."""
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.waiting(channel, message))
            yield


NOBODY = Observers(())
