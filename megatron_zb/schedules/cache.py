"""Cache of searched schedules in a folder.

A file is JSON: the request, and the compute-only table that came of it. It is checked like any
file from elsewhere: one that does not fit the request is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_zb import __version__, files
from megatron_zb.errors import UsageError
from megatron_zb.schedules import catalog, interchange
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.limit import Limit
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import keeps
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search import kernels
from megatron_zb.schedules.simulator import simulate

_FIELDS = ("reason", "table")
_MOST_BYTES = 256 * 2**20


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
    found = interchange.from_csv(texts["table"], name=catalog.family(name).name)
    p, m = request["pipeline_size"], request["num_microbatches"]
    sizes = (found.placement.pipeline_size, found.num_microbatches)
    if sizes != (p, m):
        raise UsageError(
            f"its table is for {sizes[0]} ranks and {sizes[1]} microbatches, not for {p} and {m}"
        )
    placement = request.get("placement")
    if placement is not None and found.placement.rank_of != placement.rank_of:
        raise UsageError("its stages stand elsewhere")
    if request.get("chunks") not in (None, found.placement.chunks):
        raise UsageError(f"it has {found.placement.chunks} chunks per rank")
    limit = Limit.of(request.get("memory_limit"), request.get("memory_limit_bytes"), p)
    costs: Costs | None = request.get("costs")
    if costs is not None:
        most = limit.per_rank(costs)
        if most is not None and not keeps(simulate(found, costs).peak_memory, most):
            raise UsageError("it does not keep the memory limit")
    return replace(found, reason=texts["reason"])


class Cache:
    """A folder of schedules; a second job that asks for the same finds it there."""

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
            text = files.read_text(path, _MOST_BYTES)
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
        unfinished = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, unfinished = tempfile.mkstemp(dir=self._folder, suffix=".unfinished")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(kept, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, self.path(name, request))
        except OSError as error:
            if unfinished is not None:
                with suppress(OSError):
                    os.unlink(unfinished)
            raise UsageError(f"cannot write into {self._folder}: {error.strerror}") from error


def _asked(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return all values that a kept schedule depends on, as JSON gives them back."""
    mine = {"version": __version__, "compiled": kernels.available()}
    whole: dict[str, Any] = json.loads(json.dumps({**described(name, request), **mine}))
    return whole
