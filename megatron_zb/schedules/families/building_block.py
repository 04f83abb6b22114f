"""The paper's construction: a building block, repeated (arXiv 2405.15362, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement


@dataclass(frozen=True)
class BuildingBlock:
    """The forward and backward passes of one microbatch on all stages, as offsets in unit passes.

    ``forward[s]`` and ``backward[s]`` are the starts of F and B of stage s; the block repeats
    every ``interval`` units and must not collide with itself modulo the interval.
    """

    placement: Placement
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    interval: int

    def repeat(self, num_microbatches: int) -> list[list[Pass]]:
        """Return each rank's F and B passes in the order of the repeated block."""
        timed: list[list[tuple[int, Pass]]] = [[] for _ in range(self.placement.pipeline_size)]
        for stage, rank in enumerate(self.placement.rank_of):
            for microbatch in range(num_microbatches):
                shift = microbatch * self.interval
                f = Pass(PassKind.F, stage, microbatch)
                b = Pass(PassKind.B, stage, microbatch)
                timed[rank] += [(self.forward[stage] + shift, f), (self.backward[stage] + shift, b)]
        return [[p for _, p in sorted(passes)] for passes in timed]
