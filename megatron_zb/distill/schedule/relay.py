"""The rules of teacher relaying: its kinds of passes, and the edges between steps.

Blockwise distillation trains the student of a block on the teacher block's input and output, so
students need nothing from one another. Each stage runs the teacher's blocks once, relays the
activation, trains its students, and updates them with no barrier across stages.
Source: Pipe-BD, arXiv 2301.12443 (teacher relaying, decoupled parameter update).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_zb.schedules.kinds import At, Due, Home, Kind, Need
from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.rules import Moment, Rules, Sizes
from megatron_zb.schedules.task_graph import Row, TaskGraph

_T, _S, _U = PassKind.T, PassKind.S, PassKind.U

RELAY_KINDS = (
    Kind(_T, needs=(Need(_T, At.PREVIOUS),), due=Due.ALWAYS, memory=(("activation", 1),)),
    Kind(_S, needs=(Need(_T, At.SAME),), memory=(("activation", -1),)),
    Kind(_U, Home.RANKS),
)


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

    table = RELAY_KINDS
    name = "a relay"
    has_steps = True

    @property
    def send_slots(self) -> int:
        """Send slots, enough that nothing but ``run_ahead`` holds a rank up."""
        return (self.run_ahead + 1) * self.num_microbatches

    def units(self, num_microbatches: int) -> int:
        return self.steps * self.num_microbatches

    def units_of(self, kind: Kind, units: int) -> int:
        return self.steps if kind.kind is _U else units

    def unit_name(self, kind: PassKind) -> str:
        return "step" if kind is _U else "microbatch"

    def step_of(self, p: Pass) -> int:
        return p.microbatch if p.kind is _U else p.microbatch // self.num_microbatches

    def more_inputs(self, graph: TaskGraph) -> Mapping[int, tuple[int, ...]]:
        """Return the inputs of updates, and of what begins a step.

        U needs all S of its step: those of its rank, and the last one of each other rank of the
        stage, with which it sums gradients. The first T of a step on each rank of the first stage
        needs the U of all ranks in an earlier step, and an S the U of its rank in the step before.
        """
        inputs: dict[int, tuple[int, ...]] = {}
        for rank in range(graph.placement.pipeline_size):
            inputs |= dict(self._of_rank(graph, rank))
        return inputs

    def _of_rank(self, graph: TaskGraph, rank: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        (stage,) = graph.placement.stages_of[rank]
        peers = graph.placement.ranks_of[stage]
        m, first = self.num_microbatches, peers.index(rank)
        for step in range(self.steps):
            last = (step + 1) * m - len(peers)  # the last S of each rank follow one another
            studies = (graph.code_of(Pass(_S, stage, last + i), r) for i, r in enumerate(peers))
            yield graph.code_of(Pass(_U, stage, step), rank), tuple(studies)
            if step > 0:
                before = graph.code_of(Pass(_U, stage, step - 1), rank)
                for j in range(step * m + first, (step + 1) * m, len(peers)):
                    yield graph.code_of(Pass(_S, stage, j), rank), (before,)
            awaited = step - 1 - self.run_ahead
            if stage == 0 and awaited >= 0:
                begins = graph.code_of(Pass(_T, 0, step * m + first), rank)
                yield begins, tuple(self._updates(graph, awaited, but=rank))

    def _updates(self, graph: TaskGraph, step: int, but: int) -> Iterator[int]:
        for rank, (stage,) in enumerate(graph.placement.stages_of):
            if rank != but:
                yield graph.code_of(Pass(_U, stage, step), rank)

    def further_message(self, row: Row, unit: int) -> Message | None:
        """Return the message that a step is done, which the first stage waits for."""
        return Message(False, 0, unit, row.ranks[0]) if row.kind.kind is _U else None

    def not_yet(self, p: Pass, needed: Pass) -> str:
        if p.kind is _U:
            return f"not every S of step {p.microbatch} has run yet"
        if needed.kind is _U:
            return f"the U of step {needed.microbatch} has not run yet"
        return super().not_yet(p, needed)

    def together(self, placement: Placement, rank: int, p: Pass) -> tuple[int, ...]:
        """Return the ranks that run a pass together: for U those of the stage, to sum gradients."""
        return placement.ranks_of[p.stage] if p.kind is _U else (rank,)

    def message_in_words(self, placement: Placement | None, message: Message) -> str:
        if not message.is_step_done:
            return super().message_in_words(placement, message)
        return f"the end of step {message.microbatch} for stage {message.stage}"

    def awaited_in_words(self, placement: Placement | None, message: Message, sender: str) -> str:
        if not message.is_step_done:
            return super().awaited_in_words(placement, message, sender)
        return f"{sender} to update its students in step {message.microbatch}"

    def sizes_in_words(self, schedule: Sizes) -> str:
        steps, ahead = (
            f"{n} {'step' if n == 1 else 'steps'}" for n in (self.steps, self.run_ahead)
        )
        return f"{self.num_microbatches} microbatches, {steps}, ranks run ahead by {ahead} at most"

    def moments(self, schedule: Sizes) -> list[list[tuple[Moment, Moment]]]:
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
                if p.kind is _U:
                    stands = max(stands, (step, 1, 0, p.stage, rank))
                    found[-1].append((stands, (*stands[:-1], many, rank)))
                else:
                    wave = p.microbatch % m + p.stage
                    stands = max(stands, (step, 0, wave, p.stage, p.kind is _S))
                    found[-1].append((stands, stands))
        return found
