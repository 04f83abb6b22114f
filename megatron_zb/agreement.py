"""Before the first message: do all ranks mean the same run?

Ranks that disagree would wait for each other for ever, or train something else. Each leaves what
it is about to do, as named values, in a store that all can reach; rank 0 compares and leaves a
verdict, which every rank obeys. Nothing collective is called, so nothing hangs where a rank is
missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store

from megatron_zb.errors import UsageError


class Disagreement(UsageError):
    """The ranks cannot run together; the message is the same on every rank."""


def agree(
    store: Store,
    rank: int,
    world_size: int,
    values: Mapping[str, Any],
    problem: str | None = None,
    *,
    seconds: float,
) -> None:
    """Go on if every rank has the same values and no problem; otherwise raise on every rank.

    Args:
        values: what must be equal, by the names that a message uses; as JSON can hold them, other
            things count as their text.
        problem: why this rank cannot go on, if it cannot.
        seconds: how long a rank may let the others wait.

    Raises:
        Disagreement: names the first rank that differs, the value, and what it is on both.
    """
    mine = {"problem": problem, "values": dict(values)}
    store.set(f"values/{rank}", json.dumps(mine, default=str))
    if rank == 0:
        store.set("verdict", _verdict(store, world_size, seconds))
    verdict = _get(store, "verdict", time.monotonic() + 1.5 * seconds)
    if verdict is None:
        raise Disagreement(f"rank 0 has not come to the start of the job within {seconds:g} s")
    if verdict:
        raise Disagreement(verdict)


def _verdict(store: Store, world_size: int, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    ranks = []
    for rank in range(world_size):
        found = _get(store, f"values/{rank}", deadline)
        if found is None:
            return f"rank {rank} has not come to the start of the job within {seconds:g} s"
        ranks.append(json.loads(found))
    return compare(ranks)


def _get(store: Store, key: str, deadline: float) -> str | None:
    """The value, or None if nobody has set it before the deadline."""
    left = max(deadline - time.monotonic(), 0.001)
    try:
        store.wait([key], timedelta(seconds=left))
    except (DistStoreError, RuntimeError):  # stores differ in how they say it
        return None
    return store.get(key).decode()


def compare(ranks: list[dict[str, Any]]) -> str:
    """What keeps these ranks from starting, or an empty string."""
    problems = {rank: given["problem"] for rank, given in enumerate(ranks) if given["problem"]}
    if problems:
        rank, problem = next(iter(problems.items()))
        return problem if len(problems) == len(ranks) else f"on rank {rank}: {problem}"
    first = ranks[0]["values"]
    for rank, given in enumerate(ranks):
        own = given["values"]
        for name in {**first, **own}:
            if own.get(name) != first.get(name):
                return (
                    f"the ranks were started with different arguments: {_said(name, first)} on "
                    f"rank 0, but {_said(name, own)} on rank {rank}; start every rank with the "
                    "same"
                )
    return ""


def _said(name: str, values: Mapping[str, Any]) -> str:
    value = values.get(name)
    return f"no {name}" if value in (None, False) else f"{name} {value}"
