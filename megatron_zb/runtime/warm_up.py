"""Passes that one rank runs without the others: all ranks compile and tune their kernels at once.

In a step, a stage runs its first F when the stage before it has run its own, so what a first pass
takes longer adds up over the stages. Without messages no stage waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from megatron_zb.schedules.lowering import Instruction, Program, Run, RunPair, runs_of
from megatron_zb.schedules.passes import Channel, Message, PassKind


def warm_up_program(program: Program, rank: int, *, alike: bool = True) -> Program:
    """Return a program in which a rank runs a few microbatches, all others keep their passes.

    Together they have every kind of pass of every stage of the rank. As they run in the order of
    the program, the rank holds a part of what it holds there, at every pass.

    Args:
        alike: whether the microbatches have one shape. If not, the first one runs alone.
    """
    instructions = program.ranks[rank]
    chosen = microbatches_of_each_kind(instructions) if alike else {0}
    short = tuple(_only(instructions, chosen))
    ranks = (short if r == rank else other for r, other in enumerate(program.ranks))
    return replace(program, ranks=tuple(ranks))


def microbatches_of_each_kind(instructions: Iterable[Instruction]) -> set[int]:
    """Return the first microbatches that together have each kind of pass of each stage.

    A pass may read what a pass of another unit has made, such as that of a second model: then that
    unit is one of them, too.
    """
    passes: dict[int, set[tuple[PassKind, int]]] = {}
    reads: dict[int, set[int]] = {}
    for run in runs_of(instructions):
        unit = run.work.microbatch
        passes.setdefault(unit, set()).add((run.work.kind, run.work.stage))
        reads.setdefault(unit, {unit}).update(message.microbatch for message in run.reads)
    chosen, found = set[int](), set[tuple[PassKind, int]]()
    for microbatch, kinds in sorted(passes.items()):
        if kinds - found:
            chosen |= {microbatch} | reads[microbatch]
            found |= kinds
    return chosen


def _only(instructions: Iterable[Instruction], chosen: set[int]) -> Iterator[Instruction]:
    """Yield the instructions of some microbatches; a pair with another one's pass is divided."""
    for at in instructions:
        if isinstance(at, RunPair):
            sides = [run for run in at if run.work.microbatch in chosen]
            yield from [at] if len(sides) > 1 else sides
        elif (at.work if isinstance(at, Run) else at.message).microbatch in chosen:
            yield at


class MadeUpMessages:
    """Transport of a rank that runs without the others: it sends nothing and waits for nobody.

    Args:
        fill: sets the contents of a message that the rank takes.
    """

    waits_to_receive = False

    def __init__(self, fill: Callable[[Message, torch.Tensor], object]) -> None:
        self._fill = fill
        self._posted: dict[Message, Callable[[], torch.Tensor]] = {}

    def post_receive(
        self, channel: Channel, message: Message, allocate: Callable[[], torch.Tensor]
    ) -> None:
        """Remember how to allocate the message."""
        self._posted[message] = allocate

    def take(self, message: Message) -> torch.Tensor:
        """Return a new tensor for the message."""
        tensor = self._posted.pop(message)()
        self._fill(message, tensor)
        return tensor

    def send(
        self, channel: Channel, tensor: torch.Tensor, slots: int, message: Message | None = None
    ) -> None:
        """Do nothing."""

    def between_passes(self, launches_little: bool) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing: nothing is under way."""
