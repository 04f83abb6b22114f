"""Costs of a model's layers on any placement, and those derived from a profile of a run.

Whether that run had its ends whole or vocabulary parallel, there are costs for both: what
has run is measured, and the other is derived from it. Costs counted from sizes have the same
interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from statistics import fmean, median
from typing import Protocol

from megatron_zb.measured.profile import Parts, PartSeconds, Profile, VocabularyTimes
from megatron_zb.measured.usual_gpu import ShardOverhead
from megatron_zb.schedules import Costs, layout
from megatron_zb.schedules.features.vocabulary import with_prediction
from megatron_zb.schedules.layout import Layout
from megatron_zb.schedules.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a schedule runs the layers of a model, as far as it changes their costs.

    Attributes:
        blocking: a rank cannot compute while its messages travel.
        vocabulary_parallel: vocabulary parallelism over all pipeline ranks.
        overlaps_all_to_all: overlapped forward-backward pairs hide the expert all-to-all.
    """

    blocking: bool = False
    vocabulary_parallel: bool = False
    overlaps_all_to_all: bool = False


class CostModel(Protocol):
    """Source of costs: a model counted for a device, or the profile of a run."""

    def layouts(self, placement: Placement, variant: Variant) -> Sequence[Layout]:
        """Return the layouts worth comparing, the even one first; none if layers are too few."""

    def costs(self, placement: Placement, counts: Layout, variant: Variant) -> Costs:
        """Return the costs with ``counts[s]`` layers on stage s."""


_SECONDS = ("forward", "backward", "weight")
_BYTES = ("activation", "held_for_weight")
_QUANTITIES = (*_SECONDS, *_BYTES)
_USUAL = Variant()


@dataclass(frozen=True)
class FittedPart:
    """Seconds or bytes of a decoder layer, the embedding, the output layer, and an empty stage.

    ``layers`` has a value for each decoder layer of a hybrid model, and is empty if all layers are
    alike; ``layer`` is the mean.
    """

    layer: float
    embedding: float
    output: float
    stage: float = 0.0
    layers: tuple[float, ...] = ()

    @classmethod
    def measured(cls, parts: Parts, name: str, kinds: str = "") -> FittedPart:
        """Return the seconds of a kind of pass, as timed for each part.

        Args:
            parts: the parts of the model.
            name: the kind of pass.
            kinds: a letter for each layer of a hybrid model.
        """

        def of(part: PartSeconds) -> float:
            return float(getattr(part, name))

        layers = tuple(of(parts.letters[kind]) for kind in kinds) if parts.letters else ()
        layer = fmean(layers) if layers else of(parts.layer)
        output = of(parts.output) + of(parts.multi_token)
        return cls(layer, of(parts.embedding), output, of(parts.empty_pass), layers)

    @classmethod
    def fitted(cls, values: Sequence[float], layers: Sequence[str]) -> FittedPart:
        """Fit a quantity to the sums of some stages, each with its layers as letters.

        A layer is the median of the stages without ends; where every stage has an end, the
        embedding counts for nothing.
        """
        counts = [text.count("t") for text in layers]
        whole = [
            value / n
            for value, n, text in zip(values, counts, layers, strict=True)
            if n and n == len(text)
        ]
        layer = median(whole) if whole else values[0] / max(counts[0], 1)
        return cls(
            layer,
            max(0.0, values[0] - counts[0] * layer),
            max(0.0, values[-1] - counts[-1] * layer),
        )

    def with_ends(self, embedding: float, output: float) -> FittedPart:
        """Return the same with so much more at the two ends."""
        return replace(self, embedding=self.embedding + embedding, output=self.output + output)

    def stages(self, counts: Layout) -> list[float]:
        """Return the sum of each stage, with ``counts[s]`` layers on stage s."""
        layers = iter(self.layers)
        sums = [
            (sum(islice(layers, count)) if self.layers else count * self.layer) + self.stage
            for count in counts
        ]
        sums[0] += self.embedding
        sums[-1] += self.output
        return sums


@dataclass(frozen=True)
class Fit(CostModel):
    """Costs of the parts of a model, and the slowdown of each rank against the median.

    ``parts`` are those of a model with whole ends, ``left`` what is left of them on the stages
    with vocabulary parallelism.
    """

    profile: Profile
    parts: dict[str, FittedPart]
    left: dict[str, FittedPart]
    slowdown: tuple[float, ...]

    @classmethod
    def of(cls, profile: Profile) -> Fit:
        """Derive the costs from a profile."""
        layers = [stage.layers for stage in profile.stages]
        parts = {
            name: FittedPart.fitted([getattr(stage, name) for stage in profile.stages], layers)
            for name in _QUANTITIES
        }
        if profile.parts is not None:
            measured = (*_SECONDS, "whole")
            kinds = profile.model.kinds
            parts |= {name: FittedPart.measured(profile.parts, name, kinds) for name in measured}
        slowdown = _slowdowns(profile, parts)
        if profile.vocabulary is None:
            left = {
                name: replace(part, embedding=0.0, output=_predicting(profile, name, part))
                for name, part in parts.items()
            }
            return cls(profile, parts, left, slowdown)
        ends = _whole_ends(profile.vocabulary, profile.rank_of[0])
        whole = {name: part.with_ends(*ends[name]) for name, part in parts.items()}
        return cls(profile, whole, parts, slowdown)

    @property
    def shard_overhead(self) -> ShardOverhead | None:
        """Counted costs of vocabulary parallelism; None if the profile does not have the rows."""
        model, forward = self.profile.model, self.parts["forward"]
        if model.vocabulary is None:
            return None
        output_flops, depths = 2.0 * model.hidden_size * model.vocabulary, self.depths
        one = (forward.output - self.left["forward"].output) / depths
        if not one > 0:
            return None
        shard_overhead = ShardOverhead.of_sizes(
            output_flops * forward.layer / one, model.vocabulary, model.hidden_size, model.tensor
        )
        return shard_overhead.times(depths)

    @property
    def depths(self) -> int:
        """The number of times that the output layer runs."""
        return 1 + self.profile.multi_token

    def sharded_costs(
        self, placement: Placement, counts: Layout, shard_overhead: ShardOverhead
    ) -> Costs:
        """Return the costs where output layer and embedding are sharded over all ranks.

        Those of the shards that have been measured; else what F and B of the output layer take is
        O's, its W is V's, and what it holds is held from O to V. What the embedding takes is E's
        and G's on every rank then, its data included.

        Args:
            placement, counts: as for :meth:`costs`.
            shard_overhead: what nothing has measured, if it was whole.
        """
        costs, profile = self._costs(self.left, placement, counts), self.profile
        if profile.vocabulary is not None:
            costs = profile.vocabulary.added_to(costs, profile.rank_of[-1])
            return with_prediction(costs) if profile.multi_token else costs
        output = {name: part.output - self.left[name].output for name, part in self.parts.items()}
        costs = shard_overhead.costs(
            costs,
            self.parts["forward"].layer,
            products=output["forward"] + output["backward"],
            weight=output["weight"],
            embedding=self.depths * sum(self.parts[name].embedding for name in _SECONDS),
            held=output["activation"],
        )
        return with_prediction(costs) if profile.multi_token else costs

    def layouts(self, placement: Placement, variant: Variant) -> Sequence[Layout]:
        """Return the even layout, and the one that counts the ends as layers.

        A layer of a hybrid model counts for as much as those of its kind take.
        """
        ends = self.in_layers(sharded=variant.vocabulary_parallel)
        if self.work:
            return layout.weighed(self.work, placement, *ends)
        return layout.choices(self.profile.model.layers, placement, *ends)

    def costs(self, placement: Placement, counts: Layout, variant: Variant = _USUAL) -> Costs:
        """Return the costs of a placement with ``counts[s]`` layers on stage s.

        Where messages are blocking, a pass lasts until its message is there. Pairs hide the same
        seconds of every layer as those of the run.
        """
        if variant.vocabulary_parallel:
            return self.sharded_costs(placement, counts, self.shard_overhead or ShardOverhead())
        costs = self._costs(self.parts, placement, counts, blocking=variant.blocking)
        all_to_all = self.profile.all_to_all if variant.overlaps_all_to_all else None
        if all_to_all is None:
            return costs
        ran = zip(all_to_all.seconds, self.profile.stages, strict=True)
        layer = median(s / n for s, stage in ran if (n := stage.layers.count("t")))
        return replace(all_to_all, seconds=tuple(n * layer for n in counts)).split_off(costs)

    def _costs(
        self,
        parts: dict[str, FittedPart],
        placement: Placement,
        counts: Layout,
        *,
        blocking: bool = False,
    ) -> Costs:
        latencies = self.profile.latencies()
        of = {name: part.stages(counts) for name, part in parts.items()}
        for name in of.keys() - set(_BYTES):
            of[name] = [seconds + getattr(self.profile.host, name) for seconds in of[name]]
        if blocking:
            for stage, (a, b) in enumerate(pairwise(placement.rank_of)):
                of["forward"][stage] += latencies[a][b]
                for name in of.keys() & {"backward", "whole"}:
                    of[name][stage + 1] += latencies[b][a]
        return Costs.of_slices(
            pipeline_size=placement.pipeline_size,
            forward=of["forward"],
            backward=of["backward"],
            weight=of["weight"],
            whole=of.get("whole", ()),
            p2p=0.0 if blocking else latencies,
            slowdown=self.slowdown,
            activation=of["activation"],
            held_for_weight=[
                min(pair) for pair in zip(of["held_for_weight"], of["activation"], strict=True)
            ],
        )

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Work of each decoder layer by seconds, 1 in the mean; nothing if all are alike."""
        layers = [self.parts[name].layers for name in _SECONDS]
        mean = sum(self.parts[name].layer for name in _SECONDS)
        return tuple(sum(seconds) / mean for seconds in zip(*layers, strict=True))

    def in_layers(self, *, sharded: bool = False) -> tuple[float, float]:
        """Return the number of layers that embedding and output layer count for, by seconds.

        With ``sharded``, what is left of them on the stages.
        """
        seconds = [(self.left if sharded else self.parts)[name] for name in _SECONDS]
        layer = sum(part.layer for part in seconds)
        return (
            sum(part.embedding for part in seconds) / layer,
            sum(part.output for part in seconds) / layer,
        )


def _predicting(profile: Profile, name: str, part: FittedPart) -> float:
    """Return what multi-token prediction takes of a whole output layer, besides running it."""
    if profile.parts is None or name in _BYTES:
        return min(profile.multi_token * part.layer, part.output)
    seconds: float = getattr(profile.parts.multi_token, name)
    return seconds


def _whole_ends(sharded: VocabularyTimes, start: int) -> dict[str, tuple[float, float]]:
    """Return what an embedding and an output layer would take whole, by quantity, of shards.

    Half of O is F's and half of it B's, for it multiplies twice; all of V is W's. Every rank looks
    up all tokens, and the rank ``start`` of the first stage reads their data besides. What sharding
    takes in addition is counted with them.
    """
    shards, first = sharded.shards, sharded.shards[start]
    output, weight = sum(s.output for s in shards) / 2, sum(s.weight for s in shards)
    held = float(sum(s.held for s in shards))
    return {
        "forward": (first.lookup, output),
        "backward": (first.gradient, output),
        "weight": (0.0, weight),
        "whole": (first.gradient, output + weight),
        "activation": (0.0, held),
        "held_for_weight": (0.0, held),
    }


def _slowdowns(profile: Profile, parts: dict[str, FittedPart]) -> tuple[float, ...]:
    counts = tuple(stage.layers.count("t") for stage in profile.stages)
    fitted = [0.0] * profile.pipeline_size
    found = [0.0] * profile.pipeline_size
    for name in _SECONDS:
        for stage, expected in zip(profile.stages, parts[name].stages(counts), strict=True):
            found[stage.rank] += getattr(stage, name)
            fitted[stage.rank] += expected
    shards = [] if profile.vocabulary is None else profile.vocabulary.shards
    for rank, shard in enumerate(shards):
        found[rank] += shard.seconds
        fitted[rank] += median(one.seconds for one in shards)
    return tuple(a / b for a, b in zip(found, fitted, strict=True))
