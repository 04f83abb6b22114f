"""How long a message takes from one pipeline rank to another."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from megatron_zb.runtime.channels import Channels, channels_of
from megatron_zb.schedules.communication import Channel, Message
from megatron_zb.schedules.placement import Placement

_ROUNDS = 5


def link_times(
    channels: Channels, placement: Placement, rank: int, allocate: Callable[[], torch.Tensor]
) -> dict[Channel, float]:
    """Seconds of one message on the channels to higher ranks and back; collective.

    Between two steps, when nothing is under way: for each link of the pipeline in turn, a message
    goes forth and back a few times, and half of the fastest round counts for either direction.

    Args:
        rank: this logical rank.
        allocate: a tensor such as the passes exchange.
    """
    found: dict[Channel, float] = {}
    for channel in channels_of(placement):
        if channel.source < channel.target and rank in channel:
            seconds = _fastest_round(channels, channel, rank == channel.source, allocate) / 2
            if rank == channel.source:  # the other one's rounds begin before the message is sent
                found[channel] = found[_back(channel)] = seconds
    return found


def _back(channel: Channel) -> Channel:
    return Channel(channel.target, channel.source)


def _fastest_round(
    channels: Channels, channel: Channel, begins: bool, allocate: Callable[[], torch.Tensor]
) -> float:
    there, home = (channel, _back(channel)) if begins else (_back(channel), channel)
    fastest = float("inf")
    for number in range(_ROUNDS):
        message = Message(False, -1, number)
        channels.post_receive(home, message, allocate())
        _finished(outgoing := allocate().zero_())
        start = time.perf_counter()
        if begins:
            channels.send(there, outgoing, 1)
            _finished(channels.take(message))
        else:
            _finished(channels.take(message))
            channels.send(there, outgoing, 1)
        channels.finish()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def _finished(tensor: torch.Tensor) -> None:
    """Wait until what makes a tensor has run."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
