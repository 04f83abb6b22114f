"""Rules of a training step whose output layer is cut along the vocabulary over all ranks.

*Balancing Pipeline Parallelism with Vocabulary Parallelism* (arXiv 2411.05288), with one barrier in
each microbatch: the last stage's output goes to every rank; each runs O and sends its part of the
softmax and of the input gradient back; P puts them together and tells all ranks the loss's
gradient, which V needs, and the B of the last stage follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from megatron_zb.schedules.costs import StageCosts
from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.rules import Broken, Link, Orders, TrainingRules

KINDS = (PassKind.O, PassKind.P, PassKind.V)
_FORWARD = (PassKind.F, PassKind.O, PassKind.P)
NOTHING = Link((), None)


class _Part(NamedTuple):
    """Orders of the F, B, W and BW alone."""

    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Pass, ...], ...]
    forward_only: bool


@dataclass(frozen=True)
class VocabularyRules(TrainingRules):
    """F, B, W and BW of a training step; O and V on the ranks ``holders``, P where the loss is."""

    holders: tuple[int, ...]

    holds = MappingProxyType({**TrainingRules.holds, **dict.fromkeys(KINDS, (0, 0))})
    forward_kinds: ClassVar[tuple[PassKind, ...]] = _FORWARD
    kinds: ClassVar[tuple[PassKind, ...]] = KINDS
    """Kinds of the passes of shards."""

    def memory_change(self, p: Pass, costs: StageCosts) -> float:
        if p.kind not in self.kinds:
            return super().memory_change(p, costs)
        shards = costs.of(p.microbatch).shards
        if shards is None or p.kind not in (PassKind.O, PassKind.V):
            return 0.0
        held = shards.held[p.stage - len(costs.activation)]
        return held if p.kind is PassKind.O else -held

    def links(self, placement: Placement, rank: int, passes: Sequence[Pass]) -> list[Link]:
        """Return the inputs and the output of each pass of a rank, in the order of ``passes``.

        On the last stage's rank they follow from the order alone.
        """
        stages, end = placement.num_stages, placement.rank_of[-1]
        others = [holder for holder in self.holders if holder != end]
        trains = any(p.kind not in _FORWARD for p in passes)
        found = super().links(placement, rank, [p for p in passes if p.kind not in KINDS])
        training = iter(found)
        linked = []
        for p in passes:
            j = p.microbatch
            hidden, loss = (False, stages, j, None), (True, stages, j, None)
            if p.kind is PassKind.P:
                parts = tuple((True, stages + 1 + holder, j, None) for holder in others)
                linked.append(Link(parts, loss if trains and others else None))
            elif p.kind in KINDS and rank == end:
                linked.append(NOTHING)
            elif p.kind is PassKind.O:
                linked.append(Link((hidden,), (True, stages + 1 + rank, j, None)))
            elif p.kind is PassKind.V:
                linked.append(Link((loss,), None))
            else:
                link = next(training)
                is_last = p.kind is PassKind.F and p.stage == stages - 1
                linked.append(Link(link.needs, hidden) if is_last and others else link)
        return linked

    def readers(self, placement: Placement, message: Message) -> Sequence[int]:
        stages, end = placement.num_stages, placement.rank_of[-1]
        if message.stage < stages:
            return super().readers(placement, message)
        if message.stage == stages:
            return [holder for holder in self.holders if holder != end]
        return (end,)

    def pass_in_words(self, p: Pass) -> str:
        if p.kind in (PassKind.O, PassKind.V):
            return f"{p.kind} of its rows of the vocabulary, microbatch {p.microbatch}"
        return super().pass_in_words(p)

    def message_in_words(self, placement: Placement | None, message: Message) -> str:
        if placement is None or message.stage < placement.num_stages:
            return super().message_in_words(placement, message)
        what = "the output of the last stage"
        if message.is_gradient:
            is_part = message.stage > placement.num_stages
            what = "a part of the loss" if is_part else "the gradient of the loss"
        return f"{what}, microbatch {message.microbatch}"

    def more_links(self, placement: Placement) -> set[tuple[int, int]]:
        end = placement.rank_of[-1]
        return {(holder, end) for holder in self.holders if holder != end}

    def broken_rule(self, schedule: Orders, rank: int) -> Broken | None:
        """Return the first rule that the order of a rank breaks, None if it breaks none.

        Those of a training step, and *placement* (O and V of a rank are of its own shard, P is on
        the rank of the last stage), *completeness*, *order* (on the last stage's rank F, O, P, B;
        everywhere O before V) and *microbatch order* for O, P and V.
        """
        passes = schedule.ranks[rank]
        others = [i for i, p in enumerate(passes) if p.kind not in self.kinds]
        part = tuple(
            tuple(p for p in order if p.kind not in self.kinds) if r == rank else order
            for r, order in enumerate(schedule.ranks)
        )
        sizes = schedule.placement, schedule.num_microbatches
        broken = super().broken_rule(_Part(*sizes, part, schedule.forward_only), rank)
        if broken is not None:
            at = None if broken.position is None else others[broken.position]
            return broken._replace(position=at)
        return self._broken_rule_of_shards(schedule, rank)

    def _broken_rule_of_shards(self, schedule: Orders, rank: int) -> Broken | None:
        due, after = self._due(schedule, rank), self._after(schedule.placement, rank)
        done: Counter[tuple[PassKind, int]] = Counter()
        for position, p in enumerate(schedule.ranks[rank]):
            key = (PassKind.B if p.kind is PassKind.BW else p.kind, p.stage)
            if p.kind in self.kinds:
                if key not in due:
                    why = f"no {p.kind} of stage {p.stage} is due on rank {rank}"
                    return Broken("placement", why, position)
                if p.microbatch != done[key]:
                    why = f"the next {p.kind} of stage {p.stage} is microbatch {done[key]}"
                    return Broken("microbatch order", why, position)
            for before in after.get(key, ()):
                if done[before] <= p.microbatch:
                    return Broken("order", f"its {before[0]} has not run yet", position)
            done[key] += 1
        for kind, stage in due:
            count = done[kind, stage]
            if count != schedule.num_microbatches:
                why = f"{count} of {schedule.num_microbatches} {kind} passes are listed"
                return Broken("completeness", why, stage=stage)
        return None

    def _due(self, schedule: Orders, rank: int) -> list[tuple[PassKind, int]]:
        """Return the kinds and stages of shards that a rank runs for every microbatch."""
        stages, end = schedule.placement.num_stages, schedule.placement.rank_of[-1]
        due = [(PassKind.P, stages - 1)] if rank == end else []
        if rank in self.holders:
            due.append((PassKind.O, stages + rank))
            due += [] if schedule.forward_only else [(PassKind.V, stages + rank)]
        return due

    def _after(
        self, placement: Placement, rank: int
    ) -> dict[tuple[PassKind, int], list[tuple[PassKind, int]]]:
        """Return what must have run before the passes of a kind and stage, of each microbatch."""
        last, shard = placement.num_stages - 1, placement.num_stages + rank
        forward, loss = (PassKind.F, last), (PassKind.P, last)
        output, weight = (PassKind.O, shard), (PassKind.V, shard)
        if rank != placement.rank_of[-1]:
            return {weight: [output]}
        found = {loss: [forward], (PassKind.B, last): [loss]}
        if rank in self.holders:
            found |= {output: [forward], loss: [output], weight: [loss]}
        return found
