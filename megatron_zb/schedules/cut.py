"""Where a step may be taken back: the forwards that run before any other pass, on every rank.

A step that begins on weights that are not known to be right runs these forwards first. If the
weights turn out wrong, every rank has run exactly its forwards up to the cut; what is under way on
the channels is then delivered and dropped, and the step begins anew.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megatron_zb.schedules.communication import (
    Channel,
    Instruction,
    Message,
    Program,
    Receive,
    Run,
    Send,
    Take,
)
from megatron_zb.schedules.passes import PassKind


@dataclass(frozen=True)
class Cut:
    """For every logical rank: how many instructions come before the cut, and what empties channels.

    ``drains[rank]`` posts what was sent, sends dummies for what was posted, and takes it all.
    """

    ends: tuple[int, ...]
    drains: tuple[tuple[Instruction, ...], ...]


def cut(program: Program) -> Cut:
    """The longest prefixes that hold only forwards and read only what such prefixes send."""
    ends = _prefixes(program)
    before = [rank[:end] for rank, end in zip(program.ranks, ends, strict=True)]
    return Cut(tuple(ends), _drains(program, before))


def _prefixes(program: Program) -> list[int]:
    ends = [
        next((i for i, at in enumerate(rank) if not _is_forward(at)), len(rank))
        for rank in program.ranks
    ]
    while True:
        sent = {
            (at.channel.target, at.message)
            for rank, end in zip(program.ranks, ends, strict=True)
            for at in rank[:end]
            if isinstance(at, Send)
        }
        shorter = [
            next(
                (
                    i
                    for i, at in enumerate(rank[:end])
                    if isinstance(at, Take) and (number, at.message) not in sent
                ),
                end,
            )
            for number, (rank, end) in enumerate(zip(program.ranks, ends, strict=True))
        ]
        if shorter == ends:
            return ends
        ends = shorter


def _is_forward(at: Instruction) -> bool:
    if isinstance(at, Run):
        return at.work.kind is PassKind.F
    return not (isinstance(at, Take) and at.message.is_gradient)


def _drains(
    program: Program, before: list[tuple[Instruction, ...]]
) -> tuple[tuple[Instruction, ...], ...]:
    """First all receives, then all sends, then the waiting: so no rank waits for another's wait."""
    orders = _orders(program)
    sent, posted = _counted(before, Send), _counted(before, Receive)
    taken = {(at.channel, at.message) for rank in before for at in rank if isinstance(at, Take)}
    receives: dict[int, list[Instruction]] = defaultdict(list)
    sends: dict[int, list[Instruction]] = defaultdict(list)
    takes: dict[int, list[Instruction]] = defaultdict(list)
    for channel, order in sorted(orders.items()):
        delivered = max(sent[channel], posted[channel])
        for message in order[posted[channel] : delivered]:
            receives[channel.target].append(Receive(channel, message))
        for message in order[sent[channel] : delivered]:
            sends[channel.source].append(Send(channel, message))
        for message in order[:delivered]:
            if (channel, message) not in taken:
                takes[channel.target].append(Take(channel, message))
    return tuple(
        (*receives[rank], *sends[rank], *takes[rank]) for rank in range(len(program.ranks))
    )


def _orders(program: Program) -> dict[Channel, list[Message]]:
    orders: dict[Channel, list[Message]] = defaultdict(list)
    for rank in program.ranks:
        for at in rank:
            if isinstance(at, Send):
                orders[at.channel].append(at.message)
    return orders


def _counted(
    before: list[tuple[Instruction, ...]], kind: type[Send] | type[Receive]
) -> dict[Channel, int]:
    counts: dict[Channel, int] = defaultdict(int)
    for rank in before:
        for at in rank:
            if isinstance(at, kind):
                counts[at.channel] += 1
    return counts
