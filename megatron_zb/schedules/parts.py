"""Further kinds of passes in a training step, each described by one object.

A :class:`Part` adds passes that follow another pass of their microbatch on the same rank, such as a
checkpoint of an activation. The costs carry it, so that every schedule that is built for them has
its passes: they are searched with, validated, simulated, lowered, run, drawn and exported by the
same code as all others. CONTRIBUTING.md has an example.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_zb.schedules.kinds import Kind
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.rules import TrainingRules
from megatron_zb.schedules.schedule import Schedule


@dataclass(frozen=True)
class Part:
    """A kind of passes that follow those of another kind.

    ``seconds`` and ``memory`` are of one microbatch on one whole rank, the memory in the unit of
    ``Costs.activation``; it is held until the pass of kind ``until`` of the unit has run.
    """

    kind: Kind
    seconds: float = 0.0
    memory: float = 0.0
    until: PassKind | None = None

    @property
    def follows(self) -> PassKind:
        """Kind of the pass that a pass of this part stands right behind."""
        return self.kind.needs[0].role

    def times(self, length: float) -> Part:
        """Return the part for a microbatch that is so many times as long."""
        return replace(self, seconds=self.seconds * length, memory=self.memory * length)

    def kinds(self, rules: TrainingRules) -> Iterator[Kind]:
        """Yield the kind itself, and those of the rules that free its memory."""
        table = str(self.kind.kind)
        yield replace(self.kind, memory=((table, 1),))
        for kind in rules.kinds:
            if self.until in kind.roles:
                yield replace(kind, memory=(*kind.memory, (table, -1)))


def with_part(schedule: Schedule, part: Part) -> Schedule:
    """Return a schedule with the passes of a part, each right behind the pass that it follows.

    Behind the second pass of a pair if it follows the first: nothing stands between the two.
    """
    rules = schedule.rules
    assert isinstance(rules, TrainingRules)
    rules = replace(rules, more=(*rules.more, *part.kinds(rules)))
    own = rules.kind(part.kind.kind)
    assert own is not None

    def passes(rank: tuple[Pass, ...]) -> Iterator[Pass]:
        held_back: list[Pass] = []
        for p in rank:
            yield p
            kind = rules.kind(p.kind)
            if kind is not None and part.follows in kind.roles:
                held_back.append(Pass(own.kind, p.stage, p.microbatch))
            if p not in schedule.pairs:
                yield from held_back
                held_back.clear()

    return replace(schedule, rules=rules, ranks=tuple(tuple(passes(r)) for r in schedule.ranks))
