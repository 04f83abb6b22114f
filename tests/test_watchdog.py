"""A pipeline that has stopped ends, and every rank says which one holds it up."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import ClassVar

import pytest
from torch.distributed import HashStore

from megatron_zb.runtime.progress import REMEMBERED, Progress, State, who_holds_up
from megatron_zb.runtime.watchdog import EXIT_CODE, Place, Watchdog
from megatron_zb.schedules.communication import Channel, Message
from megatron_zb.schedules.passes import Pass, PassKind


def forward(stage: int, microbatch: int) -> Pass:
    return Pass(PassKind.F, stage, microbatch)


def waiting(source: int, target: int) -> Callable[[Progress, ExitStack], None]:
    def tell(progress: Progress, stack: ExitStack) -> None:
        stack.enter_context(progress.step())
        with progress.running(forward(target, 0)):
            pass
        stack.enter_context(progress.waiting(Channel(source, target), Message(False, target, 1)))

    return tell


def running(progress: Progress, stack: ExitStack) -> None:
    stack.enter_context(progress.step())
    stack.enter_context(progress.running(forward(1, 7)))


def between(progress: Progress, stack: ExitStack) -> None:
    with progress.step():
        pass


class Job:
    """Ranks of one pipeline, each with its watchdog; None is a rank that is gone."""

    def __init__(
        self, ranks: list[Callable[[Progress, ExitStack], None] | None], seconds: float
    ) -> None:
        self.lines: dict[int, list[str]] = {}
        self.codes: dict[int, int] = {}
        self.progress: dict[int, Progress] = {}
        self.dogs: list[Watchdog] = []
        store, self.stack = HashStore(), ExitStack()
        for logical, tell in enumerate(ranks):
            if tell is None:
                continue
            self.progress[logical] = progress = Progress()
            tell(progress, self.stack)
            self.lines[logical] = []
            self.dogs.append(
                Watchdog(
                    progress,
                    Place(logical, tuple(range(10, 10 + len(ranks)))),
                    store,
                    seconds,
                    tell=self.lines[logical].append,
                    end=lambda code, logical=logical: self.codes.update({logical: code}),  # type: ignore[misc]
                )
            )

    def wait(self, ranks: set[int], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while self.codes.keys() < ranks and time.monotonic() < deadline:
            time.sleep(0.05)
        for dog in self.dogs:
            dog.stop()
        assert self.codes == dict.fromkeys(ranks, EXIT_CODE)


def test_a_rank_that_is_gone_is_named_by_all_others() -> None:
    job = Job([waiting(1, 0), waiting(2, 1), None], seconds=0.4)
    job.wait({0, 1})
    for logical, lines in job.lines.items():
        assert f"rank {10 + logical} (pipeline rank {logical} in schedule order)" in lines[0]
        assert f"waits for the activation for stage {logical}, microbatch 1" in lines[0]
        assert f"F of stage {logical}, microbatch 0" in lines[1]
        assert lines[2].startswith("megatron_zb: error: rank 12 holds up all others: it does not")


def test_a_rank_in_a_long_pass_is_named_with_the_pass() -> None:
    job = Job([waiting(1, 0), running], seconds=0.4)
    job.wait({0, 1})
    assert "rank 11 holds up all others: it is in F of stage 1, microbatch 7 for" in job.lines[0][2]
    assert job.lines[0][2].split(" for ")[0] == job.lines[1][2].split(" for ")[0]


def test_a_rank_between_steps_answers_and_goes_on() -> None:
    """It may be saving a checkpoint: it is not ended by its own watchdog."""
    job = Job([waiting(1, 0), between], seconds=0.4)
    job.wait({0})
    assert "rank 11 holds up all others: it is between two steps" in job.lines[0][2]
    assert job.lines[1] == []


def test_progress_keeps_a_job_alive() -> None:
    job = Job([running], seconds=0.6)
    stop = threading.Event()
    while not stop.wait(0.1) and len(job.progress[0].state().passes) < 20:
        with job.progress[0].running(forward(1, 8)):
            pass
    for dog in job.dogs:
        dog.stop()
    assert job.codes == {}


def test_the_last_passes_are_remembered() -> None:
    progress = Progress()
    for microbatch in range(2 * REMEMBERED):
        with progress.running(forward(0, microbatch)):
            pass
    passes = progress.state().passes
    assert len(passes) == REMEMBERED
    assert passes[-1] == f"F of stage 0, microbatch {2 * REMEMBERED - 1}"


class StandInEvent:
    """In place of a CUDA event, which needs a GPU: happens when the test says so."""

    made: ClassVar[list[StandInEvent]] = []

    def __init__(self) -> None:
        self.happened = False
        self.made.append(self)

    def record(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        return self.happened


def test_a_gpu_is_where_its_first_open_event_is() -> None:
    StandInEvent.made.clear()
    progress = Progress(on_gpu=True, event=StandInEvent)
    with progress.step():
        with progress.waiting(Channel(0, 1), Message(False, 1, 0)):
            pass
        with progress.running(forward(1, 0)):
            pass
    took, ran = StandInEvent.made
    assert progress.state().waits_for == 0
    assert progress.in_step  # though the host has left it
    took.happened = True
    assert progress.state().doing == "is in F of stage 1, microbatch 0"
    ran.happened = True
    assert progress.state().doing == "is between two steps"
    assert not progress.in_step


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
from megatron_zb.runtime.progress import Progress
from megatron_zb.runtime.watchdog import Place, Watchdog

class SlowStore(HashStore):
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
Watchdog(Progress(), Place(0, (0,)), SlowStore(), 0.2)
asked.wait()
"""


def test_a_process_that_ends_takes_its_watchdog_along() -> None:
    """In the store's own code, a thread that outlives the interpreter aborts the process."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_WATCHED], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
