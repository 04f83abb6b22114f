"""Vector clocks of streams, the memory that kernels touch, and the violations of their order."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import NamedTuple

COMPUTE = 0
"""The stream that is current where nobody has chosen one."""

BEFORE, BETWEEN = OUTSIDE_OF_PASSES = "before", "between passes"
"""Labels of what runs in no pass."""

_SHOWN_FRAMES = 4
_OUTSIDE = ("/sanitizer/", "/torch/", "contextlib", "<")
_ADDRESSES_KEPT = 500

Clock = dict[int, int]
Frames = tuple[tuple[CodeType, int], ...]
"""The number of the latest kernel of each stream that has happened."""


class Violation(NamedTuple):
    """Two uses of the same memory in no order.

    Attributes:
        kind: "race", or "use after free" where the memory was handed out again meanwhile.
        first: what came later on the host.
        second: what it is not ordered with.
    """

    kind: str
    first: str
    second: str


class Bytes(NamedTuple):
    """Bytes of a storage, from ``start`` to ``end``."""

    key: int
    start: int
    end: int


@dataclass(frozen=True)
class Access:
    """A kernel that reads or writes bytes of a storage."""

    stream: int
    number: int
    what: str
    label: str
    start: int
    end: int
    writes: bool
    frames: Frames

    def overlaps(self, other: Access) -> bool:
        return self.start < other.end and other.start < self.end

    def covers(self, other: Access) -> bool:
        return self.start <= other.start and other.end <= self.end

    def conflicts(self, other: Access) -> bool:
        return (self.writes or other.writes) and self.overlaps(other)


@dataclass
class Storage:
    """A live storage: the stream of its pool, its uses, and the streams that it is recorded for."""

    stream: int
    is_gone: Callable[[], bool]
    accesses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)

    def note(self, access: Access) -> None:
        """Forget the uses that nothing can be in conflict with before it is with this one."""
        self.accesses = [
            other
            for other in self.accesses
            if not access.covers(other)
            or not (access.writes or (not other.writes and other.stream == access.stream))
        ]
        self.accesses.append(access)


@dataclass
class Order:
    """What has happened in a process: streams with their clocks, and memory.

    Attributes:
        current: the stream that is current.
        label: the pass that is running.
        is_tracking: whether violations, and host waits inside passes, are noted.
        is_quiet: whether operations are left out.
    """

    current: int = COMPUTE
    label: str = BEFORE
    is_tracking: bool = False
    is_quiet: bool = False
    kernels: int = 0
    violations: Counter[Violation] = field(default_factory=Counter)
    host_waits: Counter[str] = field(default_factory=Counter)
    names: dict[int, str] = field(default_factory=lambda: {COMPUTE: "compute"})
    _clocks: dict[int, Clock] = field(default_factory=lambda: {COMPUTE: {COMPUTE: 0}})
    _host: Clock = field(default_factory=dict)
    _storages: dict[int, Storage] = field(default_factory=dict)
    _shared: dict[int, Storage] = field(default_factory=dict)
    _freed: dict[int, list[Access]] = field(default_factory=lambda: defaultdict(list))

    # --- streams and events

    def new_stream(self, name: str) -> int:
        number = len(self._clocks)
        self._clocks[number] = {**self._host, number: 0}
        self.names[number] = name
        return number

    def state(self, stream: int) -> Clock:
        """Return what an event holds that is recorded on a stream now."""
        return dict(self._clocks[stream])

    def wait(self, stream: int, state: Clock) -> None:
        """Make a stream wait for an event."""
        self._look_for_freed()
        _join(self._clocks[stream], state)

    def host_wait(self, state: Clock, what: str) -> None:
        """Make the host wait for an event."""
        self.learn(state)
        if self.is_tracking and self.label not in OUTSIDE_OF_PASSES:
            code = next((code for code, _ in _frames()), None)
            where = "" if code is None else f" in {code.co_name} ({_file(code)})"
            self.host_waits[f"{what}{where}"] += 1

    def learn(self, state: Clock) -> None:
        """Tell the host that an event has happened."""
        self._look_for_freed()
        _join(self._host, state)

    def wait_for_all(self, what: str) -> None:
        """Make the host wait for the device."""
        self._end_all()
        self.host_wait({}, what)

    def _end_all(self) -> None:
        for stream in list(self._clocks):
            self.learn(self.state(stream))

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Note violations and host waits in this context, from a device that has nothing to do."""
        self._end_all()
        self._freed.clear()
        self.violations.clear()
        self.host_waits.clear()
        self.is_tracking = True
        try:
            yield
        finally:
            self.is_tracking, self.label = False, BEFORE

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Leave out the operations of this context."""
        before, self.is_quiet = self.is_quiet, True
        try:
            yield
        finally:
            self.is_quiet = before

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Make a stream current in this context."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _has_happened(self, access: Access, clock: Clock) -> bool:
        known = max(clock.get(access.stream, -1), self._host.get(access.stream, -1))
        return access.number <= known

    # --- memory

    def knows(self, key: int) -> bool:
        return key in self._storages

    def hand_out(self, key: int, nbytes: int, is_gone: Callable[[], bool]) -> None:
        """Note a new storage, from the pool of the stream that is current, as one that it wrote."""
        self._look_for_freed()
        if len(self._storages) % _ADDRESSES_KEPT == 0:
            self._forget_gone()
        clock = self._clocks[self.current]
        access = self._access(Bytes(key, 0, nbytes), "allocation", _frames(), writes=True)
        for freed in self._freed.pop(self.current, []):
            if not self._has_happened(freed, clock):
                self._report("use after free", freed, access)
        self._storages[key] = Storage(self.current, is_gone, [access])

    def record(self, key: int, stream: int) -> None:
        """Keep memory until what is on a stream now has happened, when it is freed."""
        self._storages[key].recorded.add(stream)

    def _look_for_freed(self) -> None:
        gone = [key for key, storage in self._shared.items() if storage.is_gone()]
        for key in gone:
            self._free(self._shared.pop(key))
            self._storages.pop(key, None)

    def _forget_gone(self) -> None:
        """Forget what one stream alone has used: it is in order with what comes next there."""
        self._storages = {k: s for k, s in self._storages.items() if not s.is_gone()}

    def _free(self, storage: Storage) -> None:
        """Keep the uses that an event of neither the pool's nor a recorded stream waits for."""
        clocks = [self._clocks[stream] for stream in (storage.stream, *storage.recorded)]
        for access in storage.accesses:
            if not any(self._has_happened(access, clock) for clock in clocks):
                self._freed[storage.stream].append(access)

    # --- kernels

    def launch(
        self, stream: int, reads: Iterable[Bytes], writes: Iterable[Bytes], what: str
    ) -> None:
        """Note a kernel; all storages are known."""
        clock = self._clocks[stream]
        _join(clock, self._host)
        self.kernels += 1
        clock[stream] = self.kernels
        frames = _frames()
        with self.on(stream):
            accesses = [(b.key, self._access(b, what, frames, writes=False)) for b in reads]
            accesses += [(b.key, self._access(b, what, frames, writes=True)) for b in writes]
        for key, access in accesses:
            storage = self._storages[key]
            for other in storage.accesses:
                if self._races(access, other, clock):
                    self._report("race", access, other)
            storage.note(access)
            if stream != storage.stream:
                self._shared[key] = storage

    def _races(self, access: Access, other: Access, clock: Clock) -> bool:
        if other.stream == access.stream or not access.conflicts(other):
            return False
        return not self._has_happened(other, clock)

    def _access(self, where: Bytes, what: str, frames: Frames, *, writes: bool) -> Access:
        number = self._clocks[self.current].get(self.current, 0)
        span = where.start, where.end
        return Access(self.current, number, what, self.label, *span, writes, frames)

    def _report(self, kind: str, first: Access, second: Access) -> None:
        if self.is_tracking:
            self.violations[Violation(kind, self._text(first), self._text(second))] += 1

    def _text(self, access: Access) -> str:
        place = " < ".join(_name(code, line) for code, line in access.frames)
        return f"{access.what} on {self.names[access.stream]} in {access.label}, {place}"


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, -1) < number:
            clock[stream] = number


_IS_OUTSIDE: dict[CodeType, bool] = {}


def _frames() -> Frames:
    """Return the innermost functions that are not torch's nor of the sanitizer."""
    frame: FrameType | None = sys._getframe(1)
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _SHOWN_FRAMES:
        code = frame.f_code
        outside = _IS_OUTSIDE.get(code)
        if outside is None:
            outside = any(part in code.co_filename for part in _OUTSIDE)
            _IS_OUTSIDE[code] = outside
        if not outside:
            found.append((code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _file(code: CodeType) -> str:
    return code.co_filename.rpartition("/")[2]


def _name(code: CodeType, line: int) -> str:
    return f"{code.co_name} ({_file(code)}:{line})"
