"""Messages whose shape the reader does not know: the shape travels ahead of each, as a header."""

from __future__ import annotations

import sys
from collections import defaultdict, deque

import torch

from megatron_zb.runtime.channels import Channels, Header
from megatron_zb.schedules.communication import Channel, Message

# A header is the number of dimensions and then their sizes, padded to this length.
_HEADER_LENGTH = 8
# A sender that waited for a slot could wait for ever: its reader posts a receive only when it has
# read the header, which may be after its next pass.
_UNBOUNDED = sys.maxsize


class ShapedChannels:
    """Channels on which every message may have another shape; serves where Channels do.

    Only the header of a channel's next message is posted ahead. Its tensor is received when a pass
    reads it, or earlier, when the header is found to have arrived. A rank waits for nothing but the
    messages that its passes read, so every valid schedule finishes. Reading a header makes the host
    wait for it.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._expected: dict[Channel, deque[tuple[Message, torch.Tensor]]] = defaultdict(deque)
        self._channel_of: dict[Message, Channel] = {}

    def post_receive(self, channel: Channel, message: Message, buffer: torch.Tensor) -> None:
        """Expect a message of any shape, with the type and the device of ``buffer``."""
        expected = self._expected[channel]
        expected.append((message, buffer))
        self._channel_of[message] = channel
        if len(expected) == 1:
            self._post_header(channel)

    def take(self, message: Message) -> torch.Tensor:
        """Wait for a message; those ahead of it in its channel are received, too."""
        while (channel := self._channel_of.get(message)) is not None:
            self._post_tensor(channel)
        return self._channels.take(message)

    def send(self, channel: Channel, tensor: torch.Tensor, slots: int) -> None:
        """Send as the channel's next message, whatever number of slots is in use."""
        sizes = [tensor.dim(), *tensor.shape]
        sizes += [0] * (_HEADER_LENGTH - len(sizes))
        header = torch.tensor(sizes, dtype=torch.int64, device=tensor.device)
        self._channels.send(channel, header, _UNBOUNDED)
        self._channels.send(channel, tensor, _UNBOUNDED)

    def forget_taken(self) -> None:
        """Let go of what has been sent, and start to receive what has been announced."""
        for channel, expected in self._expected.items():
            while expected and self._channels.has_arrived(Header(expected[0][0])):
                self._post_tensor(channel)
        self._channels.forget_taken()

    def finish(self) -> None:
        self._channels.finish()

    def _post_header(self, channel: Channel) -> None:
        message, like = self._expected[channel][0]
        header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=like.device)
        self._channels.post_receive(channel, Header(message), header)

    def _post_tensor(self, channel: Channel) -> None:
        """Receive the tensor that the channel's header tells of, and then the next header."""
        message, like = self._expected[channel].popleft()
        del self._channel_of[message]
        dimensions, *sizes = self._channels.take(Header(message)).tolist()
        self._channels.post_receive(channel, message, like.new_empty(sizes[:dimensions]))
        if self._expected[channel]:
            self._post_header(channel)
