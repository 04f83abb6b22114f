"""A schedule as data: a placement and, for every rank, the passes in the order they run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_zb.errors import UsageError
from megatron_zb.schedules.passes import Pair, Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.rules import TRAINING, Rules, broken_pair, violation
from megatron_zb.schedules.stage_costs import StageCosts
from megatron_zb.schedules.task_graph import Orders, TaskGraph, replay


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
    of a training step, or of another (blockwise distillation has its own). ``pairs`` are the F that
    run as one with the B or BW right behind them: see :class:`~passes.Pair`.
    """

    name: str
    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Pass, ...], ...]
    forward_only: bool = False
    report: Report | None = field(default=None, compare=False)
    reason: str = field(default="", compare=False)
    rules: Rules = TRAINING
    pairs: frozenset[Pass] = frozenset()

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """Units (stage and microbatch) whose F keeps only its input: those that have an R."""
        return self._units_with(PassKind.R)

    @cached_property
    def offloaded(self) -> frozenset[tuple[int, int]]:
        """Units (stage and microbatch) that the host holds from F to B: those that have a D."""
        return self._units_with(PassKind.D)

    def _units_with(self, kind: PassKind) -> frozenset[tuple[int, int]]:
        return frozenset(
            (p.stage, p.microbatch) for rank in self.ranks for p in rank if p.kind is kind
        )

    def memory_change(self, p: Pass, costs: StageCosts) -> float:
        """Return the memory that a pass takes at its start, or frees at its end if negative."""
        recomputed = (p.stage, p.microbatch) in self.recomputed
        return self.rules.memory_change(p, costs, recomputed=recomputed)

    def forwards(self) -> Schedule:
        """Return the same schedule with only the passes of an evaluation, in the same order."""
        kinds = self.rules.forward_kinds
        ranks = tuple(tuple(p for p in rank if p.kind in kinds) for rank in self.ranks)
        return replace(self, ranks=ranks, forward_only=True, pairs=frozenset())

    def without_pairs(self) -> Schedule:
        """Return the same order without pairs: an F runs right before the backward of its pair."""
        return replace(self, pairs=frozenset())

    def pair_at(self, rank: int, position: int) -> Pair | None:
        """Return the pair whose F stands there, None if there is none."""
        passes = self.ranks[rank]
        is_paired = bool(self.pairs) and passes[position] in self.pairs
        return Pair(passes[position], passes[position + 1]) if is_paired else None

    @property
    def graph(self) -> TaskGraph:
        """Graph of all passes that a schedule of these sizes can have."""
        return TaskGraph.of(
            self.rules, self.placement, self.num_microbatches, forward_only=self.forward_only
        )

    @property
    def orders(self) -> Orders:
        """Orders of all ranks on :attr:`graph`."""
        return Orders(self.graph, self.ranks, self.pairs, self.offloaded)

    def validate(self) -> Schedule:
        """Check every rule a schedule must keep and return the schedule itself.

        Those of :meth:`check_ranks`, and *progress*: the orders of all ranks and the data
        dependencies contain no cycle.

        Raises:
            InvalidSchedule: names the first broken rule, the rank and the pass.
        """
        self.check_ranks()
        waiting = replay(self.orders).blocked
        if waiting:
            raise InvalidSchedule(
                f"{self.name}: rule 'progress': the ranks wait for one another in a circle: "
                + self._describe(waiting),
                rank=waiting[0][0],
                position=waiting[0][1],
            )
        return self

    def check_ranks(self) -> None:
        """Check all rules but progress, which a simulation checks as well.

        They are those of :func:`~violations.violation`, and *pair* (the F of a pair stands before a
        B or BW of another unit).

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
        nowhere = self.pairs.difference(*self.ranks)
        if nowhere:
            raise InvalidSchedule(
                f"{self.name}: rule 'pair': no rank runs {min(nowhere)}, which is listed as paired"
            )

    def blocked(self) -> str | None:
        """Describe the circular wait of the first ranks; return None if every pass can run."""
        return self._describe(replay(self.orders).blocked) or None

    def _describe(self, waiting: list[tuple[int, int]]) -> str:
        at = [(r, self.ranks[r][i]) for r, i in waiting[:4]]
        return "; ".join(f"rank {r} at {p}{self.rules.awaits_in_words(p)}" for r, p in at)

    def _validate_rank(self, rank: int, passes: tuple[Pass, ...]) -> None:
        broken = violation(self.graph, self.rules, rank, passes)
        broken = broken or broken_pair(self.graph, rank, passes, self.pairs)
        if broken is None:
            return
        rule, why, position, stage = broken
        at = "" if position is None else f", position {position}, pass {passes[position]}"
        at += "" if stage is None else f", stage {stage}"
        raise InvalidSchedule(
            f"{self.name}: rank {rank}{at}: rule '{rule}': {why}", rank=rank, position=position
        )
