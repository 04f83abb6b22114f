"""Copies between a device and its host, beside what the device computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

Copied = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of tensors of bytes: where to, and where from."""

Wait = Callable[[], None]
"""Function that makes what is computed from here on wait for a copy."""


class CopyEngines(Protocol):
    """The two copy engines of a device; each copies what it is given in turn.

    ``piece`` is the number of bytes in which memory of the host is to be asked for, None for any.
    """

    piece: int | None

    def begin(self, copied: Copied, *, to_host: bool) -> Wait:
        """Begin to copy, behind what the device has been given to compute until now."""

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory of the host that the engines reach."""


def engines_of(device: torch.device) -> CopyEngines:
    """Return the copy engines of a device."""
    return StreamEngines(device) if device.type == "cuda" else ThreadEngines()


class ThreadEngines:
    """Engines of a rank on a CPU: a thread for each direction, between two parts of its memory.

    With ``seconds_per_byte``, a copy takes so long at least.
    """

    piece: int | None = None

    def __init__(self, seconds_per_byte: float = 0.0) -> None:
        self._seconds_per_byte = seconds_per_byte
        self._threads = {to_host: ThreadPoolExecutor(max_workers=1) for to_host in (True, False)}

    def begin(self, copied: Copied, *, to_host: bool) -> Wait:
        return self._threads[to_host].submit(self._copy, copied).result

    def _copy(self, copied: Copied) -> None:
        for there, here in copied:
            there.copy_(here)
        time.sleep(self._seconds_per_byte * sum(here.nbytes for _, here in copied))

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class StreamEngines:
    """Engines of a GPU: a stream for each direction. The host waits for nothing.

    Pieces are of a power of two, to which torch rounds up whatever pinned memory it is asked for.
    To pin a GiB takes some tenths of a second, once for each piece.
    """

    piece: int | None = 64 * 2**20

    def __init__(self, device: torch.device) -> None:
        self._streams = {to_host: torch.cuda.Stream(device) for to_host in (True, False)}

    def begin(self, copied: Copied, *, to_host: bool) -> Wait:
        stream, ended = self._streams[to_host], torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for there, here in copied:
                there.copy_(here, non_blocking=True)
            ended.record()

        def wait() -> None:
            torch.cuda.current_stream().wait_event(ended)

        return wait

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
