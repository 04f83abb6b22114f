"""Schedules that recompute and offload, and their lower bound, beside the exact solver."""

from __future__ import annotations

import statistics
from functools import cache

import exact_recomputation
import pytest
from exact_recomputation import Problem

from megatron_zb.schedules.placement import looped, wave
from megatron_zb.schedules.simulator import simulate

PROBLEMS = [
    Problem(placement, m, recomputes, offloads, limit)
    for placement, m in ((looped(2, 1), 3), (looped(3, 1), 3), (wave(2, 2), 2))
    for recomputes, offloads in ((True, False), (False, True), (True, True))
    for limit in (1.0, 1.5, 2.0)
]


@cache
def optimum(problem: Problem) -> exact_recomputation.Optimum:
    found = exact_recomputation.optimum(
        problem.placement, problem.num_microbatches, problem.costs, problem.limits
    )
    assert found is not None
    assert found.proven
    return found


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_lower_bound_is_never_above_an_optimum(problem: Problem) -> None:
    best = optimum(problem)
    peaks = simulate(best.schedule, problem.costs).peak_memory
    assert all(peak <= most + 1e-9 for peak, most in zip(peaks, problem.limits, strict=True))
    assert problem.lower_bound <= best.makespan + 1e-6


def gap(problem: Problem) -> float:
    found = problem.found()
    assert found is not None
    return found / optimum(problem).makespan - 1


@pytest.mark.full
def test_what_is_found_is_the_optimum_more_often_than_not() -> None:
    gaps = [gap(problem) for problem in PROBLEMS]
    assert min(gaps) >= -1e-9
    assert statistics.median(gaps) < 1e-9
    assert max(gaps) < 0.05
