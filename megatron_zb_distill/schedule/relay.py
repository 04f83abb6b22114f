"""The rules of teacher relaying: dependencies of passes, and valid orders of a rank.

Blockwise distillation trains the student of a block on the teacher block's input and output, so
students need nothing from one another. Each stage runs the teacher's blocks once, relays the
activation, trains its students, and updates them with no barrier across stages.
Source: Pipe-BD, arXiv 2301.12443 (teacher relaying, decoupled parameter update).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megatron_zb.schedules.passes import Channel, Message, Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.rules import Broken, Link, Moment, Orders, Product, Rules, rank_in_words

RELAY_KINDS = (PassKind.T, PassKind.S, PassKind.U)


@dataclass(frozen=True)
class Relay(Rules):
    """Consecutive steps of ``num_microbatches`` each, with ranks at most ``run_ahead`` apart.

    No rank begins step n before every rank has updated its students in step n - 1 - ``run_ahead``:
    the first stage waits for the updates, and others begin no step before it. With 0 a step begins
    when the one before has ended everywhere.
    """

    num_microbatches: int
    steps: int
    run_ahead: int

    has_steps = True
    holds = MappingProxyType({PassKind.T: (1, 0), PassKind.S: (-1, 0), PassKind.U: (0, 0)})

    @property
    def send_slots(self) -> int:
        """Send slots, enough that nothing but ``run_ahead`` holds a rank up."""
        return (self.run_ahead + 1) * self.num_microbatches

    def step_of(self, p: Pass) -> int:
        return p.microbatch if p.kind is PassKind.U else p.microbatch // self.num_microbatches

    def is_awaited(self, step: int) -> bool:
        """Return whether the first stage waits for a step's updates before it begins another."""
        return step + 1 + self.run_ahead < self.steps

    def links(self, placement: Placement, rank: int, passes: Sequence[Pass]) -> list[Link]:
        return [
            Link(self._needs(placement, rank, p), self._makes(placement, rank, p)) for p in passes
        ]

    def readers(self, placement: Placement, message: Message) -> Sequence[int]:
        if not message.is_step_done:
            return super().readers(placement, message)
        return [rank for rank in placement.ranks_of[0] if rank != message.done_by]

    def together(self, placement: Placement, rank: int, p: Pass) -> tuple[int, ...]:
        """Return the ranks that run a pass together: for U those of the stage, to sum gradients."""
        return placement.ranks_of[p.stage] if p.kind is PassKind.U else (rank,)

    def pass_in_words(self, p: Pass) -> str:
        counted = "step" if p.kind is PassKind.U else "microbatch"
        return f"{p.kind.name} of stage {p.stage}, {counted} {p.microbatch}"

    def message_in_words(self, placement: Placement | None, message: Message) -> str:
        if not message.is_step_done:
            return super().message_in_words(placement, message)
        return f"the end of step {message.microbatch} for stage {message.stage}"

    def awaited_in_words(
        self, placement: Placement | None, channel: Channel, message: Message
    ) -> str:
        if not message.is_step_done:
            return super().awaited_in_words(placement, channel, message)
        sender = rank_in_words(channel.source)
        return f"{sender} to update its students in step {message.microbatch}"

    def sizes_in_words(self, schedule: Orders) -> str:
        steps, ahead = (
            f"{n} {'step' if n == 1 else 'steps'}" for n in (self.steps, self.run_ahead)
        )
        return f"{self.num_microbatches} microbatches, {steps}, ranks run ahead by {ahead} at most"

    def _needs(self, placement: Placement, rank: int, p: Pass) -> tuple[Product, ...]:
        if p.kind is PassKind.U:
            peers = placement.ranks_of[p.stage]
            return tuple((PassKind.S, peer, p.microbatch) for peer in peers if peer != rank)
        if p.kind is PassKind.T and p.stage > 0:
            return ((False, p.stage, p.microbatch, None),)
        awaited = self._awaited_step(placement, p)
        if awaited is None:
            return ()
        others = (r for r in range(placement.pipeline_size) if r != rank)
        return tuple((False, 0, awaited, other) for other in others)

    def _makes(self, placement: Placement, rank: int, p: Pass) -> Product | None:
        if p.kind is PassKind.T:
            is_last = p.stage == placement.num_stages - 1
            return None if is_last else (False, p.stage + 1, p.microbatch, None)
        if p.kind is PassKind.U:
            return (False, 0, p.microbatch, rank) if self.is_awaited(p.microbatch) else None
        step, microbatch = divmod(p.microbatch, self.num_microbatches)
        is_last = microbatch + len(placement.ranks_of[p.stage]) >= self.num_microbatches
        return (PassKind.S, rank, step) if is_last else None

    def _awaited_step(self, placement: Placement, p: Pass) -> int | None:
        """Return the step that all ranks must have finished before ``p``, if it waits for one.

        Only the first T of a step on each rank of the first stage waits.
        """
        if p.kind is not PassKind.T or p.stage > 0:
            return None
        step, microbatch = divmod(p.microbatch, self.num_microbatches)
        is_first = microbatch < len(placement.ranks_of[0])
        awaited = step - 1 - self.run_ahead
        return awaited if is_first and awaited >= 0 else None

    def moments(self, schedule: Orders) -> list[list[tuple[Moment, Moment]]]:
        """Order a relay by steps, so that all steps are alike, and a step by its flow of data.

        The U of a stage's ranks, which sum their gradients together, are adjacent.
        """
        m, many = self.num_microbatches, len(schedule.ranks)
        found: list[list[tuple[Moment, Moment]]] = []
        for rank, passes in enumerate(schedule.ranks):
            stands: Moment = ()
            found.append([])
            for p in passes:
                step = self.step_of(p)
                if p.kind is PassKind.U:
                    stands = max(stands, (step, 1, 0, p.stage, rank))
                    found[-1].append((stands, (*stands[:-1], many, rank)))
                else:
                    wave = p.microbatch % m + p.stage
                    stands = max(stands, (step, 0, wave, p.stage, p.kind is PassKind.S))
                    found[-1].append((stands, stands))
        return found

    def broken_rule(self, schedule: Orders, rank: int) -> Broken | None:
        """Return the first rule that the order of a rank breaks, if any.

        Rules: *placement* (each microbatch passes a stage on its rank), *order* (T before S; U
        after every S of its step and before any of the next), *microbatch order* (T, S and U of a
        stage each rise, so that gradients are summed in the order of microbatches) and
        *completeness*.
        """
        placement = schedule.placement
        due = {
            (kind, stage): iter(self._due(placement, rank, kind, stage))
            for stage in placement.stages_of[rank]
            for kind in RELAY_KINDS
        }
        done: dict[tuple[PassKind, int], int] = dict.fromkeys(due, -1)
        for position, p in enumerate(schedule.ranks[rank]):
            if p.kind not in RELAY_KINDS:
                return Broken("completeness", "a relay has T, S and U passes alone", position)
            if p.stage not in placement.stages_of[rank]:
                why = f"stage {p.stage} does not live on rank {rank}"
                return Broken("placement", why, position)
            expected = next(due[p.kind, p.stage], None)
            if p.microbatch != expected:
                return Broken("microbatch order", self._describe(p, expected), position)
            if out_of_order := self._out_of_order(placement, p, done):
                return Broken("order", out_of_order, position)
            done[p.kind, p.stage] = p.microbatch
        for (kind, stage), rest in due.items():
            if (missing := next(rest, None)) is not None:
                return Broken("completeness", f"{Pass(kind, stage, missing)} is not listed")
        return None

    def _due(self, placement: Placement, rank: int, kind: PassKind, stage: int) -> list[int]:
        if kind is PassKind.U:
            return list(range(self.steps))
        numbers = range(self.steps * self.num_microbatches)
        return [j for j in numbers if placement.rank_at(stage, j) == rank]

    def _describe(self, p: Pass, expected: int | None) -> str:
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
