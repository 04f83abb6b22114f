"""What the layers and the two ends of a model cost, read off a profile of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megatron_zb.planner.profile import Profile
from megatron_zb.schedules import Costs
from megatron_zb.schedules.layout import Layout
from megatron_zb.schedules.placement import Placement

_QUANTITIES = ("forward", "backward", "weight", "activation", "held_for_weight")


@dataclass(frozen=True)
class Part:
    """One quantity of a layer and of the two ends of the model."""

    layer: float
    embedding: float
    output: float

    @classmethod
    def fitted(cls, values: Sequence[float], layers: Sequence[str]) -> Part:
        """From the sums of some stages, each with its layers as letters.

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

    def stages(self, counts: Layout) -> list[float]:
        """The sums of stages with so many layers."""
        sums = [count * self.layer for count in counts]
        sums[0] += self.embedding
        sums[-1] += self.output
        return sums


@dataclass(frozen=True)
class Fit:
    """What the parts of a model cost, and how much slower than the median each rank is."""

    profile: Profile
    parts: dict[str, Part]
    slowdown: tuple[float, ...]

    @classmethod
    def of(cls, profile: Profile) -> Fit:
        """Read the costs off a profile."""
        layers = [stage.layers for stage in profile.stages]
        parts = {
            name: Part.fitted([getattr(stage, name) for stage in profile.stages], layers)
            for name in _QUANTITIES
        }
        return cls(profile, parts, _slowdowns(profile, parts))

    def costs(self, placement: Placement, counts: Layout) -> Costs:
        """Of a placement with so many layers on each stage."""
        of = {name: part.stages(counts) for name, part in self.parts.items()}
        return Costs.of_slices(
            pipeline_size=placement.pipeline_size,
            forward=of["forward"],
            backward=of["backward"],
            weight=of["weight"],
            p2p=self.profile.hops(),
            slowdown=self.slowdown,
            activation=of["activation"],
            held_for_weight=[
                min(pair) for pair in zip(of["held_for_weight"], of["activation"], strict=True)
            ],
        )

    def in_layers(self) -> tuple[float, float]:
        """For how many layers embedding and output layer count, by their seconds."""
        seconds = [self.parts[name] for name in ("forward", "backward", "weight")]
        layer = sum(part.layer for part in seconds)
        return (
            sum(part.embedding for part in seconds) / layer,
            sum(part.output for part in seconds) / layer,
        )


def _slowdowns(profile: Profile, parts: dict[str, Part]) -> tuple[float, ...]:
    counts = tuple(stage.layers.count("t") for stage in profile.stages)
    seconds = ("forward", "backward", "weight")
    fitted = [0.0] * profile.pipeline_size
    found = [0.0] * profile.pipeline_size
    for name in seconds:
        for stage, expected in zip(profile.stages, parts[name].stages(counts), strict=True):
            found[stage.rank] += getattr(stage, name)
            fitted[stage.rank] += expected
    return tuple(a / b for a, b in zip(found, fitted, strict=True))
