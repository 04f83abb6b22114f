"""What a rank tells of its progress: its passes, its device, and where its host stands."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import pytest
import torch
from torch.distributed import HashStore

from megatron_zb.runtime.progress import REMEMBERED, RankProgress, State
from megatron_zb.runtime.watchdog import Inquiry, Watchdog, WatchedRank
from megatron_zb.schedules.passes import Channel, Message, Pass, PassKind


def forward(stage: int, microbatch: int) -> Pass:
    return Pass(PassKind.F, stage, microbatch)


def test_the_last_passes_are_remembered() -> None:
    progress = RankProgress()
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


def test_a_gpu_is_where_its_first_open_event_is(monkeypatch: pytest.MonkeyPatch) -> None:
    StandInEvent.made.clear()
    Devices(monkeypatch).set(0)
    progress = RankProgress(on_gpu=True, event=StandInEvent)
    progress.keep_marks()
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


def test_without_a_watchdog_no_marks_are_kept() -> None:
    """Without a watchdog no thread drops marks, so their number would grow with every step."""
    StandInEvent.made.clear()
    progress = RankProgress(on_gpu=True, event=StandInEvent)
    with progress.step(), progress.running(forward(1, 0)):
        pass
    assert not StandInEvent.made
    assert not progress.in_step


class Devices:
    """In place of torch.cuda's: every thread begins on device 0, and has its own from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._of_thread: dict[int, int] = {}
        monkeypatch.setattr(torch.cuda, "current_device", self.current)
        monkeypatch.setattr(torch.cuda, "set_device", self.set)

    def current(self) -> int:
        return self._of_thread.get(threading.get_ident(), 0)

    def set(self, device: int) -> None:
        self._of_thread[threading.get_ident()] = device


def test_a_pass_that_raises_leaves_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would ever look at it again: the step would seem to go on for ever."""
    Devices(monkeypatch).set(0)
    EventOfDevice.asked.clear()
    progress = RankProgress(on_gpu=True, event=EventOfDevice)
    progress.keep_marks()
    with pytest.raises(KeyError), progress.step(), progress.running(forward(0, 0)):
        assert progress.in_step
        raise KeyError
    assert not progress.in_step
    with progress.step(), progress.running(forward(0, 1)):
        pass
    assert progress.in_step, "what has been launched has not passed"


class EventOfDevice(StandInEvent):
    """Knows on which devices it was asked."""

    asked: ClassVar[list[int]] = []

    def query(self) -> bool:
        self.asked.append(torch.cuda.current_device())
        return False


def test_watchdogs_ask_a_gpu_from_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that asks from GPU 0 takes half a GiB there, for every rank of a host."""
    EventOfDevice.asked.clear()
    Devices(monkeypatch).set(3)
    progress = RankProgress(on_gpu=True, event=EventOfDevice)
    dog = Watchdog(
        progress, WatchedRank(0, (0,)), HashStore(), 0.2, tell=said_to_nobody, end=said_to_nobody
    )
    with progress.step(), progress.running(forward(0, 0)):
        pass
    deadline = time.monotonic() + 60
    while not EventOfDevice.asked and time.monotonic() < deadline:
        time.sleep(0.02)
    dog.stop()
    assert set(EventOfDevice.asked) == {3}


def said_to_nobody(_said: object) -> None:
    """Take no note of what a watchdog says."""


class DrainedDevice(StandInEvent):
    """The driver answers nobody while another thread synchronizes the device."""

    is_drained = threading.Event()

    def query(self) -> bool:
        self.is_drained.wait(60)
        return True


def test_a_rank_that_drains_its_device_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits behind the message of another rank, and is not to be named in its place."""
    Devices(monkeypatch).set(0)
    DrainedDevice.is_drained.clear()
    progress = RankProgress(on_gpu=True, event=DrainedDevice)
    store, answers = HashStore(), list[dict[int, State]]()
    dog = Watchdog(
        progress, WatchedRank(0, (0, 1)), store, 60.0, tell=said_to_nobody, end=said_to_nobody
    )
    with progress.step(), progress.waiting(Channel(1, 0), Message(False, 0, 0)):
        pass
    other = Inquiry(store, 1, (0, 1), patience=20.0)
    answers.append(other.ask(State("is between two steps", None, 9.0, ())))
    assert answers[0].keys() == {0, 1}
    assert answers[0][0].waits_for == 1
    assert "(as last known: the driver does not answer for" in answers[0][0].doing
    DrainedDevice.is_drained.set()
    dog.stop()


class LostDevice(StandInEvent):
    """A device whose kernels have failed: every call of the driver says so."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_an_error_of_the_device_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that trains raises it; until then, the rank answers, and nothing is silent."""
    Devices(monkeypatch).set(0)
    progress = RankProgress(on_gpu=True, event=LostDevice)
    progress.keep_marks()
    with progress.step(), progress.running(forward(0, 0)):
        pass
    for _ in range(2):
        assert progress.state().doing == "is in F of stage 0, microbatch 0"


def test_marks_that_are_forgotten_are_asked_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query would invalidate a CUDA graph that is captured meanwhile."""
    Devices(monkeypatch).set(0)
    progress = RankProgress(on_gpu=True, event=EventOfDevice)
    progress.keep_marks()
    with progress.step(), progress.running(forward(0, 0)):
        pass
    assert progress.state().doing == "is in F of stage 0, microbatch 0"
    progress.forget_marks()
    EventOfDevice.asked.clear()
    assert progress.state().doing == "is between two steps"
    assert not EventOfDevice.asked


def optimizer_step(entered: threading.Event, leave: threading.Event) -> None:
    entered.set()
    leave.wait()


def test_between_two_steps_the_stack_says_where() -> None:
    entered, leave = threading.Event(), threading.Event()
    progress = RankProgress(phases={(__name__, "optimizer_step"): "in the optimizer step"})

    def train() -> None:
        with progress.step():
            pass
        optimizer_step(entered, leave)

    thread = threading.Thread(target=train)
    thread.start()
    entered.wait()
    state = progress.state()
    leave.set()
    thread.join()
    assert state.doing == "is between two steps, in the optimizer step"
    assert "called by optimizer_step (test_progress.py:" in state.place
