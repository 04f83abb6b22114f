"""Problems of a search with a drawn memory limit that some order keeps."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from megatron_zb.schedules import Costs
from megatron_zb.schedules.features.recompute_or_offload import smallest_limits
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.search.problem import Problem


def within_a_limit(draw: st.DrawFn, placement: Placement, m: int, costs: Costs) -> Problem:
    """Return the problem with 1 to 3 times the least memory of every rank."""
    p = placement.pipeline_size
    problem = Problem(placement, m, costs.for_placement(placement), (1e9,) * p)
    factor = draw(st.floats(1.0, 3.0))
    limit = tuple(factor * least for least in smallest_limits(problem))
    return replace(problem, limit=limit)
