"""Bugs of the runtime that the sanitizer has to find, each for as long as a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_zb.runtime.activation_memory import OffloadedActivations, StreamEngines, _end
from megatron_zb.runtime.channels import Channels

_TAKE, _BEGIN_IN = Channels.take, OffloadedActivations.begin_copy_in


def _take_without_wait(self: Any, message: Any) -> torch.Tensor:
    work, _ = self._received[message]
    work.move()
    work.wait = lambda: None
    return _TAKE(self, message)


def _take_without_record(self: Any, message: Any) -> torch.Tensor:
    work, buffer = self._received.pop(message)
    work.wait()
    found: torch.Tensor = buffer
    return found


def _send_and_forget(self: Any, channel: Any, tensor: torch.Tensor, *rest: Any) -> None:
    self._isend(channel, tensor).move()


def _free_at_once(self: Any, microbatch: int) -> None:
    for storage, _ in self._units[microbatch].offloaded:
        storage.let_go()


def _give_back_at_once(self: Any, microbatch: int) -> None:
    _BEGIN_IN(self, microbatch)
    self._units[microbatch].leave(self._host)


def _end_without_giving(self: Any, microbatch: int) -> None:
    _end(self._units.pop(microbatch))


def _end_without_wait(self: Any, microbatch: int) -> None:
    self._units.pop(microbatch).leave(self._host)


def _begin_behind_nothing(self: Any, copied: Any, *, to_host: bool) -> Any:
    stream, ended = self._streams[to_host], torch.cuda.Event()
    with torch.cuda.stream(stream):
        for there, here in copied:
            there.copy_(here, non_blocking=True)
        ended.record()
    return lambda: torch.cuda.current_stream().wait_event(ended)


PLANTS: dict[str, tuple[tuple[type, str, Callable[..., Any]], ...]] = {
    "no wait for a message": ((Channels, "take", _take_without_wait),),
    "a received buffer that is not recorded": ((Channels, "take", _take_without_record),),
    "sends forgotten at once": ((Channels, "send", _send_and_forget),),
    "memory freed before it is copied": ((OffloadedActivations, "end_copy_out", _free_at_once),),
    "host memory given back early": (
        (OffloadedActivations, "begin_copy_in", _give_back_at_once),
        (OffloadedActivations, "end_copy_in", _end_without_giving),
    ),
    "no wait for a copy in": ((OffloadedActivations, "end_copy_in", _end_without_wait),),
    "copies that wait for nothing": ((StreamEngines, "begin", _begin_behind_nothing),),
}
"""What is replaced, by the name of the bug."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug, none if there is no name."""
    with ExitStack() as stack:
        for owner, method, changed in PLANTS[name] if name else ():
            stack.enter_context(mock.patch.object(owner, method, changed))
        yield
