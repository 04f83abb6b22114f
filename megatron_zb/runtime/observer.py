"""Observers of a rank that runs its program, such as recorders of times and of memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from megatron_zb.schedules.passes import Channel, Message, Pair, Pass, PassKind

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
    """Several observers at once; the first one enters first and leaves last."""

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


class Span(NamedTuple):
    """A pass or pair that ran, or a message that was waited for.

    Seconds are since the recorder's beginning; ``marks`` are the names and times of what was begun
    within a pass, in this order.
    """

    of: Pass | Pair | Message
    start: float
    end: float
    marks: tuple[tuple[str, float], ...] = ()


class TimedEvent(Protocol):
    """An event in a GPU's stream, with the time at which the GPU reached it."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Any) -> float: ...


def _gpu_event() -> TimedEvent:
    return torch.cuda.Event(enable_timing=True)


class Recorder:
    """An observer that records times: the host's, or the GPU's where passes run on one.

    On a GPU the host waits for it at the beginning and in :meth:`spans`, never between.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu
        self._beginning = self._now()
        if on_gpu:
            self._beginning.synchronize()
        self.began = time.perf_counter()
        """The host's clock at the beginning."""
        self._marks: list[tuple[Pass | Pair | Message, Any, Any, list[tuple[str, Any]]]] = []
        self._within: list[tuple[str, Any]] = []
        self._finished: Any = None

    @contextmanager
    def running(self, work: Pass | Pair) -> Iterator[None]:
        """Record the span of a pass or pair that runs in this context."""
        self._within = []
        with self._marked(work):
            yield

    def mark(self, name: str) -> None:
        """Mark within a pass that the work called ``name`` begins here."""
        self._within.append((name, self._now()))

    def finish(self) -> None:
        """Record the end of the step, with all that comes after its passes."""
        self._finished = self._now()

    @contextmanager
    def waiting(self, channel: Channel, message: Message) -> Iterator[None]:
        """Record the span of the wait for a message in this context."""
        with self._marked(message):
            yield

    @contextmanager
    def _marked(self, what: Pass | Pair | Message) -> Iterator[None]:
        start = self._now()
        yield
        within, self._within = self._within, []
        self._marks.append((what, start, self._now(), within))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = _gpu_event()
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        if not self._on_gpu:
            return float(mark - self._beginning)
        return float(self._beginning.elapsed_time(mark)) / 1000

    def spans(self) -> list[Span]:
        """Return all spans since the beginning, in the order in which they ended."""
        if self._on_gpu and self._marks:
            self._marks[-1][2].synchronize()
        return [
            Span(
                of,
                self._seconds(start),
                self._seconds(end),
                tuple((name, self._seconds(mark)) for name, mark in within),
            )
            for of, start, end, within in self._marks
        ]

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to :meth:`finish`."""
        if self._on_gpu:
            self._finished.synchronize()
        return self._seconds(self._finished)


class Memory(Protocol):
    """Counter of bytes: an allocator, or hooks of autograd."""

    @property
    def bytes_of_passes(self) -> int: ...


class AllocatedMemory:
    """Bytes of all tensors on this rank's GPU, by its allocator; the host need not wait for it.

    Between two passes messages come and go, so that what a pass itself allocates and frees differs
    from what it leaves held by the messages that it reads and makes.
    """

    @property
    def bytes_of_passes(self) -> int:
        return torch.cuda.memory_allocated()


class MemoryRecorder:
    """An observer that records the change of bytes by each pass."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.changes: dict[Pass, int] = {}
        """Bytes of each pass, in their order."""

    @contextmanager
    def running(self, work: Pass | Pair) -> Iterator[None]:
        """Record the change of bytes by the pass that runs in this context.

        That of a pair is left out: it is not known which of its passes holds what.
        """
        if isinstance(work, Pair):
            yield
            return
        before = self._memory.bytes_of_passes
        yield
        self.changes[work] = self._memory.bytes_of_passes - before

    def changes_of(self, kind: PassKind, stage: int) -> dict[int, int]:
        """Return the bytes of the passes of a kind and a stage, by microbatch."""
        found = self.changes.items()
        return {p.microbatch: n for p, n in found if (p.kind, p.stage) == (kind, stage)}

    def waiting(self, channel: Channel, message: Message) -> nullcontext[None]:
        """Return an empty context: a wait changes nothing that a pass holds."""
        return nullcontext()
