"""Schedules built by one rank for all, and kept in a folder for the next job.

A search takes seconds of a core and depends on what is installed; so one rank does it, and the
others take the table from the store of the job. What a rank receives is parsed and validated like a
file; nothing of it is executed.

A file of the cache is JSON: the request, and the compute-only table that came of it. It is checked
like any file from elsewhere: one that does not fit the request is not used.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from megatron_zb import __version__, files
from megatron_zb.errors import UsageError
from megatron_zb.job.agreement import compare
from megatron_zb.parsing import Written
from megatron_zb.schedules import catalog, interchange
from megatron_zb.schedules.catalog import Build
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.adapters import Adapters
from megatron_zb.schedules.features.second_model import SecondModel
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Limit, keeps
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search import kernels
from megatron_zb.schedules.simulator import simulate

# --- the folder


_FIELDS = ("reason", "table")
_MOST_FILE_BYTES = 256 * 2**20


def described(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Describe a request for a schedule in JSON values: equal for equal calls of ``build``.

    Args:
        name: of the schedule.
        request: the keyword arguments of ``schedules.build``.
    """
    values: dict[str, Any] = {"schedule": name}
    for key, value in sorted(request.items()):
        if isinstance(value, Costs):
            values[key] = hashlib.sha256(repr(value).encode()).hexdigest()[:16]
        elif isinstance(value, Placement):
            values[key] = [value.name, *value.rank_of]
        elif isinstance(value, Written | Adapters | SecondModel):
            values[key] = repr(value)  # its text may be less
        else:
            values[key] = value
    return values


def key_of(values: dict[str, Any]) -> str:
    """Return a digest of a described request."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:24]


def pack(schedule: Schedule) -> dict[str, str]:
    """Return a schedule as texts: its reason and its table."""
    return {"reason": schedule.reason, "table": interchange.to_csv(schedule)}


def unpack(texts: Any, name: str, request: dict[str, Any]) -> Schedule:
    """Parse and validate the schedule of :func:`pack`.

    Args:
        texts: what was packed, or anything else.
        name, request: what it must be the schedule of, as for :func:`described`.

    Raises:
        UsageError: it is none, or for other sizes, another placement or another memory limit.
    """
    if not isinstance(texts, dict) or not all(isinstance(texts.get(f), str) for f in _FIELDS):
        raise UsageError("it holds no schedule")
    found = catalog.from_table(name, texts["table"], request)
    p, m = request["pipeline_size"], request["num_microbatches"]
    sizes = (found.placement.pipeline_size, found.rules.step_microbatches(found))
    if sizes != (p, m):
        raise UsageError(
            f"its table is for {sizes[0]} ranks and {sizes[1]} microbatches, not for {p} and {m}"
        )
    placement, trained = request.get("placement"), found.placement.of_trained
    if placement is not None and trained.rank_of != placement.rank_of:
        raise UsageError("its stages stand elsewhere")
    if request.get("chunks") not in (None, trained.chunks):
        raise UsageError(f"it has {trained.chunks} chunks per rank")
    limit = Limit.of(request.get("memory_limit"), p)
    costs: Costs | None = request.get("costs")
    if costs is not None:
        most = limit.per_rank(costs)
        if most is not None and not keeps(simulate(found, costs).peak_memory, most):
            raise UsageError("it does not keep the memory limit")
    return replace(found, reason=texts["reason"])


class Cache:
    """A folder of schedules; a second job that requests the same finds it there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str, request: dict[str, Any]) -> Path:
        """Return the file of a request; it depends on the version and on compiled kernels."""
        return self._folder / f"{key_of(_asked(name, request))}.json"

    def read(self, name: str, request: dict[str, Any]) -> Schedule | None:
        """Return the schedule that was kept for a request, None if there is no file.

        Raises:
            UsageError: there is a file, and it is not that of the request.
        """
        path = self.path(name, request)
        try:
            text = files.read_text(path, _MOST_FILE_BYTES)
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
        try:
            kept = json.loads(text)
            if not isinstance(kept, dict) or kept.get("asked") != _asked(name, request):
                raise UsageError("it was kept for something else")
            return unpack(kept.get("schedule"), name, request)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is no kept schedule: {error}") from error
        except UsageError as error:
            raise UsageError(f"{path} is no kept schedule: {error}") from error

    def write(self, name: str, request: dict[str, Any], schedule: Schedule) -> None:
        """Write a schedule; whoever reads meanwhile finds the whole file or none.

        Raises:
            UsageError: the file cannot be written.
        """
        kept = {"asked": _asked(name, request), "schedule": pack(schedule)}
        files.write_text(self.path(name, request), json.dumps(kept))


def _asked(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return all values that a kept schedule depends on, as JSON gives them back."""
    mine = {"version": __version__, "compiled": kernels.available()}
    whole: dict[str, Any] = json.loads(json.dumps({**described(name, request), **mine}))
    return whole


# --- one rank for all


_LONGEST_SEARCH = 900.0  # seconds; a search of the largest sizes takes minutes without numba
_TIME_TO_READ = 10.0  # seconds
_PART = 4 * 2**20  # letters of a value: stores take no more than 8 MiB
_MOST_BYTES = 2**30
_BETWEEN_LOOKS = 0.05  # seconds


class SharedBuild:
    """Builder of schedules on rank 0 of a job for all ranks; called like ``schedules.build``.

    All ranks request the same schedules in the same order. One that requests another raises.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        rank: int,
        world_size: int,
        build: Build = catalog.build,
        *,
        seconds: float = _LONGEST_SEARCH,
    ) -> None:
        """Connect at the first call.

        Args:
            connect: gives the store of the job.
            rank, world_size: of this process in the job.
            build: what rank 0 builds with.
            seconds: how long rank 0 may take.
        """
        self._connect, self._rank, self._world_size = connect, rank, world_size
        self._build, self._seconds = build, seconds
        self._connected: Store | None = None
        self._built: dict[str, Schedule] = {}
        self._asked = 0
        self._has_reported = False

    def __call__(self, name: str, **request: Any) -> Schedule:
        """Build a schedule, or take over what rank 0 has built.

        Raises:
            UsageError: rank 0 cannot build it or requests another.
        """
        values = described(name, request)
        key = key_of(values)
        if key not in self._built:
            number, self._asked = self._asked, self._asked + 1
            if self._rank == 0:
                self._built[key] = self._give(number, values, name, request)
            else:
                self._built[key] = self._take(number, values, name, request)
        return self._built[key]

    def abandon(self, error: Exception) -> None:
        """Report to the ranks that wait for a schedule why rank 0 requests none."""
        if self._rank == 0 and self._world_size > 1 and not self._has_reported:
            _put(self._store, f"{self._asked}/asked", {"problem": _describe(error)})
            self._has_reported = True

    @property
    def _store(self) -> Store:
        if self._connected is None:
            self._connected = PrefixStore("schedule", self._connect())
        return self._connected

    def _give(
        self, number: int, values: dict[str, Any], name: str, request: dict[str, Any]
    ) -> Schedule:
        self._has_reported = False
        _put(self._store, f"{number}/asked", _as_flags(values))
        try:
            schedule = self._build(name, **request)
            packed = pack(schedule)
        except BaseException as error:
            self._tell(number, error, name)
            raise
        _put(self._store, f"{number}/built", packed)
        return schedule

    def _tell(self, number: int, error: BaseException, name: str) -> None:
        """Let all ranks read a problem before this one, which may serve the store, ends."""
        refused = isinstance(error, UsageError)
        problem = str(error) if refused else f"rank 0 failed to build {name}: {error!r}"
        self._has_reported = True
        _put(self._store, f"{number}/built", {"problem": problem})
        told = [f"{number}/told/{rank}" for rank in range(1, self._world_size)]
        deadline = time.monotonic() + _TIME_TO_READ
        while told and not self._store.check(told) and time.monotonic() < deadline:
            time.sleep(_BETWEEN_LOOKS)

    def _take(
        self, number: int, values: dict[str, Any], name: str, request: dict[str, Any]
    ) -> Schedule:
        asked = self._given(number, "asked", name)
        different = compare(
            {
                r: {"problem": None, "values": v}
                for r, v in ((0, asked), (self._rank, _as_flags(values)))
            }
        )
        if different:
            raise UsageError(different)
        given = self._given(number, "built", name)
        try:
            return unpack(given, name, request)
        except UsageError as error:
            raise UsageError(f"what rank 0 has given is no schedule: {error}") from error

    def _given(self, number: int, what: str, name: str) -> dict[str, Any]:
        """Wait for a value from rank 0 and return it.

        Raises:
            UsageError: it gives a problem, nothing in time, or nothing that can be read.
        """
        given = _get(self._store, f"{number}/{what}", self._seconds)
        if given is None:
            raise UsageError(
                f"rank 0 has not given the schedule {name} within {self._seconds:g} s: see what it "
                "says itself"
            )
        if not isinstance(given, dict):
            raise UsageError("what rank 0 has given is no schedule: it is no mapping")
        if "problem" in given:
            self._store.set(f"{number}/told/{self._rank}", "")
            raise UsageError(str(given["problem"]))
        return given


def kept(folder: Path, say: Callable[[str], None], build: Build = catalog.build) -> Build:
    """Return a build function that looks into a folder first and keeps new schedules there.

    Args:
        folder: of the schedules, made if it is not there.
        say: called with a line for everything in the folder that cannot be used.
        build: builds the schedules that are not there.
    """
    folder_of_schedules = Cache(folder)

    def build_or_find(name: str, **request: Any) -> Schedule:
        try:
            found = folder_of_schedules.read(name, request)
        except UsageError as error:
            say(f"searching anew: {error}")
            found = None
        if found is not None:
            say(f"the schedule is taken from {folder_of_schedules.path(name, request)}")
            return found
        schedule = build(name, **request)
        try:
            folder_of_schedules.write(name, request, schedule)
        except UsageError as error:
            say(f"the schedule is not kept: {error}")
        return schedule

    return build_or_find


def build_with_cache(folder: str | None, rank: int) -> Build:
    """Return a build function that keeps schedules in a folder, if one is given; rank 0 reports."""

    def say(line: str) -> None:
        if rank == 0:
            print(f"megatron_zb: {line}", flush=True)

    return catalog.build if folder is None else kept(Path(folder), say)


def _as_flags(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values by the names that messages use, as JSON gives them back."""
    said = {"schedule": "--pipeline-schedule", "memory_limit": "--pipeline-memory-limit"}
    named = {said.get(name, name.replace("_", " ")): value for name, value in values.items()}
    found: dict[str, Any] = json.loads(json.dumps({**named, "megatron_zb version": __version__}))
    return found


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, UsageError) else f"rank 0 failed: {error!r}"


def _put(store: Store, key: str, value: dict[str, Any]) -> None:
    """Store a value in parts, and the number of parts last."""
    packed = base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()
    parts = [packed[i : i + _PART] for i in range(0, len(packed), _PART)]
    for number, part in enumerate(parts):
        store.set(f"{key}/{number}", part)
    store.set(key, str(len(parts)))


def _get(store: Store, key: str, seconds: float) -> Any:
    """Return the value that rank 0 has stored, None if there is none within ``seconds``.

    Raises:
        UsageError: it is not what :func:`_put` puts, or the store is gone with rank 0.
    """
    deadline = time.monotonic() + seconds
    try:
        while not store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_BETWEEN_LOOKS)
        count = int(store.get(key))
        packed = b"".join(store.get(f"{key}/{number}") for number in range(count))
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"rank 0 ended before it has given a schedule: {error}") from error
    try:
        unpacked = zlib.decompressobj()
        text = unpacked.decompress(base64.b64decode(packed, validate=True), _MOST_BYTES)
        return json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        raise UsageError(f"what rank 0 has given is no schedule: {error}") from error
