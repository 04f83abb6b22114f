"""Seconds of a model's parts within its passes, from marks that a run has set in them.

A pass of a stage is what comes before its layers, the layers, and what comes after them: in F, the
embedding stands before the layers and the output layer after them, in B and BW it is the other way
round; an encoder counts as a part of the embedding. What a stage without that end spends there is
what a pass costs by itself. The layers of a hybrid model have marks of their kind, see
:func:`of_kind`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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

_WITHIN_LAYERS = (LAYERS, ATTENTION)

Segments = Mapping[str, float]
"""Seconds of a pass by mark."""


def of_kind(mark: str, kind: str) -> str:
    """Return ``LAYERS`` or ``ATTENTION`` in layers of a kind; no letter if all layers are alike."""
    return f"{mark} {kind}" if kind else mark


def _mark_of(name: str) -> str:
    """Return the mark without the kind of :func:`of_kind`."""
    return name.partition(" ")[0]


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
    """Mean seconds of the passes of a stage, by mark; ``layers`` are its letters.

    ``kinds`` are those of its decoder layers, a letter for each, if the model is a hybrid.
    """

    layers: str
    forward: Segments
    backward: Segments
    weight: Segments
    whole: Segments
    kinds: str = field(default="", kw_only=True)


def of_stages(stages: Sequence[StageTimes]) -> Parts | None:
    """Derive the parts; return None where the layers of a stage could not be separated."""
    held = [s for s in stages if "t" in s.layers]
    if not held or not all(LAYERS in map(_mark_of, of) for s in held for of in _ways(s)):
        return None
    passes = [
        _around(stages, _forward, first="E", last="L"),
        _around(stages, _backward, first="L", last="E"),
        _weights(stages),
        _around(stages, _whole, first="L", last="E"),
    ]
    names = ("layer", "E", "L", "multi_token", "empty")
    of = {
        name: PartSeconds(**dict(zip(_OF, seconds, strict=True)))
        for name, seconds in ((name, [kind[name] for kind in passes]) for name in names)
    }
    return Parts(
        layer=of["layer"],
        letters={
            kind: PartSeconds(
                **{name: _of_letter(stages, of, kind, _WITHIN_LAYERS) for name, of in _OF.items()}
            )
            for kind in _letters(stages)
        },
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
    forward, backward = (_per_layer(stages, of, (ATTENTION,)) for of in (_forward, _backward))
    if not (forward and backward):
        return None
    tokens, squares = fmean(lengths.tokens), fmean(lengths.squares)
    return AttentionProfile(forward=forward, backward=backward, tokens=tokens, squares=squares)


_Of = Callable[[StageTimes], Segments]


def _forward(stage: StageTimes) -> Segments:
    return stage.forward


def _backward(stage: StageTimes) -> Segments:
    return stage.backward


def _weight(stage: StageTimes) -> Segments:
    return stage.weight


def _whole(stage: StageTimes) -> Segments:
    return stage.whole


_OF: dict[str, _Of] = {
    "forward": _forward,
    "backward": _backward,
    "weight": _weight,
    "whole": _whole,
}


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
        "layer": _per_layer(stages, of, _WITHIN_LAYERS),
        first: end_of(BEFORE, first, before),
        last: end_of(AFTER, last, after),
        "multi_token": _median(_of(s, of, MULTI_TOKEN) for s in stages if "m" in s.layers),
        "empty": before + after,
    }


def _weights(stages: Sequence[StageTimes]) -> dict[str, float]:
    of = _weight
    return {
        "layer": _per_layer(stages, of, _WITHIN_LAYERS),
        # autograd sums that of the embedding itself in B
        "E": _median(_of(s, of, ENCODER) for s in stages if "E" in s.layers),
        "L": _median(_of(s, of, OUTPUT) for s in stages if "L" in s.layers),
        "multi_token": _median(_of(s, of, MULTI_TOKEN) for s in stages if "m" in s.layers),
        "empty": _median(_of(s, of, BEFORE) + _of(s, of, AFTER) for s in stages),
    }


def _per_layer(stages: Sequence[StageTimes], of: _Of, marks: Sequence[str]) -> float:
    """Return the seconds of a layer; in a hybrid model they are the mean of all layers."""
    if _letters(stages):
        counts = Counter("".join(s.kinds for s in stages))
        total = sum(n * _of_letter(stages, of, kind, marks) for kind, n in counts.items())
        return total / counts.total()
    return _median(
        sum(seconds for name, seconds in of(s).items() if _mark_of(name) in marks) / n
        for s in stages
        if (n := s.layers.count("t"))
    )


def _of_letter(stages: Sequence[StageTimes], of: _Of, kind: str, marks: Sequence[str]) -> float:
    """Return the seconds of a layer of a kind."""
    return _median(
        sum(_of(s, of, of_kind(mark, kind)) for mark in marks) / n
        for s in stages
        if (n := s.kinds.count(kind))
    )


def _letters(stages: Sequence[StageTimes]) -> list[str]:
    """Return the kinds of a hybrid model's layers; none where a stage could not separate them."""
    marked = (of_kind(LAYERS, kind) in of for s in stages for kind in s.kinds for of in _ways(s))
    return list(dict.fromkeys(kind for s in stages for kind in s.kinds)) if all(marked) else []


def _ways(stage: StageTimes) -> tuple[Segments, Segments]:
    """Return the segments of F and of B, which need a mark for each kind of layer."""
    return stage.forward, stage.backward


def _of(stage: StageTimes, of: _Of, name: str) -> float:
    return of(stage).get(name, 0.0)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0
