"""Costs of the layers and the two ends of a model, derived from a profile of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from megatron_zb.measured.cutting import Cutting
from megatron_zb.measured.profile import Parts, Profile
from megatron_zb.schedules import Costs
from megatron_zb.schedules.layout import Layout
from megatron_zb.schedules.placement import Placement

_SECONDS = ("forward", "backward", "weight")
_BYTES = ("activation", "held_for_weight")
_QUANTITIES = (*_SECONDS, *_BYTES)


@dataclass(frozen=True)
class Part:
    """One quantity of a layer, of the two ends of the model, and of a stage by itself."""

    layer: float
    embedding: float
    output: float
    stage: float = 0.0

    @classmethod
    def measured(cls, parts: Parts, name: str) -> Part:
        """Return the seconds of a kind of pass, as timed for each part."""
        layer, embedding, output, multi_token, stage = (
            getattr(part, name)
            for part in (
                parts.layer,
                parts.embedding,
                parts.output,
                parts.multi_token,
                parts.empty_pass,
            )
        )
        return cls(layer, embedding, output + multi_token, stage)

    @classmethod
    def fitted(cls, values: Sequence[float], layers: Sequence[str]) -> Part:
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

    def stages(self, counts: Layout, *, with_ends: bool = True) -> list[float]:
        """Return the sum of each stage, with ``counts[s]`` layers on stage s."""
        sums = [count * self.layer + self.stage for count in counts]
        if with_ends:
            sums[0] += self.embedding
            sums[-1] += self.output
        return sums


@dataclass(frozen=True)
class Fit:
    """Costs of the parts of a model, and the slowdown of each rank against the median."""

    profile: Profile
    parts: dict[str, Part]
    slowdown: tuple[float, ...]

    @classmethod
    def of(cls, profile: Profile) -> Fit:
        """Derive the costs from a profile."""
        layers = [stage.layers for stage in profile.stages]
        parts = {
            name: Part.fitted([getattr(stage, name) for stage in profile.stages], layers)
            for name in _QUANTITIES
        }
        if profile.parts is not None:
            measured = (*_SECONDS, "whole")
            parts |= {name: Part.measured(profile.parts, name) for name in measured}
        return cls(profile, parts, _slowdowns(profile, parts))

    def cut_costs(self, placement: Placement, counts: Layout, cutting: Cutting) -> Costs:
        """Return the costs where output layer and embedding are cut over all ranks.

        What F and B of the output layer take is O's, its W is V's, and what it holds is held from O
        to V. What the embedding takes is E's and G's on every rank, its data included.

        Args:
            placement, counts: as for :meth:`costs`.
            cutting: what nothing has measured.
        """
        output = {name: part.output for name, part in self.parts.items()}
        return cutting.costs(
            self.costs(placement, counts, with_ends=False),
            self.parts["forward"].layer,
            products=output["forward"] + output["backward"],
            weight=output["weight"],
            embedding=sum(self.parts[name].embedding for name in _SECONDS),
            held=output["activation"],
        )

    def costs(
        self,
        placement: Placement,
        counts: Layout,
        *,
        blocking: bool = False,
        with_ends: bool = True,
    ) -> Costs:
        """Return the costs of a placement with ``counts[s]`` layers on stage s.

        With ``blocking`` messages, a pass lasts until its message is there. ``with_ends`` adds
        embedding and output layer to the first and the last stage.
        """
        hops = self.profile.hops()
        of = {name: part.stages(counts, with_ends=with_ends) for name, part in self.parts.items()}
        for name in of.keys() - set(_BYTES):
            of[name] = [seconds + getattr(self.profile.host, name) for seconds in of[name]]
        if blocking:
            for stage, (a, b) in enumerate(pairwise(placement.rank_of)):
                of["forward"][stage] += hops[a][b]
                for name in of.keys() & {"backward", "whole"}:
                    of[name][stage + 1] += hops[b][a]
        return Costs.of_slices(
            pipeline_size=placement.pipeline_size,
            forward=of["forward"],
            backward=of["backward"],
            weight=of["weight"],
            whole=of.get("whole", ()),
            p2p=0.0 if blocking else hops,
            slowdown=self.slowdown,
            activation=of["activation"],
            held_for_weight=[
                min(pair) for pair in zip(of["held_for_weight"], of["activation"], strict=True)
            ],
        )

    def in_layers(self) -> tuple[float, float]:
        """Return the number of layers that embedding and output layer count for, by seconds."""
        seconds = [self.parts[name] for name in _SECONDS]
        layer = sum(part.layer for part in seconds)
        return (
            sum(part.embedding for part in seconds) / layer,
            sum(part.output for part in seconds) / layer,
        )


def _slowdowns(profile: Profile, parts: dict[str, Part]) -> tuple[float, ...]:
    counts = tuple(stage.layers.count("t") for stage in profile.stages)
    fitted = [0.0] * profile.pipeline_size
    found = [0.0] * profile.pipeline_size
    for name in _SECONDS:
        for stage, expected in zip(profile.stages, parts[name].stages(counts), strict=True):
            found[stage.rank] += getattr(stage, name)
            fitted[stage.rank] += expected
    return tuple(a / b for a, b in zip(found, fitted, strict=True))
