"""Carry out one rank's program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from megatron_zb.runtime.autograd_stage import Stage
from megatron_zb.schedules.communication import (
    Channel,
    Message,
    Program,
    Receive,
    Run,
    Send,
    Take,
)
from megatron_zb.schedules.passes import PassKind

Allocate = Callable[[Message], torch.Tensor]


class Transport(Protocol):
    """What the executor asks of channels; see :class:`megatron_zb.runtime.channels.Channels`."""

    def post_receive(self, channel: Channel, message: Message, buffer: torch.Tensor) -> None: ...

    def take(self, message: Message) -> torch.Tensor: ...

    def send(self, channel: Channel, tensor: torch.Tensor, slots: int) -> None: ...

    def forget_taken(self) -> None: ...

    def finish(self) -> None: ...


def run_program(
    program: Program,
    rank: int,
    stages: Mapping[int, Stage],
    channels: Transport,
    allocate: Allocate,
) -> None:
    """Run the instructions of one logical rank, once.

    Args:
        program: what :func:`megatron_zb.schedules.lower` made.
        rank: the logical rank.
        stages: the stages this rank holds.
        channels: its channels to other ranks, for messages of known shapes or of any shape.
        allocate: an empty tensor of the right shape, type and device for a message.
    """
    here: dict[Message, torch.Tensor | None] = {}
    outgoing: torch.Tensor | None = None
    for instruction in program.ranks[rank]:
        if isinstance(instruction, Receive):
            buffer = allocate(instruction.message)
            channels.post_receive(instruction.channel, instruction.message, buffer)
            del buffer
        elif isinstance(instruction, Take):
            here[instruction.message] = channels.take(instruction.message)
        elif isinstance(instruction, Send):
            assert outgoing is not None
            channels.send(instruction.channel, outgoing, program.send_slots)
            outgoing = None
        else:
            channels.forget_taken()
            result = _run_pass(instruction, stages, here)
            if instruction.makes_local:
                assert instruction.makes is not None
                here[instruction.makes] = result
            else:
                outgoing = result
            del result
    channels.finish()


def _run_pass(
    run: Run,
    stages: Mapping[int, Stage],
    here: dict[Message, torch.Tensor | None],
) -> torch.Tensor | None:
    kind, stage_index, microbatch = run.work
    stage = stages[stage_index]
    if kind is PassKind.W:
        stage.backward_weight(microbatch)
        return None
    received = here.pop(run.reads) if run.reads is not None else None
    if kind is PassKind.F:
        return stage.forward(microbatch, received)
    if kind is PassKind.B:
        return stage.backward_input(microbatch, received)
    return stage.backward(microbatch, received)
