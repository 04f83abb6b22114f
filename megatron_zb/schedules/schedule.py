"""A schedule as data: a placement and, for every rank, the passes in the order they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megatron_zb.errors import UsageError
from megatron_zb.schedules.passes import Pass
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.rules import TRAINING, Product, Rules


class InvalidSchedule(UsageError):
    """Error of a schedule that breaks a rule; the message names the rule and the place.

    ``rank`` and ``position`` are the place of the pass at fault in ``Schedule.ranks``, counted from
    0: of the first that waits for ever if several do. None where no single pass is at fault.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, position: int | None = None
    ) -> None:
        super().__init__(message)
        self.rank, self.position = rank, position


@dataclass(frozen=True)
class Report:
    """Quality of a schedule for the costs it was built for, in seconds.

    ``period`` is that of iterations in a row, None where the schedule was not built for them.
    """

    makespan: float
    lower_bound: float
    period: float | None = None

    @property
    def gap(self) -> float:
        """Share of the lower bound that is, at most, left to gain."""
        return self.makespan / self.lower_bound - 1.0


@dataclass(frozen=True)
class Schedule:
    """Order of the passes on every rank of a placement.

    ``ranks[r]`` lists the passes of logical rank r. ``forward_only`` marks a schedule of F passes
    alone (evaluation). ``report`` compares it with the lower bound of its placement at the memory
    it was allowed; ``reason`` says why ``auto`` chose it. ``rules`` are those of its kind of work:
    of a training step, or of another (blockwise distillation has its own).
    """

    name: str
    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Pass, ...], ...]
    forward_only: bool = False
    report: Report | None = field(default=None, compare=False)
    reason: str = field(default="", compare=False)
    rules: Rules = TRAINING

    def forwards(self) -> Schedule:
        """Return the same schedule with the passes of an evaluation alone, in the same order."""
        kinds = self.rules.forward_kinds
        ranks = tuple(tuple(p for p in rank if p.kind in kinds) for rank in self.ranks)
        return replace(self, ranks=ranks, forward_only=True)

    def validate(self) -> Schedule:
        """Check every rule a schedule must keep and return the schedule itself.

        Rules of a rank are those of its kind of work, such as :meth:`TrainingRules.broken_rule`;
        *progress* is of all ranks: their orders and the data dependencies contain no cycle.

        Raises:
            InvalidSchedule: names the first broken rule, the rank and the pass.
        """
        if len(self.ranks) != self.placement.pipeline_size:
            raise InvalidSchedule(
                f"{self.name}: rule 'placement': {len(self.ranks)} ranks are listed, "
                f"the placement has {self.placement.pipeline_size}"
            )
        for rank, passes in enumerate(self.ranks):
            self._validate_rank(rank, passes)
        waiting = walk(self, lambda rank, position, p: None)
        if waiting:
            raise InvalidSchedule(
                f"{self.name}: rule 'progress': the ranks wait for one another in a circle: "
                + self._describe(waiting),
                rank=waiting[0][0],
                position=waiting[0][1],
            )
        return self

    def blocked(self) -> str | None:
        """Describe the circular wait of the first ranks; return None if every pass can run."""
        waiting = walk(self, lambda rank, position, p: None)
        return self._describe(waiting) or None

    def _describe(self, waiting: list[tuple[int, int]]) -> str:
        return "; ".join(f"rank {r} at {self.ranks[r][i]}" for r, i in waiting[:4])

    def _validate_rank(self, rank: int, passes: tuple[Pass, ...]) -> None:
        broken = self.rules.broken_rule(self, rank)
        if broken is None:
            return
        rule, why, position, stage = broken
        at = "" if position is None else f", position {position}, pass {passes[position]}"
        at += "" if stage is None else f", stage {stage}"
        raise InvalidSchedule(
            f"{self.name}: rank {rank}{at}: rule '{rule}': {why}", rank=rank, position=position
        )


def walk(schedule: Schedule, visit: Callable[[int, int, Pass], object]) -> list[tuple[int, int]]:
    """Visit every pass after the passes it depends on, as ``visit(rank, position, pass)``.

    Each rank is walked in its own order. Returns the ``(rank, position)`` of the passes that
    could never run: empty for a schedule without circular waits.
    """
    ranks, placement = schedule.ranks, schedule.placement
    links = [schedule.rules.links(placement, rank, passes) for rank, passes in enumerate(ranks)]
    position = [0] * len(ranks)
    produced: set[Product] = set()
    waiting: dict[Product, list[int]] = {}
    runnable = list(range(len(ranks) - 1, -1, -1))
    while runnable:
        rank = runnable.pop()
        passes, linked, i = ranks[rank], links[rank], position[rank]
        while i < len(linked):
            needs, makes = linked[i]
            missing = next((need for need in needs if need not in produced), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            visit(rank, i, passes[i])
            i += 1
            if makes is not None:
                produced.add(makes)
                runnable += waiting.pop(makes, ())
        position[rank] = i
    return [(r, i) for r, i in enumerate(position) if i < len(ranks[r])]
