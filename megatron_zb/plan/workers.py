"""Processes that search several schedules in parallel."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from typing import Protocol, TypeVar

from megatron_zb.children import end_with_parent

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
    """Yield a ``map`` over ``count`` processes; by default one for each core, 8 at most.

    This process is one of them. It starts the others after ``after`` seconds (2 by default), and
    they end with the context: at once where an exception leaves it.
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
                left = [item, *rest]
                resource_tracker.ensure_running()  # which would let signals through
                with _held_back():  # a process half started would be left behind
                    if not pools:
                        pools.append(context.enter_context(_pool(count - 1)))
                    futures = [pools[0].submit(call, one) for one in left]
                yield from _results(call, left, futures)

        yield each


def _results(
    call: Callable[[_Item], _Result], items: Sequence[_Item], futures: Sequence[Future[_Result]]
) -> Iterator[_Result]:
    """Yield the results in order; while one is computed elsewhere, compute a later one here."""
    here: dict[int, _Result] = {}
    for number, future in enumerate(futures):
        for later in range(number, len(futures)):
            if number in here or future.done():
                break
            if futures[later].cancel():
                here[later] = call(items[later])
        yield here.pop(number) if number in here else future.result()


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def _held_back() -> Iterator[None]:
    """Hold signals back until the context ends; processes that it starts never get a SIGINT.

    Ctrl-C goes to all processes of a terminal's job; this one ends the others.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []  # another thread, which does not block it, may meet a signal
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    held = [number for number in _SIGNALS if callable(handlers[number])]
    for number in held:
        signal.signal(number, lambda number, frame: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in held:
            signal.signal(number, handlers[number])
    for first in came[:1]:
        signal.raise_signal(first)


def _begin(parent: int) -> None:
    """Prepare a process that searches."""
    end_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


@contextmanager
def _pool(count: int) -> Iterator[ProcessPoolExecutor]:
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(),),
    )
    try:
        yield pool
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
