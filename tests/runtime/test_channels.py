"""What channels keep of messages under way, and for how long; here the messages go nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.runtime.channels import Channels, KnownShapes, ShapedChannels
from megatron_zb.runtime.executor import run_program
from megatron_zb.schedules.passes import Channel, Message

THERE = Channel(0, 1)


def message(microbatch: int) -> Message:
    return Message(False, 1, microbatch)


class Noted(Channels):
    """Channels of a rank whose sends are noted, and taken when that is said."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.sent: list[torch.Tensor] = []
        self.taken: set[int] = set()
        self._prepare(torch.device("cpu"))

    def _isend(self, channel: Channel, tensor: torch.Tensor) -> Any:
        number = len(self.sent)
        self.sent.append(tensor)
        self.notes.append(f"send {number}")
        return SimpleNamespace(
            is_completed=lambda: number in self.taken,
            wait=lambda: self.notes.append(f"wait {number}"),
        )

    def _irecv(self, channel: Channel, buffer: torch.Tensor) -> Any:
        return SimpleNamespace(wait=lambda: None)


def test_a_send_beyond_the_slots_waits_for_the_oldest() -> None:
    channels = Noted()
    for _ in range(4):
        channels.send(THERE, torch.zeros(2), slots=2)
    assert channels.notes == ["send 0", "send 1", "wait 0", "send 2", "wait 1", "send 3"]
    channels.finish()
    assert channels.notes[-2:] == ["wait 2", "wait 3"]


def seen_in(channels: Noted) -> Callable[[Channel], AbstractContextManager[None]]:
    """A context that notes for whom the channels wait."""

    @contextmanager
    def seen(channel: Channel) -> Iterator[None]:
        channels.notes.append(f"until {channel.target} takes")
        yield

    return seen


def test_a_wait_for_the_reader_of_a_send_is_seen_and_no_other_send_is() -> None:
    channels = Noted()
    channels.until_taken = seen_in(channels)
    for _ in range(3):
        channels.send(THERE, torch.zeros(2), slots=2)
    assert channels.notes == ["send 0", "send 1", "until 1 takes", "wait 0", "send 2"]
    channels.finish()
    channels.finish()  # nothing is left to wait for
    assert channels.notes[5:] == ["until 1 takes", "wait 1", "wait 2"]
    with channels.capturing(True):  # a mark of the device would spoil the graph
        channels.send(THERE, torch.zeros(2), slots=1)
        channels.finish()
    assert channels.notes[8:] == ["send 3", "wait 3"]


def test_a_wait_for_the_reader_of_a_header_is_seen() -> None:
    channels, messages, headers = shaped()
    messages.until_taken = seen_in(headers)  # as the watchdog sets it, after the step has begun
    for microbatch in range(2):
        channels.send(THERE, torch.zeros(3), 1, Message(False, 1, microbatch))
    assert headers.notes == ["send 0", "until 1 takes", "wait 0", "send 1", "until 1 takes"]


def test_sends_that_have_been_taken_are_forgotten_between_passes() -> None:
    channels = Noted()
    for _ in range(2):
        channels.send(THERE, torch.zeros(2), slots=2)
    channels.taken.add(0)
    channels.between_passes()
    channels.send(THERE, torch.zeros(2), slots=2)
    assert channels.notes == ["send 0", "send 1", "send 2"]


# --- shapes


def shaped() -> tuple[ShapedChannels, Noted, Noted]:
    messages, headers = Noted(), Noted()
    return ShapedChannels(messages, headers, 4), messages, headers


BACK = Channel(1, 0)


def test_a_gradient_has_the_shape_of_the_activation_that_went_out() -> None:
    channels, messages, headers = shaped()
    channels.send(THERE, torch.zeros(3, 2), 1, Message(False, 1, 5))
    assert (len(messages.sent), len(headers.sent)) == (1, 1)
    gradient = Message(True, 0, 5)
    channels.post_receive(BACK, gradient, lambda: torch.empty(1))  # without a header
    assert channels.take(gradient).shape == (3, 2)


def test_a_gradient_is_sent_without_a_header_to_where_its_activation_came_from() -> None:
    channels, messages, headers = shaped()

    def arrive(channel: Channel, buffer: torch.Tensor) -> Any:
        buffer.copy_(torch.tensor([2, 3, 2, 0, 0, 0, 0, 0]))
        return SimpleNamespace(wait=lambda: None)

    headers._irecv = arrive  # type: ignore[method-assign]
    activation, gradient = Message(False, 1, 5), Message(True, 0, 5)
    channels.post_receive(THERE, activation, lambda: torch.empty(1))
    assert channels.take(activation).shape == (3, 2)
    with pytest.raises(RuntimeError, match=r"shape \[6\], but its activation \[3, 2\]"):
        channels.send(BACK, torch.zeros(6), 1, gradient)
    channels.send(BACK, torch.zeros(6), 1, gradient)  # of no activation that is remembered
    assert (len(messages.sent), len(headers.sent)) == (1, 1)
    channels.post_receive(THERE, activation, lambda: torch.empty(1))
    channels.take(activation)
    channels.send(BACK, torch.zeros(3, 2), 1, gradient)
    assert (len(messages.sent), len(headers.sent)) == (2, 1)


def test_shapes_of_forwards_alone_are_forgotten_with_the_step() -> None:
    channels, _, headers = shaped()
    channels.send(THERE, torch.zeros(3), 1, Message(False, 1, 0))
    channels.finish()
    channels.send(BACK, torch.zeros(3), 1, Message(True, 0, 0))
    assert len(headers.sent) == 2


# --- buffers


def test_what_is_sent_lies_in_one_piece() -> None:
    channels = Noted()
    tensor = torch.arange(6).view(2, 3).t()
    channels.send(THERE, tensor, slots=1)
    (sent,) = channels.sent
    assert sent.is_contiguous()
    assert torch.equal(sent, tensor)


def test_a_message_that_nobody_reads_is_an_error() -> None:
    channels = Noted()
    channels.post_receive(THERE, message(0), lambda: torch.empty(1))
    with pytest.raises(RuntimeError, match="messages were received and never read"):
        channels.finish()
    channels.take(message(0))
    channels.finish()


class Transport:
    """What a rank is sent, made up, and a note of what it does in which order."""

    waits_to_receive = False

    def __init__(self) -> None:
        self.notes: list[str] = []

    def post_receive(
        self, channel: Channel, message: Message, allocate: Callable[[], torch.Tensor]
    ) -> None:
        pass

    def take(self, message: Message) -> torch.Tensor:
        return torch.zeros(1)

    def send(
        self, channel: Channel, tensor: torch.Tensor, slots: int, message: Message | None = None
    ) -> None:
        pass

    def between_passes(self, launches_little: bool = False) -> None:
        self.notes.append("between")

    def finish(self) -> None:
        self.notes.append("end")


class Stage:
    """One that notes its passes."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        self._notes.append("pass")
        return torch.zeros(1)

    backward = backward_input = forward

    def backward_weight(self, microbatch: int) -> None:
        self._notes.append("pass")


def test_messages_are_looked_at_before_every_pass() -> None:
    """Else what has been sent would be held until the end of the step."""
    schedule = schedules.build("zb-h1", pipeline_size=2, num_microbatches=3)
    transport = Transport()
    stages = {0: Stage(transport.notes)}
    run_program(schedules.lower(schedule), 0, stages, transport, lambda message: torch.zeros(1))
    assert transport.notes == ["between", "pass"] * len(schedule.ranks[0]) + ["end"]


def test_a_message_of_another_shape_than_its_reader_knows_is_refused() -> None:
    messages = Noted()
    channels = KnownShapes(messages, lambda message: (message.microbatch + 1, 2), num_stages=4)
    channels.send(THERE, torch.zeros(3, 2), 3, Message(False, 3, 2))
    channels.send(THERE, torch.zeros(5), 3, Message(True, 4, 0))  # not between stages
    assert messages.notes == ["send 0", "send 1"]
    with pytest.raises(
        UsageError, match=r"microbatch 1 has the shape \[3, 2\], but \[2, 2\] follows"
    ):
        channels.send(THERE, torch.zeros(3, 2), 3, Message(False, 1, 1))
    assert len(messages.sent) == 2
