"""Questions among the ranks of a job, through a store, about the state of each, and the verdict.

Any rank may ask at any time; a question has a number, all ranks answer it, and the next one has
the next number. No call waits in the store, which one connection answers in turn.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store

from megatron_zb.runtime.watchdog.progress import State

_PAUSE = 0.1  # seconds between two looks for answers
_WATCHED, _LEFT = "watched", "left"


@dataclass(frozen=True)
class Conclusion:
    """Reason for the end of a job: a sentence, and the ranks that are there to report it."""

    sentence: str
    ranks: tuple[int, ...]


class Inquiry:
    """One rank's part in questions. ``heard`` is the ``time.monotonic`` of the store's last answer.

    ``asked_first`` is whether no other rank was asking already when this one last did.

    Args:
        job: all ranks that may be asked.
        patience: seconds that all ranks together have to answer a question.
        stopped: is set when nobody waits for answers any more.
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
        """Announce that this rank is watched from now on: it answers."""
        self._call(self._store.set, f"is/{self._rank}", _WATCHED)

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
        """Confirm that this rank has reported; wait for the others, whom its end would end, too."""
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
        states: of the ranks that have told theirs; one that has not holds up.
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

    A rank that does not answer holds up the job wherever the others are. One that answers does so
    in a step alone: between two steps it may load data or write a checkpoint for as long as it has
    to.

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
