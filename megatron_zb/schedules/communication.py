"""Lowering: from pass lists to programs with sends and receives, proved free of deadlock.

Messages between two ranks travel on a *channel*, one for each direction, first in first out. The
order in which the source runs the producing passes is the order of the messages, so both sides
know it without talking. A rank posts receives ahead, in that order, into a bounded number of
buffers, and keeps a bounded number of sends that have not been taken yet; it waits only for a
message that its next pass reads, or for the oldest untaken send when all its send slots are in use.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule


class Channel(NamedTuple):
    """One direction between two logical ranks."""

    source: int
    target: int


class Message(NamedTuple):
    """The output of one pass on its way to the rank that reads it.

    ``is_gradient`` tells an output gradient from an activation; ``stage`` is the *reading* stage.
    """

    is_gradient: bool
    stage: int
    microbatch: int


class Receive(NamedTuple):
    """Post a receive into a buffer of its own."""

    channel: Channel
    message: Message


class Take(NamedTuple):
    """Wait for a posted message; its buffer becomes the input of the next pass."""

    channel: Channel
    message: Message


class Run(NamedTuple):
    """Run a pass on the message it ``reads``, if any, to the message it ``makes``, if any.

    ``makes_local`` says that a later pass of this very rank reads it; otherwise a Send follows.
    """

    work: Pass
    reads: Message | None
    makes: Message | None
    makes_local: bool


class Send(NamedTuple):
    """Send what the pass just run has made."""

    channel: Channel
    message: Message


Instruction: TypeAlias = Receive | Take | Run | Send

_SEND_SLOTS = (2, 4, 8, 16, 64, 256, 4096)


@dataclass(frozen=True)
class Program:
    """Instructions for every logical rank, and the buffers with which they were proved to finish.

    ``receive_buffers[channel]`` is the most receives of a channel that are posted and not yet read;
    ``send_slots`` the most sends of a channel that may wait to be taken.
    """

    schedule: Schedule
    ranks: tuple[tuple[Instruction, ...], ...]
    receive_buffers: dict[Channel, int]
    send_slots: int


def lower(schedule: Schedule) -> Program:
    """Add the sends and receives to a schedule and prove that they cannot deadlock.

    Raises:
        InvalidSchedule: the ranks would wait for one another in a circle.
    """
    runs = [[_run(p, schedule.placement) for p in rank] for rank in schedule.ranks]
    sent = _message_order(runs, schedule.placement)
    buffers = {
        channel: _buffers_needed(messages, runs[channel.target])
        for channel, messages in sent.items()
    }
    ranks = tuple(
        tuple(_instructions(rank, runs[rank], sent, buffers, schedule.placement))
        for rank in range(len(runs))
    )
    for slots in _SEND_SLOTS:
        program = Program(schedule, ranks, buffers, slots)
        stuck = unfinished(program)
        if not stuck:
            return program
    rank, instruction = next(iter(stuck.items()))
    raise InvalidSchedule(
        f"{schedule.name}: rule 'progress': rank {rank} would wait for ever at {instruction}"
    )


def _run(p: Pass, placement: Placement) -> Run:
    if p.kind is PassKind.W:
        return Run(p, None, None, False)
    last = placement.num_stages - 1
    is_gradient = p.kind is not PassKind.F
    step = -1 if is_gradient else 1
    source, target = p.stage - step, p.stage + step
    reads = Message(is_gradient, p.stage, p.microbatch) if 0 <= source <= last else None
    if not 0 <= target <= last:
        return Run(p, reads, None, False)
    makes_local = placement.rank_of[target] == placement.rank_of[p.stage]
    return Run(p, reads, Message(is_gradient, target, p.microbatch), makes_local)


def _message_order(runs: list[list[Run]], placement: Placement) -> dict[Channel, list[Message]]:
    sent: dict[Channel, list[Message]] = defaultdict(list)
    for rank, passes in enumerate(runs):
        for run in passes:
            if run.makes is not None and not run.makes_local:
                sent[Channel(rank, placement.rank_of[run.makes.stage])].append(run.makes)
    return dict(sent)


def _buffers_needed(messages: list[Message], target_runs: list[Run]) -> int:
    """Buffers so that every message can arrive, in order, before the pass that reads it."""
    index = {message: i for i, message in enumerate(messages)}
    needed, read = 1, 0
    for run in target_runs:
        if run.reads is not None and (i := index.get(run.reads)) is not None:
            needed = max(needed, i + 1 - read)
            read += 1
    return needed


def _instructions(
    rank: int,
    runs: list[Run],
    sent: dict[Channel, list[Message]],
    buffers: dict[Channel, int],
    placement: Placement,
) -> list[Instruction]:
    unposted = {c: deque(messages) for c, messages in sent.items() if c.target == rank}
    channel_of = {message: c for c, messages in unposted.items() for message in messages}
    posted = dict.fromkeys(unposted, 0)
    instructions: list[Instruction] = []

    def post(channel: Channel) -> None:
        while unposted[channel] and posted[channel] < buffers[channel]:
            instructions.append(Receive(channel, unposted[channel].popleft()))
            posted[channel] += 1

    for channel in sorted(unposted):
        post(channel)
    for run in runs:
        if run.reads is not None and run.reads in channel_of:
            channel = channel_of[run.reads]
            instructions.append(Take(channel, run.reads))
            posted[channel] -= 1
            post(channel)  # before the pass, so that the next message travels while it runs
        instructions.append(run)
        if run.makes is not None and not run.makes_local:
            instructions.append(Send(Channel(rank, placement.rank_of[run.makes.stage]), run.makes))
    return instructions


def unfinished(program: Program) -> dict[int, Instruction]:
    """Run the program on paper with its bounded buffers; the instructions no rank gets past.

    A rank waits only for a message it reads, or for a send slot, and no choice depends on when a
    message arrives. Such a network has one outcome: if one order of arrivals finishes, all do, so
    this single run is the proof (Kahn 1974).
    """
    position = [0] * len(program.ranks)
    posted: dict[Channel, int] = defaultdict(int)
    sent: dict[Channel, int] = defaultdict(int)
    arrived: set[tuple[int, Message]] = set()
    orders: dict[Channel, list[Message]] = defaultdict(list)
    for instructions in program.ranks:
        for instruction in instructions:
            if isinstance(instruction, Send):
                orders[instruction.channel].append(instruction.message)

    def deliver(channel: Channel, before: int) -> None:
        for i in range(before, min(posted[channel], sent[channel])):
            arrived.add((channel.target, orders[channel][i]))

    def advance(rank: int) -> set[int]:
        """Run a rank until it waits; the ranks whose wait that may have ended."""
        touched = set()
        for i in range(position[rank], len(program.ranks[rank])):
            instruction = program.ranks[rank][i]
            if isinstance(instruction, Take):
                if (rank, instruction.message) not in arrived:
                    break
                arrived.discard((rank, instruction.message))
            elif not isinstance(instruction, Run):
                channel = instruction.channel
                before = min(posted[channel], sent[channel])
                if isinstance(instruction, Receive):
                    posted[channel] += 1
                    touched.add(channel.source)
                elif sent[channel] - posted[channel] >= program.send_slots:
                    break
                else:
                    sent[channel] += 1
                    touched.add(channel.target)
                deliver(channel, before)
            position[rank] = i + 1
        return touched

    runnable = set(range(len(program.ranks)))
    while runnable:
        rank = runnable.pop()
        before = position[rank]
        touched = advance(rank)
        if position[rank] > before:
            runnable |= touched
    return {r: program.ranks[r][i] for r, i in enumerate(position) if i < len(program.ranks[r])}
