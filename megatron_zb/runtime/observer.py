"""Observers of a rank that runs its program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

from megatron_zb.schedules.passes import Channel, Message, Pair, Pass

NOTHING = nullcontext()
"""Context of an observer that has nothing to do after a pass or a wait."""


class Observer(Protocol):
    """Observer of every pass and every wait for a message.

    A context is entered as soon as it is made, so an observer may do in the call what comes before.
    A generator under ``contextmanager`` takes the host microseconds in every pass: what looks on in
    every training returns an object instead.
    """

    def running(self, work: Pass | Pair) -> AbstractContextManager[None]:
        """Return a context to run a pass or a pair in."""

    def waiting(self, channel: Channel, message: Message) -> AbstractContextManager[None]:
        """Return a context to wait for a message in."""


class Observers:
    """Several observers at once; the first one is told first and last."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def running(self, work: Pass | Pair) -> AbstractContextManager[Any]:
        """Return a context to run a pass or a pair in."""
        if not self._observers:
            return NOTHING
        return _entered(observer.running(work) for observer in self._observers)

    def waiting(self, channel: Channel, message: Message) -> AbstractContextManager[Any]:
        """Return a context to wait for a message in."""
        if not self._observers:
            return NOTHING
        return _entered(observer.waiting(channel, message) for observer in self._observers)


def _entered(contexts: Iterable[AbstractContextManager[None]]) -> ExitStack:
    """Enter all contexts in this order; the returned stack leaves them in the reverse order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return stack.pop_all()


NOBODY = Observers(())
