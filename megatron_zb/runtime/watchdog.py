"""Ends a job whose pipeline has stopped, and says which rank holds it up.

A rank that is killed, stopped or stuck leaves all others waiting for its messages for ever. On
every rank a thread watches the rank's progress; when a step has had none for too long, it asks all
ranks of its pipeline, through a store, what they are doing, writes it down, and ends the process.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from megatron_zb.runtime.progress import Progress, State, who_holds_up

EXIT_CODE = 3
_TIME_TO_ANSWER = 5.0  # seconds, for all together
_INTERVAL = 1.0  # seconds, between two looks


@dataclass(frozen=True)
class Place:
    """A rank's place: ``logical`` in its ``pipeline``, the global ranks in logical order."""

    logical: int
    pipeline: tuple[int, ...]


class Watchdog:
    """Watches one rank from a thread of its own; ``end`` takes the place of the end, in tests.

    Args:
        seconds: without progress in a step, after which the job is ended.
        store: that all ranks of the job can reach.
        tell: what to do with each line of the report.
    """

    def __init__(
        self,
        progress: Progress,
        place: Place,
        store: Store,
        seconds: float,
        *,
        tell: Callable[[str], None] | None = None,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self._progress = progress
        self._place = place
        self._store = store
        self._seconds = seconds
        self._tell = tell or _to_stderr
        self._end = end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pipeline watchdog", daemon=True)
        # a thread that is in the store when the interpreter ends would abort the process
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        atexit.unregister(self.stop)
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        interval = min(_INTERVAL, self._seconds / 4)
        while not self._stopped.wait(interval):
            if self._progress.seconds() > self._seconds and self._progress.in_step:
                self._report()
                self._end(EXIT_CODE)
                return
            if self._is_asked():
                self._answer()

    def _is_asked(self) -> bool:
        try:
            return self._store.check([self._question])
        except Exception:  # the host of the store is gone, and the job with it
            return False

    def _answer(self) -> State:
        own = self._progress.state()
        self._store.set(self._key(self._place.logical), json.dumps(asdict(own)))
        return own

    def _report(self) -> None:
        me = self._place.pipeline[self._place.logical]
        own = self._progress.state()
        self._tell(
            f"megatron_zb: error: rank {me} (pipeline rank {self._place.logical} in schedule "
            f"order) has made no progress for {own.seconds:.0f} s: it {own.doing}"
        )
        self._tell(f"  its last passes: {'; '.join(own.passes) or 'none'}")
        try:
            self._store.set(self._question, "")
            self._answer()
        except Exception as error:
            self._tell(f"megatron_zb: error: nothing can be asked of the other ranks: {error}")
            return
        states = {self._place.logical: own, **self._others()}
        self._tell(self._verdict(states))

    def _others(self) -> dict[int, State]:
        """What the other ranks of the pipeline tell; a rank that is gone tells nothing."""
        found = {}
        deadline = time.monotonic() + _TIME_TO_ANSWER
        for logical in range(len(self._place.pipeline)):
            if logical == self._place.logical:
                continue
            left = timedelta(seconds=max(0.05, deadline - time.monotonic()))
            try:
                self._store.wait([self._key(logical)], left)
                found[logical] = State(**json.loads(self._store.get(self._key(logical))))
            except Exception:  # a store says in many ways that there is nothing, or that it is gone
                continue
        return found

    def _verdict(self, states: dict[int, State]) -> str:
        logical = who_holds_up(states, self._place.logical)
        rank = self._place.pipeline[logical]
        if logical not in states:
            return (
                f"megatron_zb: error: rank {rank} holds up all others: it does not answer, so it "
                "has been killed or stopped, or its host is gone"
            )
        state = states[logical]
        return (
            f"megatron_zb: error: rank {rank} holds up all others: it {state.doing} for "
            f"{state.seconds:.0f} s"
        )

    def _key(self, logical: int) -> str:
        return f"state/{self._place.pipeline[logical]}"

    @property
    def _question(self) -> str:
        return f"asked/{min(self._place.pipeline)}"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
