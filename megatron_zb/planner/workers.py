"""Processes that search several schedules in parallel."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

MOST = 8  # processes: each takes about 300 MB, and no schedule is shared between two
AFTER = 2.0  # seconds: what takes less is not worth the start of a process


class Each(Protocol):
    """Function like ``map``, with the results in the order of the items."""

    def __call__(
        self, call: Callable[[_Item], _Result], items: Iterable[_Item], /
    ) -> Iterator[_Result]: ...


@contextmanager
def workers(count: int | None = None, after: float | None = None) -> Iterator[Each]:
    """Yield a ``map`` over ``count`` processes; without one, over one for each core, 8 at most.

    Only this process works for the first ``after`` seconds (2, if not given). The others end with
    the context, at once where an exception leaves it.
    """
    count = count or min(len(os.sched_getaffinity(0)), MOST)
    others = time.monotonic() + (AFTER if after is None else after)
    with ExitStack() as context:
        pools: list[ProcessPoolExecutor] = []  # one at most, from when it is needed

        def each(call: Callable[[_Item], _Result], items: Iterable[_Item], /) -> Iterator[_Result]:
            rest = iter(items)
            for item in rest:
                if count == 1 or time.monotonic() < others:
                    yield call(item)
                    continue
                if not pools:
                    pools.append(context.enter_context(_pool(count)))
                with _held_back(signal.SIGINT):  # a process half started would be left behind
                    results = pools[0].map(call, [item, *rest])
                yield from results

        yield each


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Hold a signal back until the context ends; only the main thread ever meets one."""
    before = signal.getsignal(number)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(number, before)
    if came:
        signal.raise_signal(number)


@contextmanager
def _pool(count: int) -> Iterator[ProcessPoolExecutor]:
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield pool
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
