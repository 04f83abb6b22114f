"""Table of pass kinds: what a pass needs, where it runs, what memory it takes.

A kind of pass is one entry here, or in the file of the feature that brings it. Validation,
simulation, the search and lowering read the entries and know no kind by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, TypeAlias

from megatron_zb.schedules.passes import PassKind


class At(Enum):
    """Place of the pass that makes an input, relative to the pass that needs it."""

    PREVIOUS = "the stage before"
    NEXT = "the stage after"
    SAME = "the same stage"
    FIRST = "the first stage"
    LAST = "the last stage"
    SHARDS = "all shards"
    READER = "the shard on the first stage's rank"


class Need(NamedTuple):
    """Input of a pass: the output of a pass of kind ``role`` of the same microbatch.

    ``on`` limits the input to passes of the first or the last stage. An input from the pass's own
    rank and stage is an *order rule*; any other travels as a message.
    """

    role: PassKind
    at: At
    on: At | None = None


class Home(Enum):
    """Stages that have passes of a kind."""

    STAGES = "every stage"
    INNER = "every stage but the last"
    FIRST = "the first stage"
    LAST = "the last stage"
    SHARDS = "every shard"
    LOOKUPS = "every shard, and the rank of the first stage"
    RANKS = "every rank of every stage"


class Due(Enum):
    """When a schedule must have the passes of a kind."""

    ALWAYS = "in every schedule"
    TRAINING = "in a training step"
    INSTEAD = "in a training step, in place of the kinds that it plays"
    CHOSEN = "for chosen units of a training step"


class Copies(Enum):
    """Directions of the copies between a device and its host."""

    OUT = "to the host"
    IN = "to the device"


Memory: TypeAlias = tuple[tuple[str, int], ...]
"""Change of memory: how many times each table of :class:`~stage_costs.StageCosts` is taken."""


@dataclass(frozen=True)
class Kind:
    """One kind of pass.

    ``plays`` are the kinds whose output a pass makes in place of its own. ``memory`` is the change
    of device memory, taken at the start or freed at the end; ``if_recomputed`` replaces it for a
    unit that has an R. A pass with ``copies`` starts a copy of its unit in that direction when it
    ends; one with ``awaits`` begins once that copy has ended. A chosen pass runs ``before``
    another one of its unit, ``requires`` a later one and ``excludes`` others. ``pairs_with`` is the
    kind that it may run as one with. ``rule`` names what an order breaks that has it elsewhere.
    ``letter`` stands for the kind in tables for torch.distributed.pipelining, if not its name.
    A kind ``is_further`` whose messages say their kind, since F or B of the unit send theirs the
    same way.
    """

    kind: PassKind
    home: Home = Home.STAGES
    needs: tuple[Need, ...] = ()
    due: Due = Due.TRAINING
    plays: tuple[PassKind, ...] = ()
    is_gradient: bool = False
    memory: Memory = ()
    if_recomputed: Memory | None = None
    copies: Copies | None = None
    awaits: Copies | None = None
    before: PassKind | None = None
    requires: PassKind | None = None
    excludes: tuple[PassKind, ...] = ()
    pairs_with: PassKind | None = None
    rule: str = "order"
    letter: str = ""
    is_further: bool = False

    @property
    def roles(self) -> tuple[PassKind, ...]:
        """Kinds whose output a pass of this kind makes."""
        return self.plays or (self.kind,)

    def change(self, *, recomputed: bool) -> Memory:
        """Return the change of memory of a pass of a unit that has an R, or of one that has not."""
        return self.if_recomputed if recomputed and self.if_recomputed is not None else self.memory

    def change_of_count(self, *, recomputed: bool) -> int:
        """Return by how many activations a pass changes those that its rank holds."""
        counted = ("activation", "held_for_weight")
        return sum(n for table, n in self.change(recomputed=recomputed) if table in counted)


_F, _B, _W, _R, _D, _H = (PassKind(letter) for letter in "FBWRDH")

_BACKWARD = Kind(
    _B,
    needs=(Need(_F, At.SAME), Need(_B, At.NEXT)),
    is_gradient=True,
    memory=(("activation", -1), ("held_for_weight", 1)),
    awaits=Copies.IN,
    letter="I",
)

TRAINING_KINDS = (
    Kind(
        _F,
        needs=(Need(_F, At.PREVIOUS),),
        due=Due.ALWAYS,
        memory=(("activation", 1),),
        if_recomputed=(("kept_input", 1),),
        copies=Copies.OUT,
        pairs_with=_B,
    ),
    _BACKWARD,
    Kind(_W, needs=(Need(_B, At.SAME),), is_gradient=True, memory=(("held_for_weight", -1),)),
    replace(
        _BACKWARD,
        kind=PassKind.BW,
        due=Due.INSTEAD,
        plays=(_B, _W),
        memory=(("activation", -1),),
        letter="B",
    ),
    Kind(
        _R,
        Home.INNER,
        needs=(Need(_F, At.SAME),),
        due=Due.CHOSEN,
        memory=(("activation", 1),),
        if_recomputed=(("activation", 1), ("kept_input", -1)),
        before=_B,
        excludes=(_D,),
        rule="recomputation",
    ),
    Kind(
        _D,
        Home.INNER,
        needs=(Need(_F, At.SAME),),
        due=Due.CHOSEN,
        memory=(("activation", -1),),
        awaits=Copies.OUT,
        before=_B,
        requires=_H,
        excludes=(_R,),
        rule="offload",
    ),
    Kind(
        _H,
        Home.INNER,
        needs=(Need(_F, At.SAME), Need(_D, At.SAME)),
        due=Due.CHOSEN,
        memory=(("activation", 1),),
        copies=Copies.IN,
        before=_B,
        rule="offload",
    ),
)
"""F, B, W and BW of a training step (arXiv 2401.10241, section 2); R, D and H of chosen units."""


def with_needs(
    kinds: tuple[Kind, ...], more: Mapping[PassKind, tuple[Need, ...]]
) -> tuple[Kind, ...]:
    """Return the kinds with further inputs of those that play a role of ``more``."""
    return tuple(
        replace(
            it, needs=it.needs + tuple(need for role in it.roles for need in more.get(role, ()))
        )
        for it in kinds
    )
