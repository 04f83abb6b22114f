"""The two ends of a model: embedding and output layer, on the first and on the last stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron_zb.plan import byte_counts
from megatron_zb.plan.byte_counts import ActivationBytes, StateBytes
from megatron_zb.plan.work import PassSeconds, Workload
from megatron_zb.schedules.placement import Placement


@dataclass(frozen=True)
class WholeEnds:
    """Ends that the first and the last stage have as a whole.

    A feature may move them: a subclass then counts what the two stages and every rank have.

    Attributes:
        are_apart: whether ranks run them beside their stages, when they can.
        more_held: microbatches that a rank holds for them, at most.
    """

    load: Workload

    are_apart: ClassVar[bool] = False
    more_held: ClassVar[int] = 0

    @property
    def first(self) -> PassSeconds:
        """Seconds of the first stage beside its layers."""
        return self.load.embedding()

    @property
    def last(self) -> PassSeconds:
        """Seconds of the last stage beside its layers."""
        return self.load.output()

    @property
    def last_in_layout(self) -> float:
        """Seconds that the last stage counts for in a layout, beside its layers."""
        return self.last.total

    @property
    def last_held(self) -> ActivationBytes:
        """Bytes of a microbatch on the last stage, beside those of its layers."""
        return byte_counts.output_held(self.load)

    @property
    def held_by_ranks(self) -> Sequence[ActivationBytes]:
        """Bytes of a microbatch on each rank, beside those of its stages."""
        return ()

    @property
    def states(self) -> StateBytes:
        """Bytes that each rank keeps from step to step, beside those of its stages."""
        return StateBytes()

    def busiest(self, layer: PassSeconds, encoder: PassSeconds) -> PassSeconds:
        """Return the seconds of the stages of the slowest rank under the best layout.

        Args:
            layer: the work of an average layer.
            encoder: that of the encoder on the first stage.
        """
        pipeline, layers, output = self.load.strategy.pipeline, self.load.model.layers, self.last
        whole = layer * layers + output + self.first + encoder
        equal = whole * (1 / pipeline)
        in_layers = math.ceil((layers + output.total / layer.total) / pipeline - 0.5)
        slowest = max(equal, layer * in_layers, key=lambda w: w.total)
        return max(slowest, output, encoder, key=lambda w: w.total)

    def fullest(self, layer: PassSeconds, placement: Placement) -> PassSeconds:
        """Return the seconds of the last rank if all but the two end stages have a layer."""
        others = [s for s in placement.stages_of[placement.rank_of[-1]] if s]
        return self.last + layer * (len(others) - 1)

    def added_to(self, work: PassSeconds, *, is_last: bool) -> PassSeconds:
        """Return the work of a rank's stages with what it has beside them."""
        return work

    def link_seconds(self, placement: Placement) -> float:
        """Return the seconds for which messages of the ends use one rank's link."""
        return 0.0

    def connections(self, placement: Placement, rank: int) -> float:
        """Return the bytes of NCCL's buffers for messages of the ends."""
        return 0.0

    def logits(self, *, is_last: bool) -> float:
        """Return the bytes of logits, and of their parts, that a rank has at a time."""
        return byte_counts.logits(self.load) if is_last else 0.0
