"""First stage of the search: seconds and bytes of each choice by formula, to order all of them.

The bubbles are those of ``docs/schedules.md``, the memory is the peak that the catalog promises;
simulation decides afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from megatron_zb.planner import byte_counts
from megatron_zb.planner.byte_counts import ActivationBytes, StateBytes
from megatron_zb.planner.candidate import ScheduleCandidate
from megatron_zb.planner.stages import average_layer
from megatron_zb.planner.step import by_formula
from megatron_zb.planner.vocabulary import CountedShard
from megatron_zb.planner.work import PassSeconds, Workload
from megatron_zb.schedules import catalog
from megatron_zb.schedules.placement import Placement


@dataclass(frozen=True)
class EvenSplit:
    """A workload cut evenly, ends included: average work and memory of a rank.

    With ``cuts_vocabulary``, every rank has a shard of the output layer.
    """

    load: Workload
    cuts_vocabulary: bool = False

    @cached_property
    def _middle(self) -> int:
        return self.load.model.layers - 1

    @cached_property
    def _parts(self) -> tuple[PassSeconds, PassSeconds]:
        return average_layer(self.load), self.load.output()

    @cached_property
    def _shard(self) -> PassSeconds:
        shard = CountedShard(self.load)
        return PassSeconds(shard.output + shard.lookup, shard.loss, shard.weight + shard.lookup)

    @cached_property
    def _rank_beside_shard(self) -> PassSeconds:
        pipeline, layers = self.load.strategy.pipeline, self.load.model.layers
        layer = self._parts[0]
        equal = (layer * layers + CountedShard(self.load).looked_up) * (1 / pipeline)
        return max(equal, layer * math.ceil(layers / pipeline - 0.5), key=lambda w: w.total)

    @cached_property
    def rank(self) -> PassSeconds:
        """Seconds of a microbatch on the slowest rank of the best layout."""
        if self.cuts_vocabulary:
            return self._rank_beside_shard + self._shard
        pipeline, layers = self.load.strategy.pipeline, self.load.model.layers
        layer, output = self._parts
        whole = layer * layers + output + self.load.embedding()
        equal = whole * (1 / pipeline)
        in_layers = math.ceil((layers + output.total / layer.total) / pipeline - 0.5)
        slowest = max(equal, layer * in_layers, key=lambda w: w.total)
        return max(slowest, output, key=lambda w: w.total)

    def rank_with(self, placement: Placement) -> PassSeconds:
        """Return :attr:`rank` where every stage but the first and the last has a layer at least."""
        if self.cuts_vocabulary:
            return self.rank
        layer, output = self._parts
        others = [s for s in placement.stages_of[placement.rank_of[-1]] if s]
        fullest = output + layer * (len(others) - 1)
        return max(self.rank, fullest, key=lambda w: w.total)

    def of_stages(self, placement: Placement) -> PassSeconds:
        """Return :meth:`rank_with` without the shard of the rank, which fills waits."""
        return self._rank_beside_shard if self.cuts_vocabulary else self.rank_with(placement)

    @cached_property
    def held(self) -> ActivationBytes:
        """Bytes of a microbatch on one rank."""
        model, pipeline = self.load.model, self.load.strategy.pipeline
        alike = model.alike(range(model.layers)) if model.kinds else {self._middle: model.layers}
        held = [(byte_counts.layer_held(self.load, i), n / pipeline) for i, n in alike.items()]
        parts = (
            ActivationBytes(one.activation * n, one.for_weight * n, one.in_backward)
            for one, n in held
        )
        return sum(parts, ActivationBytes())

    @cached_property
    def states(self) -> StateBytes:
        """States of a rank with its share of the layers, the last ones, and the embedding."""
        layers = self.load.model.layers
        count = math.ceil(layers / self.load.strategy.pipeline)
        states = byte_counts.rank_states(
            self.load,
            range(layers - count, layers),
            embedding=not self.cuts_vocabulary,
            output=False,
        )
        return states + CountedShard(self.load).states if self.cuts_vocabulary else states


def seconds(split: EvenSplit, candidate: ScheduleCandidate, m: int, chunks: int | None) -> float:
    """Estimate the seconds of an iteration by formula."""
    p = split.load.strategy.pipeline
    if p == 1:
        return m * split.rank.total + by_formula(split.load, split.states, split.rank)
    placement = candidate.placement(p, chunks)
    work, hop, v = split.rank_with(placement), split.load.hop(False), placement.chunks
    stages = split.of_stages(placement)
    if candidate.blocking:
        work = stages = work + PassSeconds(v * hop, v * hop)
    family = catalog.family(candidate.family)
    steady = m * max(work.total, family.interval(stages))
    step = by_formula(split.load, split.states, work)
    return steady + family.bubble(p, stages, v) + 2 * (p - 1) * hop + step


def memory(split: EvenSplit, candidate: ScheduleCandidate, m: int, chunks: int | None) -> float:
    """Estimate the bytes of the first rank, by the peak that the catalog promises."""
    p = split.load.strategy.pipeline
    peak = min(m, _peak(candidate, p, m, chunks) + split.cuts_vocabulary)
    fixed = split.states.total + split.load.device.reserved_bytes
    return fixed + peak * split.held.activation


def _peak(candidate: ScheduleCandidate, p: int, m: int, chunks: int | None) -> float:
    if candidate.family == "interleaved" and chunks:
        return p + (p - 1) / chunks
    return catalog.family(candidate.family).peak_microbatches(p, m) if m > 1 else 1
