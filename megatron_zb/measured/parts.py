"""Seconds of a model's parts within its passes, from marks that a run has set in them.

A pass of a stage is what comes before its layers, the layers, and what comes after them: in F, the
embedding stands before the layers and the output layer after them, in B and BW it is the other way
round; an encoder counts as a part of the embedding. What a stage without that end spends there is
what a pass costs by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from megatron_zb.measured.profile import AttentionProfile, Parts, PartSeconds
from megatron_zb.schedules.step_plan import Lengths

BEFORE, DATA, ENCODER, LAYERS, ATTENTION, MULTI_TOKEN, OUTPUT, AFTER = (
    "before",
    "data",
    "encoder",
    "layers",
    "attention",
    "multi_token",
    "output",
    "after",
)
"""Work that begins at a mark; ``DATA`` is reading a batch, ``OUTPUT`` and ``ENCODER`` are in W,
``ATTENTION`` is what layers compute for pairs of queries and keys.
"""

Segments = Mapping[str, float]
"""Seconds of a pass by mark."""


def segments(start: float, end: float, marks: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the seconds of one pass by mark; the time before the first one is ``BEFORE``."""
    found: dict[str, float] = {}
    begun = [(BEFORE, start), *marks]
    ended = [when for _, when in marks]
    for (name, since), until in zip(begun, [*ended, end], strict=True):
        found[name] = found.get(name, 0.0) + until - since
    return found


@dataclass(frozen=True)
class StageTimes:
    """Mean seconds of the passes of a stage, by mark; ``layers`` are its letters."""

    layers: str
    forward: Segments
    backward: Segments
    weight: Segments
    whole: Segments


def of_stages(stages: Sequence[StageTimes]) -> Parts | None:
    """Derive the parts; return None where the layers of a stage could not be separated."""
    if not all(LAYERS in s.forward and LAYERS in s.backward for s in stages if "t" in s.layers):
        return None
    if not any("t" in s.layers for s in stages):
        return None
    kinds = [
        _around(stages, _forward, first="E", last="L"),
        _around(stages, _backward, first="L", last="E"),
        _weights(stages),
        _around(stages, lambda s: s.whole, first="L", last="E"),
    ]
    names = ("layer", "E", "L", "multi_token", "empty")
    of = {
        name: PartSeconds(**dict(zip(_KINDS, seconds, strict=True)))
        for name, seconds in ((name, [kind[name] for kind in kinds]) for name in names)
    }
    return Parts(
        layer=of["layer"],
        embedding=of["E"],
        output=of["L"],
        multi_token=of["multi_token"],
        empty_pass=of["empty"],
    )


def attention_of(stages: Sequence[StageTimes], lengths: Lengths) -> AttentionProfile | None:
    """Return what attention takes in one layer; None where no module had its marks.

    Args:
        stages: mean seconds of the passes of all stages.
        lengths: of the microbatches that were measured.
    """
    forward, backward = (_per_layer(stages, of, [ATTENTION]) for of in (_forward, _backward))
    if not (forward and backward):
        return None
    tokens, squares = fmean(lengths.tokens), fmean(lengths.squares)
    return AttentionProfile(forward=forward, backward=backward, tokens=tokens, squares=squares)


_KINDS = ("forward", "backward", "weight", "whole")
_Of = Callable[[StageTimes], Segments]


def _forward(stage: StageTimes) -> Segments:
    return stage.forward


def _backward(stage: StageTimes) -> Segments:
    return stage.backward


def _around(stages: Sequence[StageTimes], of: _Of, first: str, last: str) -> dict[str, float]:
    """Derive the seconds of a kind of pass: ``first`` is before its layers, ``last`` after."""

    def usual(name: str, end: str) -> float:
        return _median(_of(s, of, name) for s in stages if end not in s.layers)

    def end_of(name: str, end: str, empty: float) -> float:
        return _median(
            max(0.0, _of(s, of, name) + _of(s, of, DATA) - empty) for s in stages if end in s.layers
        )

    before, after = usual(BEFORE, first), usual(AFTER, last)
    return {
        "layer": _layer(stages, of),
        first: end_of(BEFORE, first, before),
        last: end_of(AFTER, last, after),
        "multi_token": _median(_of(s, of, MULTI_TOKEN) for s in stages if "m" in s.layers),
        "empty": before + after,
    }


def _weights(stages: Sequence[StageTimes]) -> dict[str, float]:
    def of(stage: StageTimes) -> Segments:
        return stage.weight

    return {
        "layer": _layer(stages, of),
        # autograd sums that of the embedding itself in B
        "E": _median(_of(s, of, ENCODER) for s in stages if "E" in s.layers),
        "L": _median(_of(s, of, OUTPUT) for s in stages if "L" in s.layers),
        "multi_token": _median(_of(s, of, MULTI_TOKEN) for s in stages if "m" in s.layers),
        "empty": _median(_of(s, of, BEFORE) + _of(s, of, AFTER) for s in stages),
    }


def _layer(stages: Sequence[StageTimes], of: _Of) -> float:
    return _per_layer(stages, of, [LAYERS, ATTENTION])


def _per_layer(stages: Sequence[StageTimes], of: _Of, names: Sequence[str]) -> float:
    counts = [(s, s.layers.count("t")) for s in stages]
    return _median(sum(_of(s, of, name) for name in names) / n for s, n in counts if n)


def _of(stage: StageTimes, of: _Of, name: str) -> float:
    return of(stage).get(name, 0.0)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0
