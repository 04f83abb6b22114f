"""Rules of a kind of work: its kinds of passes, and the words that messages use for them.

The table of kinds defines inputs, outputs, memory and valid orders (see :mod:`kinds`); the rules
add what a table cannot say. A schedule holds its rules, and whatever walks through it asks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol, TypeAlias

from megatron_zb.schedules.kinds import (
    EMBEDDING_KINDS,
    TRAINING_KINDS,
    VOCABULARY_KINDS,
    Due,
    Home,
    Kind,
)
from megatron_zb.schedules.passes import Channel, Message, Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.stage_costs import StageCosts
from megatron_zb.schedules.task_graph import Row, TaskGraph

Moment: TypeAlias = tuple[float, ...]
"""A place in an order: compared from the first number on."""


class Sizes(Protocol):
    """Sizes and orders of a :class:`~schedule.Schedule`, as far as rules read them."""

    @property
    def placement(self) -> Placement: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def ranks(self) -> tuple[tuple[Pass, ...], ...]: ...


class Rules:
    """Rules of the passes of a kind of work."""

    table: ClassVar[tuple[Kind, ...]] = ()
    """Kinds that all work of this class has."""

    name: ClassVar[str] = "a training step"

    has_steps = False
    """Whether one schedule goes through several steps of the optimizer, one after the other."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of the passes."""
        return tuple(self.by_kind.values())

    @cached_property
    def by_kind(self) -> Mapping[PassKind, Kind]:
        """Entries of the table, or those that replace them, by kind."""
        return {it.kind: it for it in self.table}

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """Ranks that hold a shard of the vocabulary."""
        return ()

    @property
    def send_slots(self) -> int:
        """The most sends of a channel that are left untaken in a program."""
        return 2

    @property
    def forward_kinds(self) -> tuple[PassKind, ...]:
        """Kinds of the passes of an evaluation."""
        return tuple(it.kind for it in self.kinds if it.due is Due.ALWAYS)

    def kind(self, kind: PassKind) -> Kind | None:
        """Return the entry of a kind, None if this work has no such passes."""
        return self.by_kind.get(kind)

    def units(self, num_microbatches: int) -> int:
        """Return the number of units that passes of a kind and stage work on."""
        return num_microbatches

    def units_of(self, kind: Kind, units: int) -> int:
        """Return the number of units of a kind, of all ``units``."""
        return units

    def unit_name(self, kind: PassKind) -> str:
        """Name the unit that a pass of a kind works on."""
        return "microbatch"

    def more_inputs(self, graph: TaskGraph) -> Mapping[int, tuple[int, ...]]:
        """Return inputs of nodes that the table of kinds does not have."""
        return {}

    def further_message(self, row: Row, unit: int) -> Message | None:
        """Return the message that carries an output to nodes of :meth:`more_inputs`."""
        return None

    def more_links(self, placement: Placement) -> set[tuple[int, int]]:
        """Return pairs of ranks that messages travel between beside those of the placement."""
        usual = {tuple(sorted(pair)) for pair in placement.links}
        return TaskGraph.of(self, placement, 1).pairs_of_ranks() - usual

    def memory_change(self, p: Pass, costs: StageCosts, *, recomputed: bool = False) -> float:
        """Return the memory that a pass takes at its start, or frees at its end if negative.

        ``recomputed`` is whether the pass's unit has an R.
        """
        change = self.by_kind[p.kind].change(recomputed=recomputed)
        return costs.of(p.microbatch).change(change, p.stage)

    def together(self, placement: Placement, rank: int, p: Pass) -> tuple[int, ...]:
        """Return the ranks that run a pass as one, so that none of them gets past it first."""
        return (rank,)

    def step_of(self, p: Pass) -> int:
        """Return the step that a pass belongs to."""
        return 0

    def moments(self, schedule: Sizes) -> list[list[tuple[Moment, Moment]]] | None:
        """Return the place of every pass of every rank, and of its messages, in the total order.

        None for the order of a simulation.
        """
        return None

    def not_yet(self, p: Pass, needed: Pass) -> str:
        """Describe why a pass cannot run before another one of its rank."""
        return f"its {needed.kind} has not run yet"

    def pass_in_words(self, p: Pass) -> str:
        """Describe a pass, such as ``F of stage 1, microbatch 3``."""
        kind = self.kind(p.kind)
        if kind is not None and kind.home in (Home.SHARDS, Home.LOOKUPS):
            return f"{p.kind} of its rows of the vocabulary, microbatch {p.microbatch}"
        return f"{p.kind.name} of stage {p.stage}, {self.unit_name(p.kind)} {p.microbatch}"

    def message_in_words(self, placement: Placement | None, message: Message) -> str:
        """Describe a message, such as ``the gradient for stage 1, microbatch 3``.

        ``placement`` is None where nobody knows it yet.
        """
        kind = "the gradient" if message.is_gradient else "the activation"
        return f"{kind} for stage {message.stage}, microbatch {message.microbatch}"

    def awaited_in_words(
        self, placement: Placement | None, channel: Channel, message: Message
    ) -> str:
        """Describe a message to a rank that waits for it: what comes, and from which rank."""
        what = self.message_in_words(placement, message)
        return f"{what}, from {rank_in_words(channel.source)}"

    def sizes_in_words(self, schedule: Sizes) -> str:
        """Describe the amount of work of a schedule."""
        return f"{schedule.num_microbatches} microbatches"


def rank_in_words(rank: int) -> str:
    """Name a rank of the schedule to users, who know the ranks of the job."""
    return f"pipeline rank {rank} in schedule order"


@dataclass(frozen=True)
class TrainingRules(Rules):
    """Rules of a training step."""

    more: tuple[Kind, ...] = field(default=(), kw_only=True)
    """Entries of :mod:`parts`: further kinds, and those that they change."""

    table: ClassVar[tuple[Kind, ...]] = TRAINING_KINDS

    @cached_property
    def by_kind(self) -> Mapping[PassKind, Kind]:
        """Entries of the table, or those that replace them, by kind."""
        return {it.kind: it for it in (*self.table, *self.more)}


@dataclass(frozen=True)
class VocabularyRules(TrainingRules):
    """Rules of a training step with a vocabulary parallel output layer.

    O and V run on the ranks ``holders``, P where the loss is.
    """

    holders: tuple[int, ...]

    table = VOCABULARY_KINDS

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        return self.holders

    def message_in_words(self, placement: Placement | None, message: Message) -> str:
        if placement is None or message.stage < placement.num_stages:
            return super().message_in_words(placement, message)
        what = _SHARD_MESSAGES[_place(placement, message), message.is_gradient]
        return f"{what}, microbatch {message.microbatch}"


@dataclass(frozen=True)
class EmbeddingRules(VocabularyRules):
    """Rules of a training step whose output layer and embedding are vocabulary parallel."""

    table = EMBEDDING_KINDS


def _place(placement: Placement, message: Message) -> str:
    """Return which of the stages past the model's a message has; see :class:`TaskGraph`."""
    beyond = message.stage - placement.num_stages
    return {0: "all", placement.pipeline_size + 1: "first"}.get(beyond, "shard")


_SHARD_MESSAGES = {
    ("all", False): "the output of the last stage",
    ("all", True): "the gradient of the loss",
    ("shard", False): "a part of the embedding",
    ("shard", True): "a part of the loss",
    ("first", False): "the tokens",
    ("first", True): "the gradient of the embedding",
}

TRAINING = TrainingRules()
