"""Rollback of a step: the forwards that run before any other pass, on every rank.

A step that begins on weights that are not known to be right runs these forwards first. If the
weights turn out wrong, every rank has run exactly its forwards up to the cut, and every message
before it has both been sent and been received; what nobody has read is dropped, and the step begins
anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_zb.schedules.passes import Channel, Message, PassKind
from megatron_zb.schedules.program.lowering import (
    Instruction,
    PostReceive,
    Program,
    Run,
    RunPair,
    Send,
    WaitReceive,
)


@dataclass(frozen=True)
class Rollback:
    """Number of instructions before the cut, and messages to drop, for every logical rank.

    ``drops[rank]`` has the messages that have been received before the cut and not been read.
    """

    ends: tuple[int, ...]
    drops: tuple[tuple[Message, ...], ...]


def rollback(program: Program) -> Rollback:
    """Find the longest prefixes that hold only forwards, and messages both of whose ends they hold.

    They are a beginning of the total order of the program, so they finish as the program does.
    """
    ends = [
        next((i for i, at in enumerate(rank) if not _is_forward(at)), len(rank))
        for rank in program.ranks
    ]
    while True:
        held = [
            set(_ends_of_messages(rank[:end]))
            for rank, end in zip(program.ranks, ends, strict=True)
        ]
        shorter = [
            next((i for i, at in enumerate(rank[:end]) if not _is_whole(at, held)), end)
            for rank, end in zip(program.ranks, ends, strict=True)
        ]
        if shorter == ends:
            break
        ends = shorter
    prefixes = [rank[:end] for rank, end in zip(program.ranks, ends, strict=True)]
    return Rollback(tuple(ends), tuple(map(_unread, prefixes)))


def _is_forward(at: Instruction) -> bool:
    if isinstance(at, RunPair):
        return False
    return at.work.kind is PassKind.F if isinstance(at, Run) else not at.message.is_gradient


def _ends_of_messages(
    instructions: tuple[Instruction, ...],
) -> Iterator[tuple[type, Channel, Message]]:
    for at in instructions:
        if isinstance(at, Send | PostReceive):
            yield type(at), at.channel, at.message


def _is_whole(at: Instruction, held: list[set[tuple[type, Channel, Message]]]) -> bool:
    """Return whether the other end of a message is before the cut, too."""
    if isinstance(at, Send):
        return (PostReceive, *at) in held[at.channel.target]
    if isinstance(at, PostReceive):
        return (Send, *at) in held[at.channel.source]
    return True


def _unread(prefix: tuple[Instruction, ...]) -> tuple[Message, ...]:
    taken = {at.message for at in prefix if isinstance(at, WaitReceive)}
    received = (at.message for at in prefix if isinstance(at, PostReceive))
    return tuple(message for message in received if message not in taken)
