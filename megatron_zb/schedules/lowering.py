"""Lowering: from pass lists to programs of passes and messages that no device can deadlock.

A GPU may make the host wait for everything that it has enqueued, at any moment, and may hold up all
kernels behind one that waits. A program is safe there if it finishes when every send and every
receive is a blocking rendezvous at its place. So the programs of all ranks are projections of one
total order, in which a message comes right after the pass that makes it and stands in the programs
of its sender and of its reader at that place. The first event of the order that has not happened
can always happen. :func:`lower` replays what it made, to prove it.

:func:`peak_with_messages` is the memory of a rank while it runs its program.

:func:`rollback` cuts a program: a step that begins on weights that are not known to be right first
runs the forwards that come before any other pass, on every rank. If the weights turn out wrong,
every rank has run exactly its forwards up to the cut, and every message before it has both been
sent and been received; what nobody has read is dropped, and the step begins anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.memory import walk
from megatron_zb.schedules.passes import Channel, Message, Pair, Pass, PassKind
from megatron_zb.schedules.rules import Moment
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.simulator import Timeline, simulate
from megatron_zb.schedules.stage_costs import StageCosts
from megatron_zb.schedules.task_graph import TaskGraph, replay


class PostReceive(NamedTuple):
    """Instruction to post a receive into a buffer of its own."""

    channel: Channel
    message: Message


class WaitReceive(NamedTuple):
    """Instruction to wait for a posted message; its buffer becomes the next pass's input."""

    channel: Channel
    message: Message


class Run(NamedTuple):
    """Instruction to run a pass, from the messages it ``reads`` to that it ``makes``, if any.

    ``makes_local`` says that a later pass of this very rank reads it; otherwise Sends follow.
    """

    work: Pass
    reads: tuple[Message, ...]
    makes: Message | None
    makes_local: bool


class RunPair(NamedTuple):
    """Instruction to run a pair: its inputs were taken before, both outputs are sent after it."""

    forward: Run
    backward: Run

    @property
    def work(self) -> Pair:
        return Pair(self.forward.work, self.backward.work)


class Send(NamedTuple):
    """Instruction to send what the last pass or pair made for a message, or that a step is done."""

    channel: Channel
    message: Message


class Meet(NamedTuple):
    """Place at which a rank may wait for all others; ``unit`` is one of what ends there."""

    unit: int


Instruction: TypeAlias = PostReceive | WaitReceive | Run | RunPair | Send


def runs_of(instructions: Iterable[Instruction]) -> Iterator[Run]:
    """Yield every pass of a program, those of a pair one after the other."""
    for at in instructions:
        if isinstance(at, Run):
            yield at
        elif isinstance(at, RunPair):
            yield from at


@dataclass(frozen=True)
class Program:
    """Instructions for every logical rank.

    ``send_slots`` is the most sends of a channel that are left untaken; past that the oldest is
    waited for. Any number is safe, since even a rank that waits for each finishes. ``meets`` are
    the places at which all ranks may wait for one another, for each rank as many: the positions of
    the instructions that follow.
    """

    schedule: Schedule
    ranks: tuple[tuple[Instruction, ...], ...]
    send_slots: int
    meets: tuple[tuple[int, ...], ...] = ()

    def with_meets(self, rank: int) -> list[Instruction | Meet]:
        """Return the instructions of a rank, and where it meets the others."""
        found: list[Instruction | Meet] = list(self.ranks[rank])
        for position in reversed(self.meets[rank] if self.meets else ()):
            found.insert(position, Meet(0))
        return found


def lower(
    schedule: Schedule, timeline: Timeline | None = None, *, captured: bool = False
) -> Program:
    """Add the sends and receives to a schedule and prove that they cannot deadlock.

    Args:
        timeline: of this schedule; it says what comes first in the order of all passes. Without
            one, passes of equal time. All ranks of a job must be given the same.
        captured: for a CUDA graph, in which a receive stands behind the computation. Then a message
            stands where the pass that makes it begins; otherwise where that pass ends, so that its
            receive occupies the reader's thread blocks, or its host, no longer than it has to.

    Raises:
        InvalidSchedule: the ranks would wait for one another in a circle.
    """
    ranks: list[list[Instruction]] = [[] for _ in schedule.ranks]
    moments = _moments(schedule, timeline, captured=captured)
    for rank, instruction in _total_order(schedule, moments):
        ranks[rank].append(instruction)
    program = Program(schedule, tuple(map(tuple, ranks)), schedule.rules.send_slots)
    check_progress(program)
    return program


def check_progress(program: Program) -> None:
    """Check that a program finishes when every send and receive is a blocking rendezvous.

    Raises:
        InvalidSchedule: names the ranks that wait for one another, and the messages.
    """
    stuck = unfinished(program)
    if stuck:
        waits = "; ".join(
            f"rank {rank} {_wait_in_words(program.schedule, at)}" for rank, at in stuck.items()
        )
        raise InvalidSchedule(
            f"{program.schedule.name}: rule 'progress': with sends and receives that wait for each "
            f"other, the ranks wait in a circle: {waits}"
        )


def _wait_in_words(schedule: Schedule, at: Instruction | Meet) -> str:
    if isinstance(at, Meet):
        return "to meet all others"
    if isinstance(at, Run | RunPair):
        return f"to run {at.work}, for which others are not ready"
    message, (source, target) = at.message, at.channel
    what = f"{schedule.rules.message_in_words(schedule.placement, message)},"
    if isinstance(at, Send):
        return f"to send {what} to rank {target}"
    verb = "receive" if isinstance(at, PostReceive) else "take"
    return f"to {verb} {what} from rank {source}"


# --- the total order

_Moments: TypeAlias = list[list[tuple[Moment, Moment]]]
"""Places of every pass of every rank, and of its output, in the order."""


def _total_order(schedule: Schedule, moments: _Moments) -> Iterator[tuple[int, Instruction]]:
    """Yield all passes and messages by their moments, each with the rank it concerns.

    A message stands before the passes of its moment.

    Raises:
        InvalidSchedule: some pass can never run.
    """
    done = replay(schedule.orders)
    places = done.sequence  # each after what it depends on, and so within a moment
    if done.blocked:
        raise InvalidSchedule(
            f"{schedule.name}: rule 'progress': the ranks wait for one another in a circle: "
            f"{schedule.blocked()}"
        )
    places.sort(key=lambda place: moments[place[0]][place[1]][0])
    graph = schedule.graph
    made: list[tuple[Moment, int, list[Send]]] = []
    for number, (rank, position) in enumerate(places):
        stands, makes = moments[rank][position]
        while made and made[0][0] <= stands:
            yield from _messages(heapq.heappop(made)[-1])
        if position and schedule.pair_at(rank, position - 1):
            continue  # with its F, which stands at the same moment
        together = [position, position + 1] if schedule.pair_at(rank, position) else [position]
        runs: list[Run] = []
        sends: list[Send] = []
        for at in together:
            code = graph.code_of(schedule.ranks[rank][at], rank)
            for message, source in _awaited(graph, code):
                if source != rank:
                    yield rank, WaitReceive(Channel(source, rank), message)
            run, its_sends = _run(graph, code, rank, schedule.ranks[rank][at])
            runs.append(run)
            sends += its_sends
        yield rank, RunPair(*runs) if len(runs) > 1 else runs[0]
        heapq.heappush(made, (makes, number, sends))
    for _, _, sends in sorted(made):
        yield from _messages(sends)


def _awaited(graph: TaskGraph, code: int) -> Iterator[tuple[Message, int]]:
    """Yield the messages that a pass waits for, each with the rank that makes it."""
    for maker in graph.makers_of(code):
        message = graph.message_of(maker)
        if message is not None:
            yield message, graph.rank_of(maker)


def _run(graph: TaskGraph, code: int, rank: int, p: Pass) -> tuple[Run, list[Send]]:
    """Return a pass with its inputs and output, and what its rank sends when it has run."""
    reads = tuple(it for it, _ in _awaited(graph, code) if not it.is_step_done)
    sends, makes, makes_local = [], None, False
    for role in graph.roles[code // graph.units]:
        made = role * graph.units + code % graph.units
        message = graph.message_of(made)
        if message is None:
            continue
        readers = graph.reader_ranks(made)
        sends = [Send(Channel(rank, reader), message) for reader in readers if reader != rank]
        if not message.is_step_done:
            makes, makes_local = message, rank in readers
    return Run(p, reads, makes, makes_local), sends


def _messages(sends: list[Send]) -> Iterator[tuple[int, Instruction]]:
    for send in sends:
        yield send.channel.source, send
        yield send.channel.target, PostReceive(*send)


def _moments(schedule: Schedule, timeline: Timeline | None, *, captured: bool) -> _Moments:
    moments = schedule.rules.moments(schedule)
    if moments is not None:
        return moments
    if timeline is None:
        p = len(schedule.ranks)
        costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=1.0)
        timeline = simulate(schedule, costs.having(Vocabulary(output=1.0, weight=1.0, lookup=0.0)))
    made = timeline.start if captured else timeline.end
    return [
        [((start,), (end,)) for start, end in zip(starts, ends, strict=True)]
        for starts, ends in zip(timeline.start, made, strict=True)
    ]


# --- the proof


def unfinished(program: Program) -> dict[int, Instruction | Meet]:
    """Replay a program under blocking rendezvous; return the instructions no rank gets past.

    A send waits for its receive and a receive for its send, each at its place; what ranks run
    together waits for all of them. No choice depends on time, so this one replay is the proof.
    """
    schedule, position = program.schedule, [0] * len(program.ranks)
    has_run = _HasRun(schedule.graph)
    received: set[tuple[int, Message]] = set()

    ranks = [program.with_meets(rank) for rank in range(len(program.ranks))]

    def at(rank: int) -> Instruction | Meet | None:
        instructions = ranks[rank]
        return instructions[position[rank]] if position[rank] < len(instructions) else None

    def moves(rank: int) -> tuple[int, ...]:
        """Return the ranks that get past their instruction together with this one, if it does."""
        here = at(rank)
        if isinstance(here, Meet):
            all_meet = all(isinstance(at(other), Meet) for other in range(len(ranks)))
            return tuple(range(len(ranks))) if all_meet else ()
        if here is not None and not has_run.allows(rank, here):
            return ()
        if isinstance(here, RunPair):
            return (rank,)
        if isinstance(here, Run):
            met = schedule.rules.together(schedule.placement, rank, here.work)
            return met if all(at(other) == here for other in met) else ()
        if isinstance(here, WaitReceive):
            return (rank,) if (rank, here.message) in received else ()
        if here is None:
            return ()
        send, receive = (at(other) for other in here.channel)
        if not (
            isinstance(send, Send) and isinstance(receive, PostReceive) and receive == (*send,)
        ):
            return ()
        received.add((here.channel.target, here.message))
        return here.channel

    runnable = set(range(len(ranks)))
    while runnable:
        rank = runnable.pop()
        while moved := moves(rank):
            runnable.update(moved)
            for other in moved:
                has_run.add(other, ranks[other][position[other]])
                position[other] += 1
            if has_run.is_awaited:
                runnable.update(range(len(position)))
    return {rank: here for rank in range(len(position)) if (here := at(rank)) is not None}


class _HasRun:
    """Passes that have run, for those of other ranks that wait for them without a message."""

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        self._nodes: set[int] = set()
        self.is_awaited = bool(graph.more)

    def allows(self, rank: int, at: Instruction) -> bool:
        """Return whether all that an instruction waits for on other ranks has run."""
        if not self.is_awaited:
            return True
        codes = (self._graph.code_of(run.work, rank) for run in runs_of((at,)))
        return all(self._nodes.issuperset(self._graph.others(code)) for code in codes)

    def add(self, rank: int, at: Instruction | Meet) -> None:
        """Add the passes of an instruction that a rank gets past: those whose roles it plays."""
        if isinstance(at, Meet) or not self.is_awaited:
            return
        for run in runs_of((at,)):
            row = self._graph.code_of(run.work, rank) // self._graph.units
            for role in self._graph.roles[row]:
                self._nodes.add(role * self._graph.units + run.work.microbatch)


def peak_with_messages(program: Program, rank: int, costs: StageCosts, message: float) -> float:
    """Return the most memory that a rank holds, in the unit of ``activation``.

    A buffer is there from when its receive is posted until its pass takes it, as part of what the
    pass holds; a message that was sent, until the next pass begins.

    Args:
        message: memory of one message, in the same unit.
    """
    order = (
        program.schedule.memory_change(run.work, costs) for run in runs_of(program.ranks[rank])
    )
    steps = iter(walk(order))
    held = peak = 0.0
    posted = sent = 0
    for at in program.ranks[rank]:
        if isinstance(at, PostReceive):
            posted += 1
        elif isinstance(at, WaitReceive):
            posted -= 1
        elif isinstance(at, Send):
            sent += 1
        elif isinstance(at, Run | RunPair):
            sent = 0
            for _ in runs_of([at]):
                within, held = next(steps)
                peak = max(peak, within + message * posted)
        peak = max(peak, held + message * (posted + sent))
    return peak


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
    """Return whether the other end of a message is also before the cut."""
    if isinstance(at, Send):
        return (PostReceive, *at) in held[at.channel.target]
    if isinstance(at, PostReceive):
        return (Send, *at) in held[at.channel.source]
    return True


def _unread(prefix: tuple[Instruction, ...]) -> tuple[Message, ...]:
    taken = {at.message for at in prefix if isinstance(at, WaitReceive)}
    received = (at.message for at in prefix if isinstance(at, PostReceive))
    return tuple(message for message in received if message not in taken)
