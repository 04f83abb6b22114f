"""Which layers stand on which stage: as even as they go, or balanced by their seconds."""

from __future__ import annotations

from megatron_zb.schedules.placement import Placement

Layout = tuple[int, ...]
"""Layers of each stage, in model order."""


def even(layers: int, placement: Placement) -> Layout | None:
    """As this package spreads them: where they do not divide, the ranks with the ends have less."""
    return _shared_out(layers, placement, 0.0, 0.0, at_ends=1)


def balanced(layers: int, placement: Placement, embedding: float, output: float) -> Layout | None:
    """The ends of the model count for so many layers, and may stand alone on their stages."""
    return _shared_out(layers, placement, embedding, output, at_ends=0)


def _shared_out(
    layers: int, placement: Placement, embedding: float, output: float, at_ends: int
) -> Layout | None:
    """One layer at a time to the rank with the least to do, on its smallest stage."""
    last = placement.num_stages - 1
    counts = [at_ends if stage in (0, last) else 1 for stage in range(last + 1)]
    if layers < sum(counts) or last == 0:
        return (layers,) if last == 0 else None
    weight = [float(count) for count in counts]
    weight[0] += embedding
    weight[last] += output
    load = [sum(weight[s] for s in held) for held in placement.stages_of]
    ends = {placement.rank_of[0], placement.rank_of[last]}
    for _ in range(layers - sum(counts)):
        rank = min(range(len(load)), key=lambda r: (load[r], r in ends, r))
        stage = min(placement.stages_of[rank], key=lambda s: (weight[s], s))
        counts[stage] += 1
        weight[stage] += 1
        load[rank] += 1
    return tuple(counts)


def text(layout: Layout) -> str:
    """As ``--pipeline-model-parallel-layout`` takes it, such as ``Et|tt|tt|tL``."""
    parts = ["t" * count for count in layout]
    parts[0] = "E" + parts[0]
    parts[-1] += "L"
    return "|".join(parts)
