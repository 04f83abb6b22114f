"""The program of a relay one step at a time, for any number of steps.

All steps of a relay are alike but for the numbers in them, so the instructions of a long training
are those of a few steps, shifted. Joined, the steps are exactly what
:func:`megatron_zb.schedules.lower` makes of all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_zb.distill.schedule.distribution import Distribution
from megatron_zb.distill.schedule.pipe_bd import pipe_bd
from megatron_zb.distill.schedule.relay import Relay
from megatron_zb.schedules.lowering import (
    Instruction,
    PostReceive,
    Program,
    Run,
    RunPair,
    Send,
    WaitReceive,
    lower,
)
from megatron_zb.schedules.passes import Message, PassKind
from megatron_zb.schedules.schedule import Schedule


@dataclass(frozen=True)
class StepByStep:
    """The steps of a relay; build it with :func:`step_by_step`.

    ``program`` has as many steps as it takes until they repeat, and was checked to finish.
    """

    program: Program
    _relay: Relay
    most_waiting: int | None = None
    """Sends of a channel that are left untaken, if fewer than ``run_ahead`` allows."""

    @property
    def schedule(self) -> Schedule:
        """Schedule of the few steps that all others repeat."""
        return self.program.schedule

    def stage_on(self, rank: int) -> int:
        """Return the stage of a rank."""
        return self.schedule.placement.stages_of[rank][0]

    @property
    def send_slots(self) -> int:
        slots = self.program.send_slots
        return slots if self.most_waiting is None else min(slots, self.most_waiting)

    @cached_property
    def _patterns(self) -> tuple[tuple[tuple[Instruction, ...], ...], ...]:
        """Instructions of each step of the program, for every rank."""
        return tuple(tuple(_cut_into_steps(rank)) for rank in self.program.ranks)

    def of_step(self, rank: int, step: int, first: int, until: int) -> list[Instruction]:
        """Return the instructions of a rank in one step of the steps ``first`` to ``until - 1``.

        Passes and messages are numbered through from step 0, whatever the first step. When the last
        of the steps has run on every rank, no message is under way.
        """
        steady = self._relay.run_ahead + 1
        pattern = min(step - first, steady)
        return [
            _shifted(at, step - pattern, self._relay.num_microbatches)
            for at in self._patterns[rank][pattern]
            if isinstance(at, Run | RunPair | WaitReceive)
            or not at.message.is_step_done
            or at.message.microbatch + step - pattern + 1 + self._relay.run_ahead < until
        ]


def step_by_step(
    distribution: Distribution,
    microbatches: int,
    run_ahead: int = 1,
    most_waiting: int | None = None,
) -> StepByStep:
    """Build :func:`~megatron_zb.distill.schedule.pipe_bd.pipe_bd` for any number of steps.

    A limit of one send is enough for every rank to finish: the program is checked with sends that
    wait until they are taken.

    Raises:
        UsageError: as ``pipe_bd``.
        InvalidSchedule: the ranks would wait for one another in a cycle.
    """
    # Steps up to run_ahead wait for no update; the next one does, and is awaited by a later one.
    schedule = pipe_bd(distribution, microbatches, 2 * max(run_ahead, 0) + 3, run_ahead)
    assert isinstance(schedule.rules, Relay)
    return StepByStep(lower(schedule), schedule.rules, most_waiting)


def _cut_into_steps(instructions: tuple[Instruction, ...]) -> list[tuple[Instruction, ...]]:
    """Split instructions after each step's update and its messages that the step is done."""
    steps: list[list[Instruction]] = [[]]
    has_updated = False
    for at in instructions:
        is_step_done = isinstance(at, Send | PostReceive) and at.message.is_step_done
        if has_updated and not is_step_done:
            steps.append([])
            has_updated = False
        steps[-1].append(at)
        has_updated = has_updated or (isinstance(at, Run) and at.work.kind is PassKind.U)
    return [tuple(step) for step in steps]


def _shifted(at: Instruction, steps: int, num_microbatches: int) -> Instruction:
    """Return the instruction shifted by `steps` steps."""
    assert not isinstance(at, RunPair), "a relay has no pairs"
    if not isinstance(at, Run):
        return at._replace(message=_shifted_message(at.message, steps, num_microbatches))
    number = steps if at.work.kind is PassKind.U else steps * num_microbatches
    work = at.work._replace(microbatch=at.work.microbatch + number)
    reads = tuple(_shifted_message(message, steps, num_microbatches) for message in at.reads)
    makes = None if at.makes is None else _shifted_message(at.makes, steps, num_microbatches)
    return Run(work, reads, makes, at.makes_local)


def _shifted_message(message: Message, steps: int, num_microbatches: int) -> Message:
    number = steps if message.is_step_done else steps * num_microbatches
    return message._replace(microbatch=message.microbatch + number)
