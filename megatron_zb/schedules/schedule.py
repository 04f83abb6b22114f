"""A schedule is data: a placement and, for every rank, the passes in the order they run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megatron_zb.errors import UsageError
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.relay import RELAY_KINDS, Product, Relay

_BACKWARD_KINDS = (PassKind.B, PassKind.BW)
_WEIGHT_KINDS = (PassKind.W, PassKind.BW)
# Which of F, B and W of a microbatch a pass is, as columns of a count.
_COLUMNS = {PassKind.F: (0,), PassKind.B: (1,), PassKind.W: (2,), PassKind.BW: (1, 2)}


class InvalidSchedule(UsageError):
    """A schedule breaks a rule; the message names the rule and the place.

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
    """How good a schedule is for the costs it was built for, in seconds.

    ``period`` is that of iterations in a row, None where the schedule was not built for them.
    """

    makespan: float
    lower_bound: float
    period: float | None = None

    @property
    def gap(self) -> float:
        """The share of the lower bound that is, at most, left to gain."""
        return self.makespan / self.lower_bound - 1.0


@dataclass(frozen=True)
class Schedule:
    """What to run in which order.

    ``ranks[r]`` lists the passes of logical rank r. ``forward_only`` marks a schedule of F passes
    alone (evaluation). ``report`` compares it with the lower bound of its placement at the memory
    it was allowed; ``reason`` says why ``auto`` chose it. ``relay`` marks a schedule of T, S and U
    passes (blockwise distillation), which may go through several steps of ``num_microbatches``
    each.
    """

    name: str
    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Pass, ...], ...]
    forward_only: bool = False
    report: Report | None = field(default=None, compare=False)
    reason: str = field(default="", compare=False)
    relay: Relay | None = None

    def forwards(self) -> Schedule:
        """The same schedule with its F passes alone, in the same order."""
        ranks = tuple(tuple(p for p in rank if p.kind is PassKind.F) for rank in self.ranks)
        return replace(self, ranks=ranks, forward_only=True)

    def validate(self) -> Schedule:
        """Check every rule a schedule must keep and return the schedule itself.

        Rules: *placement* (a pass runs on the rank of its stage), *completeness* (every stage and
        microbatch has one F and either one BW or one B and one W), *order* (F before B before W),
        *microbatch order* (F, input gradients and weight gradients of a stage each rise with the
        microbatch, so that sums are formed in 1F1B's order) and *progress* (the ranks' orders and
        the data dependencies contain no cycle). With T, S and U the rules of a rank are those of
        :meth:`Relay.broken_rule`.

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
                + self._said(waiting),
                rank=waiting[0][0],
                position=waiting[0][1],
            )
        return self

    def blocked(self) -> str | None:
        """Where the first ranks wait for one another in a circle; None if every pass can run."""
        waiting = walk(self, lambda rank, position, p: None)
        return self._said(waiting) or None

    def _said(self, waiting: list[tuple[int, int]]) -> str:
        return "; ".join(f"rank {r} at {self.ranks[r][i]}" for r, i in waiting[:4])

    def _validate_relay(self, rank: int, passes: tuple[Pass, ...], relay: Relay) -> None:
        broken = relay.broken_rule(self.placement, rank, passes)
        if broken is None:
            return
        position, rule, why = broken
        at = "" if position is None else f", position {position}, pass {passes[position]}"
        raise InvalidSchedule(
            f"{self.name}: rank {rank}{at}: rule '{rule}': {why}", rank=rank, position=position
        )

    def _validate_rank(self, rank: int, passes: tuple[Pass, ...]) -> None:
        if self.relay is not None:
            self._validate_relay(rank, passes, self.relay)
            return
        done: dict[int, list[int]] = {s: [0, 0, 0] for s in self.placement.stages_of[rank]}
        for position, p in enumerate(passes):

            def broken(rule: str, why: str, at: int = position, p: Pass = p) -> InvalidSchedule:
                return InvalidSchedule(
                    f"{self.name}: rank {rank}, position {at}, pass {p}: rule '{rule}': {why}",
                    rank=rank,
                    position=at,
                )

            if p.stage not in done:
                raise broken("placement", f"stage {p.stage} does not live on rank {rank}")
            if not 0 <= p.microbatch < self.num_microbatches:
                raise broken("completeness", f"there are {self.num_microbatches} microbatches")
            if self.forward_only and p.kind is not PassKind.F:
                raise broken("completeness", "a forward-only schedule has F passes alone")
            counts = done[p.stage]
            if p.kind in RELAY_KINDS:
                raise broken("completeness", "only a relay has T, S and U passes")
            columns = _COLUMNS[p.kind]
            for column in columns:
                if counts[column] != p.microbatch:
                    raise broken(
                        "microbatch order",
                        f"the next {'FBW'[column]} of stage {p.stage} is microbatch "
                        f"{counts[column]}",
                    )
            if p.kind in _BACKWARD_KINDS and counts[0] <= p.microbatch:
                raise broken("order", "its F has not run yet")
            if p.kind is PassKind.W and counts[1] <= p.microbatch:
                raise broken("order", "its B has not run yet")
            for column in columns:
                counts[column] += 1
        expected = [self.num_microbatches] + [0 if self.forward_only else self.num_microbatches] * 2
        for stage, counts in done.items():
            for column, letter in enumerate("FBW"):
                if counts[column] != expected[column]:
                    raise InvalidSchedule(
                        f"{self.name}: rank {rank}, stage {stage}: rule 'completeness': "
                        f"{counts[column]} of {expected[column]} {letter} passes are listed",
                        rank=rank,
                    )


def walk(schedule: Schedule, visit: Callable[[int, int, Pass], object]) -> list[tuple[int, int]]:
    """Visit every pass after the passes it depends on, as ``visit(rank, position, pass)``.

    Each rank is walked in its own order. Returns the ``(rank, position)`` of the passes that
    could never run: empty for a schedule without circular waits.
    """
    ranks, num_stages = schedule.ranks, schedule.placement.num_stages
    if schedule.relay is not None:
        return _walk_relay(schedule, schedule.relay, visit)
    position = [0] * len(ranks)
    produced: set[tuple[bool, int, int]] = set()
    waiting: dict[tuple[bool, int, int], int] = {}
    runnable = list(range(len(ranks) - 1, -1, -1))
    while runnable:
        rank = runnable.pop()
        passes = ranks[rank]
        i = position[rank]
        while i < len(passes):
            p = passes[i]
            kind, stage, microbatch = p
            if kind is PassKind.F:
                need = (False, stage - 1, microbatch) if stage > 0 else None
            elif kind is PassKind.W or stage == num_stages - 1:
                need = None
            else:
                need = (True, stage + 1, microbatch)
            if need is not None and need not in produced:
                waiting[need] = rank
                break
            visit(rank, i, p)
            i += 1
            if kind is not PassKind.W:
                made = (kind is not PassKind.F, stage, microbatch)
                produced.add(made)
                waiter = waiting.pop(made, None)
                if waiter is not None:
                    runnable.append(waiter)
        position[rank] = i
    return [(r, i) for r, i in enumerate(position) if i < len(ranks[r])]


def _walk_relay(
    schedule: Schedule, relay: Relay, visit: Callable[[int, int, Pass], object]
) -> list[tuple[int, int]]:
    """:func:`walk` where a pass may need what several ranks make, and several may need one."""
    ranks, placement = schedule.ranks, schedule.placement
    position = [0] * len(ranks)
    produced: set[Product] = set()
    waiting: dict[Product, list[int]] = defaultdict(list)
    runnable = list(range(len(ranks) - 1, -1, -1))
    while runnable:
        rank = runnable.pop()
        while position[rank] < len(ranks[rank]):
            p = ranks[rank][position[rank]]
            needs = relay.needs(placement, rank, p)
            missing = next((need for need in needs if need not in produced), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            visit(rank, position[rank], p)
            position[rank] += 1
            made = relay.makes(placement, rank, p)
            if made is not None:
                produced.add(made)
                runnable += waiting.pop(made, [])
    return [(r, i) for r, i in enumerate(position) if i < len(ranks[r])]
