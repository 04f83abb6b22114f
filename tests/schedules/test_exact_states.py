"""Schedules that drop and move activations, and their lower bound, beside the exact solver."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cache

import exact_states
import pytest

from megatron_zb import schedules
from megatron_zb.schedules.bounds import lower_bound
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.placement import Placement, looped, wave
from megatron_zb.schedules.simulator import simulate


@dataclass(frozen=True)
class Problem:
    """``limit`` in activations of a rank's microbatch."""

    placement: Placement
    num_microbatches: int
    drops: bool
    moves: bool
    limit: float

    @property
    def costs(self) -> Costs:
        p = self.placement.pipeline_size
        costs = Costs.uniform(pipeline_size=p, forward=20, backward=24, weight=16, p2p=1)
        if self.drops:
            costs = costs.with_recomputation(kept_input=0.1)
        return costs.with_offload(seconds=18) if self.moves else costs

    @property
    def limits(self) -> tuple[float, ...]:
        return (self.limit,) * self.placement.pipeline_size


PROBLEMS = [
    Problem(placement, m, drops, moves, limit)
    for placement, m in ((looped(2, 1), 3), (looped(3, 1), 3), (wave(2, 2), 2))
    for drops, moves in ((True, False), (False, True), (True, True))
    for limit in (1.0, 1.5, 2.0)
]


@cache
def optimum(problem: Problem) -> exact_states.Optimum:
    found = exact_states.optimum(
        problem.placement, problem.num_microbatches, problem.costs, problem.limits
    )
    assert found is not None
    assert found.proven
    return found


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_lower_bound_is_never_above_an_optimum(problem: Problem) -> None:
    placement, m = problem.placement, problem.num_microbatches
    table = problem.costs.for_placement(placement)
    best = optimum(problem)
    peaks = simulate(best.schedule, problem.costs).peak_memory
    assert all(peak <= most + 1e-9 for peak, most in zip(peaks, problem.limits, strict=True))
    assert lower_bound(placement, m, table, problem.limits) <= best.makespan + 1e-6


def gap(problem: Problem) -> float:
    p = problem.placement.pipeline_size
    found = schedules.build(
        "auto",
        pipeline_size=p,
        num_microbatches=problem.num_microbatches,
        costs=problem.costs,
        placement=problem.placement,
        memory_limit=(problem.limit + 1e-6) / p,
    )
    return simulate(found, problem.costs).makespan / optimum(problem).makespan - 1


@pytest.mark.full
def test_what_is_found_is_the_optimum_more_often_than_not() -> None:
    gaps = [gap(problem) for problem in PROBLEMS]
    assert min(gaps) >= -1e-9
    assert statistics.median(gaps) < 1e-9
    assert max(gaps) < 0.05
