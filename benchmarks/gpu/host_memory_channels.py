"""Messages between ranks that share one GPU: through pinned host memory and gloo.

NCCL refuses two ranks on one device, and gloo sends no tensors of a GPU. Here a message is copied
to the host on a stream of its own, sent by a thread, received by a thread and copied to the other
rank's buffer on a stream of its own. Slow, but what computes is real: its streams, its events and
the order in which the host reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_zb.megatron_core import connections
from megatron_zb.runtime.channels import Channels
from megatron_zb.schedules.passes import Channel


@dataclass(frozen=True)
class Transfer:
    """A message on its way; the thread that carries it leaves the event of its last copy."""

    task: Future[torch.cuda.Event | None]

    def wait(self) -> None:
        """Hold up the host until the message has come, and the current stream until it is copied.

        A send has been copied when it has been sent.
        """
        copied = self.task.result()
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would not hold up the host."""
        return self.task.done()


class HostMemoryChannels(Channels):
    """The channels of one rank over the default process group, which is gloo's.

    Every direction of a link has a thread, so its messages stay in order and wait for no others.
    """

    def __init__(self, pipeline_ranks: Sequence[int], *arguments: Any, **options: Any) -> None:
        self._global_ranks = list(pipeline_ranks)
        self._threads: dict[Channel, ThreadPoolExecutor] = {}
        self._to_host, self._from_host = torch.cuda.Stream(), torch.cuda.Stream()
        super().__init__(pipeline_ranks, *arguments, **options)

    def _isend(self, channel: Channel, tensor: torch.Tensor) -> Any:
        host = _on_host(tensor)
        copied = torch.cuda.Event()
        self._to_host.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._to_host):
            host.copy_(tensor.detach(), non_blocking=True)
            copied.record(self._to_host)

        def send() -> None:
            copied.synchronize()
            _done(dist.isend(host, self._global_ranks[channel.target]))

        return self._start(channel, send)

    def _irecv(self, channel: Channel, buffer: torch.Tensor) -> Any:
        host = _on_host(buffer)
        allocated = torch.cuda.Event()
        allocated.record(torch.cuda.current_stream())

        def receive() -> torch.cuda.Event:
            _done(dist.irecv(host, self._global_ranks[channel.source]))
            copied = torch.cuda.Event()
            self._from_host.wait_event(allocated)
            with torch.cuda.stream(self._from_host):
                buffer.copy_(host, non_blocking=True)
                copied.record(self._from_host)
            return copied

        return self._start(channel, receive)

    def _start(self, channel: Channel, task: Callable[[], torch.cuda.Event | None]) -> Transfer:
        if channel not in self._threads:
            self._threads[channel] = ThreadPoolExecutor(max_workers=1)
        return Transfer(self._threads[channel].submit(task))

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        super().close()


def share_the_gpu() -> None:
    """Let all adapters of this process send their messages through the host's memory."""
    connections.Channels = HostMemoryChannels  # type: ignore[misc]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the host for a message, which a GPU can copy from and to by itself."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _done(work: dist.Work | None) -> None:
    assert work is not None  # None would mean that this rank is not in the group
    work.wait()
