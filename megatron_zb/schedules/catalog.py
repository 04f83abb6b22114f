"""The schedules by name, and how one is built from its name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from megatron_zb.errors import UsageError
from megatron_zb.schedules import one_f_one_b, v_shape, zero_bubble
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import peak_held_chunks

Builder = Callable[[int, int, Costs, int], Schedule]


@dataclass(frozen=True)
class Family:
    """One named schedule.

    ``peak_microbatches(p)`` bounds the activations of the worst rank, in microbatches of a whole
    rank; ``build(p, m, costs, slots)`` keeps ``slots = chunks * peak`` chunk activations.
    """

    name: str
    chunks: int
    splits_backward: bool
    peak_microbatches: Callable[[int], int]
    build: Builder
    summary: str
    source: str


_FAMILIES = (
    Family(
        "1f1b",
        chunks=1,
        splits_backward=False,
        peak_microbatches=lambda p: p,
        build=one_f_one_b.one_f_one_b,
        summary="Megatron's own order, run by this package: fused backward, one chunk per rank",
        source="PipeDream-Flush, arXiv 2006.09503",
    ),
    Family(
        "zb-h1",
        chunks=1,
        splits_backward=True,
        peak_microbatches=lambda p: p,
        build=zero_bubble.zb_h1,
        summary="1F1B's placement and memory, a third of its bubble",
        source="Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2",
    ),
    Family(
        "v-min",
        chunks=2,
        splits_backward=True,
        peak_microbatches=lambda p: (p + 4) // 3,
        build=v_shape.v_min,
        summary="a third of 1F1B's activation memory",
        source="Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 4",
    ),
    Family(
        "v-half",
        chunks=2,
        splits_backward=True,
        peak_microbatches=lambda p: (p + 2) // 2,
        build=v_shape.v_half,
        summary="half of 1F1B's activation memory, half its bubble",
        source="Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 4",
    ),
    Family(
        "v-zb",
        chunks=2,
        splits_backward=True,
        peak_microbatches=lambda p: p,
        build=v_shape.v_zb,
        summary="1F1B's activation memory, almost no bubble",
        source="Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 4",
    ),
)

_BY_NAME = {family.name: family for family in _FAMILIES}


def names() -> list[str]:
    """The names that :func:`build` takes."""
    return list(_BY_NAME)


def suggest(name: str) -> list[str]:
    """The known names nearest to a misspelt one, best first."""
    return difflib.get_close_matches(name.lower(), names(), n=3, cutoff=0.3)


def family(name: str) -> Family:
    """Look a name up.

    Raises:
        UsageError: there is no such schedule; the nearest names are given.
    """
    found = _BY_NAME.get(name.lower())
    if found is None:
        near = suggest(name)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(
            f"unknown pipeline schedule '{name}': {hint}known are {', '.join(names())}"
        )
    return found


def build(
    name: str,
    *,
    pipeline_size: int,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """Build a named schedule for the given costs.

    Args:
        name: one of :func:`names`.
        pipeline_size: pipeline ranks p, 2 or more.
        num_microbatches: microbatches m per iteration, 1 or more.
        costs: what passes cost; equal ones (1, 1, 1, no p2p) when left out.
        memory_limit: the most activation memory a rank may hold, as a fraction of 1F1B's peak,
            which is p microbatches of activations on the first rank; None leaves the schedule its
            own peak.

    Raises:
        UsageError: unknown name, sizes out of range, or a limit below what the schedule needs.
    """
    chosen = family(name)
    if num_microbatches < 1:
        raise UsageError(f"{num_microbatches} microbatches were asked for: give 1 or more")
    if costs is None:
        costs = Costs.uniform(pipeline_size=max(pipeline_size, 1), forward=1, backward=1, weight=1)
    peak = chosen.peak_microbatches(pipeline_size)
    schedule = chosen.build(pipeline_size, num_microbatches, costs, chosen.chunks * peak)
    if memory_limit is not None:
        _check_limit(schedule, memory_limit)
    return schedule.validate()


def _check_limit(schedule: Schedule, memory_limit: float) -> None:
    placement = schedule.placement
    peaks = [Fraction(peak_held_chunks(rank), placement.chunks) for rank in schedule.ranks]
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    needed = peaks[worst] / placement.pipeline_size
    if needed > Fraction(memory_limit).limit_denominator(10**6):
        raise UsageError(
            f"{schedule.name} cannot keep the memory limit {memory_limit:g} of 1F1B: rank {worst} "
            f"needs {float(needed):.4g}, the smallest limit that is possible here"
        )
