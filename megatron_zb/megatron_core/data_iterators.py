"""Iterators over microbatches: read once for both ends of a model, or read again from the start.

Megatron gives every chunk of a rank an iterator of its own over the same microbatches, and both
the first and the last stage read theirs. Where one rank has both, as in a V, it would load all data
twice: :class:`SharedReading` avoids that. A chunk that reads for two models reads once, too: see
:class:`ReadTwice`. A step that runs twice reads and draws the same both times: see :class:`Start`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_zb.megatron_core.random_streams import RandomState
from megatron_zb.megatron_core.step import Step, StepPart


class ReadingsPart(StepPart):
    """Reads each microbatch once on a rank that has the first and the last stage."""

    def __init__(self) -> None:
        self._readings = SharedReadings(), SharedReadings()  # of trainings, and of evaluations

    def before_step(self, step: Step) -> None:
        iterators = step.data_iterators
        held = [step.physical.stage(step.pp_rank, chunk) for chunk in range(len(iterators))]
        ends = (0, step.physical.placement.num_stages - 1)
        if len(held) > 1 and all(end in held for end in ends):
            readings = self._readings[step.forward_only]
            step.data_iterators = readings.shared(iterators, *map(held.index, ends))


class SharedReading:
    """Two iterators of one rank, of which only the first is read once both were seen to agree.

    The first microbatch is read from both and compared. If it differs, each goes on by itself.
    """

    def __init__(self, first: Iterator[Any], last: Iterator[Any]) -> None:
        self.iterators = (first, last)
        self._agree: bool | None = None
        self._ahead: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self.views: tuple[Iterator[Any], Iterator[Any]] = (_View(self, 0), _View(self, 1))
        """What each stage is to read instead of its own iterator, the same in every step."""

    def next(self, end: int) -> Any:
        """Return the next microbatch of the first (0) or the last stage (1).

        Raises:
            StopIteration: there is none.
        """
        ahead = self._ahead[end]
        if ahead:
            return ahead.popleft()
        if self._agree is None:
            both = [next(iterator) for iterator in self.iterators]
            self._agree = _equal(*both)
            for queue, found in zip(self._ahead, both, strict=True):
                queue.append(found)
            return ahead.popleft()
        if not self._agree:
            return next(self.iterators[end])
        found = next(self.iterators[0])
        self._ahead[1 - end].append(_copied(found))
        return found


class _View:
    """One reader's view of a reading of several; all else is asked of the reader's iterator."""

    def __init__(self, reading: SharedReading | ReadTwice | ReadAStepAhead, reader: int) -> None:
        self._reading, self._reader = reading, reader

    def __iter__(self) -> _View:
        return self

    def __next__(self) -> Any:
        return self._reading.next(self._reader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_reading"].iterators[self._reader], name)


class SharedReadings:
    """The shared readings of a job, one for each pair of iterators."""

    def __init__(self) -> None:
        self._found: list[SharedReading] = []

    def shared(self, iterators: list[Any], first: int, last: int) -> list[Any]:
        """Return the iterators of all chunks, of which those of the ends read together.

        Iterators that are one object, or save a state of their own, are left alone.
        """
        ends = (iterators[first], iterators[last])
        if None in ends or ends[0] is ends[1] or any(map(_saves_a_state, ends)):
            return iterators
        reading = next((it for it in self._found if it.iterators == ends), None)
        if reading is None:
            reading = SharedReading(*ends)
            self._found = [*self._found[-_MOST_READINGS + 1 :], reading]
        result = list(iterators)
        result[first], result[last] = reading.views
        return result


_MOST_READINGS = 4
"""Of iterators that are remembered: training, validation, test, and one to spare."""


def _saves_a_state(iterator: Any) -> bool:
    return hasattr(getattr(iterator, "iterable", iterator), "save_state")


def _equal(one: Any, other: Any) -> bool:
    """Return whether two microbatches are the same, as far as that can be seen."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one is None or (isinstance(one, str | bytes | int | float) and one == other)


def _copied(microbatch: Any) -> Any:
    """Return a microbatch whose entries can be replaced, on the same tensors."""
    return microbatch.copy() if isinstance(microbatch, dict | list) else microbatch


class Passing:
    """The microbatches of an iterator that pass a stage; all else is asked of the iterator."""

    def __init__(self, iterator: Any, units: Sequence[int]) -> None:
        self._iterator, self._units = iterator, iter(units)
        self._read = 0

    def __iter__(self) -> Passing:
        return self

    def __next__(self) -> Any:
        self._skip(next(self._units))
        self._read += 1
        return next(self._iterator)

    def finish(self, num_microbatches: int) -> None:
        """Leave the iterator at the first microbatch of the next step, if any has been read."""
        if self._read:
            self._skip(num_microbatches)

    def _skip(self, unit: int) -> None:
        while self._read < unit:
            next(self._iterator)
            self._read += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


class ReadTwice:
    """An iterator whose microbatches two readers take in turn, each at its own pace.

    A microbatch is kept until both have taken it, and is read only once.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterators = (iterator, iterator)
        self._ahead: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self._taken = [0, 0]

    def views(self) -> tuple[Iterator[Any], Iterator[Any]]:
        """Return what each reader is to read; all else is asked of the iterator."""
        return _View(self, 0), _View(self, 1)

    def next(self, reader: int) -> Any:
        """Return the next microbatch of a reader.

        Raises:
            StopIteration: there is none.
        """
        if not self._ahead[reader]:
            found = next(self.iterators[reader])
            self._ahead[reader].append(found)
            self._ahead[1 - reader].append(_copied(found))
        self._taken[reader] += 1
        return self._ahead[reader].popleft()

    def finish(self, num_microbatches: int) -> None:
        """Let both readers begin with the next step's first microbatch, if either has read any."""
        if not any(self._taken):
            return
        for reader, taken in enumerate(self._taken):
            for _ in range(num_microbatches - taken):
                self.next(reader)
        self._taken = [0, 0]


class ReadAStepAhead:
    """An iterator of which one reader takes microbatches of a step, and another of the next one.

    Both name microbatches by their place behind the start of the step. A microbatch is read once,
    and kept until the first reader has taken it.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterators = (iterator, iterator)
        self._read: deque[Any] = deque()
        self._places: tuple[Iterator[int], Iterator[int]] = (iter(()), iter(()))

    @property
    def is_ahead(self) -> bool:
        """Whether microbatches have been read that no step has had."""
        return bool(self._read)

    def views(self, num_microbatches: int, units: Sequence[int]) -> tuple[_View, _View]:
        """Return what the readers are to read in a step of so many microbatches.

        Args:
            num_microbatches: of the step.
            units: microbatches of the next step that the second reader takes, in their order.
        """
        later = (num_microbatches + unit for unit in units)
        self._places = iter(range(num_microbatches)), later
        return _View(self, 0), _View(self, 1)

    def next(self, reader: int) -> Any:
        """Return the next microbatch of a reader.

        Raises:
            StopIteration: there is none.
        """
        place = next(self._places[reader])
        self._fill(place + 1)
        found = self._read[place]
        if reader:
            return _copied(found)
        self._read[place] = None
        return found

    def finish(self, num_microbatches: int) -> None:
        """Let both readers begin with the next step, behind one of so many microbatches."""
        self._fill(num_microbatches)
        for _ in range(num_microbatches):
            self._read.popleft()

    def _fill(self, count: int) -> None:
        while len(self._read) < count:
            self._read.append(next(self.iterators[0]))


class TwiceRead:
    """Readings of the first chunk of a rank by two models, one for each iterator of a job."""

    def __init__(self) -> None:
        self._found: list[ReadTwice] = []

    def share(self, step: Step, units: Sequence[int] | None) -> None:
        """Let a second reader read beside the first chunk, from one iterator more of a step.

        Args:
            step: the step that begins.
            units: the microbatches of the second reader; None for all.
        """
        iterator = step.data_iterators[0]
        if iterator is None:  # as on tensor-parallel ranks that are sent what another one reads
            step.data_iterators = [*step.data_iterators, None]
            return
        reading = next((it for it in self._found if it.iterators[0] is iterator), None)
        if reading is None:
            reading = ReadTwice(iterator)
            self._found = [*self._found[-_MOST_READINGS + 1 :], reading]
        first, second = reading.views()
        own = second if units is None else Passing(second, units)
        step.data_iterators = [first, *step.data_iterators[1:], own]

    def finish(self, num_microbatches: int) -> None:
        """Let all readers begin with the next step, behind one of so many microbatches."""
        for reading in self._found:
            reading.finish(num_microbatches)


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)

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
        # chunks that share an iterator take turns, again in the order in which they will read
        replayed = {id(it): Replayed(it) for it in data_iterators if it is not None}
        self._replayed = list(replayed.values())
        self.data_iterators = [replayed.get(id(it)) for it in data_iterators]
        """Iterators to read from instead."""

    def go_back(self) -> None:
        """Draw and read again what has been drawn and read since."""
        self._random.restore()
        for data in self._replayed:
            data.go_back()

    def forget(self) -> None:
        """Stop recording, as no return to the start follows."""
        for data in self._replayed:
            data.go_on()
