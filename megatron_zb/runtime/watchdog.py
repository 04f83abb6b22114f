"""Watchdog that ends a job that has stopped, and reports the rank that holds it up.

A rank that is killed, suspended or stuck leaves all others waiting for ever. On every rank, a
thread watches the rank's progress and answers questions. A rank without progress for too long asks
all ranks of the job for their states, through a store. The answers, and the ranks that give none,
decide whether the job is slow or has stopped. In a job that has stopped, every rank reports its
state and the rank that holds up all others, and ends. A second thread watches the store itself: the
process that holds it may be the one that was suspended.

Any rank may ask at any time. Questions are numbered, and all ranks answer each. No call waits
inside the store, because a connection serves its calls one after the other.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store

from megatron_zb.runtime.progress import RankProgress, State

# --- questions among ranks, and the verdict


_PAUSE = 0.1  # seconds between two looks for answers
_WATCHED, _LEFT = "watched", "left"


@dataclass(frozen=True)
class Conclusion:
    """Reason for the end of a job: a sentence, and the ranks that are there to report it."""

    sentence: str
    ranks: tuple[int, ...]


class Inquiry:
    """One rank's side of the questions.

    ``heard`` is the ``time.monotonic`` of the store's last answer. ``asked_first`` is False where
    another rank was already asking when this one last did.

    Args:
        job: all ranks that may be asked.
        patience: seconds that all ranks together have to answer a question.
        stopped: set when nobody waits for answers any more.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        job: Collection[int],
        patience: float,
        stopped: threading.Event | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._job = tuple(job)
        self._stopped = stopped or threading.Event()
        self._patience = patience
        self._given: deque[tuple[float, int]] = deque()  # answers: when, and to which question
        self._number = 0  # of the next question
        self.asked_first = False
        self.heard = time.monotonic()

    def come(self) -> None:
        """Announce that this rank is watched from now on, and where: it answers."""
        self._call(self._store.set, f"host/{self._rank}", socket.gethostname())
        self._call(self._store.set, f"is/{self._rank}", _WATCHED)

    def host_of(self, rank: int) -> str | None:
        """Return the host of a rank that has been watched."""
        key = f"host/{rank}"
        if not self._call(self._store.check, [key]):
            return None
        return str(self._call(self._store.get, key).decode())

    def leave(self) -> None:
        """Announce that this rank ends, as it should: nobody is to wait for its answers."""
        self._call(self._store.set, f"is/{self._rank}", _LEFT)

    @property
    def was_asked(self) -> bool:
        """Whether there has been any question."""
        return self._number > 0

    def is_asked(self) -> bool:
        """Return whether there is a question without this rank's answer."""
        return bool(self._call(self._store.check, [f"question/{self._number}"]))

    def answer(self, state: State) -> None:
        """Answer with this rank's state; delete older answers, which nobody waits for any more."""
        told = {**asdict(state), "passes": ()}
        self._call(self._store.set, self._key(self._number, self._rank), json.dumps(told))
        now = time.monotonic()
        self._given.append((now, self._number))
        while now - self._given[0][0] > 2 * self._patience:
            self._call(self._store.delete_key, self._key(self._given.popleft()[1], self._rank))
        self._number += 1

    def ask(self, state: State) -> dict[int, State]:
        """Ask all ranks, and return the answers that come in time, the own one among them.

        A verdict ends the waiting: ranks that say one answer no more.
        """
        self.asked_first = True
        while self.is_asked():
            self.asked_first = False
            self.answer(state)
        number, me = self._number, str(self._rank)
        asking = self._call(self._store.compare_set, f"question/{number}", "", me)
        self.asked_first = self.asked_first and asking == me.encode()
        self.answer(state)
        keys = {rank: self._key(number, rank) for rank in self._job}
        deadline = time.monotonic() + self._patience
        while not self._call(self._store.check, list(keys.values())):
            is_over = time.monotonic() > deadline or self._has_verdict()
            if is_over or self._stopped.wait(_PAUSE):
                keys = {r: k for r, k in keys.items() if self._call(self._store.check, [k])}
                break
            if self.is_asked():  # by another one, who waits for this rank
                self.answer(state)
        return {rank: self._state(key) for rank, key in keys.items()}

    def not_there(self, answered: Collection[int]) -> tuple[list[int], list[int]]:
        """Return the ranks that have not answered and should have, and those that have left.

        A rank that has not come to its first step is neither: it may be loading for long.
        """
        silent: list[int] = []
        left: list[int] = []
        for rank in self._job:
            if rank in answered or not self._call(self._store.check, [f"is/{rank}"]):
                continue
            is_watched = self._call(self._store.get, f"is/{rank}") == _WATCHED.encode()
            (silent if is_watched else left).append(rank)
        return silent, left

    def end(self, verdict: Conclusion) -> None:
        """Store the verdict for all ranks; the first one counts."""
        self._call(self._store.compare_set, "verdict", "", json.dumps(asdict(verdict)))

    def verdict(self) -> Conclusion | None:
        """Return the verdict, None if there is none."""
        if not self._has_verdict():
            return None
        found = json.loads(self._call(self._store.get, "verdict"))
        return Conclusion(found["sentence"], tuple(found["ranks"]))

    def _has_verdict(self) -> bool:
        return bool(self._call(self._store.check, ["verdict"]))

    def told(self, verdict: Conclusion, seconds: float) -> None:
        """Mark this rank as reported, and wait for the others, which its end would end."""
        self._call(self._store.set, f"told/{self._rank}", "")
        keys = [f"told/{rank}" for rank in verdict.ranks]
        deadline = time.monotonic() + seconds
        while not self._call(self._store.check, keys) and time.monotonic() < deadline:
            time.sleep(_PAUSE)

    def _state(self, key: str) -> State:
        return State(**json.loads(self._call(self._store.get, key)))

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"answer/{number}/{rank}"

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        finally:  # an error is heard, too: the store is gone
            self.heard = time.monotonic()


def who_holds_up(states: Mapping[int, State], rank: int) -> int:
    """Return the rank that a rank waits for in the end: the first that waits for no message.

    Args:
        states: of the ranks that have answered; one that has not holds up the others.
    """
    seen = set()
    while rank in states and rank not in seen:
        seen.add(rank)
        after = states[rank].waits_for
        if after is None:
            break
        rank = after
    return rank


def judged(states: Mapping[int, State], silent: Collection[int], seconds: float) -> int | None:
    """Return the rank that holds up all others for good; None where the job may merely be slow.

    A rank that does not answer holds up the job wherever the others are. A rank that answers can
    only hold it up within a step: between two steps it may load data or write a checkpoint, however
    long that takes.

    Args:
        states: of the ranks that have answered, by rank.
        silent: ranks that are watched, have not left, and have not answered.
        seconds: without progress in a step, after which a rank counts as stuck.
    """
    stuck = [rank for rank, state in states.items() if state.in_step and state.seconds > seconds]
    ends = [who_holds_up(states, rank) for rank in stuck]
    gone = [rank for rank in ends if rank not in states]
    if gone:
        return gone[0]
    if silent:
        return min(silent)
    return next((rank for rank in ends if rank in stuck), None)


def sentence(
    rank: int, states: Mapping[int, State], has_left: bool = False, waited: float = 0.0
) -> str:
    """Describe which rank holds up all others, and how; it had ``waited`` seconds to answer."""
    if rank in states:
        how = f"it {states[rank].doing} for {states[rank].seconds:.0f} s"
    elif has_left:
        how = "it has left the job"
    else:
        how = (
            f"it does not answer within {waited:.0f} s, so it has been killed or stopped, or its "
            "host is gone"
        )
    return f"rank {rank} holds up all others: {how}"


def slowest(states: Mapping[int, State], asking: int) -> int:
    """Return the rank that the others probably wait for, where none holds them up for good."""
    end = who_holds_up(states, asking)
    if end != asking and end in states:
        return end
    busy = [r for r, s in states.items() if s.waits_for is None and not s.waits_for_all]
    return min(busy or states, key=lambda rank: (states[rank].seconds, rank))


# --- the watchdog


EXIT_CODE = 3
_TIME_TO_ANSWER = 5.0, 30.0  # seconds, for all ranks together: at least and at most
_TIME_TO_TELL = 3.0  # seconds, for all ranks to write what they have to say
_INTERVAL = 1.0  # seconds, between two looks
_LOOKS = 1000  # at the store in a second, of all ranks together


@dataclass(frozen=True)
class WatchedRank:
    """A rank's place: ``logical`` in its ``pipeline``, the global ranks in logical order.

    ``job`` are the global ranks of all pipelines; without any, there is only this one. With
    ``mirrored``, the logical order is the reverse of Megatron's.
    """

    logical: int
    pipeline: tuple[int, ...]
    job: tuple[int, ...] = ()
    mirrored: bool = False

    @property
    def pipeline_rank(self) -> int:
        """Megatron's pipeline rank."""
        return len(self.pipeline) - 1 - self.logical if self.mirrored else self.logical

    @property
    def rank(self) -> int:
        return self.pipeline[self.logical]


class Watchdog:
    """Watchdog of one rank, with threads of its own; tests replace the end of the process, ``end``.

    Args:
        seconds: without progress, after which the other ranks are asked.
        store: that all ranks of the job can reach.
        tell: called with each line of the report.
        patience: seconds that all ranks together have to answer; by default a tenth of the others,
            though not less than 5 and not more than 30.
    """

    def __init__(
        self,
        progress: RankProgress,
        place: WatchedRank,
        store: Store,
        seconds: float,
        *,
        tell: Callable[[str], None] | None = None,
        end: Callable[[int], Any] = os._exit,
        patience: float | None = None,
    ) -> None:
        self._progress = progress
        progress.keep_marks()
        self._place = place
        self._seconds = seconds
        self._tell = tell or _to_stderr
        self._end = end
        job = place.job or place.pipeline
        self._interval = max(min(_INTERVAL, seconds / 4), len(job) / _LOOKS)
        least, most = _TIME_TO_ANSWER
        usual = max(least, min(most, seconds / 10), 3 * self._interval)
        self._patience = usual if patience is None else patience
        self._pause = min(self._patience, seconds / 2)  # between two questions
        self._stopped = threading.Event()
        self._inquiry = Inquiry(_connection(store), place.rank, job, self._patience, self._stopped)
        self._holder = _holder(store)
        self._last_question = -math.inf
        self._known_wait = -math.inf  # is slow, and said to be: when it began
        self._ending = threading.Lock()
        self._threads = [
            threading.Thread(target=work, name=f"pipeline watchdog {number}", daemon=True)
            for number, work in enumerate((self._watch, self._watch_the_store))
        ]
        # a thread that is in the store when the interpreter ends would abort the process
        atexit.register(self.stop)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching, and let the others know that this rank will not answer."""
        self.begin_to_stop()
        for thread in self._threads:
            thread.join(self._patience)  # longer only where the store does not answer

    def begin_to_stop(self) -> None:
        """Let the threads end; wait for neither."""
        atexit.unregister(self.stop)
        self._stopped.set()

    def _watch(self) -> None:
        with suppress(Exception):
            self._inquiry.come()
        while self._goes_on():
            try:
                self._look()
            except Exception as error:  # the host of the store is gone, and the job with it
                self._end_without_others(error)
        with suppress(Exception):
            self._inquiry.leave()

    def _goes_on(self) -> bool:
        """Wait for the next look; return False after :meth:`stop`.

        The count of a process that was stopped meanwhile begins anew.
        """
        start = time.monotonic()
        goes_on = not self._stopped.wait(self._interval)
        if time.monotonic() - start > self._interval + min(self._seconds, self._patience) / 2:
            self._progress.begin_anew()
        return goes_on

    def _look(self) -> None:
        now = time.monotonic()
        if self._inquiry.is_asked():
            self._inquiry.answer(self._state())
            self._last_question = now
            self._count_wait_as_known()
        elif self._inquiry.was_asked and (verdict := self._inquiry.verdict()):
            self._end_with(verdict)
        elif self._is_still() and now - self._last_question > self._pause:
            self._ask()
            self._last_question = time.monotonic()

    def _is_still(self) -> bool:
        return self._progress.seconds() > self._seconds

    def _state(self) -> State:
        return self._progress.state(dict(enumerate(self._place.pipeline)))

    def _ask(self) -> None:
        states = self._inquiry.ask(self._state())
        if self._stopped.is_set():
            return
        if verdict := self._inquiry.verdict():
            self._end_with(verdict)
            return
        silent, left = self._inquiry.not_there(states)
        rank = judged(states, silent, self._seconds)
        if rank is not None:
            said = sentence(rank, states, rank in left, self._patience)
            if (host := self._inquiry.host_of(rank)) is not None:
                said += f"; it is on {host}"
            self._inquiry.end(Conclusion(said, tuple(states)))
            self._end_with(self._inquiry.verdict() or Conclusion(said, ()))
        elif not self._inquiry.asked_first:
            self._count_wait_as_known()
        elif self._progress.moved() != self._known_wait:
            self._tell_that_it_is_slow(states)

    def _count_wait_as_known(self) -> None:
        """Leave the report of this rank's wait to the rank that asked.

        A wait that has just begun is none that it asked about: this rank has moved since.
        """
        if time.monotonic() - (began := self._progress.moved()) > self._pause:
            self._known_wait = began

    def _tell_that_it_is_slow(self, states: dict[int, State]) -> None:
        """Report a slow rank, once for every wait, and from the rank alone that has asked first."""
        me = self._place.rank
        rank = slowest(states, me)
        if states[rank].in_step:  # it will move, or soon be found to be stuck
            return
        self._known_wait = self._progress.moved()
        self._tell(
            f"megatron_zb: rank {me} has made no progress for {states[me].seconds:.0f} s, but all "
            f"ranks in training answer, so the job goes on: rank {rank} {states[rank].doing} for "
            f"{states[rank].seconds:.0f} s, in {states[rank].place}"
        )

    def _end_with(self, verdict: Conclusion) -> None:
        """Write all that is known, let the others do so, and end."""
        if not self._ending.acquire(blocking=False):
            return
        self._report(verdict.sentence)
        with suppress(Exception):
            self._inquiry.told(verdict, _TIME_TO_TELL + self._interval)
        self._finish()

    def _end_without_others(self, error: Exception) -> None:
        """End a rank that is stuck in a step: a store that is gone takes the job along."""
        if not self._progress.in_step or not self._is_still():
            return
        if self._ending.acquire(blocking=False):
            self._report(f"nothing can be asked of the other ranks: {error}")
            self._finish()

    def _watch_the_store(self) -> None:
        while self._goes_on():
            unheard = time.monotonic() - self._inquiry.heard
            if unheard < self._patience + self._interval or not self._is_still():
                continue
            if self._ending.acquire(blocking=False):
                self._report(
                    f"{self._holder} does not answer for {unheard:.0f} s, so the process that "
                    "holds it has been killed or stopped, or its host is gone"
                )
                self._finish()

    def _report(self, conclusion: str) -> None:
        own = self._state()
        self._tell(
            f"megatron_zb: error: rank {self._place.rank} (pipeline rank "
            f"{self._place.pipeline_rank}, on {socket.gethostname()}) has made no progress for "
            f"{own.seconds:.0f} s: it {own.doing}"
        )
        self._tell(f"  its last passes: {'; '.join(own.passes) or 'none'}")
        self._tell(f"  it stands in {own.place}")
        self._tell(f"megatron_zb: error: {conclusion}")

    def _finish(self) -> None:
        self._stopped.set()
        self._end(EXIT_CODE)


def _connection(store: Any) -> Store:
    """Return a connection of its own: another thread may wait in the store for long.

    Older stores have only one.
    """
    try:
        connection: Store = store.clone()
    except Exception:  # it has no such method, or its kind has none
        connection = store
    return connection


def _holder(store: Any) -> str:
    """Describe the store, with what is known of the process that holds it."""
    inner = getattr(store, "_underlying_non_prefix_store", store)
    if getattr(inner, "host", None) is None:
        return "the store of the job"
    whose = "torchrun's" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0's"
    return f"the store of the job at {inner.host}:{inner.port}, {whose},"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
