"""Passes, the units of work of a pipeline, and the messages between them."""

from __future__ import annotations

from typing import ClassVar, NamedTuple


class PassKind(str):
    """Computation of a pass for one stage and one microbatch.

    There is one object for each kind, so that kinds are compared by identity. A further kind is
    registered with :meth:`add` in the file of its feature; the rules of its work define it.

    ``F`` forward, ``B`` input gradient, ``W`` weight gradient, ``BW`` both gradients at once
    (*Zero Bubble Pipeline Parallelism*, arXiv 2401.10241, section 2).

    ``R`` is the recomputation of an F that has kept nothing but its input, between that F and its
    B, which needs what it makes (as in *Training Deep Nets with Sublinear Memory Cost*, arXiv
    1604.06174, for a whole stage at once).

    ``D`` and ``H`` are of a unit whose activation is offloaded between its F and its B.
    The copy from the device begins by itself when F ends; at D the rank waits until that copy has
    ended, and the activation's memory is free. At H the copy from the host begins, into memory that
    is taken there; B waits for its end. Neither takes a rank's time by itself.

    Blockwise distillation has other kinds (*Pipe-BD*, arXiv 2301.12443): ``T`` is the teacher's
    forward, from the activation that the stage before relays to the one that the next stage reads;
    ``S`` the student's forward, loss and backward, which reads and makes no message and runs after
    T of the same stage and microbatch, on the same rank; ``U`` the update of the stage's students,
    after the last S of a step.

    Where the output layer is vocabulary parallel (arXiv 2411.05288), every rank r holds a shard of
    it as stage S + r: ``O`` computes the shard's logits, their softmax within the shard and its
    part of the input gradient; ``P``, on the rank of the last stage, puts the parts of all shards
    together to the loss and the gradient of that stage's output; ``V`` is the weight gradient of
    the shard. Where the embedding is vocabulary parallel, too, ``E`` looks up a microbatch's tokens
    in the shard (on the rank of the first stage it reads them before), and ``G`` is the weight
    gradient of these rows. For multi-token prediction, E looks up the later tokens, too; ``M``
    hands their rows from the first stage to the last one, and ``K`` their gradients back.

    The rules of a schedule define the inputs, outputs and valid orders of its passes:
    :class:`megatron_zb.schedules.rules.Rules`.
    """

    F: ClassVar[PassKind]
    B: ClassVar[PassKind]
    W: ClassVar[PassKind]
    BW: ClassVar[PassKind]
    R: ClassVar[PassKind]
    D: ClassVar[PassKind]
    H: ClassVar[PassKind]
    T: ClassVar[PassKind]
    S: ClassVar[PassKind]
    U: ClassVar[PassKind]
    O: ClassVar[PassKind]  # noqa: E741
    P: ClassVar[PassKind]
    V: ClassVar[PassKind]
    E: ClassVar[PassKind]
    G: ClassVar[PassKind]
    M: ClassVar[PassKind]
    K: ClassVar[PassKind]

    words: str
    shades: tuple[str, str] | None
    _registered: ClassVar[dict[str, PassKind]] = {}

    def __new__(cls, letters: str) -> PassKind:
        """Return the registered kind of that name, such as ``PassKind("F")``."""
        if letters not in cls._registered:
            raise ValueError(f"'{letters}' is no kind of pass")
        return cls._registered[letters]

    @classmethod
    def add(cls, letters: str, words: str, shades: tuple[str, str] | None = None) -> PassKind:
        """Register a kind, or return it if it is registered already.

        Args:
            letters: its name in tables, one letter in most.
            words: its name in a legend.
            shades: its colours in pictures as #RRGGBB, of the first and of the last chunk of a
                rank; pictures leave out a kind without.

        Raises:
            ValueError: another kind has these letters.
        """
        known = cls._registered.get(letters)
        if known is not None and known.words != words:
            taken = " ".join(cls._registered)
            raise ValueError(f"'{letters}' is {known.words}: give a letter other than {taken}")
        if known is None:
            made = str.__new__(cls, letters)
            made.words, made.shades = words, shades
            cls._registered[letters] = made
        return cls._registered[letters]

    @classmethod
    def all(cls) -> tuple[PassKind, ...]:
        """Return all kinds, in the order in which they were registered."""
        return tuple(cls._registered.values())

    @property
    def value(self) -> str:
        """The letters of the kind as a plain string."""
        return str(self)

    @property
    def name(self) -> str:
        """The letters of the kind, as members of an enumeration have them."""
        return str(self)


# One hue for each kind, from the shade of the first chunk of a rank to that of the last. Chosen by
# a search for colours that stay apart in the eyes of colour-blind people, too: a test simulates
# these eyes and measures. Grey stands only for idle, violet for memory.
for _letters, _words, _shades in (
    ("F", "forward", ("#0545C3", "#88AFFC")),  # blue
    ("B", "input gradient", ("#7A4C0F", "#F49417")),  # orange
    ("W", "weight gradient", ("#0A472B", "#3FC98A")),  # green
    ("BW", "backward, fused", ("#4F0A44", "#C556AC")),  # magenta
    ("R", "recomputation", ("#DB9FB5", "#DB9FB5")),  # pink
    ("D", "release", None),
    ("H", "reload", None),
    ("T", "teacher", ("#2A18A8", "#978FE6")),  # indigo
    ("S", "students", ("#970810", "#F3838A")),  # red
    ("U", "update", ("#8C7A00", "#F2DC2A")),  # yellow
    ("O", "logits", ("#68AC2B", "#C4F49A")),  # lime
    ("P", "loss", ("#2F882B", "#98CF96")),  # grass
    ("V", "logit weights", ("#2D88AA", "#68D0F6")),  # cyan
    ("E", "embedding", None),
    ("G", "embedding weights", None),
    ("M", "later tokens", None),
    ("K", "gradient of later tokens", None),
):
    setattr(PassKind, _letters, PassKind.add(_letters, _words, _shades))


LAUNCH_LITTLE = frozenset(map(PassKind, "DHEGMK"))
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

    ``is_gradient`` is true for an output gradient, false for an activation; ``stage`` is the
    *reading* stage. A message that a *step is done* carries no tensor of the model: it tells the
    first stage that rank ``done_by`` has updated its students in step ``microbatch``: a later one
    may begin. ``made_by`` is the kind of a further pass (:class:`~features.part.Part`), whose
    messages go beside those of F and B; None for these.
    """

    is_gradient: bool
    stage: int
    microbatch: int
    done_by: int | None = None
    made_by: PassKind | None = None

    @property
    def is_step_done(self) -> bool:
        return self.done_by is not None
