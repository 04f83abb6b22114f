"""The rules of teacher relaying: which pass needs what, and which orders of a rank are valid.

Blockwise distillation trains the student of a block on what the teacher's block reads and makes, so
students need nothing from one another. Each stage runs the teacher's blocks once, relays the
activation, trains its students, and updates them with no barrier across stages.
Source: Pipe-BD, arXiv 2301.12443 (teacher relaying, decoupled parameter update).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement

RELAY_KINDS = (PassKind.T, PassKind.S, PassKind.U)

Product: TypeAlias = tuple[object, int, int]
"""What a pass makes: its kind, then stage and microbatch (T), or rank and step (S, U)."""


class Broken(NamedTuple):
    """A broken rule, and the position on the rank; None if no pass is at fault."""

    position: int | None
    rule: str
    why: str


@dataclass(frozen=True)
class Relay:
    """Steps in a row, m = ``num_microbatches`` each, and how far ranks may drift apart.

    No rank begins step n before every rank has updated its students in step n - 1 - ``run_ahead``:
    the first stage waits for the updates, and others begin no step before it. With 0 a step begins
    when the one before has ended everywhere.
    """

    num_microbatches: int
    steps: int
    run_ahead: int

    def step_of(self, p: Pass) -> int:
        return p.microbatch if p.kind is PassKind.U else p.microbatch // self.num_microbatches

    def awaited_step(self, placement: Placement, p: Pass) -> int | None:
        """The step that all ranks must have finished before ``p``, if it waits for one.

        Only the first T of a step on each rank of the first stage does.
        """
        if p.kind is not PassKind.T or p.stage > 0:
            return None
        step, microbatch = divmod(p.microbatch, self.num_microbatches)
        is_first = microbatch < len(placement.ranks_of[0])
        awaited = step - 1 - self.run_ahead
        return awaited if is_first and awaited >= 0 else None

    def is_awaited(self, step: int) -> bool:
        """Whether the first stage waits for the updates of a step before it begins another."""
        return step + 1 + self.run_ahead < self.steps

    def needs(self, placement: Placement, rank: int, p: Pass) -> list[Product]:
        """What other ranks must have made before ``p`` can run on ``rank``."""
        if p.kind is PassKind.U:  # the gradients of the stage are summed over its ranks
            peers = placement.ranks_of[p.stage]
            return [(PassKind.S, peer, p.microbatch) for peer in peers if peer != rank]
        if p.kind is PassKind.T and p.stage > 0:
            return [(PassKind.T, p.stage - 1, p.microbatch)]
        awaited = self.awaited_step(placement, p)
        if awaited is None:
            return []
        others = (r for r in range(placement.pipeline_size) if r != rank)
        return [(PassKind.U, other, awaited) for other in others]

    def makes(self, placement: Placement, rank: int, p: Pass) -> Product | None:
        """What other ranks may wait for once ``p`` has run on ``rank``."""
        if p.kind is PassKind.T:
            return (PassKind.T, p.stage, p.microbatch)
        if p.kind is PassKind.U:
            return (PassKind.U, rank, p.microbatch)
        step, microbatch = divmod(p.microbatch, self.num_microbatches)
        is_last = microbatch + len(placement.ranks_of[p.stage]) >= self.num_microbatches
        return (PassKind.S, rank, step) if is_last else None

    def broken_rule(
        self, placement: Placement, rank: int, passes: tuple[Pass, ...]
    ) -> Broken | None:
        """The first rule that the order of a rank breaks, if any.

        Rules: *placement* (each microbatch passes a stage on its rank), *order* (T before S; U
        after every S of its step and before any of the next), *microbatch order* (T, S and U of a
        stage each rise, so that gradients are summed in the order of microbatches) and
        *completeness*.
        """
        due = {
            (kind, stage): iter(self._due(placement, rank, kind, stage))
            for stage in placement.stages_of[rank]
            for kind in RELAY_KINDS
        }
        done: dict[tuple[PassKind, int], int] = dict.fromkeys(due, -1)
        for position, p in enumerate(passes):
            if p.kind not in RELAY_KINDS:
                return Broken(position, "completeness", "a relay has T, S and U passes alone")
            if p.stage not in placement.stages_of[rank]:
                return Broken(
                    position, "placement", f"stage {p.stage} does not live on rank {rank}"
                )
            expected = next(due[p.kind, p.stage], None)
            if p.microbatch != expected:
                return Broken(position, "microbatch order", self._said(p, expected))
            if why := self._out_of_order(placement, p, done):
                return Broken(position, "order", why)
            done[p.kind, p.stage] = p.microbatch
        for (kind, stage), rest in due.items():
            if (missing := next(rest, None)) is not None:
                return Broken(None, "completeness", f"{Pass(kind, stage, missing)} is not listed")
        return None

    def _due(self, placement: Placement, rank: int, kind: PassKind, stage: int) -> list[int]:
        if kind is PassKind.U:
            return list(range(self.steps))
        numbers = range(self.steps * self.num_microbatches)
        return [j for j in numbers if placement.rank_at(stage, j) == rank]

    def _said(self, p: Pass, expected: int | None) -> str:
        if expected is None:
            return f"there is no {p.kind} of stage {p.stage} left to run on this rank"
        return f"the next {p.kind} of stage {p.stage} on this rank is {expected}"

    def _out_of_order(
        self, placement: Placement, p: Pass, done: dict[tuple[PassKind, int], int]
    ) -> str | None:
        if p.kind is PassKind.S:
            if done[PassKind.T, p.stage] < p.microbatch:
                return "its T has not run yet"
            if done[PassKind.U, p.stage] < self.step_of(p) - 1:
                return f"the U of step {self.step_of(p) - 1} has not run yet"
        if p.kind is PassKind.U:
            last = (p.microbatch + 1) * self.num_microbatches - len(placement.ranks_of[p.stage])
            if done[PassKind.S, p.stage] < last:
                return f"not every S of step {p.microbatch} has run yet"
        return None
