"""The rules of a GPU on CPU ranks: what gloo forgives, a rank pool with these rules does not.

:func:`install` gives the channels of this process the worst that NCCL and CUDA may do. A send
waits, at its place, until its receive has been posted. A receive's buffer holds NaN, or garbage,
until it has been waited for. A tensor that was sent must not change before the runtime lets go of
it, and when it may is told at random. Before passes taken at random, the host waits for every
receive that is open, as a first launch of a kernel makes it wait; so it does where a pass asks the
device to synchronise. Outside of a program, nothing says that such a wait ends: there, to ask for
it while a receive is open that nobody has sent to yet raises.
"""

from __future__ import annotations

import os
import random
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.executor import Execution
from megatron_zb.schedules.passes import Channel

DRAINS = 0.3
"""The share of passes before which the host waits for everything."""
LETS_GO = 0.5
"""The share of questions after a send that are answered with yes."""


class Violation(AssertionError):
    """A rule of the device was broken."""


class _Sent:
    """A tensor on its way, which must stay as it is."""

    def __init__(self, tensor: torch.Tensor, rng: random.Random) -> None:
        self._tensor, self._rng = tensor, rng
        self._content = _content(tensor)

    def wait(self) -> None:
        if _content(self._tensor) != self._content:
            raise Violation("a tensor was changed while it was on its way to another rank")

    def is_completed(self) -> bool:
        self.wait()
        return self._rng.random() < LETS_GO


class _Open:
    """A posted receive; its message reaches the buffer when the runtime waits for it."""

    def __init__(
        self, work: Any, staging: torch.Tensor, buffer: torch.Tensor, sent: Path, number: int
    ) -> None:
        self._work, self._staging, self._buffer = work, staging, buffer
        self._sent, self._number = sent, number
        self.place = "".join(traceback.format_stack(limit=8)[:-2])
        self.has_arrived = False

    def is_sent(self) -> bool:
        """Whether the peer has come to its send."""
        return self._sent.exists() and self._sent.stat().st_size >= self._number

    def arrive(self) -> None:
        if not self.has_arrived:
            self._work.wait()
            self.has_arrived = True

    def wait(self) -> None:
        self.arrive()
        _OPEN.remove(self)
        self._buffer.copy_(self._staging)

    def is_completed(self) -> bool:
        return self.has_arrived


_OPEN: list[_Open] = []
_PROGRAMS: list[Any] = []  # that this rank is carrying out


def install(folder: Path) -> None:
    """Make the channels of this process obey; to be called before any are made.

    Args:
        folder: in which all ranks of the job write down what they have sent.
    """
    folder.mkdir(exist_ok=True)
    rng = random.Random(f"rank {os.environ.get('RANK', '0')}")
    posted: Counter[str] = Counter()
    isend, irecv = Channels._isend, Channels._irecv
    between_passes = Channels.between_passes

    def hostile_isend(self: Channels, channel: Channel, tensor: torch.Tensor) -> Any:
        isend(self, channel, tensor.detach().clone()).wait()  # gloo's waits for its receive
        with (folder / _key(self, channel)).open("ab") as sent:
            sent.write(b".")
        return _Sent(tensor, rng)

    def hostile_irecv(self: Channels, channel: Channel, buffer: torch.Tensor) -> Any:
        key = _key(self, channel)
        posted[key] += 1
        staging = torch.empty_like(buffer)
        buffer.fill_(float("nan") if buffer.is_floating_point() else -(1 << 40))
        opened = _Open(irecv(self, channel, staging), staging, buffer, folder / key, posted[key])
        _OPEN.append(opened)
        return opened

    def hostile_between_passes(self: Channels, launches_little: bool = False) -> None:
        between_passes(self, launches_little)
        if rng.random() < DRAINS:
            _drain()

    patched: Any = Channels
    patched._isend, patched._irecv = hostile_isend, hostile_irecv
    patched.between_passes = hostile_between_passes
    patched = Execution
    patched.run = _in_program(Execution.run)
    for owner, name in (
        (torch.cuda, "synchronize"),
        (torch.cuda, "empty_cache"),
        (torch.cuda.Stream, "synchronize"),
        (torch.cuda.Event, "synchronize"),
    ):
        setattr(owner, name, _checked(getattr(owner, name, None), name))


def _drain() -> None:
    for opened in _OPEN:
        opened.arrive()


def _in_program(run: Callable[..., None]) -> Callable[..., None]:
    def counted(*arguments: Any) -> None:
        _PROGRAMS.append(run)
        try:
            run(*arguments)
        finally:
            _PROGRAMS.pop()

    return counted


def _checked(function: Any, name: str) -> Callable[..., Any]:
    def synchronise(*arguments: Any, **keywords: Any) -> Any:
        if _PROGRAMS:
            _drain()
        for opened in _OPEN:
            if not opened.has_arrived and not opened.is_sent():
                raise Violation(
                    f"{name} was called while a receive is open that its peer has not sent to; it "
                    f"was posted at\n{opened.place}"
                )
        return None if function is None else function(*arguments, **keywords)

    return synchronise


def _key(channels: Channels, channel: Channel) -> str:
    group: Any = channels._groups[channel][0]
    return f"{group.group_name}-{channel.source}-{channel.target}"


def _content(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())
