"""Passes, the units of work of a pipeline, and the messages between them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class PassKind(str, Enum):
    """Computation of a pass for one stage and one microbatch.

    Kinds of all work stand here, since tables of schedules, pictures and handlers are keyed by one
    enum; what each means is up to the rules of its work.

    ``F`` forward, ``B`` input gradient, ``W`` weight gradient, ``BW`` both gradients at once
    (*Zero Bubble Pipeline Parallelism*, arXiv 2401.10241, section 2).

    ``R`` is the recomputation of an F that has kept nothing but its input, between that F and its
    B, which needs what it makes (as in *Training Deep Nets with Sublinear Memory Cost*, arXiv
    1604.06174, for a whole stage at once).

    ``D`` and ``H`` are of a unit whose activation is moved to the host between its F and its B.
    The copy from the device begins by itself when F ends; at D the rank waits until that copy has
    ended, and the activation's memory is free. At H the copy from the host begins, into memory that
    is taken there; B waits for its end. Neither takes a rank's time by itself.

    Blockwise distillation has other kinds (*Pipe-BD*, arXiv 2301.12443): ``T`` is the teacher's
    forward, from the activation that the stage before relays to the one that the next stage reads;
    ``S`` the student's forward, loss and backward, which reads and makes no message and runs after
    T of the same stage and microbatch, on the same rank; ``U`` the update of the stage's students,
    after the last S of a step.

    Where the output layer is cut along the vocabulary (arXiv 2411.05288), every rank r holds a
    shard of it as stage S + r: ``O`` computes the shard's logits, their softmax within the shard
    and its part of the input gradient; ``P``, on the rank of the last stage, puts the parts of all
    shards together to the loss and the gradient of that stage's output; ``V`` is the weight
    gradient of the shard. Where the embedding is cut, too, ``E`` looks up a microbatch's tokens in
    the shard (on the rank of the first stage it reads them before), and ``G`` is the weight
    gradient of these rows.

    The rules of a schedule define the inputs, outputs and valid orders of its passes:
    :class:`megatron_zb.schedules.rules.Rules`.
    """

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"
    R = "R"
    D = "D"
    H = "H"
    T = "T"
    S = "S"
    U = "U"
    O = "O"  # noqa: E741
    P = "P"
    V = "V"
    E = "E"
    G = "G"

    __hash__ = str.__hash__  # as that of Enum, without a call of Python: passes are hashed a lot

    def __str__(self) -> str:
        return self.value


LAUNCH_LITTLE = frozenset({PassKind.D, PassKind.H, PassKind.E, PassKind.G})
"""Kinds of passes that keep a GPU busy for microseconds, or not at all."""


class Pass(NamedTuple):
    """One unit of work: its kind, the stage (0 to S-1) and the microbatch (0 to m-1).

    O, V, E and G of rank r have stage S + r.

    T and S count microbatches through all steps: microbatch j of step n is n * m + j. In U the
    microbatch is the number of the step.
    """

    kind: PassKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


class Pair(NamedTuple):
    """A forward and a backward of two units (stage and microbatch) that a rank runs as one.

    So the communication of the one can hide behind the computation of the other (DeepSeek-V3, arXiv
    2412.19437, section 3.2.1). It needs both inputs before it begins and makes both outputs when it
    ends. ``backward`` is a B or a BW.
    """

    forward: Pass
    backward: Pass

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})"


class Channel(NamedTuple):
    """One direction between two logical ranks."""

    source: int
    target: int


class Message(NamedTuple):
    """The output of one pass on its way to the rank that reads it.

    ``is_gradient`` tells an output gradient from an activation; ``stage`` is the *reading* stage.
    A message that a *step is done* carries no tensor of the model: it tells the first stage that
    rank ``done_by`` has updated its students in step ``microbatch``: a later one may begin.
    """

    is_gradient: bool
    stage: int
    microbatch: int
    done_by: int | None = None

    @property
    def is_step_done(self) -> bool:
        return self.done_by is not None
