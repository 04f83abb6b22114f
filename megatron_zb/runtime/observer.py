"""What may look on while a rank carries its program out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

from megatron_zb.schedules.passes import Channel, Message, Pass

NOTHING = nullcontext()
"""For an observer that has nothing to do after a pass or a wait."""


class Observer(Protocol):
    """Is told around every pass and every wait for a message.

    A context is entered as soon as it is made, so an observer may do in the call what comes before.
    A generator under ``contextmanager`` takes the host microseconds in every pass: what looks on in
    every training returns an object instead.
    """

    def running(self, work: Pass) -> AbstractContextManager[None]:
        """Around a pass."""

    def waiting(self, channel: Channel, message: Message) -> AbstractContextManager[None]:
        """Around the wait for a message."""


class Observers:
    """Several that look on at once; the first one is told first and last."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def running(self, work: Pass) -> AbstractContextManager[Any]:
        """Around a pass."""
        if not self._observers:
            return NOTHING
        return _entered(observer.running(work) for observer in self._observers)

    def waiting(self, channel: Channel, message: Message) -> AbstractContextManager[Any]:
        """Around the wait for a message."""
        if not self._observers:
            return NOTHING
        return _entered(observer.waiting(channel, message) for observer in self._observers)


def _entered(contexts: Iterable[AbstractContextManager[None]]) -> ExitStack:
    """All of them, entered in this order and left in the other one."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return stack.pop_all()


NOBODY = Observers(())
