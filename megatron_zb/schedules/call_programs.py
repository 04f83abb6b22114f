"""Programs of the calls of a training whose updates come one step late.

A call is a part of one endless program. It is cut so that nothing is under way between two calls: a
message is received in the call in which it is sent, at the end if its reader needs it in the next
one. So ranks may meet between two calls, and a device may be waited for.

What belongs to a group can be left out of the endless program, on all ranks at once, and the rest
still runs: what is left keeps its order. So the first call leaves out the group before, the last
one the next group, and the drain all but the group that has begun.

Before the update of a group all ranks may meet once, as reductions over them do: see
:class:`~megatron_zb.schedules.lowering.Meet`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.update_delay import GROUPS, Calls, calls_of
from megatron_zb.schedules.lowering import (
    Instruction,
    Meet,
    PostReceive,
    Program,
    Run,
    RunPair,
    Send,
    WaitReceive,
    check_progress,
    lower,
)
from megatron_zb.schedules.meeting_places import before_update
from megatron_zb.schedules.passes import Message
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import Timeline, simulate

_BEFORE, _OWN, _NEXT = 0, 1, 2
_Step: TypeAlias = Instruction | Meet


@dataclass(frozen=True)
class Call:
    """One call of a training.

    Args:
        group: number of the group whose losses it returns.
        follows: the group before has begun, and its rest runs in this call.
        has_begun: the call before has run the first passes of this group.
        reads_ahead: the first passes of the next group run in this call.
    """

    group: int
    follows: bool
    has_begun: bool
    reads_ahead: bool


class CallPrograms:
    """Programs of calls and drains, in which units count through all groups of a training.

    Args:
        schedule: of consecutive groups, see :mod:`update_delay`.
        costs: for which it was built; equal ones if left out.

    Raises:
        UsageError: the schedule is for updates without a delay.
    """

    def __init__(self, schedule: Schedule, costs: Costs | None = None) -> None:
        self.calls: Calls = calls_of(schedule)
        self._group = self.calls.group
        several = self.calls.consecutive(schedule.name, GROUPS)
        if costs is None:
            p = schedule.placement.pipeline_size
            costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=1.0)
        timeline = simulate(several, costs)
        whole = lower(several, timeline)
        self._schedule, self._slots = several, whole.send_slots
        self._ranks = _of_call(_with_meet(whole, timeline, self._group), self.calls)
        check_progress(self._example())

    @property
    def group(self) -> int:
        """Microbatches of a group."""
        return self._group

    @property
    def reads_ahead(self) -> bool:
        """Whether a call runs passes of the next group."""
        return self.calls.reads_ahead

    def of(self, call: Call) -> Program:
        """Return the program of a call."""
        groups = {_OWN}
        groups |= {_BEFORE} if call.follows else set()
        groups |= {_NEXT} if call.reads_ahead else set()
        ranks = []
        for rank in range(len(self._ranks)):
            first = () if call.has_begun else self._some(rank, {_NEXT}, call.group - 1)
            rest = self._some(rank, groups, call.group)
            if call.has_begun and not call.follows:  # a drain has taken what had been sent
                taken = self._unread[rank]
                rest = (it for it in rest if not self._is_of(it, taken, call.group))
            ranks.append((*first, *rest))
        return self._program(ranks)

    def drain(self, call: Call) -> Program:
        """Return the program that ends the group of a call, and takes what has been sent."""
        ranks = []
        for rank in range(len(self._ranks)):
            rest = tuple(self._some(rank, {_BEFORE}, call.group + 1))
            taken = self._unread[rank] if call.reads_ahead else ()
            waits = (_shifted(it, call.group * self._group) for it in taken)
            ranks.append((*rest, *waits))
        return self._program(ranks)

    def _program(self, ranks: Sequence[Sequence[_Step]]) -> Program:
        """Return the program of some instructions, among which ranks meet."""
        instructions, meets = [], []
        for rank in ranks:
            instructions.append(tuple(at for at in rank if not isinstance(at, Meet)))
            places = (i for i, at in enumerate(rank) if isinstance(at, Meet))
            meets.append(tuple(place - before for before, place in enumerate(places)))
        return Program(self._schedule, tuple(instructions), self._slots, tuple(meets))

    def _some(self, rank: int, groups: Collection[int], call: int) -> Iterator[_Step]:
        """Yield the instructions of some groups in the call of a group."""
        for at in self._ranks[rank]:
            if _unit_of(at) // self._group in groups:
                yield _shifted(at, (call - 1) * self._group)

    @cached_property
    def _unread(self) -> list[tuple[WaitReceive, ...]]:
        """What takes the messages of the next group that a rank receives in a call and reads later.

        In units of the call behind it.
        """
        found = []
        for rank in self._ranks:
            taken = {at.message for at in rank if isinstance(at, WaitReceive)}
            posted = (at for at in rank if isinstance(at, PostReceive))
            ahead = (at for at in posted if at.message.microbatch // self._group == _NEXT)
            later = ((at.channel, at.message) for at in ahead if at.message not in taken)
            found.append(
                tuple(
                    WaitReceive(channel, _later(message, -self._group))
                    for channel, message in later
                )
            )
        return found

    def _is_of(self, at: _Step, taken: Sequence[Instruction], call: int) -> bool:
        """Return whether an instruction takes a message that a drain has taken."""
        return _shifted(at, (1 - call) * self._group) in taken

    def _example(self) -> Program:
        """Return some calls, a drain between two of them and one at the end, for the proof."""
        ahead = self.reads_ahead
        first = Call(0, follows=False, has_begun=False, reads_ahead=ahead)
        second = Call(1, follows=True, has_begun=ahead, reads_ahead=ahead)
        third = Call(2, follows=False, has_begun=ahead, reads_ahead=False)
        programs = [self.of(first), self.of(second), self.drain(second), self.of(third)]
        programs.append(self.drain(third))
        return joined(programs)


def joined(programs: Sequence[Program]) -> Program:
    """Return the program that runs several ones in turn."""
    ranks, meets = [], []
    for rank in range(len(programs[0].ranks)):
        instructions, places = list[Instruction](), list[int]()
        for program in programs:
            places += [len(instructions) + place for place in program.meets[rank]]
            instructions += program.ranks[rank]
        ranks.append(tuple(instructions))
        meets.append(tuple(places))
    return replace(programs[0], ranks=tuple(ranks), meets=tuple(meets))


def _with_meet(whole: Program, timeline: Timeline, group: int) -> list[list[_Step]]:
    """Return the instructions of every rank, and where it meets the others before an update."""
    unit = (GROUPS // 2 - 1) * group
    positions = before_update(whole, timeline, unit, unit + group - 1)
    found = []
    for instructions, position in zip(whole.ranks, positions, strict=True):
        found.append([*instructions[:position], Meet(unit), *instructions[position:]])
    return found


def _of_call(ranks: Sequence[Sequence[_Step]], calls: Calls) -> list[tuple[_Step, ...]]:
    """Return the instructions of every rank in a call, with units as in :class:`Calls`.

    1. A pass is of the call that its place in the order says, and what it sends is with it.
    2. A message is received in the call in which it is sent: where it stands if that is in this
       call, else at the end, or at the beginning.
    3. It is taken where it is needed, in this call or a later one.
    """
    middle = GROUPS // 2
    call_of: dict[Message, int] = {}
    numbered: list[list[tuple[int, _Step]]] = []
    for rank, instructions in enumerate(ranks):
        ends = _ends(calls, rank)
        numbered.append(list(_numbered(instructions, ends)))
        call_of |= {at.message: call for call, at in numbered[-1] if isinstance(at, Send)}
    shift = -(middle - 1) * calls.group
    found = []
    for of_rank in numbered:
        first, here, last = list[_Step](), list[_Step](), list[_Step]()
        for call, at in of_rank:
            of: list[_Step] | None
            if isinstance(at, Meet):  # with its update, which this call runs on every rank
                of = here if call == middle else first
            elif not isinstance(at, PostReceive):
                of = here if call == middle else None
            elif call_of[at.message] != middle:
                of = None
            else:
                of = here if call == middle else last if call > middle else first
            if of is not None:
                of.append(_shifted(at, shift))
        found.append((*first, *here, *last))
    return found


def _ends(calls: Calls, rank: int) -> list[int]:
    """Return the number of passes of a rank until the end of each of several consecutive calls."""
    begun = len(calls.some({_NEXT})[rank])
    rest, whole = len(calls.some({_BEFORE})[rank]), len(calls.ranks[rank])
    return [begun + whole * call - rest for call in range(1, GROUPS)]


def _numbered(instructions: Sequence[_Step], ends: Sequence[int]) -> Iterator[tuple[int, _Step]]:
    """Yield the instructions of a rank, each with the number of its call.

    Args:
        ends: number of passes until the end of each call but the last.
    """
    passes = 0
    for at in instructions:
        begins = isinstance(at, Run | WaitReceive)  # what a pass waits for is of its call
        yield sum(end < passes + begins for end in ends), at
        passes += isinstance(at, Run)


def _unit_of(at: _Step) -> int:
    if isinstance(at, Meet):
        return at.unit
    if isinstance(at, Run):
        return at.work.microbatch
    if isinstance(at, RunPair):
        raise TypeError("consecutive groups have no pairs")
    return at.message.microbatch


def _shifted(at: _Step, units: int) -> _Step:
    """Return an instruction on a later unit."""
    if isinstance(at, Meet):
        return Meet(at.unit + units)
    if isinstance(at, Run):
        work = at.work._replace(microbatch=at.work.microbatch + units)
        makes = None if at.makes is None else _later(at.makes, units)
        return Run(work, tuple(_later(it, units) for it in at.reads), makes, at.makes_local)
    if isinstance(at, RunPair):
        raise TypeError("consecutive groups have no pairs")
    return type(at)(at.channel, _later(at.message, units))


def _later(message: Message, units: int) -> Message:
    return message._replace(microbatch=message.microbatch + units)
