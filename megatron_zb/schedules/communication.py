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
from megatron_zb.schedules.relay import Product, Relay
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule


class Channel(NamedTuple):
    """One direction between two logical ranks."""

    source: int
    target: int


class Message(NamedTuple):
    """The output of one pass on its way to the rank that reads it.

    ``is_gradient`` tells an output gradient from an activation; ``stage`` is the *reading* stage.
    A *credit* carries no tensor of the model: it tells the first stage that rank ``credit_of`` has
    updated its students in step ``microbatch``, so that the first stage may begin a later one.
    """

    is_gradient: bool
    stage: int
    microbatch: int
    credit_of: int | None = None

    @property
    def is_credit(self) -> bool:
        return self.credit_of is not None


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
    """Send what the pass just run has made, or a credit for it."""

    channel: Channel
    message: Message


Instruction: TypeAlias = Receive | Take | Run | Send

_WITHOUT_MESSAGES = (PassKind.W, PassKind.S, PassKind.U)
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
    runs = [[_run(p, rank, schedule) for p in passes] for rank, passes in enumerate(schedule.ranks)]
    sent = _message_order(runs, schedule)
    buffers = {
        channel: _buffers_needed(channel, messages, runs[channel.target], schedule)
        for channel, messages in sent.items()
    }
    ranks = tuple(
        tuple(_instructions(rank, runs[rank], sent, buffers, schedule)) for rank in range(len(runs))
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


def _run(p: Pass, rank: int, schedule: Schedule) -> Run:
    if p.kind in _WITHOUT_MESSAGES:
        return Run(p, None, None, False)
    placement = schedule.placement
    last = placement.num_stages - 1
    is_gradient = p.kind not in (PassKind.F, PassKind.T)
    step = -1 if is_gradient else 1
    source, target = p.stage - step, p.stage + step
    reads = Message(is_gradient, p.stage, p.microbatch) if 0 <= source <= last else None
    if not 0 <= target <= last:
        return Run(p, reads, None, False)
    makes_local = placement.rank_at(target, p.microbatch) == rank
    return Run(p, reads, Message(is_gradient, target, p.microbatch), makes_local)


def _sends(rank: int, run: Run, schedule: Schedule) -> list[Send]:
    """What a rank sends when it has run a pass."""
    if run.work.kind is PassKind.U:
        return _credits(rank, run.work, schedule)
    if run.makes is None or run.makes_local:
        return []
    target = schedule.placement.rank_at(run.makes.stage, run.makes.microbatch)
    return [Send(Channel(rank, target), run.makes)]


def _credits(rank: int, update: Pass, schedule: Schedule) -> list[Send]:
    """A credit to each rank of the first stage, if that waits for this step's updates at all."""
    relay = schedule.relay
    if relay is None or not relay.is_awaited(update.microbatch):
        return []
    credit = Message(False, 0, update.microbatch, rank)
    waiting = schedule.placement.ranks_of[0]
    return [Send(Channel(rank, first), credit) for first in waiting if first != rank]


def _takes(rank: int, run: Run, schedule: Schedule) -> list[Message]:
    """What must be there before a rank runs a pass, whether sent by another rank or made here."""
    taken = [] if run.reads is None else [run.reads]
    relay = schedule.relay
    if relay is not None:
        step = relay.awaited_step(schedule.placement, run.work)
        if step is not None:
            others = (r for r in range(len(schedule.ranks)) if r != rank)
            taken += [Message(False, 0, step, other) for other in others]
    return taken


def _message_order(runs: list[list[Run]], schedule: Schedule) -> dict[Channel, list[Message]]:
    sent: dict[Channel, list[Message]] = defaultdict(list)
    for rank, passes in enumerate(runs):
        for run in passes:
            for channel, message in _sends(rank, run, schedule):
                sent[channel].append(message)
    return dict(sent)


def _buffers_needed(
    channel: Channel, messages: list[Message], target_runs: list[Run], schedule: Schedule
) -> int:
    """Buffers so that every message can arrive, in order, before the pass that reads it.

    In a relay also so many that no rank is held up before ``run_ahead`` holds it up: room for all
    that a channel carries in the step at hand and in those ahead.
    """
    index = {message: i for i, message in enumerate(messages)}
    needed, read = 1, 0
    for run in target_runs:
        for message in _takes(channel.target, run, schedule):
            if (i := index.get(message)) is not None:
                needed = max(needed, i + 1 - read)
                read += 1
    if schedule.relay is None:
        return needed
    return max(needed, _most_under_way(messages, schedule.relay))


def _most_under_way(messages: list[Message], relay: Relay) -> int:
    """The most messages of a channel in ``run_ahead + 1`` steps in a row; all steps are alike."""
    steps = [
        message.microbatch // (1 if message.is_credit else relay.num_microbatches)
        for message in messages
    ]
    return sum(step - steps[0] <= relay.run_ahead for step in steps)


def _instructions(
    rank: int,
    runs: list[Run],
    sent: dict[Channel, list[Message]],
    buffers: dict[Channel, int],
    schedule: Schedule,
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
        for message in _takes(rank, run, schedule):
            if message in channel_of:
                channel = channel_of[message]
                instructions.append(Take(channel, message))
                posted[channel] -= 1
                post(channel)  # before the pass, so that the next message travels while it runs
        instructions.append(run)
        instructions += _sends(rank, run, schedule)
    return instructions


def unfinished(program: Program) -> dict[int, Instruction]:
    """Run the program on paper with its bounded buffers; the instructions no rank gets past.

    A rank waits only for a message it reads, for a send slot, or in U for the other ranks of its
    stage to come to theirs, and no choice depends on when a message arrives. Such a network has one
    outcome: if one order of arrivals finishes, all do, so this single run is the proof (Kahn 1974).
    """
    position = [0] * len(program.ranks)
    posted: dict[Channel, int] = defaultdict(int)
    sent: dict[Channel, int] = defaultdict(int)
    arrived: set[tuple[int, Message]] = set()
    orders: dict[Channel, list[Message]] = defaultdict(list)
    meetings = _Meetings(program.schedule)
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
            elif isinstance(instruction, Run):
                if not meetings.can_run(rank, instruction.work):
                    break
                touched |= meetings.ran(rank, instruction.work)
            else:
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


class _Meetings:
    """Where the ranks of a stage wait for one another without a message: to sum gradients in U."""

    def __init__(self, schedule: Schedule) -> None:
        self._relay, self._placement = schedule.relay, schedule.placement
        self._made: set[Product] = set()

    def can_run(self, rank: int, work: Pass) -> bool:
        """Whether all other ranks of the stage have come as far as ``rank`` needs them to."""
        if self._relay is None or work.kind is not PassKind.U:
            return True
        return self._made.issuperset(self._relay.needs(self._placement, rank, work))

    def ran(self, rank: int, work: Pass) -> set[int]:
        """Note a pass; the ranks whose wait that may have ended."""
        if self._relay is None or work.kind is not PassKind.S:
            return set()
        made = self._relay.makes(self._placement, rank, work)
        if made is None:
            return set()
        self._made.add(made)
        return {peer for peer in self._placement.ranks_of[work.stage] if peer != rank}
