"""Further kinds of passes in a training step, each described by one object.

A :class:`Part` adds passes that follow another pass of their microbatch on the same rank, such as a
checkpoint of an activation, and that may read what others of their kind have sent. The costs have
it as a feature, so that every schedule that is built for them has its passes: they are searched
with, validated, simulated, lowered, run, drawn and exported by the same code as all others.
CONTRIBUTING.md has an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_zb.schedules.costs import (
    Costs,
    Feature,
    Scale,
    added,
    by_slice,
    resampled,
    seconds_of,
)
from megatron_zb.schedules.kinds import At, Kind
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.rules import TrainingRules
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import Timeline, simulate
from megatron_zb.schedules.stage_costs import StageCosts

_BW, _F = PassKind.BW, PassKind.F


@dataclass(frozen=True)
class Part(Feature):
    """A kind of passes that follow those of another kind.

    Args:
        kind: its entry in the table of kinds. The first of its needs is the pass that it follows;
            a further one is the pass of its own kind on the stage before, or after.
        seconds: of one microbatch on one whole rank.
        memory: the same, in the unit of activation.
        until: kind of the pass of the unit whose end frees that memory.
    """

    name: ClassVar[str] = "parts"

    kind: Kind
    seconds: float = 0.0
    memory: float = 0.0
    until: PassKind | None = None

    @property
    def key(self) -> object:
        return self.kind.kind

    def said(self) -> dict[str, str]:
        words = f"passes {self.kind.kind}"
        return {"parts": words} | ({"parts that hold memory": words} if self.memory else {})

    @property
    def letter(self) -> str:
        """Letter of the passes in a table."""
        return self.kind.letter or str(self.kind.kind)

    @property
    def follows(self) -> PassKind:
        """Kind of the pass that a pass of this part follows."""
        return self.kind.needs[0].role

    def scaled(self, scale: Scale) -> Part:
        factor = scale.tokens
        return replace(self, seconds=self.seconds * factor, memory=self.memory * factor)

    def placed(self, costs: Costs, placement: Placement, table: StageCosts) -> StageCosts:
        own = self.kind.kind
        seconds = seconds_of(costs, by_slice(costs, self.seconds), placement)
        memory = resampled(by_slice(costs, self.memory), placement.num_stages)
        latency = dict(table.latency)
        for need in self.kind.needs[1:]:
            latency[own] = table.latency[_F if need.at is At.PREVIOUS else _BW]
        return replace(
            table.with_seconds({own: seconds}),
            latency=latency,
            memory={**table.memory, str(own): memory},
        )

    def folded(self, costs: Costs) -> Costs:
        """Return the costs with the passes counted as a part of those that they follow."""
        seconds, memory = by_slice(costs, self.seconds), by_slice(costs, self.memory)
        kinds = {self.follows} | ({_BW} if self.follows is not _F else set())
        tables = {k: added(of, seconds) if k in kinds else of for k, of in costs.seconds.items()}
        held = {**costs.memory, "activation": added(costs.memory["activation"], memory)}
        return replace(
            costs,
            seconds=tables,
            memory=held,
            features=tuple(it for it in costs.features if it.key != self.key),
            microbatches=tuple(map(self._folded_row, costs.microbatches)),
        )

    def _folded_row(self, row: Costs) -> Costs:
        return next(it for it in row.features if it.key == self.key).folded(row)

    def kinds(self, rules: TrainingRules) -> Iterator[Kind]:
        """Yield the kind itself, and those of the rules that free its memory."""
        table = str(self.kind.kind)
        yield replace(self.kind, memory=((table, 1),), is_further=True)
        for kind in rules.kinds:
            if self.until in kind.roles:
                yield replace(kind, memory=(*kind.memory, (table, -1)))

    def added_to(self, schedule: Schedule, costs: Costs) -> Schedule:
        """Return a schedule with the passes of the part.

        Each stands right behind the pass that it follows: behind the second pass of a pair if that
        is the first, since nothing stands between the two. One that also reads what another rank
        sends stands where that has arrived.
        """
        whole = self.ruled(schedule)
        if len(self.kind.needs) == 1:
            return replace(whole, ranks=tuple(tuple(self._behind(r, whole)) for r in whole.ranks))
        timeline = simulate(schedule, self.folded(costs))
        due = _Due(self, whole, timeline)
        return replace(whole, ranks=tuple(map(due.merged, range(len(whole.ranks)))))

    def ruled(self, schedule: Schedule) -> Schedule:
        """Return a schedule under rules with the kind, such as one whose table has its passes."""
        rules = schedule.rules
        assert isinstance(rules, TrainingRules)
        return replace(schedule, rules=replace(rules, more=(*rules.more, *self.kinds(rules))))

    def follow(self, schedule: Schedule, p: Pass) -> bool:
        """Return whether a pass of this part follows another one."""
        kind = schedule.rules.kind(p.kind)
        return kind is not None and self.follows in kind.roles

    def stages(self, schedule: Schedule) -> set[int]:
        """Return the stages that have passes of the part, by its home."""
        own = self.kind.kind
        return {row.stage for row in schedule.graph.rows if row.kind.kind is own}

    def _behind(self, rank: Sequence[Pass], schedule: Schedule) -> Iterator[Pass]:
        held_back: list[Pass] = []
        stages = self.stages(schedule)
        for p in rank:
            yield p
            if p.stage in stages and self.follow(schedule, p):
                held_back.append(p._replace(kind=self.kind.kind))
            if p not in schedule.pairs:
                yield from held_back
                held_back.clear()


class _Due:
    """When passes of a part can run at the earliest, by the timeline of the others.

    1. The pass that a pass follows has ended, and what it reads has arrived.
    2. The pass of its row before it has run: rows keep the order of microbatches.
    3. It stands before the first pass of its rank that starts no earlier. All passes together can
       run in the order of these times, so no rank waits for ever.
    """

    def __init__(self, part: Part, schedule: Schedule, timeline: Timeline) -> None:
        self._part, self._schedule, self._timeline = part, schedule, timeline
        self._end: dict[Pass, float] = {}
        stages = part.stages(schedule)
        for rank, passes in enumerate(timeline.schedule.ranks):
            for p, end in zip(passes, timeline.end[rank], strict=True):
                if p.stage in stages and part.follow(schedule, p):
                    self._end[p._replace(kind=part.kind.kind)] = end
        self._found: dict[Pass, tuple[float, int]] = {}
        for p in sorted(self._end, key=lambda p: p.microbatch):
            self.at(p)

    def at(self, p: Pass) -> tuple[float, int]:
        """Return when a pass can run, and after how many others of its part."""
        if p in self._found:
            return self._found[p]
        before = list(self._before(p))
        times = [at + late for (at, _), late in before]
        found = max([self._end[p], *times]), 1 + max((n for (_, n), _ in before), default=0)
        self._found[p] = found
        return found

    def _before(self, p: Pass) -> Iterator[tuple[tuple[float, int], float]]:
        """Yield when the passes of the part can run that a pass waits for, and their latency."""
        if p.microbatch > 0:
            yield self.at(p._replace(microbatch=p.microbatch - 1)), 0.0
        for need in self._part.kind.needs[1:]:
            maker = p._replace(stage=p.stage + (1 if need.at is At.NEXT else -1))
            if maker in self._end:
                costs = self._timeline.costs.of(p.microbatch)
                late = costs.latency[_BW if need.at is At.NEXT else _F]
                yield self.at(maker), late[maker.stage]

    def merged(self, rank: int) -> tuple[Pass, ...]:
        """Return the passes of a rank with those of the part."""
        stages = self._schedule.placement.stages_of[rank]
        due = sorted((self.at(p), p) for p in self._end if p.stage in stages)
        found, upcoming, is_second = list[Pass](), iter(due), False
        upcoming_one = next(upcoming, None)
        times = zip(self._schedule.ranks[rank], self._timeline.start[rank], strict=True)
        for p, start in times:
            while not is_second and upcoming_one is not None and upcoming_one[0][0] <= start:
                found.append(upcoming_one[1])
                upcoming_one = next(upcoming, None)
            found.append(p)
            is_second = p in self._schedule.pairs
        if upcoming_one is not None:
            found += [upcoming_one[1], *(p for _, p in upcoming)]
        return tuple(found)
