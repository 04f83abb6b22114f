"""Agreement of a job's ranks before and while they build: if one cannot go on, none does.

Ranks that disagree would wait for each other for ever, or train something else. Each leaves what
it is about to do, as named values, in a store that all can reach; rank 0 compares and leaves a
verdict, which every rank obeys. Nothing collective is called, so nothing hangs where a rank is
missing.

A rank that another has to wait for, but that itself waits for none, leaves its values alone: see
:func:`leave`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import DistStoreError, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from megatron_zb.errors import UsageError
from megatron_zb.parsing import Written, flag_of

# --- values that two processes can compare: equal text for the same meaning, on every host


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def comparable(value: Any) -> Any:
    """Return a value as JSON can hold it, without what differs between two processes.

    Numbers, texts and truth values stay what they are. A class or a function becomes its name, and
    any other object its type with its attributes, or its ``repr`` without an address in memory.
    """
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # NaN is not equal to itself
    if isinstance(value, Mapping):
        return {str(comparable(k)): comparable(v) for k, v in sorted(value.items(), key=_text)}
    if isinstance(value, set | frozenset):
        return sorted(map(comparable, value), key=str)
    if isinstance(value, list | tuple):
        return [comparable(one) for one in value]
    if isinstance(value, PurePath | Written):
        return str(value)
    return _described(value)


def _text(item: tuple[Any, Any]) -> str:
    return str(comparable(item[0]))


def _described(value: Any) -> Any:
    if isinstance(value, partial):
        return [_described(value.func), comparable(value.args), comparable(value.keywords)]
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value):
        attributes = {field.name: getattr(value, field.name, None) for field in fields(value)}
    elif isinstance(value, argparse.Namespace):
        attributes = vars(value)
    else:
        return _ADDRESS.sub("", repr(value))
    return [type(value).__qualname__, comparable(attributes)]


def named_arguments(
    args: argparse.Namespace,
    *,
    of_rank: Collection[str] = (),
    local: Collection[str] = (),
    flags: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return the comparable values of parsed arguments by the names that a message uses.

    Args:
        of_rank: attributes that are left out, because every rank has its own.
        local: those that each host may have another value of, such as a folder for its log: it
            counts only whether there is one.
        flags: those of the parser, where they are known; what is called otherwise on the command
            line, such as ``--no-bias-gelu-fusion``, then goes by the name of its attribute.
    """
    found = {}
    for name, value in vars(args).items():
        if name not in of_rank:
            flag = flag_of(name)
            said = flag if flags is None or flag in flags else name
            found[said] = value is not None if name in local else comparable(value)
    return found


# --- the meeting of the ranks


class Disagreement(UsageError):
    """Error of ranks that cannot run together; the message is the same on every rank.

    ``speaks`` is true on the one rank that reports it to the user.
    """

    def __init__(self, message: str, *, speaks: bool) -> None:
        super().__init__(message)
        self.speaks = speaks


def raise_it(error: UsageError, *, speaks: bool | None = None) -> NoReturn:
    """Raise an error that every rank has."""
    raise error


class Rendezvous:
    """The part of this rank in the agreement.

    Args:
        seconds: the longest wait for another rank.
        end: ends this rank for an error of the user; ``speaks`` is true on the rank that reports.
        store: of the job, where it is known already.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        seconds: float,
        *,
        end: Callable[..., NoReturn] = raise_it,
        store: Store | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._seconds = seconds
        self._store = store
        self.end = end

    def begin(self, name: str) -> None:
        """Take this rank's place in torch.distributed, which has been initialised."""
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        store = PrefixStore(name, _get_default_store())
        number = store.add(f"begun by {self._rank}", 1)  # of this process group
        self._store = PrefixStore(str(number), store)

    @property
    def is_possible(self) -> bool:
        """Whether this rank has the address of the job's store."""
        if self._store is not None or self._world_size == 1:
            return True
        return dist.is_initialized() or "MASTER_ADDR" in os.environ

    def store(self) -> Store:
        """Connect to the store of the job, once."""
        if self._store is None:
            self._store = self._connect()
        return self._store

    def agree(self, where: str, values: Mapping[str, Any], failure: Exception | None) -> bool:
        """Go on if every rank comes here with the same values and without a failure.

        Ends this rank with one sentence otherwise, or raises ``failure`` where that is what ends
        the job and nothing that the user can mend.

        Returns:
            Whether the ranks have met: not where the address of the job's store is not known yet.
        """
        can_meet = self.is_possible
        try:
            if can_meet:
                self._agree(where, values, failure)
            elif failure is not None:
                raise failure
        except Disagreement as error:
            if failure is None or isinstance(failure, UsageError) or not _tells(error, failure):
                self.end(error, speaks=error.speaks)
            raise failure from None
        except UsageError as error:
            self.end(error)
        return can_meet

    def _agree(self, where: str, values: Mapping[str, Any], failure: Exception | None) -> None:
        agree(
            PrefixStore(where, self.store()),
            self._rank,
            self._world_size,
            values,
            _in_one_line(failure),
            seconds=self._seconds,
        )

    def leave(self, where: str, failure: Exception) -> None:
        """Tell ranks that come here that this one does not, and why; wait for nothing."""
        if self._store is not None:
            with suppress(RuntimeError):
                leave(PrefixStore(where, self._store), self._rank, {}, _in_one_line(failure))

    def stay_away(self, where: str, values: Mapping[str, Any]) -> None:
        """Tell ranks that meet that this one does not; wait for nothing."""
        if self._world_size == 1:
            return
        with suppress(RuntimeError, OSError):  # then the others find that nobody comes
            store = store_of_launcher(_attempt())
            if store is not None:
                leave(PrefixStore(where, store), self._rank, values)

    def _connect(self) -> Store:
        if dist.is_initialized():
            return PrefixStore("megatron_zb", _get_default_store())
        return store_of_job(self._world_size, _attempt())


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _tells(error: Disagreement, failure: Exception) -> bool:
    """Return whether the failure of this rank is what ends the job."""
    return str(_in_one_line(failure)) in str(error)


def _in_one_line(failure: Exception | None) -> str | None:
    """Describe a failure in one line."""
    if failure is None:
        return None
    if isinstance(failure, UsageError):
        return str(failure)
    return " ".join("".join(traceback.format_exception_only(failure)).split())


def agree(
    store: Store,
    rank: int,
    world_size: int,
    values: Mapping[str, Any],
    problem: str | None = None,
    *,
    seconds: float,
) -> None:
    """Check that all ranks have the same values and no problem; otherwise raise on every rank.

    Args:
        values: what must be equal, by the names that a message uses; as JSON can hold them, other
            things count as their text.
        problem: why this rank cannot go on, if it cannot.
        seconds: how long a rank may let the others wait.

    Raises:
        Disagreement: names the first rank that differs, the value, and what it is on both.
    """
    _set(store, rank, values, problem, waits=True)
    if rank == 0:
        store.set("verdict", _verdict(store, world_size, seconds))
    deadline = time.monotonic() + 1.5 * seconds
    first = _given(store, 0, deadline)
    if first is not None and not first["waits"]:  # it gives no verdict
        mine = _given(store, rank, deadline)
        assert mine is not None, "this rank has just left it"
        different = compare({0: first, rank: mine}) or _missing(0, seconds)
        raise Disagreement(different, speaks=store.add("speaks", 1) == 1)
    verdict = None if first is None else _get(store, "verdict", deadline)
    if verdict is None:
        raise Disagreement(_missing(0, seconds), speaks=store.add("speaks", 1) == 1)
    if verdict:
        raise Disagreement(verdict, speaks=rank == 0)


def store_of_job(world_size: int, attempt: str) -> Store:
    """Connect to the store that the launcher of the job provides; waits until all ranks do.

    Args:
        attempt: distinguishes the starts of a job that is restarted.
    """
    if world_size == 1:
        return HashStore()
    store, _, _ = next(iter(rendezvous("env://")))
    return PrefixStore(f"megatron_zb/{attempt}", store)


def store_of_launcher(attempt: str) -> Store | None:
    """Connect to the same store and wait for no rank; None where no launcher like torchrun has one.

    With others, a rank of the job has the store, which it makes when it begins to wait.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, wait_for_workers=False)
    return PrefixStore(f"megatron_zb/{attempt}", store)


def leave(store: Store, rank: int, values: Mapping[str, Any], problem: str | None = None) -> None:
    """Store the values that the other ranks of :func:`agree` compare with, and wait for nobody."""
    _set(store, rank, values, problem, waits=False)


def _set(
    store: Store, rank: int, values: Mapping[str, Any], problem: str | None, *, waits: bool
) -> None:
    mine = {"problem": problem, "values": dict(values), "waits": waits}
    store.set(f"values/{rank}", json.dumps(mine, default=str))


def _given(store: Store, rank: int, deadline: float) -> dict[str, Any] | None:
    found = _get(store, f"values/{rank}", deadline)
    return None if found is None else json.loads(found)


def _missing(rank: int, seconds: float) -> str:
    return f"rank {rank} has not come to the start of the job within {seconds:g} s"


def _verdict(store: Store, world_size: int, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    ranks = {}
    for rank in range(world_size):
        given = _given(store, rank, deadline)
        if given is None:
            return _missing(rank, seconds)
        ranks[rank] = given
    return compare(ranks)


def _get(store: Store, key: str, deadline: float) -> str | None:
    """Return the value, or None if nobody has set it before the deadline."""
    left = max(deadline - time.monotonic(), 0.001)
    try:
        store.wait([key], timedelta(seconds=left))
    except (DistStoreError, RuntimeError):  # stores differ in how they say it
        return None
    return store.get(key).decode()


def compare(ranks: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the reason why these ranks cannot start together, or an empty string.

    A difference is reported first: the problem of a single rank may come from it. A rank with a
    problem may not have got as far as to know all values.
    """
    (first_rank, first), *others = ranks.items()
    for rank, given in others:
        differing = _first_difference(first, given)
        if differing is not None:
            here, there = (_describe(differing, g["values"]) for g in (first, given))
            if here == there:  # nothing, and not nothing of another kind
                here, there = (f"{differing} {g['values'].get(differing)}" for g in (first, given))
            what = "with different arguments" if differing.startswith("-") else "differently"
            return (
                f"the ranks were started {what}: {here} on rank {first_rank}, but {there} on rank "
                f"{rank}; start every rank with the same"
            )
    problems = {rank: given["problem"] for rank, given in ranks.items() if given["problem"]}
    if not problems:
        return ""
    rank, problem = next(iter(problems.items()))
    is_everyones = len(problems) == len(ranks) and len(set(problems.values())) == 1
    return problem if is_everyones else f"on rank {rank}: {problem}"


def _first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the name of the first value that is not the same, None if all are."""
    a, b = one["values"], other["values"]
    names = {**a, **b}
    if one["problem"] or other["problem"]:
        names = {name: None for name in names if name in a and name in b}
    for name in names:
        if (type(a.get(name)), a.get(name)) != (type(b.get(name)), b.get(name)):
            return name
    return None


def _describe(name: str, values: Mapping[str, Any]) -> str:
    value = values.get(name)
    if value is None or value is False:
        return f"no {name}"
    return name if value is True else f"{name} {value}"
