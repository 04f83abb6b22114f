"""Lowering: from pass lists to programs of passes and messages that no device can deadlock.

A GPU may make the host wait for everything that it has enqueued, at any moment, and may hold up all
kernels behind one that waits. A program is safe there if it finishes when every send and every
receive is a blocking rendezvous at its place. So the programs of all ranks are projections of one
total order, in which a message comes right after the pass that makes it and stands in the programs
of its sender and of its reader at that place. The first event of the order that has not happened
can always happen. :func:`lower` replays what it made, to prove it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.relay import Relay
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule, walk
from megatron_zb.schedules.simulator import Timeline, simulate


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
_SEND_SLOTS = 2


@dataclass(frozen=True)
class Program:
    """Instructions for every logical rank.

    ``send_slots`` is the most sends of a channel that are left untaken; past that the oldest is
    waited for. Any number is safe, since even a rank that waits for each finishes.
    """

    schedule: Schedule
    ranks: tuple[tuple[Instruction, ...], ...]
    send_slots: int = _SEND_SLOTS


def lower(
    schedule: Schedule, timeline: Timeline | None = None, *, waits_to_receive: bool = False
) -> Program:
    """Add the sends and receives to a schedule and prove that they cannot deadlock.

    Args:
        timeline: of this schedule; it says what comes first in the order of all passes. Without
            one, passes of equal time. All ranks of a job must be given the same.
        waits_to_receive: a rank waits where it posts a receive. Then a message stands where the
            pass that makes it ends, so that its reader has nothing else to do meanwhile; otherwise
            where that pass begins, so that the receive is posted by the time that it ends.

    Raises:
        InvalidSchedule: the ranks would wait for one another in a circle.
    """
    ranks: list[list[Instruction]] = [[] for _ in schedule.ranks]
    moments = _moments(schedule, timeline, late=waits_to_receive)
    for rank, instruction in _total_order(schedule, moments):
        ranks[rank].append(instruction)
    program = Program(schedule, tuple(map(tuple, ranks)), _send_slots(schedule))
    check_progress(program)
    return program


def check_progress(program: Program) -> None:
    """Check that a program finishes when every send and receive is a blocking rendezvous.

    Raises:
        InvalidSchedule: names the ranks that wait for one another, and the messages.
    """
    stuck = unfinished(program)
    if stuck:
        waits = "; ".join(f"rank {rank} {_wait_in_words(at)}" for rank, at in stuck.items())
        raise InvalidSchedule(
            f"{program.schedule.name}: rule 'progress': with sends and receives that wait for each "
            f"other, the ranks wait in a circle: {waits}"
        )


def _wait_in_words(at: Instruction) -> str:
    if isinstance(at, Run):
        return f"to run {at.work} with the other ranks of its stage"
    message, (source, target) = at.message, at.channel
    kind = "credit" if message.is_credit else "gradient" if message.is_gradient else "activation"
    what = f"the {kind} for stage {message.stage}, microbatch {message.microbatch},"
    if isinstance(at, Send):
        return f"to send {what} to rank {target}"
    verb = "receive" if isinstance(at, Receive) else "take"
    return f"to {verb} {what} from rank {source}"


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
    """List what a rank sends when it has run a pass."""
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


def _takes(rank: int, run: Run, schedule: Schedule) -> list[Take]:
    """List the messages of other ranks that must be there before a rank runs a pass."""
    placement, relay = schedule.placement, schedule.relay
    taken = []
    if run.reads is not None:
        step = 1 if run.reads.is_gradient else -1
        source = placement.rank_at(run.reads.stage + step, run.reads.microbatch)
        if source != rank:
            taken.append(Take(Channel(source, rank), run.reads))
    awaited = None if relay is None else relay.awaited_step(placement, run.work)
    if awaited is not None:
        others = (r for r in range(len(schedule.ranks)) if r != rank)
        taken += [Take(Channel(r, rank), Message(False, 0, awaited, r)) for r in others]
    return taken


def _send_slots(schedule: Schedule) -> int:
    """So many that no rank of a relay is held up before ``run_ahead`` holds it up."""
    relay = schedule.relay
    if relay is None:
        return _SEND_SLOTS
    return (relay.run_ahead + 1) * relay.num_microbatches


# --- the total order

_Moment: TypeAlias = tuple[float, ...]
_Moments: TypeAlias = list[list[tuple[_Moment, _Moment]]]
"""For every pass of every rank: where it stands in the order, and where what it makes does."""


def _total_order(schedule: Schedule, moments: _Moments) -> Iterator[tuple[int, Instruction]]:
    """Yield all passes and messages by their moments, each with the rank it concerns.

    A message stands before the passes of its moment.

    Raises:
        InvalidSchedule: some pass can never run.
    """
    places: list[tuple[int, int]] = []  # each after what it depends on, and so within a moment
    if walk(schedule, lambda rank, position, p: places.append((rank, position))):
        raise InvalidSchedule(
            f"{schedule.name}: rule 'progress': the ranks wait for one another in a circle: "
            f"{schedule.blocked()}"
        )
    places.sort(key=lambda place: moments[place[0]][place[1]][0])
    made: list[tuple[_Moment, int, list[Send]]] = []
    for number, (rank, position) in enumerate(places):
        stands, makes = moments[rank][position]
        while made and made[0][0] <= stands:
            yield from _messages(heapq.heappop(made)[-1])
        run = _run(schedule.ranks[rank][position], rank, schedule)
        yield from ((rank, take) for take in _takes(rank, run, schedule))
        yield rank, run
        heapq.heappush(made, (makes, number, _sends(rank, run, schedule)))
    for _, _, sends in sorted(made):
        yield from _messages(sends)


def _messages(sends: list[Send]) -> Iterator[tuple[int, Instruction]]:
    for send in sends:
        yield send.channel.source, send
        yield send.channel.target, Receive(*send)


def _moments(schedule: Schedule, timeline: Timeline | None, *, late: bool) -> _Moments:
    if schedule.relay is not None:
        return _relay_moments(schedule, schedule.relay)
    if timeline is None:
        p = len(schedule.ranks)
        costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=1.0)
        timeline = simulate(schedule, costs)
    made = timeline.end if late else timeline.start
    return [
        [((start,), (end,)) for start, end in zip(starts, ends, strict=True)]
        for starts, ends in zip(timeline.start, made, strict=True)
    ]


def _relay_moments(schedule: Schedule, relay: Relay) -> _Moments:
    """Order a relay by steps, so that all steps are alike, and a step by the way of its data.

    The U of a stage's ranks, which meet there to sum their gradients, stand side by side.
    """
    m, many = relay.num_microbatches, len(schedule.ranks)
    found: _Moments = []
    for rank, passes in enumerate(schedule.ranks):
        stands: _Moment = ()
        found.append([])
        for p in passes:
            step = relay.step_of(p)
            if p.kind is PassKind.U:
                stands = max(stands, (step, 1, 0, p.stage, rank))
                found[-1].append((stands, (*stands[:-1], many, rank)))
            else:
                wave = p.microbatch % m + p.stage
                stands = max(stands, (step, 0, wave, p.stage, p.kind is PassKind.S))
                found[-1].append((stands, stands))
    return found


# --- the proof


def unfinished(program: Program) -> dict[int, Instruction]:
    """Replay a program under blocking rendezvous; return the instructions no rank gets past.

    A send waits for its receive and a receive for its send, each at its place; a U waits for those
    of the other ranks of its stage. No choice depends on time, so this one replay is the proof.
    """
    position = [0] * len(program.ranks)
    received: set[tuple[int, Message]] = set()

    def at(rank: int) -> Instruction | None:
        instructions = program.ranks[rank]
        return instructions[position[rank]] if position[rank] < len(instructions) else None

    def moves(rank: int) -> tuple[int, ...]:
        """Return the ranks that get past their instruction together with this one, if it does."""
        here = at(rank)
        if isinstance(here, Run):
            met = _meeting(program.schedule, rank, here.work)
            return met if all(at(other) == here for other in met) else ()
        if isinstance(here, Take):
            return (rank,) if (rank, here.message) in received else ()
        if here is None:
            return ()
        send, receive = (at(other) for other in here.channel)
        if not (isinstance(send, Send) and isinstance(receive, Receive) and receive == (*send,)):
            return ()
        received.add((here.channel.target, here.message))
        return here.channel

    runnable = set(range(len(program.ranks)))
    while runnable:
        rank = runnable.pop()
        while moved := moves(rank):
            runnable.update(moved)
            for other in moved:
                position[other] += 1
    return {rank: here for rank in range(len(position)) if (here := at(rank)) is not None}


def _meeting(schedule: Schedule, rank: int, work: Pass) -> tuple[int, ...]:
    """Return the ranks that run a pass together: in U all of the stage, else this one."""
    return schedule.placement.ranks_of[work.stage] if work.kind is PassKind.U else (rank,)
