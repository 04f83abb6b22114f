"""What a rank is doing, kept for when it stops: the pass it runs, the message it waits for.

On a GPU the host runs ahead: what it has launched is marked by events, and what the GPU is doing is
what the first event that has not happened yet was to end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_zb.schedules.communication import Channel, Message
from megatron_zb.schedules.passes import Pass, PassKind

REMEMBERED = 50


@dataclass(frozen=True)
class State:
    """A moment of a rank: what it does, and for which rank's message it waits, if for one.

    ``doing`` is a phrase, ``waits_for`` a logical rank of the same pipeline, ``seconds`` how long
    it has been so, ``passes`` the last ones that it began.
    """

    doing: str
    waits_for: int | None
    seconds: float
    passes: tuple[str, ...] = ()


class Event(Protocol):
    """A mark among what a GPU has been given to do."""

    def record(self) -> None: ...

    def query(self) -> bool: ...


_Situation = Pass | tuple[Channel, Message] | None


class Progress:
    """Told by the executor, read by the watchdog's thread.

    Args:
        on_gpu: the host does not wait for what it launches; ``event`` makes the marks.
    """

    def __init__(self, on_gpu: bool = False, event: type[Event] = torch.cuda.Event) -> None:
        self._event = event if on_gpu else None
        self._marks: deque[tuple[_Situation, Event]] = deque()
        self._passes: deque[Pass] = deque(maxlen=REMEMBERED)
        self._situation: _Situation = None
        self._host_in_step = False
        self._moved = time.monotonic()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        self._situation = None
        self._moved = time.monotonic()
        self._host_in_step = True
        try:
            yield
        finally:
            self._host_in_step = False
            self._moved = time.monotonic()

    @contextmanager
    def running(self, work: Pass) -> Iterator[None]:
        """Around a pass."""
        self._passes.append(work)
        with self._in(work):
            yield

    def waiting(self, channel: Channel, message: Message) -> Any:
        """Around the wait for a message."""
        return self._in((channel, message))

    @contextmanager
    def _in(self, situation: _Situation) -> Iterator[None]:
        self._situation = situation
        self._moved = time.monotonic()
        yield
        if self._event is not None:
            event = self._event()
            event.record()
            self._marks.append((situation, event))

    @property
    def in_step(self) -> bool:
        """Whether something of a step is still to be done, by the host or by the GPU."""
        return self._host_in_step or bool(self._marks)

    def seconds(self) -> float:
        """Since something last happened."""
        while self._marks and self._marks[0][1].query():
            self._marks.popleft()
            self._moved = time.monotonic()
        return time.monotonic() - self._moved

    def state(self) -> State:
        """What the rank does now."""
        seconds, passes = self.seconds(), tuple(map(said, self._passes))
        situation = self._marks[0][0] if self._marks else self._situation
        if not self.in_step:
            return State("is between two steps", None, seconds, passes)
        if situation is None:
            return State("is before its first pass", None, seconds, passes)
        if isinstance(situation, Pass):
            return State(f"is in {said(situation)}", None, seconds, passes)
        channel, message = situation
        if message.is_credit:
            doing = (
                f"waits for pipeline rank {channel.source} in schedule order to update its "
                f"students in step {message.microbatch}"
            )
            return State(doing, channel.source, seconds, passes)
        kind = "the gradient" if message.is_gradient else "the activation"
        doing = (
            f"waits for {kind} for stage {message.stage}, microbatch {message.microbatch}, "
            f"from pipeline rank {channel.source} in schedule order"
        )
        return State(doing, channel.source, seconds, passes)


def said(work: Pass) -> str:
    """A pass in words."""
    counted = "step" if work.kind is PassKind.U else "microbatch"
    return f"{work.kind.name} of stage {work.stage}, {counted} {work.microbatch}"


def who_holds_up(states: dict[int, State], rank: int) -> int:
    """The rank that a rank waits for in the end: the first on the way that waits for no message.

    Args:
        states: of the ranks of one pipeline that have told theirs; one that has not holds up.
    """
    seen = set()
    while rank in states and rank not in seen:
        seen.add(rank)
        after = states[rank].waits_for
        if after is None:
            break
        rank = after
    return rank
