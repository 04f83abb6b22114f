"""A pipeline that has stopped ends, and every rank says which one holds it up."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from jobs import started
from live_processes import wait_until
from torch.distributed import HashStore, Store

from megatron_zb.runtime.progress import REMEMBERED, RankProgress, State
from megatron_zb.runtime.watchdog import (
    EXIT_CODE,
    Conclusion,
    Inquiry,
    Watchdog,
    WatchedRank,
    judged,
    who_holds_up,
)
from megatron_zb.schedules import build
from megatron_zb.schedules.passes import Channel, Message, Pair, Pass, PassKind


def forward(stage: int, microbatch: int) -> Pass:
    return Pass(PassKind.F, stage, microbatch)


def waiting(source: int, target: int) -> Callable[[RankProgress, ExitStack], None]:
    def tell(progress: RankProgress, stack: ExitStack) -> None:
        stack.enter_context(progress.step())
        with progress.running(forward(target, 0)):
            pass
        stack.enter_context(progress.waiting(Channel(source, target), Message(False, target, 1)))

    return tell


def sending(source: int, target: int) -> Callable[[RankProgress, ExitStack], None]:
    """A rank whose messages another one does not take, after a pass that it is no longer in."""

    def tell(progress: RankProgress, stack: ExitStack) -> None:
        stack.enter_context(progress.step())
        with progress.running(forward(source, 2)):
            pass
        stack.enter_context(progress.until_taken(Channel(source, target)))

    return tell


def running(progress: RankProgress, stack: ExitStack) -> None:
    stack.enter_context(progress.step())
    stack.enter_context(progress.running(forward(1, 7)))


def between(progress: RankProgress, stack: ExitStack) -> None:
    with progress.step():
        pass


def stopped(progress: RankProgress, stack: ExitStack) -> None:
    """It has come, and answers no more; see Job."""


FIRST = 10
"""The global number of the first rank of a job."""


class Job:
    """Ranks, each with its watchdog, in pipelines of equal size, by default in one.

    None is a rank that has never come to a step, `stopped` one whose process is.
    """

    def __init__(
        self,
        ranks: list[Callable[[RankProgress, ExitStack], None] | None],
        seconds: float,
        *,
        pipelines: int = 1,
        store: Store | None = None,
    ) -> None:
        self.lines: dict[int, list[str]] = {}
        self.codes: dict[int, int] = {}
        self.progress: dict[int, RankProgress] = {}
        self.dogs: list[Watchdog] = []
        self.store, self.stack = store or HashStore(), ExitStack()
        everyone = tuple(range(FIRST, FIRST + len(ranks)))
        size = len(ranks) // pipelines
        for number, tell in enumerate(ranks):
            if tell is None:
                continue
            if tell is stopped:
                Inquiry(self.store, everyone[number], everyone, patience=5.0).come()
                continue
            self.progress[number] = RankProgress()
            tell(self.progress[number], self.stack)
        for number, progress in self.progress.items():  # all have begun to wait at one time
            start = number // size * size
            self.lines[number] = []
            self.dogs.append(
                Watchdog(
                    progress,
                    WatchedRank(number - start, everyone[start : start + size], everyone),
                    self.store,
                    seconds,
                    tell=self.lines[number].append,
                    patience=1.0,
                    end=partial(self.codes.__setitem__, number),
                )
            )

    def wait(self, ranks: set[int], seconds: float = 60.0) -> None:
        """Until these have ended, and no others."""
        self.until(lambda: self.codes.keys() >= ranks, seconds)
        for dog in self.dogs:
            dog.stop()
        self.stack.close()
        assert self.codes == dict.fromkeys(ranks, EXIT_CODE)

    def said(self) -> list[str]:
        return [line for lines in self.lines.values() for line in lines]

    def until(self, happens: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until something happens, or for so long."""
        deadline = time.monotonic() + seconds
        while not happens() and time.monotonic() < deadline:
            time.sleep(0.05)


def test_a_pair_is_told_with_both_of_its_passes() -> None:
    progress = RankProgress()
    with progress.step(), progress.running(Pair(forward(1, 3), Pass(PassKind.BW, 0, 2))):
        state = progress.state()
    assert state.doing == "is in F of stage 1, microbatch 3, with BW of stage 0, microbatch 2"
    assert state.passes == ("F of stage 1, microbatch 3, with BW of stage 0, microbatch 2",)


def test_a_rank_that_is_gone_is_named_by_all_others() -> None:
    job = Job([waiting(1, 0), waiting(2, 1), None], seconds=0.4)
    job.wait({0, 1})
    for logical, lines in job.lines.items():
        host = socket.gethostname()
        assert f"rank {FIRST + logical} (pipeline rank {logical}, on {host}) has" in lines[0]
        source = f"from rank {FIRST + logical + 1} (pipeline rank {logical + 1})"
        assert lines[0].endswith(source)
        assert f"waits for the activation for stage {logical}, microbatch 1" in lines[0]
        assert f"F of stage {logical}, microbatch 0" in lines[1]
        assert lines[3].startswith("megatron_zb: error: rank 12 holds up all others: it does not")


def test_ranks_of_a_v_have_megatrons_numbers() -> None:
    """A V begins on Megatron's last pipeline rank, as the start of the job says."""
    schedule = build("v-half", pipeline_size=4, num_microbatches=8)
    progress, stack = RankProgress(schedule=schedule), ExitStack()
    with stack:
        waiting(1, 0)(progress, stack)
        doing = progress.state({logical: 7 - logical for logical in range(4)}).doing
        assert doing.endswith("from rank 6 (pipeline rank 2)")
        assert progress.state().doing.endswith("from pipeline rank 2")
    place = WatchedRank(1, (7, 6, 5, 4), mirrored=True)
    assert (place.rank, place.pipeline_rank) == (6, 2)
    assert WatchedRank(1, (4, 5, 6, 7)).pipeline_rank == 1


def test_the_host_of_a_rank_that_is_gone_is_named() -> None:
    job = Job([waiting(1, 0), stopped], seconds=0.4)
    job.wait({0})
    assert job.lines[0][3].endswith(f", or its host is gone; it is on {socket.gethostname()}")


def test_a_rank_in_a_long_pass_is_named_with_the_pass() -> None:
    job = Job([waiting(1, 0), running], seconds=0.4)
    job.wait({0, 1})
    assert "rank 11 holds up all others: it is in F of stage 1, microbatch 7 for" in job.lines[0][3]
    assert job.lines[0][3] == job.lines[1][3]


def test_a_rank_that_takes_no_messages_is_named_and_not_the_one_that_sends_them() -> None:
    job = Job([sending(0, 1), running], seconds=0.4)
    job.wait({0, 1})
    takes = "it waits until rank 11 (pipeline rank 1) takes what it has sent"
    assert job.lines[0][0].endswith(takes)
    for lines in job.lines.values():
        assert "rank 11 holds up all others: it is in F of stage 1, microbatch 7" in lines[3]


@pytest.mark.parametrize("others", [waiting(1, 0), between])
def test_a_rank_that_is_stopped_is_named_wherever_the_others_are(
    others: Callable[[RankProgress, ExitStack], None],
) -> None:
    """Here in the other of two pipelines, which waits for it between two steps."""
    job = Job([others, between, between, stopped], seconds=0.4, pipelines=2)
    job.wait({0, 1, 2})
    for lines in job.lines.values():
        assert "rank 13 holds up all others: it does not answer" in lines[3]
    assert "is between two steps" in job.lines[2][0]
    assert "it stands in sleep" in job.lines[2][2] or ", called by " in job.lines[2][2]


@pytest.mark.parametrize("other", [waiting(1, 0), between])
def test_a_rank_between_steps_may_take_its_time(
    other: Callable[[RankProgress, ExitStack], None],
) -> None:
    """It loads data, or writes a checkpoint: the others wait, and one of them says so, once."""
    job = Job([other, between], seconds=0.4)
    job.until(lambda: bool(job.said()))
    job.until(lambda: bool(job.codes), seconds=1.5)
    job.wait(set())
    (line,) = job.said()
    found = re.search("answer, so the job goes on: rank (1.) is between two steps", line)
    assert found is not None
    assert other is between or found[1] == "11"


def test_a_wait_is_said_once_though_the_count_begins_anew() -> None:
    """As it does where the whole machine stood for a while."""
    job = Job([between, between], seconds=0.4)
    job.until(lambda: bool(job.said()))
    for progress in job.progress.values():
        progress.begin_anew()
    job.until(lambda: bool(job.codes), seconds=1.5)
    job.wait(set())
    assert len(job.said()) == 1


def test_a_new_wait_is_said_again() -> None:
    job = Job([between, between], seconds=0.4)
    job.until(lambda: bool(job.said()))
    for _ in range(10):  # a wait that begins while a question is answered may count as its wait
        for progress in job.progress.values():
            between(progress, job.stack)
        job.until(lambda: len(job.said()) > 1, seconds=3)
        if len(job.said()) > 1:
            break
    job.wait(set())
    assert len(job.said()) == 2


def test_a_watchdog_ends_without_anybody_waiting_for_it() -> None:
    """As where a process begins again: the next step has another one, on another store."""
    lines = list[str]()
    dog = Watchdog(RankProgress(), WatchedRank(0, (0,)), HashStore(), 60, tell=lines.append)
    dog.begin_to_stop()
    for thread in dog._threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in dog._threads)
    assert not lines


def test_a_wait_that_begins_before_an_answer_is_not_the_one_that_was_asked_about() -> None:
    progress, store, lines = RankProgress(), HashStore(), list[str]()
    everyone = (FIRST, FIRST + 1)
    elsewhere = State("is between two steps", None, 9.0)
    other = Inquiry(store, everyone[1], everyone, patience=5.0)
    other.come()
    rank = WatchedRank(0, everyone, everyone)
    dog = Watchdog(progress, rank, store, 0.8, tell=lines.append, patience=5.0)
    try:
        for _ in range(10):  # on a machine that stands still, the wait may be old by then
            between(progress, ExitStack())
            other.ask(elsewhere)
            deadline = time.monotonic() + 3
            while not lines and time.monotonic() < deadline:
                if other.is_asked():
                    other.answer(elsewhere)
                time.sleep(0.05)
            if lines:
                break
    finally:
        dog.stop()
    assert "rank 10 has made no progress for 1 s" in lines[0]


def test_a_rank_that_has_left_is_not_missed() -> None:
    job = Job([between, between], seconds=0.4)
    job.dogs[1].stop()
    job.until(lambda: bool(job.said()))
    job.wait(set())
    assert "so the job goes on" in job.said()[0]


def test_a_rank_that_has_not_come_yet_is_not_missed() -> None:
    job = Job([between, None], seconds=0.4)
    job.until(lambda: bool(job.said()))
    job.until(lambda: len(job.said()) > 1, seconds=2.5)
    job.wait(set())
    (line,) = job.said()  # once, though there is a question every second
    assert "so the job goes on" in line


class Questions:
    """In the place of an inquiry: counts what a watchdog asks, and asks it where that is said."""

    asked_first = True
    was_asked = False

    def __init__(self, others: dict[int, State]) -> None:
        self.is_asking = False
        self.asked = self.answered = 0
        self._others = others

    def is_asked(self) -> bool:
        return self.is_asking

    def answer(self, state: State) -> None:
        self.answered += 1

    def ask(self, state: State) -> dict[int, State]:
        self.asked += 1
        return {FIRST: state, **self._others}

    def verdict(self) -> None:
        return None

    def not_there(self, states: dict[int, State]) -> tuple[set[int], set[int]]:
        return set(), set()


class Asked:
    """A watchdog of rank 10 that looks when it is told to, at a clock that stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: dict[int, State]) -> None:
        self.progress, self.lines = RankProgress(), list[str]()
        place = WatchedRank(0, (FIRST,), (FIRST,))
        self.dog = Watchdog(
            self.progress, place, HashStore(), 10.0, tell=self.lines.append, patience=1.0
        )
        self.dog.stop()
        self.questions = Questions(others)
        self.now = time.monotonic()
        self.still = 20.0
        monkeypatch.setattr(self.dog, "_stopped", threading.Event())
        monkeypatch.setattr(self.dog, "_inquiry", self.questions)
        monkeypatch.setattr(self.progress, "seconds", lambda: self.still)
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def test_a_rank_that_has_just_asked_or_answered_waits_before_it_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else two ranks that stand still would ask each other without end."""
    asked = Asked(monkeypatch, {})
    questions = asked.questions
    questions.is_asking = True
    asked.dog._look()
    questions.is_asking = False
    asked.dog._look()
    assert (questions.answered, questions.asked) == (1, 0)
    for count in (1, 2):
        asked.now += 1.5
        asked.dog._look()
        asked.dog._look()
        assert questions.asked == count


def test_a_rank_asks_when_it_has_stood_still_for_the_time_that_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked(monkeypatch, {})
    asked.still = 9.9
    asked.dog._look()
    assert asked.questions.asked == 0
    asked.still = 10.1
    asked.dog._look()
    assert asked.questions.asked == 1


@pytest.mark.parametrize("in_step", [True, False])
def test_a_rank_in_a_step_is_not_said_to_be_slow(
    in_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It will move, or soon be found to be stuck."""
    other = State("is in a pass", None, 3.0, in_step=in_step)
    asked = Asked(monkeypatch, {FIRST + 1: other})
    asked.dog._look()
    assert len(asked.lines) == (0 if in_step else 1)


def test_a_process_that_was_stopped_begins_to_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, {})
    begun: list[float] = []
    monkeypatch.setattr(asked.progress, "begin_anew", lambda: begun.append(asked.now))
    for passed, counts in ((0.3, 0), (60.0, 1)):

        def wait(seconds: float, passed: float = passed) -> bool:
            asked.now += passed
            return False

        monkeypatch.setattr(asked.dog, "_stopped", SimpleNamespace(wait=wait))
        assert asked.dog._goes_on()
        assert len(begun) == counts


def test_a_verdict_ends_the_wait_for_answers() -> None:
    """Two ranks may ask at once; one that has its answers says the verdict, and answers no more."""
    store, state = HashStore(), State("is between two steps", None, 9.0, ())
    one, other = (Inquiry(store, rank, (0, 1), patience=60.0) for rank in range(2))
    answers: list[dict[int, State]] = []
    thread = threading.Thread(target=lambda: answers.append(one.ask(state)))
    thread.start()
    other.end(Conclusion("rank 1 holds up all others", (0, 1)))
    thread.join(20.0)
    assert [list(found) for found in answers] == [[0]]
    assert one.verdict() == Conclusion("rank 1 holds up all others", (0, 1))


def test_a_rank_that_reports_waits_for_those_that_the_verdict_names() -> None:
    """Its end would end them, too; it does not wait for ever, nor for other ranks."""
    store = HashStore()
    one, other = (Inquiry(store, rank, (0, 1, 2), patience=60.0) for rank in range(2))
    verdict = Conclusion("rank 2 holds up all others", (0, 1))
    waiting = threading.Thread(target=one.told, args=(verdict, 60.0))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    other.told(verdict, 60.0)
    waiting.join(20.0)
    assert not waiting.is_alive()
    begin = time.monotonic()
    one.told(Conclusion("rank 0 holds up all others", (0, 1, 2)), 0.1)
    assert time.monotonic() - begin >= 0.1


def test_the_first_verdict_counts() -> None:
    store = HashStore()
    one, other = (Inquiry(store, rank, (0, 1), patience=60.0) for rank in range(2))
    assert one.verdict() is None
    one.end(Conclusion("rank 1 holds up all others", (0, 1)))
    other.end(Conclusion("rank 0 holds up all others", (0,)))
    assert other.verdict() == one.verdict() == Conclusion("rank 1 holds up all others", (0, 1))


def test_of_two_that_ask_at_once_one_is_the_first() -> None:
    store, state = HashStore(), State("is between two steps", None, 9.0, ())
    ranks = [Inquiry(store, rank, (0, 1), patience=20.0) for rank in range(2)]
    threads = [threading.Thread(target=inquiry.ask, args=(state,)) for inquiry in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert sorted(inquiry.asked_first for inquiry in ranks) == [False, True]


class Questioned:
    """A store to which another rank's question comes after so many looks of this one."""

    def __init__(self, looks: int) -> None:
        self._store, self._looks = HashStore(), looks

    def check(self, keys: list[str]) -> bool:
        found = self._store.check(keys)
        self._looks -= 1
        if self._looks == 0:
            self._store.compare_set("question/0", "", "1")
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("looks", [1, 2])
def test_a_rank_whose_question_comes_second_has_not_asked_first(looks: int) -> None:
    """Whether it comes while this one looks for it, or while this one asks."""
    state = State("is between two steps", None, 9.0, ())
    inquiry = Inquiry(cast(Store, Questioned(looks)), 0, (0, 1), patience=0.1)
    inquiry.ask(state)
    assert inquiry.asked_first == (looks == 2)


def test_questions_leave_nothing_behind() -> None:
    """A checkpoint may take hours, with a question every few minutes."""
    store = HashStore()
    ranks = [Inquiry(store, rank, (0, 1), patience=0.1) for rank in range(2)]
    state = State("is between two steps", None, 9.0, ("F",) * REMEMBERED)
    for number in range(20):
        asking, asked = ranks[number % 2], ranks[1 - number % 2]
        thread = threading.Thread(target=asking.ask, args=(state,))
        thread.start()
        while not asked.is_asked():
            time.sleep(0.001)
        asked.answer(state)
        thread.join()
        time.sleep(0.05)
    answers = [f"answer/{number}/{rank}" for number in range(20) for rank in range(2)]
    assert sum(store.check([key]) for key in answers) <= 10  # of 40


class HeldStore(HashStore):
    """Its holder is stopped when the test says so: no call returns then."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held, self.is_free = threading.Event(), threading.Event()

    def clone(self) -> Store:
        return self

    def check(self, keys: list[str]) -> bool:
        if self.is_held.is_set():
            self.is_free.wait()
        return bool(super().check(keys))


def test_a_store_that_does_not_answer_is_named() -> None:
    store = HeldStore()
    job = Job([between, between], seconds=0.4, store=store)
    store.is_held.set()
    job.until(lambda: len(job.codes) == 2)
    store.is_free.set()
    job.wait({0, 1})
    for lines in job.lines.values():
        assert "the store of the job does not answer for" in lines[3]


def test_a_rank_that_is_stuck_in_a_step_is_named_by_one_that_is_not() -> None:
    states = {
        0: State("", None, 9.0, in_step=False, waits_for_all=True),
        1: State("", 2, 9.0, in_step=True),
        2: State("", None, 9.0, in_step=True),
    }
    assert judged(states, [], 6.0) == 2
    states[2] = State("", None, 1.0, in_step=True)  # it makes progress
    assert judged(states, [], 6.0) is None
    assert judged(states, [3], 6.0) == 3
    del states[2]
    assert judged(states, [2, 3], 6.0) == 2


def test_progress_keeps_a_job_alive() -> None:
    job = Job([running], seconds=0.6)
    stop = threading.Event()
    while not stop.wait(0.1) and len(job.progress[0].state().passes) < 20:
        with job.progress[0].running(forward(1, 8)):
            pass
    for dog in job.dogs:
        dog.stop()
    assert job.codes == {}


@pytest.mark.parametrize(
    ("waits", "rank", "held_up_by"),
    [
        ({0: 1, 1: 2, 2: None}, 0, 2),
        ({0: 1, 1: 2}, 0, 2),  # 2 tells nothing
        ({0: None, 1: 0}, 0, 0),
        ({0: 1, 1: 0}, 0, 0),  # a circle, which no lowered program has
    ],
)
def test_who_holds_up(waits: dict[int, int | None], rank: int, held_up_by: int) -> None:
    states = {r: State("", w, 0.0) for r, w in waits.items()}
    assert who_holds_up(states, rank) == held_up_by


ENDS_WHILE_WATCHED = """
import sys, threading
from torch.distributed import HashStore
from megatron_zb.runtime.progress import RankProgress
from megatron_zb.runtime.watchdog import WatchedRank, Watchdog

class SlowStore(HashStore):
    def clone(self):
        return self

    def check(self, keys):
        asked.set()
        return self.wait_a_while()

    def wait_a_while(self):
        from datetime import timedelta
        try:
            self.wait(["never"], timedelta(seconds=0.5))
        except Exception:
            return False

asked = threading.Event()
Watchdog(RankProgress(), WatchedRank(0, (0,)), SlowStore(), 0.2)
asked.wait()
"""


@pytest.mark.slow
def test_a_process_that_ends_takes_its_watchdog_along() -> None:
    """In the store's own code, a thread that outlives the interpreter aborts the process."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_WATCHED], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


STOPPED_FOR_A_WHILE = """
import sys, time
from pathlib import Path
from torch.distributed import HashStore
from megatron_zb.runtime.progress import RankProgress
from megatron_zb.runtime.watchdog import WatchedRank, Watchdog
from megatron_zb.schedules.passes import Pass, PassKind

progress = RankProgress()
with progress.step(), progress.running(Pass(PassKind.F, 0, 0)):
    Watchdog(progress, WatchedRank(0, (0,)), HashStore(), 1.0)
    print("runs", flush=True)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.05)
"""


def test_a_job_that_was_suspended_goes_on(tmp_path: Path) -> None:
    """All of its processes stopped and went on: no rank holds up the others."""
    program, done, said = (tmp_path / name for name in ("program.py", "done", "said"))
    program.write_text(STOPPED_FOR_A_WHILE)
    process = started(str(program), [str(done)], {}, [said, said])
    try:
        wait_until(lambda: said.exists() and said.read_text() == "runs\n")
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.5)
        done.touch()
        process.join(60)
    finally:
        process.kill()
        process.join()
    assert (process.exitcode, said.read_text()) == (0, "runs\n")
