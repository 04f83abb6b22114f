"""Processes that look at several schedules side by side."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST = 8  # processes: each takes about 300 MB, and no schedule is shared between two


class Each(Protocol):
    """Call a function with each item, as ``map`` does: results in the order of the items."""

    def __call__(
        self, call: Callable[[_Item], _Result], items: Iterable[_Item], /
    ) -> Iterator[_Result]: ...


@contextmanager
def workers(count: int | None = None) -> Iterator[Each]:
    """Yield a ``map`` over ``count`` processes; without one, over one for each core, 8 at most.

    The processes end with the context, at once where an exception leaves it.
    """
    count = count or min(len(os.sched_getaffinity(0)), _MOST)
    if count == 1:
        yield map
        return
    pool = ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield pool.map
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
