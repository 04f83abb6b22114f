"""Progress of a rank, kept for when it stops: the pass it runs, the message or rank it waits for.

On a GPU the host runs ahead, and records an event after everything that it launches: the GPU is
busy with what the first pending event ends. Between two steps, the activity is read from the stack
of the thread that trains.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType
from typing import Protocol

import torch

from megatron_zb.runtime.observer import NOTHING
from megatron_zb.schedules.passes import Channel, Message, Pair, Pass
from megatron_zb.schedules.rules import TRAINING
from megatron_zb.schedules.schedule import Schedule

REMEMBERED = 50
_COLLECTIVES = "torch.distributed.distributed_c10d"
_DEPTH = 5  # frames that are told
_ANSWER = 0.5  # seconds that the driver has for an answer before one goes on without it

Phases = Mapping[tuple[str, str], str]
"""Phrases such as ``in the optimizer step``, by the start of a module's name and a function."""


@dataclass(frozen=True)
class State:
    """State of a rank: its activity, and the rank that it waits for, if any.

    ``doing`` is a phrase, ``waits_for`` a rank of the same pipeline, ``seconds`` the time that it
    has been so, ``passes`` the last ones that it began, ``place`` its current functions and lines.
    """

    doing: str
    waits_for: int | None
    seconds: float
    passes: tuple[str, ...] = ()
    in_step: bool = False
    waits_for_all: bool = False
    place: str = ""


class Event(Protocol):
    """An event in a GPU's stream."""

    def record(self) -> None: ...

    def query(self) -> bool: ...


_Situation = Pass | Pair | tuple[Channel, Message] | Channel | None
"""A pass, a wait for a message, or a wait until a message of a channel has been taken."""


class _Marked:
    """Context of a pass or a wait on a GPU; its end leaves a mark, except after an exception."""

    __slots__ = ("_event", "_marks", "_situation")

    def __init__(
        self,
        marks: deque[tuple[_Situation, Event]],
        situation: _Situation,
        event: type[Event],
    ) -> None:
        self._marks = marks
        self._situation = situation
        self._event = event

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            event = self._event()
            event.record()
            self._marks.append((self._situation, event))


class _Looker:
    """Query CUDA events on a separate thread.

    A query may block while another thread synchronizes the device or frees its memory. The
    watchdog's threads then go on with the last known state, and the rank is not taken for dead.

    Args:
        device: on which the events are; on another one, the thread would take memory there.
        look: queries the events.
    """

    def __init__(self, device: int, look: Callable[[], None]) -> None:
        self._device, self._look = device, look
        self._asked, self._answered = threading.Event(), threading.Event()
        self._answered.set()
        self._asking = threading.Lock()
        self._since = 0.0
        threading.Thread(target=self._run, name="pipeline watchdog looker", daemon=True).start()

    def ask(self) -> None:
        """Query the events; return when that is done, or after half a second."""
        with self._asking:
            if self._answered.is_set():
                self._since = time.monotonic()
                self._answered.clear()
                self._asked.set()
        self._answered.wait(_ANSWER)

    def unanswered(self) -> float:
        """Return the seconds that the driver has not answered, 0 if it has."""
        return 0.0 if self._answered.is_set() else time.monotonic() - self._since

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            self._asked.wait()
            self._asked.clear()
            with suppress(Exception):  # of the device, which the thread that trains raises, too
                self._look()
            self._answered.set()


class RankProgress:
    """Progress of one rank, written by the executor and read by the watchdog's threads.

    On a GPU, marks are kept only after :meth:`keep_marks`: a separate thread drops those that have
    been passed, see :meth:`moved`.

    Args:
        on_gpu: the host does not wait for what it launches; ``event`` makes the marks.
        phases: phrases for functions that are called between two steps.
        schedule: of the steps, whose rules describe passes and messages; None for any training.
    """

    def __init__(
        self,
        on_gpu: bool = False,
        event: type[Event] = torch.cuda.Event,
        phases: Phases | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self._rules = TRAINING if schedule is None else schedule.rules
        self._placement = None if schedule is None else schedule.placement
        self._marks_with = event if on_gpu else None
        self._event: type[Event] | None = None
        self._looker: _Looker | None = None
        self._phases: Phases = phases or {}
        self._thread = threading.get_ident()
        self._looking = threading.Lock()
        self._marks: deque[tuple[_Situation, Event]] = deque()
        self._passes: deque[Pass | Pair] = deque(maxlen=REMEMBERED)
        self._situation: _Situation = None
        self._host_in_step = False
        self._moved = self._counted_from = time.monotonic()

    def keep_marks(self) -> None:
        """Keep marks from now on, because somebody will look; call it on the thread that trains."""
        self._event = self._marks_with
        if self._event is not None and self._looker is None:
            self._looker = _Looker(torch.cuda.current_device(), self._drop_passed)

    def forget_marks(self) -> None:
        """Drop all marks, so that nobody asks the driver; the device has done what they marked.

        While a graph is captured in CUDA's global mode, a query by any thread invalidates it.
        """
        with self._looking:
            self._marks.clear()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count as a step what runs in this context."""
        self._thread = threading.get_ident()
        self._situation = None
        self._moved = time.monotonic()
        self._host_in_step = True
        try:
            yield
        finally:
            self._host_in_step = False
            self._moved = time.monotonic()

    def running(self, work: Pass | Pair) -> AbstractContextManager[None]:
        """Return a context to run a pass or a pair in."""
        self._passes.append(work)
        return self._in(work)

    def waiting(self, channel: Channel, message: Message) -> AbstractContextManager[None]:
        """Return a context to wait for a message in."""
        return self._in((channel, message))

    def until_taken(self, channel: Channel) -> AbstractContextManager[None]:
        """Return a context to wait in until the reader of a channel has taken a message."""
        return self._in(channel)

    def _in(self, situation: _Situation) -> AbstractContextManager[None]:
        self._situation = situation
        self._moved = time.monotonic()
        return NOTHING if self._event is None else _Marked(self._marks, situation, self._event)

    @property
    def in_step(self) -> bool:
        """Whether something of a step is still to be done, by the host or by the GPU."""
        return self._host_in_step or bool(self._marks)

    def moved(self) -> float:
        """Return the ``time.monotonic`` of the last progress: one wait has one such time."""
        if self._looker is not None and self._marks:
            self._looker.ask()
        return self._moved

    def _drop_passed(self) -> None:
        with self._looking:
            while self._marks and self._marks[0][1].query():
                self._marks.popleft()
                self._moved = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds since the last progress, or since the count began anew."""
        return time.monotonic() - max(self.moved(), self._counted_from)

    def begin_anew(self) -> None:
        """Restart the count: the whole process has been stopped, and goes on."""
        self._counted_from = time.monotonic()

    def state(self, ranks: Mapping[int, int] | None = None) -> State:
        """Return the rank's current state.

        Args:
            ranks: the global rank of each of the pipeline's logical ranks, for ``waits_for`` and
                the phrase; None leaves logical ranks there, and pipeline ranks in the phrase.
        """
        seconds, passes = self.seconds(), tuple(map(self._in_words, self._passes))
        frames = _frames_of(self._thread)
        doing, waits_for = self._situation_in_words(ranks)
        collective = _collective_of(frames)
        in_step = self.in_step
        if not in_step:
            phase = _phase_of(frames, self._phases)
            parts = ("is between two steps", phase, collective and f"waiting in {collective}")
            doing = ", ".join(filter(None, parts))
        silent = 0.0 if self._looker is None else self._looker.unanswered()
        if silent > _ANSWER:
            doing += f" (as last known: the driver does not answer for {silent:.0f} s)"
        return State(
            doing,
            waits_for if ranks is None or waits_for is None else ranks[waits_for],
            seconds,
            passes,
            in_step,
            collective is not None,
            _place_of(frames),
        )

    def _situation_in_words(self, ranks: Mapping[int, int] | None) -> tuple[str, int | None]:
        """Return, in a step, a phrase and the logical rank that the rank waits for."""
        marks = list(self._marks)
        situation = marks[0][0] if marks else self._situation
        if not self.in_step:
            return "", None
        if situation is None:
            return "is before its first pass", None
        if isinstance(situation, Pass | Pair):
            return f"is in {self._in_words(situation)}", None
        if isinstance(situation, Channel):
            reader = self._name(situation.target, ranks)
            return f"waits until {reader} takes what it has sent", situation.target
        channel, message = situation
        sender = self._name(channel.source, ranks)
        awaited = self._rules.awaited_in_words(self._placement, message, sender)
        return f"waits for {awaited}", channel.source

    def _name(self, logical: int, ranks: Mapping[int, int] | None) -> str:
        """Name a rank by its global rank, where that is known, and Megatron's pipeline rank."""
        placement = self._placement
        number = logical if placement is None else placement.pipeline_rank(logical)
        said = f"pipeline rank {number}"
        return said if ranks is None else f"rank {ranks[logical]} ({said})"

    def _in_words(self, work: Pass | Pair) -> str:
        passes = (work,) if isinstance(work, Pass) else work
        return ", with ".join(map(self._rules.pass_in_words, passes))


# The position of a thread, read from its stack by another one, without its cooperation.


def _frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost first; empty where it has ended."""
    frame = sys._current_frames().get(thread)
    return list(_outwards(frame))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _phase_of(frames: list[FrameType], phases: Phases) -> str | None:
    """Return the phrase of the innermost function that has one, None if none has."""
    for frame in frames:
        for (module, function), phrase in phases.items():
            if frame.f_code.co_name == function and _module(frame).startswith(module):
                return phrase
    return None


def _collective_of(frames: list[FrameType]) -> str | None:
    """Return the function of torch.distributed in which the thread waits for others, or None."""
    found = None
    for frame in frames:
        name = frame.f_code.co_name
        if _module(frame) == _COLLECTIVES and not name.startswith("_"):
            found = name
    return found


def _place_of(frames: list[FrameType]) -> str:
    """Describe the innermost functions outside of torch.

    For example ``step (optimizer.py:120), called by ...``.
    """
    own = [f for f in frames if not _module(f).startswith(("torch.", "contextlib"))]
    said = [
        f"{f.f_code.co_name} ({PurePath(f.f_code.co_filename).name}:{f.f_lineno})"
        for f in own[:_DEPTH]
    ]
    return ", called by ".join(said) or "nowhere: its thread has ended"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
