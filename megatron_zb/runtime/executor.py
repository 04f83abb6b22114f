"""Carry out one rank's program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol, TypeAlias, cast

import torch

from megatron_zb.runtime.autograd_stage import Stage
from megatron_zb.runtime.distillation_stage import DistillationStage
from megatron_zb.runtime.observer import NOBODY, Observer
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
from megatron_zb.schedules.relay import RELAY_KINDS

AnyStage: TypeAlias = Stage | DistillationStage
Allocate = Callable[[Message], torch.Tensor]


class Transport(Protocol):
    """What the executor asks of channels; see :class:`megatron_zb.runtime.channels.Channels`."""

    waits_to_receive: bool
    """Whether the host waits for the sender where a receive is posted."""

    def post_receive(
        self, channel: Channel, message: Message, allocate: Callable[[], torch.Tensor]
    ) -> None: ...

    def take(self, message: Message) -> torch.Tensor: ...

    def send(self, channel: Channel, tensor: torch.Tensor, slots: int) -> None: ...

    def between_passes(self) -> None: ...

    def finish(self) -> None: ...


def run_program(
    program: Program,
    rank: int,
    stages: Mapping[int, AnyStage],
    channels: Transport,
    allocate: Allocate,
    observer: Observer | None = None,
) -> None:
    """Run the instructions of one logical rank, once.

    Args:
        program: what :func:`megatron_zb.schedules.lower` made.
        rank: the logical rank.
        stages: the stages this rank holds.
        channels: its channels to other ranks, for messages of known shapes or of any shape.
        allocate: an empty tensor of the right shape, type and device for a message; for a credit
            (``message.is_credit``) too, which any tensor serves, as long as all ranks agree.
        observer: is told what the rank does.
    """
    execution = Execution(program.send_slots, stages, channels, allocate, observer)
    execution.run(program.ranks[rank])
    channels.finish()


class Execution:
    """Carries instructions out; what one leaves for a later one may cross from run to run."""

    def __init__(
        self,
        send_slots: int,
        stages: Mapping[int, AnyStage],
        channels: Transport,
        allocate: Allocate,
        observer: Observer | None = None,
    ) -> None:
        self._send_slots = send_slots
        self._stages = stages
        self._channels = channels
        self._allocate = allocate
        self._observer = observer or NOBODY
        self._here: dict[Message, torch.Tensor | None] = {}
        self._outgoing: torch.Tensor | None = None

    def run(self, instructions: Iterable[Instruction]) -> None:
        channels = self._channels
        for instruction in instructions:
            if isinstance(instruction, Receive):
                self._post_receive(*instruction)
            elif isinstance(instruction, Take):
                with self._observer.waiting(instruction.channel, instruction.message):
                    taken = channels.take(instruction.message)
                if not instruction.message.is_credit:
                    self._here[instruction.message] = taken
                del taken
            elif isinstance(instruction, Send):
                if instruction.message.is_credit:
                    self._outgoing = self._allocate(instruction.message).zero_()
                outgoing, self._outgoing = self._outgoing, None
                assert outgoing is not None
                channels.send(instruction.channel, outgoing, self._send_slots)
                del outgoing
            else:
                self._run_pass(instruction)

    def _post_receive(self, channel: Channel, message: Message) -> None:
        allocate = partial(self._allocate, message)
        if not self._channels.waits_to_receive:
            self._channels.post_receive(channel, message, allocate)
            return
        with self._observer.waiting(channel, message):
            self._channels.post_receive(channel, message, allocate)

    def _run_pass(self, run: Run) -> None:
        self._channels.between_passes()
        with self._observer.running(run.work):
            result = _run_pass(run, self._stages, self._here)
        if run.makes_local:
            assert run.makes is not None
            self._here[run.makes] = result
        else:
            self._outgoing = result if run.makes is not None else None


def _run_pass(
    run: Run,
    stages: Mapping[int, AnyStage],
    here: dict[Message, torch.Tensor | None],
) -> torch.Tensor | None:
    kind, stage_index, microbatch = run.work
    if kind in RELAY_KINDS:
        return _run_relay_pass(run, cast(DistillationStage, stages[stage_index]), here)
    stage = cast(Stage, stages[stage_index])
    if kind is PassKind.W:
        stage.backward_weight(microbatch)
        return None
    received = here.pop(run.reads) if run.reads is not None else None
    if kind is PassKind.F:
        return stage.forward(microbatch, received)
    if kind is PassKind.B:
        return stage.backward_input(microbatch, received)
    return stage.backward(microbatch, received)


def _run_relay_pass(
    run: Run, stage: DistillationStage, here: dict[Message, torch.Tensor | None]
) -> torch.Tensor | None:
    kind, _, number = run.work
    if kind is PassKind.T:
        return stage.teach(number, here.pop(run.reads) if run.reads is not None else None)
    if kind is PassKind.S:
        stage.study(number)
    else:
        stage.update(number)
    return None
