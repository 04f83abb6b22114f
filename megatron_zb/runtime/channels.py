"""Messages between pipeline ranks: one first-in-first-out queue for each direction of a link.

Messages to higher ranks and messages to lower ranks use two process groups, so that opposite
messages never wait for each other. Nothing here blocks the host on a GPU: ``wait`` makes the
current stream wait, and finished sends are found by asking.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.schedules.communication import Channel, Message
from megatron_zb.schedules.placement import Placement


class Header(NamedTuple):
    """What goes ahead of a message whose shape its reader does not know."""

    message: Message


def channels_of(placement: Placement) -> list[Channel]:
    """Every channel that a placement needs, in the one order that all ranks agree on."""
    pairs = {c for a, b in placement.links for c in (Channel(a, b), Channel(b, a))}
    return sorted(pairs)


def _direction_groups(pipeline_ranks: list[int]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Two new groups over these ranks; each rank of the job makes those of every pipeline."""
    pipelines: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(pipelines, tuple(sorted(pipeline_ranks)))
    mine: list[dist.ProcessGroup] = []
    for members in sorted(set(pipelines)):
        for _ in range(2):
            group = dist.new_group(list(members))
            if isinstance(group, dist.ProcessGroup):  # ranks outside get a number instead
                mine.append(group)
    return mine[0], mine[1]


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None would mean that this rank is not in the group
    return work


class Channels:
    """The channels of one rank over ``pipeline_ranks`` (global ranks in logical order).

    Creating it is collective over all ranks of the job: every pipeline gets two communicators, and
    one element is sent over every link, because a backend such as NCCL connects a pair at its first
    message and would hold up the host in the middle of a step.
    """

    def __init__(
        self, pipeline_ranks: Sequence[int], placement: Placement, device: torch.device | str | int
    ) -> None:
        self._ranks = list(pipeline_ranks)
        self._upward, self._downward = _direction_groups(self._ranks)
        self._received: dict[Message | Header, tuple[dist.Work, torch.Tensor]] = {}
        self._sends: dict[Channel, deque[tuple[dist.Work, torch.Tensor]]] = defaultdict(deque)
        self.activation_memory: ActivationMemory | None = None
        self._connect(channels_of(placement), device)

    def _connect(self, channels: Iterable[Channel], device: torch.device | str | int) -> None:
        me = self._ranks.index(dist.get_rank())
        probe = torch.zeros(1, device=device)
        for channel in channels:
            if channel.source == me:
                self._isend(channel, probe).wait()
            elif channel.target == me:
                self._irecv(channel, probe).wait()

    def _group(self, channel: Channel) -> dist.ProcessGroup:
        return self._upward if channel.source < channel.target else self._downward

    def _isend(self, channel: Channel, tensor: torch.Tensor) -> dist.Work:
        return _started(dist.isend(tensor, self._ranks[channel.target], group=self._group(channel)))

    def _irecv(self, channel: Channel, tensor: torch.Tensor) -> dist.Work:
        return _started(dist.irecv(tensor, self._ranks[channel.source], group=self._group(channel)))

    def post_receive(
        self, channel: Channel, message: Message | Header, buffer: torch.Tensor
    ) -> None:
        """Receive the channel's next message into ``buffer``; :meth:`take` hands it out."""
        if self.activation_memory is not None:
            self.activation_memory.hold(buffer)
        self._received[message] = (self._irecv(channel, buffer), buffer)

    def has_arrived(self, message: Message | Header) -> bool:
        """Whether :meth:`take` would not wait, as far as the backend can tell."""
        return self._received[message][0].is_completed()

    def take(self, message: Message | Header) -> torch.Tensor:
        """Wait for a posted message and give its buffer away."""
        work, buffer = self._received.pop(message)
        work.wait()
        if self.activation_memory is not None:
            self.activation_memory.release(buffer)
        return buffer

    def send(self, channel: Channel, tensor: torch.Tensor, slots: int) -> None:
        """Send as the channel's next message; the tensor is kept until it has been taken.

        At most ``slots`` sends of a channel are left untaken: past that, the oldest is waited for.
        """
        pending = self._sends[channel]
        while len(pending) >= slots:
            pending[0][0].wait()
            self._forget(pending)
        if self.activation_memory is not None:
            self.activation_memory.hold(tensor)
        pending.append((self._isend(channel, tensor), tensor))

    def forget_taken(self) -> None:
        """Let go of the sends that have been taken."""
        for pending in self._sends.values():
            while pending and pending[0][0].is_completed():
                self._forget(pending)

    def _forget(self, pending: deque[tuple[dist.Work, torch.Tensor]]) -> None:
        _, tensor = pending.popleft()
        if self.activation_memory is not None:
            self.activation_memory.release(tensor)

    def close(self) -> None:
        """Give the two communicators back; collective over the pipeline."""
        for group in (self._upward, self._downward):
            dist.destroy_process_group(group)

    def finish(self) -> None:
        """Wait for every send of this step; a step leaves no message behind."""
        for pending in self._sends.values():
            while pending:
                pending[0][0].wait()
                self._forget(pending)
        if self._received:
            raise RuntimeError(f"messages were received and never read: {list(self._received)}")
