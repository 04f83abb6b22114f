"""Rules of a training step whose embedding is cut along the vocabulary, like its output layer.

*Balancing Pipeline Parallelism with Vocabulary Parallelism* (arXiv 2411.05288), its input layers:
E on the rank of the first stage reads the tokens of a microbatch and tells them to all ranks; E of
each rank looks up those of its rows, and the first stage's F has the sum of what all have found.
What its backward hands on goes to all ranks, whose G adds the gradients of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.rules import Link, Orders
from megatron_zb.schedules.vocabulary import KINDS, NOTHING, VocabularyRules

EMBEDDING_KINDS = (PassKind.E, PassKind.G)
_BACKWARD = (PassKind.B, PassKind.BW)


@dataclass(frozen=True)
class EmbeddingRules(VocabularyRules):
    """Rules of a cut output layer, and E and G on the ranks that hold a shard.

    With S stages and p ranks, activation S + 1 + r is what rank r has looked up, S + p + 1 the
    tokens; gradient S + p + 1 is that of what the first stage was given.
    """

    holds = MappingProxyType({**VocabularyRules.holds, **dict.fromkeys(EMBEDDING_KINDS, (0, 0))})
    forward_kinds = (*VocabularyRules.forward_kinds, PassKind.E)
    kinds = (*KINDS, *EMBEDDING_KINDS)

    def links(self, placement: Placement, rank: int, passes: Sequence[Pass]) -> list[Link]:
        rest = [p for p in passes if p.kind not in EMBEDDING_KINDS]
        others = iter(super().links(placement, rank, rest))
        start = placement.rank_of[0]
        link = self._link_on_first if rank == start else self._link
        return [
            link(placement, rank, p)
            if p.kind in EMBEDDING_KINDS
            else self._ends(placement, p, next(others))
            for p in passes
        ]

    def _link_on_first(self, placement: Placement, rank: int, p: Pass) -> Link:
        reads = p.kind is PassKind.E and self._elsewhere(placement)
        return Link((), _told(placement, p.microbatch, is_gradient=False)) if reads else NOTHING

    def _link(self, placement: Placement, rank: int, p: Pass) -> Link:
        if p.kind is PassKind.G:
            return Link((_told(placement, p.microbatch, is_gradient=True),), None)
        found = Message(False, placement.num_stages + 1 + rank, p.microbatch)
        return Link((_told(placement, p.microbatch, is_gradient=False),), found)

    def _ends(self, placement: Placement, p: Pass, link: Link) -> Link:
        """Return the link of another pass, with what it is given by E or hands on to G."""
        elsewhere = self._elsewhere(placement)
        if p.stage != 0 or not elsewhere:
            return link
        if p.kind is PassKind.F:
            first = placement.num_stages + 1
            found = tuple(Message(False, first + holder, p.microbatch) for holder in elsewhere)
            return Link(found, link.makes)
        if p.kind in _BACKWARD:
            return Link(link.needs, _told(placement, p.microbatch, is_gradient=True))
        return link

    def _elsewhere(self, placement: Placement) -> list[int]:
        """Return the ranks with a shard, but for that of the first stage."""
        return [holder for holder in self.holders if holder != placement.rank_of[0]]

    def readers(self, placement: Placement, message: Message) -> Sequence[int]:
        stages, p = placement.num_stages, placement.pipeline_size
        if message.stage == stages + p + 1:
            return self._elsewhere(placement)
        if message.stage > stages and not message.is_gradient:
            return (placement.rank_of[0],)
        return super().readers(placement, message)

    def pass_in_words(self, p: Pass) -> str:
        if p.kind in EMBEDDING_KINDS:
            return f"{p.kind} of its rows of the vocabulary, microbatch {p.microbatch}"
        return super().pass_in_words(p)

    def message_in_words(self, placement: Placement | None, message: Message) -> str:
        if placement is None or message.stage <= placement.num_stages:
            return super().message_in_words(placement, message)
        if message.stage == placement.num_stages + placement.pipeline_size + 1:
            what = "the gradient of the embedding" if message.is_gradient else "the tokens"
        elif message.is_gradient:
            return super().message_in_words(placement, message)
        else:
            what = "a part of the embedding"
        return f"{what}, microbatch {message.microbatch}"

    def more_links(self, placement: Placement) -> set[tuple[int, int]]:
        start = placement.rank_of[0]
        return super().more_links(placement) | {(r, start) for r in self._elsewhere(placement)}

    def _due(self, schedule: Orders, rank: int) -> list[tuple[PassKind, int]]:
        shard = schedule.placement.num_stages + rank
        holds = rank in self.holders
        due = super()._due(schedule, rank)
        if holds or rank == schedule.placement.rank_of[0]:
            due.append((PassKind.E, shard))
        if holds and not schedule.forward_only:
            due.append((PassKind.G, shard))
        return due

    def _after(
        self, placement: Placement, rank: int
    ) -> dict[tuple[PassKind, int], list[tuple[PassKind, int]]]:
        found = super()._after(placement, rank)
        shard = placement.num_stages + rank
        rows, gradient = (PassKind.E, shard), (PassKind.G, shard)
        if rank != placement.rank_of[0]:
            return found | {gradient: [rows]}
        return found | {(PassKind.F, 0): [rows], gradient: [(PassKind.B, 0)]}


def _told(placement: Placement, microbatch: int, *, is_gradient: bool) -> Message:
    """Return the message of the first stage's rank to all others."""
    everyone = placement.num_stages + placement.pipeline_size + 1
    return Message(is_gradient, everyone, microbatch)
