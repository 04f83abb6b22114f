"""Measurement of links: the seconds of a message, of a sum over all ranks, and of host copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_zb.runtime.activation_memory import HostCopyEngines
from megatron_zb.runtime.channels import Channels, channels_of
from megatron_zb.schedules.passes import Channel, Message
from megatron_zb.schedules.placement import Placement

_ROUNDS = 5
_SUMS = 4
_COPY_ROUNDS = 3


def link_times(
    channels: Channels,
    placement: Placement,
    rank: int,
    allocate: Callable[[], torch.Tensor],
    more_peers: Iterable[tuple[int, int]] = (),
) -> dict[Channel, float]:
    """Measure the seconds of one message on the channels to higher ranks and back; collective.

    Between two steps, when nothing is under way: for each link of the pipeline in turn, a message
    goes forth and back a few times, and half of the fastest round counts for either direction.

    Args:
        rank: this logical rank.
        allocate: gives a tensor such as the passes exchange.
        more_peers: pairs of ranks beside those of the placement, as the channels have them.
    """
    found: dict[Channel, float] = {}
    for channel in channels_of(placement, more_peers):
        if channel.source < channel.target and rank in channel:
            begins = rank == channel.source
            seconds, _ = _fastest_round(channels, channel, begins, allocate)
            seconds /= 2
            if begins:  # the other one's rounds begin before the message is sent
                found[channel] = found[_back(channel)] = seconds
    return found


def clock_ahead(
    channels: Channels, placement: Placement, rank: int, device: torch.device | str | int
) -> float:
    """Measure by how many seconds the next rank's ``perf_counter`` is ahead; collective.

    As :func:`link_times`, between two steps. 0 on the last rank, which has none behind it.
    """

    def allocate() -> torch.Tensor:
        return torch.tensor([time.perf_counter()], dtype=torch.float64, device=device)

    ahead = 0.0
    for channel in channels_of(placement):
        if channel.target == channel.source + 1 and rank in channel:
            begins = rank == channel.source
            _, found = _fastest_round(channels, channel, begins, allocate)
            if begins:
                ahead = found
    return ahead


def _back(channel: Channel) -> Channel:
    return Channel(channel.target, channel.source)


def _fastest_round(
    channels: Channels, channel: Channel, begins: bool, allocate: Callable[[], torch.Tensor]
) -> tuple[float, float]:
    """Return the seconds of the fastest round, and of its answer past the round's middle.

    Each message is received where it stands in the round, after the one before it: a host that
    waits for its GPU waits for nothing that the other end cannot do yet.
    """
    back = _back(channel)
    fastest = (float("inf"), 0.0)
    for number in range(_ROUNDS):
        there, home = (Message(is_gradient, -1, number) for is_gradient in (False, True))
        outgoing = _finished(allocate())
        start = time.perf_counter()
        if begins:
            channels.send(channel, outgoing, 1)
            answer = _received(channels, back, home, allocate)
        else:
            answer = _received(channels, channel, there, allocate)
            channels.send(back, _finished(allocate()), 1)
        end = time.perf_counter()
        channels.finish()
        past = answer.flatten()[0].item() - (start + end) / 2
        fastest = min(fastest, (end - start, past))
    return fastest


def _received(
    channels: Channels, channel: Channel, message: Message, allocate: Callable[[], torch.Tensor]
) -> torch.Tensor:
    channels.post_receive(channel, message, allocate)
    return _finished(channels.take(message))


def _finished(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor once it has been computed; wait for nothing else of the GPU."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor


def seconds_over_a_link(numbers: int, device: torch.device | str | int) -> float:
    """Measure the seconds for ``numbers`` float32 values to pass a link once; equal on all ranks.

    Collective over all ranks of the job: they are summed over all of them a few times, and the
    fastest counts. A ring over k ranks sends 2(k-1)/k of them over each link. 0 for one rank.
    """
    ranks = dist.get_world_size()
    if ranks == 1 or numbers == 0:
        return 0.0
    tensor = torch.zeros(numbers, device=device)
    taken = torch.tensor([_seconds_to_sum(tensor) for _ in range(_SUMS)], device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken.min()) * ranks / (2 * (ranks - 1))


def _seconds_to_sum(tensor: torch.Tensor) -> float:
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()  # which waits for the sum
    return time.perf_counter() - began


BYTES = 1 << 24
"""Bytes of each copy that is timed."""


class CopyTimes(NamedTuple):
    """Seconds of :data:`BYTES` copied one way, and both ways at once."""

    one_way: float
    both_ways: float


def copy_times(engines: HostCopyEngines, device: torch.device) -> CopyTimes:
    """Measure the seconds of a copy on the engines of this rank; collective over the job.

    All ranks copy at the same time, so that a link that several share is as slow as in a step. One
    way is the slower of both, and each figure the fastest of a few rounds.
    """
    there, back = (engines.host_buffer(BYTES) for _ in range(2))
    leaving, coming = (torch.zeros(BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    out, into = (there, leaving, True), (coming, back, False)

    def seconds(*copies: tuple[torch.Tensor, torch.Tensor, bool]) -> float:
        dist.barrier()
        begun = time.perf_counter()
        waits = [engines.begin([(to, from_)], to_host=to_host) for to, from_, to_host in copies]
        for wait in waits:
            wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    rounds = [(seconds(out), seconds(into), seconds(out, into)) for _ in range(_COPY_ROUNDS)]
    outs, intos, both = (min(column) for column in zip(*rounds, strict=True))
    return CopyTimes(max(outs, intos), both)
