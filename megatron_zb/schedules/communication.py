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
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
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
    moments = _moments(schedule, timeline, late=waits_to_receive)
    program = Program(schedule, _projections(schedule, moments), _send_slots(schedule))
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


def _projections(schedule: Schedule, moments: _Moments) -> tuple[tuple[Instruction, ...], ...]:
    """Write down what one total order of all passes and messages says of each rank."""
    programs: list[list[Instruction]] = [[] for _ in schedule.ranks]
    for rank, instruction in _TotalOrder(schedule, moments).instructions():
        programs[rank].append(instruction)
    return tuple(map(tuple, programs))


class _TotalOrder:
    """All passes and messages by their moments; of one moment, messages come first.

    The U of a stage's ranks, which meet there to sum their gradients, are one event.
    """

    def __init__(self, schedule: Schedule, moments: _Moments) -> None:
        self._schedule = schedule
        self._runs = [[_run(p, r, schedule) for p in rank] for r, rank in enumerate(schedule.ranks)]
        self._moments = moments
        self._position = [0] * len(self._runs)
        self._there: set[tuple[int, Message]] = set()
        self._events: list[tuple[_Moment, bool, int, int]] = []

    def instructions(self) -> Iterator[tuple[int, Instruction]]:
        """Yield each with the rank whose program it stands in.

        Raises:
            InvalidSchedule: some pass can never run.
        """
        for rank in range(len(self._runs)):
            self._offer(rank)
        while self._events:
            _, is_pass, rank, position = heapq.heappop(self._events)
            if not is_pass:
                yield from self._messages(rank, position)
            elif position == self._position[rank]:  # else it was offered twice
                for met in self._meeting(rank):
                    yield from self._pass(met)
        self._check_all_ran()

    def _next(self, rank: int) -> Run | None:
        runs, position = self._runs[rank], self._position[rank]
        return runs[position] if position < len(runs) else None

    def _offer(self, rank: int) -> None:
        """Put a rank's next pass among the events, if all that it needs is there."""
        run = self._next(rank)
        if run is None or not self._is_ready(rank, run):
            return
        moment, _ = self._moments[rank][self._position[rank]]
        heapq.heappush(self._events, (moment, True, rank, self._position[rank]))

    def _is_ready(self, rank: int, run: Run) -> bool:
        needed = [take.message for take in _takes(rank, run, self._schedule)]
        if run.reads is not None:
            needed.append(run.reads)
        return self._there.issuperset((rank, message) for message in needed) and all(
            (other := self._next(met)) is not None and other.work == run.work
            for met in self._meeting(rank)
        )

    def _meeting(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that run the next pass of this one together with it."""
        run = self._next(rank)
        return _meeting(self._schedule, rank, run.work) if run is not None else ()

    def _pass(self, rank: int) -> Iterator[tuple[int, Instruction]]:
        position = self._position[rank]
        run = self._runs[rank][position]
        for take in _takes(rank, run, self._schedule):
            yield rank, take
        yield rank, run
        self._position[rank] += 1
        if run.makes_local and run.makes is not None:
            self._there.add((rank, run.makes))
        if _sends(rank, run, self._schedule):
            _, moment = self._moments[rank][position]
            heapq.heappush(self._events, (moment, False, rank, position))
        else:
            self._offer(rank)

    def _messages(self, rank: int, position: int) -> Iterator[tuple[int, Instruction]]:
        """Send what a pass has made; only then the rank's next pass may come."""
        sends = _sends(rank, self._runs[rank][position], self._schedule)
        for send in sends:
            yield rank, send
            yield send.channel.target, Receive(*send)
            self._there.add((send.channel.target, send.message))
        self._offer(rank)
        for send in sends:
            self._offer(send.channel.target)

    def _check_all_ran(self) -> None:
        waiting = {rank: run for rank in range(len(self._runs)) if (run := self._next(rank))}
        if waiting:
            said = "; ".join(f"rank {rank} at {run.work}" for rank, run in waiting.items())
            raise InvalidSchedule(
                f"{self._schedule.name}: rule 'progress': the ranks wait for one another in a "
                f"circle: {said}"
            )


def _meeting(schedule: Schedule, rank: int, work: Pass) -> tuple[int, ...]:
    """Return the ranks that run a pass together: in U all of the stage, else this one."""
    return schedule.placement.ranks_of[work.stage] if work.kind is PassKind.U else (rank,)


def _moments(schedule: Schedule, timeline: Timeline | None, *, late: bool) -> _Moments:
    if schedule.relay is not None:
        relay = schedule.relay
        return [[(_wave(relay, p),) * 2 for p in passes] for passes in schedule.ranks]
    if timeline is None:
        p = len(schedule.ranks)
        costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=1.0)
        timeline = simulate(schedule, costs)
    made = timeline.end if late else timeline.start
    return [
        [((start,), (end,)) for start, end in zip(starts, ends, strict=True)]
        for starts, ends in zip(timeline.start, made, strict=True)
    ]


def _wave(relay: Relay, p: Pass) -> _Moment:
    """Order a relay by steps, so that all steps are alike, and a step by the way of its data."""
    step = relay.step_of(p)
    if p.kind is PassKind.U:
        return (step, 1, 0, p.stage)
    return (step, 0, p.microbatch % relay.num_microbatches + p.stage, p.stage)


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

    def step(rank: int) -> tuple[int, ...]:
        """Get past a rank's next instruction; the ranks that have moved, none if it waits."""
        here = at(rank)
        if isinstance(here, Take):
            moves: tuple[int, ...] = (rank,) if (rank, here.message) in received else ()
        elif isinstance(here, Run):
            met = _meeting(program.schedule, rank, here.work)
            moves = met if all(_is_run_of(at(r), here.work) for r in met) else ()
        elif here is not None:
            source, target = here.channel
            matches = at(source) == Send(*here) and at(target) == Receive(*here)
            matches = matches and isinstance(at(source), Send) and isinstance(at(target), Receive)
            moves = (source, target) if matches else ()
            received.update((target, here.message) for _ in moves[:1])
        else:
            moves = ()
        for moved in moves:
            position[moved] += 1
        return moves

    runnable = set(range(len(program.ranks)))
    while runnable:
        rank = runnable.pop()
        while moved := step(rank):
            runnable.update(moved)
    return {rank: here for rank in range(len(position)) if (here := at(rank)) is not None}


def _is_run_of(at: Instruction | None, work: Pass) -> bool:
    return isinstance(at, Run) and at.work == work
