"""Rules of a kind of work: inputs and outputs of its passes, and valid orders of a rank.

A schedule holds the rules of its passes. Whatever walks through a schedule (validation, simulation,
lowering) asks them, and knows no kind of pass by itself; so another kind of work is another class
of rules, and a handler for each of its kinds where a rank carries them out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

from megatron_zb.schedules.costs import StageCosts
from megatron_zb.schedules.passes import Channel, Message, Pass, PassKind
from megatron_zb.schedules.placement import Placement

Product: TypeAlias = Hashable
"""Output of a pass: the fields of the :class:`Message` that carries it, if it can travel."""


class Link(NamedTuple):
    """Inputs of a pass that other passes make, and its output, if others may need it."""

    needs: tuple[Product, ...]
    makes: Product | None


class Broken(NamedTuple):
    """A broken rule: its name and why, and the position on the rank or else the stage at fault."""

    rule: str
    why: str
    position: int | None = None
    stage: int | None = None


Moment: TypeAlias = tuple[float, ...]
"""A place in an order: compared from the first number on."""


class Orders(Protocol):
    """Orders that rules are asked about: those of a :class:`~schedule.Schedule`."""

    @property
    def placement(self) -> Placement: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def ranks(self) -> tuple[tuple[Pass, ...], ...]: ...
    @property
    def forward_only(self) -> bool: ...


class Rules(ABC):
    """Rules of the passes of a kind of work."""

    holds: ClassVar[Mapping[PassKind, tuple[int, int]]]
    """By how many a pass of each kind changes the activations that its rank holds: those held
    whole, and those of which W still needs a part."""

    forward_kinds: ClassVar[tuple[PassKind, ...]] = (PassKind.F,)
    """Kinds of the passes of an evaluation."""

    has_steps = False
    """Whether one schedule goes through several steps of the optimizer, one after the other."""

    @property
    def send_slots(self) -> int:
        """The most sends of a channel that are left untaken in a program."""
        return 2

    @abstractmethod
    def links(self, placement: Placement, rank: int, passes: Sequence[Pass]) -> list[Link]:
        """Return the inputs and the output of each pass of a rank, in the order of ``passes``."""

    @abstractmethod
    def broken_rule(self, schedule: Orders, rank: int) -> Broken | None:
        """Return the first rule that the order of a rank breaks, None if it breaks none."""

    def memory_change(self, p: Pass, costs: StageCosts) -> float:
        """Return the memory that a pass takes at its start, or frees at its end if negative."""
        kind, stage, microbatch = p
        return costs.of(microbatch).changes[self.holds[kind]][stage]

    def readers(self, placement: Placement, message: Message) -> Sequence[int]:
        """Return the ranks that read a message, of which the one that makes it may be one."""
        return (placement.rank_at(message.stage, message.microbatch),)

    def more_links(self, placement: Placement) -> set[tuple[int, int]]:
        """Return pairs of ranks that messages travel between beside those of the placement."""
        return set()

    def together(self, placement: Placement, rank: int, p: Pass) -> tuple[int, ...]:
        """Return the ranks that run a pass as one, so that none of them gets past it alone."""
        return (rank,)

    def step_of(self, p: Pass) -> int:
        """Return the step that a pass belongs to."""
        return 0

    def moments(self, schedule: Orders) -> list[list[tuple[Moment, Moment]]] | None:
        """Return the place of every pass of every rank, and of its messages, in the total order.

        None for the order of a simulation.
        """
        return None

    def pass_in_words(self, p: Pass) -> str:
        """Describe a pass, such as ``F of stage 1, microbatch 3``."""
        return f"{p.kind.name} of stage {p.stage}, microbatch {p.microbatch}"

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

    def sizes_in_words(self, schedule: Orders) -> str:
        """Describe the amount of work of a schedule."""
        return f"{schedule.num_microbatches} microbatches"


def rank_in_words(rank: int) -> str:
    """Name a rank of the schedule to users, who know the ranks of the job."""
    return f"pipeline rank {rank} in schedule order"


@dataclass(frozen=True)
class TrainingRules(Rules):
    """F, B, W and BW of a training step (arXiv 2401.10241, section 2).

    With R of units that are dropped, and D and H of those that are moved to the host.
    """

    holds = MappingProxyType(
        {
            PassKind.F: (1, 0),
            PassKind.B: (-1, 1),
            PassKind.W: (0, -1),
            PassKind.BW: (-1, 0),
            PassKind.R: (1, 0),
            PassKind.D: (-1, 0),
            PassKind.H: (1, 0),
        }
    )

    def links(self, placement: Placement, rank: int, passes: Sequence[Pass]) -> list[Link]:
        last = placement.num_stages - 1
        nothing = Link((), None)
        found = []
        for kind, stage, microbatch in passes:
            if kind is PassKind.W or kind in _BETWEEN:
                found.append(nothing)
                continue
            is_gradient = kind is not PassKind.F
            first, end, following = (last, 0, -1) if is_gradient else (0, last, 1)
            found.append(
                Link(
                    () if stage == first else ((is_gradient, stage, microbatch, None),),
                    None if stage == end else (is_gradient, stage + following, microbatch, None),
                )
            )
        return found

    def broken_rule(self, schedule: Orders, rank: int) -> Broken | None:
        """Return the first rule that the order of a rank breaks, None if it breaks none.

        Rules: *placement* (a pass runs on the rank of its stage), *completeness* (every stage and
        microbatch has one F and either one BW or one B and one W), *order* (F before B before W),
        *recomputation* (R once, between F and B, and never on the last stage), *offload* (D and H
        once each, D before H, between F and B of a unit without R, and never on the last stage) and
        *microbatch order* (F, input gradients and weight gradients of a stage each rise with the
        microbatch, so that sums are formed in 1F1B's order).
        """
        m = schedule.num_microbatches
        done: dict[int, list[int]] = {s: [0, 0, 0] for s in schedule.placement.stages_of[rank]}
        between: set[Pass] = set()
        for position, p in enumerate(schedule.ranks[rank]):
            if p.stage not in done:
                why = f"stage {p.stage} does not live on rank {rank}"
                return Broken("placement", why, position)
            if not 0 <= p.microbatch < m:
                return Broken("completeness", f"there are {m} microbatches", position)
            if schedule.forward_only and p.kind is not PassKind.F:
                why = "a forward-only schedule has F passes alone"
                return Broken("completeness", why, position)
            if p.kind in _BETWEEN:
                why_not = _why_not_between(p, done[p.stage], schedule.placement)
                why_not = why_not or _why_not_after(p, between)
                if why_not is not None:
                    rule = "recomputation" if p.kind is PassKind.R else "offload"
                    return Broken(rule, why_not, position)
                between.add(p)
                continue
            columns = _COLUMNS.get(p.kind)
            if columns is None:
                why = f"a training step has no {p.kind} passes"
                return Broken("completeness", why, position)
            counts = done[p.stage]
            for column in columns:
                if counts[column] != p.microbatch:
                    why = (
                        f"the next {'FBW'[column]} of stage {p.stage} is microbatch "
                        f"{counts[column]}"
                    )
                    return Broken("microbatch order", why, position)
            if p.kind in (PassKind.B, PassKind.BW) and counts[0] <= p.microbatch:
                return Broken("order", "its F has not run yet", position)
            if p.kind is PassKind.W and counts[1] <= p.microbatch:
                return Broken("order", "its B has not run yet", position)
            for column in columns:
                counts[column] += 1
        expected = [m] + [0 if schedule.forward_only else m] * 2
        for stage, counts in done.items():
            for count, wanted, letter in zip(counts, expected, "FBW", strict=True):
                if count != wanted:
                    why = f"{count} of {wanted} {letter} passes are listed"
                    return Broken("completeness", why, stage=stage)
        for p in sorted(between):
            if p.kind is PassKind.D and p._replace(kind=PassKind.H) not in between:
                return Broken("offload", f"{p} has no H that fetches it", stage=p.stage)
        return None


def _why_not_after(p: Pass, between: Collection[Pass]) -> str | None:
    """Return why R, D or H cannot run after those of its stage that have, None if it can."""
    if p in between:
        return "it has run before"
    recomputed, moved = (p._replace(kind=kind) in between for kind in (PassKind.R, PassKind.D))
    if p.kind is PassKind.H:
        return None if moved else "its D has not run yet"
    return "a unit is either dropped or moved" if recomputed or moved else None


def _why_not_between(p: Pass, done: Sequence[int], placement: Placement) -> str | None:
    """Return why R, D or H cannot run after so many F and B of its stage, None if it can."""
    if p.stage == placement.num_stages - 1:
        return "the last stage's B follows its F at once"
    if done[0] <= p.microbatch:
        return "its F has not run yet"
    return "its B has run already" if done[1] > p.microbatch else None


_BETWEEN = (PassKind.R, PassKind.D, PassKind.H)

# Which of F, B and W of a microbatch a pass is, as columns of a count.
_COLUMNS = {PassKind.F: (0,), PassKind.B: (1,), PassKind.W: (2,), PassKind.BW: (1, 2)}

TRAINING = TrainingRules()
