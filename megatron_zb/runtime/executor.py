"""Execution of one rank's program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch

from megatron_zb.runtime.observer import NOBODY, Observer
from megatron_zb.schedules.lowering import (
    Instruction,
    PostReceive,
    Program,
    Run,
    RunPair,
    Send,
    WaitReceive,
)
from megatron_zb.schedules.passes import LAUNCH_LITTLE, Channel, Message, PassKind

Allocate = Callable[[Message], torch.Tensor]

Handler: TypeAlias = Callable[..., torch.Tensor | None]
"""Function that runs a pass: from its stage, the microbatch and the messages that it reads, if any,
to the message that it makes, if any.
"""

TRAINING: dict[PassKind, Handler] = {
    PassKind.F: lambda stage, microbatch, received=None: stage.forward(microbatch, received),
    PassKind.B: lambda stage, microbatch, received=None: stage.backward_input(microbatch, received),
    PassKind.BW: lambda stage, microbatch, received=None: stage.backward(microbatch, received),
    PassKind.W: lambda stage, microbatch: stage.backward_weight(microbatch),
    PassKind.R: lambda stage, microbatch: stage.recompute(microbatch),
    PassKind.D: lambda stage, microbatch: stage.end_copy_out(microbatch),
    PassKind.H: lambda stage, microbatch: stage.begin_copy_in(microbatch),
}
"""Handlers of a training step's passes, on a stage such as
:class:`megatron_zb.runtime.autograd_stage.AutogradStage`.
"""


class Side(NamedTuple):
    """One side of a pair: its kind, its stage, the microbatch and the messages that it reads.

    ``handler`` runs it outside the pair; None for that of :data:`TRAINING`.
    """

    kind: PassKind
    stage: Any
    microbatch: int
    received: tuple[torch.Tensor | None, ...]
    handler: Handler | None = None

    def run(self) -> torch.Tensor | None:
        """Run the pass outside the pair; return its message, None if it makes none."""
        handler = self.handler or TRAINING[self.kind]
        return handler(self.stage, self.microbatch, *self.received)


PairHandler: TypeAlias = Callable[[Side, Side], tuple[torch.Tensor | None, torch.Tensor | None]]
"""Function that runs a pair: from its F and its B or BW to the messages that the two make."""


def one_after_the_other(
    forward: Side, backward: Side
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Run F, then B or BW: for stages without an all-to-all to hide."""
    return forward.run(), backward.run()


class Transport(Protocol):
    """Interface of channels to the executor; see :class:`megatron_zb.runtime.channels.Channels`."""

    waits_to_receive: bool
    """Whether the host waits for the sender where a receive is posted."""

    def post_receive(
        self, channel: Channel, message: Message, allocate: Callable[[], torch.Tensor]
    ) -> None: ...

    def take(self, message: Message) -> torch.Tensor: ...

    def send(
        self, channel: Channel, tensor: torch.Tensor, slots: int, message: Message | None = None
    ) -> None: ...

    def between_passes(self, launches_little: bool) -> None: ...

    def finish(self) -> None: ...


def run_program(
    program: Program,
    rank: int,
    stages: Mapping[int, Any],
    channels: Transport,
    allocate: Allocate,
    observer: Observer | None = None,
    *,
    handlers: Mapping[PassKind, Handler] = TRAINING,
    pairs: PairHandler = one_after_the_other,
) -> None:
    """Run the instructions of one logical rank, once.

    Args:
        program: what :func:`megatron_zb.schedules.lower` made.
        rank: the logical rank.
        stages: the stages this rank holds.
        channels: its channels to other ranks, for messages of known shapes or of any shape.
        allocate: gives an empty tensor of a message's shape, type and device. Any tensor
            serves one that a step is done (``message.is_step_done``), if all ranks agree.
        observer: observes every pass and wait.
        handlers: the function that runs each kind of pass.
        pairs: the function that runs a pair.
    """
    execution = Execution(
        program.send_slots, stages, channels, allocate, observer, handlers=handlers, pairs=pairs
    )
    execution.run(program.ranks[rank])
    channels.finish()


class Execution:
    """Executor of instructions; results that a later one needs are kept from run to run.

    With ``here``, they are kept there, also for another execution.
    """

    def __init__(
        self,
        send_slots: int,
        stages: Mapping[int, Any],
        channels: Transport,
        allocate: Allocate,
        observer: Observer | None = None,
        *,
        handlers: Mapping[PassKind, Handler] = TRAINING,
        pairs: PairHandler = one_after_the_other,
        here: dict[Message, torch.Tensor | None] | None = None,
    ) -> None:
        self._send_slots = send_slots
        self._stages = stages
        self._handlers = handlers
        self._pairs = pairs
        self._channels = channels
        self._allocate = allocate
        self._observer = observer or NOBODY
        self._here = {} if here is None else here
        self._outgoing: dict[Message, torch.Tensor | None] = {}

    def run(self, instructions: Iterable[Instruction]) -> None:
        """Execute instructions in their order."""
        channels, waiting, here = self._channels, self._observer.waiting, self._here
        for instruction in instructions:
            kind = type(instruction)
            if kind is Run:
                self._run_pass(cast(Run, instruction))
                continue
            if kind is RunPair:
                self._run_pair(cast(RunPair, instruction))
                continue
            channel, message = cast(PostReceive | WaitReceive | Send, instruction)
            if kind is WaitReceive:
                with waiting(channel, message):
                    taken = channels.take(message)
                if not message.is_step_done:
                    here[message] = taken
                del taken
            elif kind is Send:
                channels.send(channel, self._next_outgoing(message), self._send_slots, message)
            else:
                self._post_receive(channel, message)

    def _post_receive(self, channel: Channel, message: Message) -> None:
        allocate = partial(self._allocate, message)
        if not self._channels.waits_to_receive:
            self._channels.post_receive(channel, message, allocate)
            return
        with self._observer.waiting(channel, message):
            self._channels.post_receive(channel, message, allocate)

    def _next_outgoing(self, message: Message) -> torch.Tensor:
        if message.is_step_done:
            return self._allocate(message).zero_()
        outgoing = self._outgoing.get(message)
        assert outgoing is not None, f"nothing has been made to send as {message}"
        return outgoing

    def _begin(self, launches_little: bool) -> None:
        self._outgoing.clear()
        self._channels.between_passes(launches_little)

    def _run_pass(self, run: Run) -> None:
        kind, stage, microbatch = run.work
        self._begin(kind in LAUNCH_LITTLE)
        with self._observer.running(run.work):
            received = map(self._here.pop, run.reads)
            result = self._handlers[kind](self._stages[stage], microbatch, *received)
        self._keep(run, result)

    def _run_pair(self, pair: RunPair) -> None:
        self._begin(False)
        with self._observer.running(pair.work):
            results = self._pairs(*map(self._side, pair))
        for run, result in zip(pair, results, strict=True):
            self._keep(run, result)

    def _side(self, run: Run) -> Side:
        kind, stage, microbatch = run.work
        received = tuple(map(self._here.pop, run.reads))
        return Side(kind, self._stages[stage], microbatch, received, self._handlers[kind])

    def _keep(self, run: Run, result: torch.Tensor | None) -> None:
        if run.makes_local:
            self._here[cast(Message, run.makes)] = result
        elif run.makes is not None:
            self._outgoing[run.makes] = result
