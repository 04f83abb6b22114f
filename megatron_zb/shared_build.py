"""One rank builds a schedule, and the others take its table from the store of the job.

A search takes seconds of a core and depends on what is installed; so one does it for all. What a
rank receives is parsed and validated like a file; nothing of it is executed.
"""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from megatron_zb import __version__
from megatron_zb.agreement import agree
from megatron_zb.errors import UsageError
from megatron_zb.schedules import cache, catalog
from megatron_zb.schedules.schedule import Schedule

Build = Callable[..., Schedule]

_LONGEST_START = 300.0  # seconds: imports from a slow disk differ between ranks
_LONGEST_SEARCH = 900.0  # seconds; a search of the largest sizes takes minutes without numba
_TIME_TO_READ = 10.0  # seconds
_PART = 4 * 2**20  # letters of a value: stores take no more than 8 MiB
_MOST_BYTES = 2**30
_BETWEEN_LOOKS = 0.05  # seconds


def job_store(rank: int, world_size: int, timeout: timedelta | None = None) -> Store:
    """The store that the ranks of a job share, which torch's process groups can use later, too.

    Under torchrun it is the agent's, otherwise rank 0 serves it at ``MASTER_ADDR``. Keys of an
    attempt are its own, so that one after a restart does not read those of the last.
    """
    if world_size == 1:
        store: Store = dist.HashStore()
    elif timeout is None:
        store, _, _ = next(iter(dist.rendezvous("env://", rank, world_size)))
    else:
        store, _, _ = next(iter(dist.rendezvous("env://", rank, world_size, timeout=timeout)))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"megatron_zb/{attempt}", store)


def is_in_a_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started with others, in a way that tells where they meet."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(environment.get(name) for name in needed) and int(environment["WORLD_SIZE"]) > 1


class SharedBuild:
    """Builds schedules on rank 0 of a job for all of its ranks; called like ``schedules.build``.

    Every rank has to ask for the same; the first time, all make sure of it before rank 0 starts.
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
        self._store: Store | None = None
        self._built: dict[str, Schedule] = {}

    def __call__(self, name: str, **request: Any) -> Schedule:
        """Build a schedule, or take over what rank 0 has built.

        Raises:
            UsageError: rank 0 cannot build it, the ranks ask for different ones, or one is
                missing; the same on every rank.
        """
        values = cache.described(name, request)
        key = cache.key_of(values)
        if key not in self._built:
            store = self._agreed_store(values)
            if self._rank == 0:
                self._built[key] = self._give(store, key, name, request)
            else:
                self._built[key] = self._take(store, key, name, request)
        return self._built[key]

    def _agreed_store(self, values: dict[str, Any]) -> Store:
        if self._store is None:
            store = self._connect()
            agree(
                dist.PrefixStore("asked", store),
                self._rank,
                self._world_size,
                {**_as_flags(values), "megatron_zb version": __version__},
                seconds=_LONGEST_START,
            )
            self._store = store
        return self._store

    def _give(self, store: Store, key: str, name: str, request: dict[str, Any]) -> Schedule:
        try:
            schedule = self._build(name, **request)
        except UsageError as error:
            self._tell(store, key, str(error))
            raise
        except BaseException as error:
            self._tell(store, key, f"rank 0 failed to build {name}: {error!r}")
            raise
        _put(store, key, cache.pack(schedule))
        return schedule

    def _tell(self, store: Store, key: str, problem: str) -> None:
        """Let all ranks read a problem before this one ends, which may serve the store."""
        _put(store, key, {"problem": problem})
        told = [_told(key, rank) for rank in range(1, self._world_size)]
        deadline = time.monotonic() + _TIME_TO_READ
        while told and not store.check(told) and time.monotonic() < deadline:
            time.sleep(_BETWEEN_LOOKS)

    def _take(self, store: Store, key: str, name: str, request: dict[str, Any]) -> Schedule:
        given = _get(store, key, self._seconds)
        if given is None:
            raise UsageError(
                f"rank 0 has not given the schedule {name} within {self._seconds:g} s: see what it "
                "says itself"
            )
        if isinstance(given, dict) and "problem" in given:
            store.set(_told(key, self._rank), "")
            raise UsageError(str(given["problem"]))
        try:
            return cache.unpack(given, name, request)
        except UsageError as error:
            raise UsageError(f"what rank 0 has given is no schedule: {error}") from error


def kept(folder: Path, say: Callable[[str], None], build: Build = catalog.build) -> Build:
    """A build that looks into a folder first and keeps what it has built there.

    Args:
        folder: where the schedules are, made if it is not there.
        say: is told in one line what of the folder cannot be used.
        build: makes what is not there.
    """
    folder_of_schedules = cache.Cache(folder)

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


def _as_flags(values: dict[str, Any]) -> dict[str, Any]:
    """By the names that a message about a difference uses."""
    said = {"schedule": "--pipeline-schedule", "memory_limit": "--pipeline-memory-limit"}
    return {said.get(name, name.replace("_", " ")): value for name, value in values.items()}


def _told(key: str, rank: int) -> str:
    return f"schedule/{key}/told/{rank}"


def _put(store: Store, key: str, value: dict[str, str]) -> None:
    """In parts, of which the number comes last."""
    packed = base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()
    parts = [packed[i : i + _PART] for i in range(0, len(packed), _PART)]
    for number, part in enumerate(parts):
        store.set(f"schedule/{key}/{number}", part)
    store.set(f"schedule/{key}", str(len(parts)))


def _get(store: Store, key: str, seconds: float) -> Any:
    """What rank 0 has put, None if it has not before the time is over.

    Raises:
        UsageError: it is not what :func:`_put` puts, or the store is gone with rank 0.
    """
    deadline = time.monotonic() + seconds
    try:
        while not store.check([f"schedule/{key}"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_BETWEEN_LOOKS)
        count = int(store.get(f"schedule/{key}"))
        packed = b"".join(store.get(f"schedule/{key}/{number}") for number in range(count))
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"rank 0 ended before it has given a schedule: {error}") from error
    try:
        unpacked = zlib.decompressobj()
        text = unpacked.decompress(base64.b64decode(packed, validate=True), _MOST_BYTES)
        return json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        raise UsageError(f"what rank 0 has given is no schedule: {error}") from error
