"""Messages of shapes that the reader does not know: each shape travels ahead, as a header."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_zb.runtime.channels import Channels, Header
from megatron_zb.schedules.passes import Channel, Message

# A header is the number of dimensions and then their sizes, padded to this length.
_HEADER_LENGTH = 8


class ShapedChannels:
    """Channels on which every message may have another shape; used in place of Channels.

    A header goes from host to host when the pass that makes the message has been enqueued, so
    reading it waits for no GPU. The reader's host waits for it where the receive stands in the
    program, which every program allows.

    Args:
        channels: for the messages.
        headers: between the same ranks, for tensors of the host.
    """

    waits_to_receive = True

    def __init__(self, channels: Channels, headers: Channels) -> None:
        self._channels, self._headers = channels, headers

    def post_receive(
        self, channel: Channel, message: Message, allocate: Callable[[], torch.Tensor]
    ) -> None:
        """Receive a message of any shape, with the type and the device of ``allocate()``."""
        header = Header(message)
        self._headers.post_receive(channel, header, _empty_header)
        dimensions, *sizes = self._headers.take(header).tolist()
        shape = sizes[:dimensions]
        self._channels.post_receive(channel, message, lambda: allocate().new_empty(shape))

    def take(self, message: Message) -> torch.Tensor:
        """Wait for a posted message and give its buffer away."""
        return self._channels.take(message)

    def send(self, channel: Channel, tensor: torch.Tensor, slots: int) -> None:
        """Send a tensor as the channel's next message, its shape first."""
        header = _empty_header().zero_()
        header[: tensor.dim() + 1] = torch.tensor([tensor.dim(), *tensor.shape], device="cpu")
        self._headers.send(channel, header, slots)
        self._channels.send(channel, tensor, slots)

    def between_passes(self, launches_little: bool = False) -> None:
        """Release the sends that have been taken, and keep the host from running too far ahead."""
        self._headers.between_passes(launches_little)
        self._channels.between_passes(launches_little)

    def finish(self) -> None:
        """Wait for every send of this step."""
        self._headers.finish()
        self._channels.finish()


def _empty_header() -> torch.Tensor:
    return torch.empty(_HEADER_LENGTH, dtype=torch.int64, device="cpu")
