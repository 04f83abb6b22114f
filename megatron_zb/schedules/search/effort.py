"""Effort of a search for so many seconds, from counts alone so that every rank of a job agrees."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zb.schedules.search.kernels import available
from megatron_zb.schedules.search.runner import Problem

_PLAIN_RUNS = 100  # at most where nothing is compiled, which is some forty times slower
_SLOWER = 40


@dataclass(frozen=True)
class Effort:
    """Effort of a search: runs of the list scheduler, and moves of the polishing after it."""

    runs: int
    moves: int


@dataclass(frozen=True)
class Pace:
    """Nanoseconds of a compiled search for each pass of a problem, and the most that is useful.

    Args:
        run: of a run of the list scheduler, and ``run_per_rank`` more for each rank.
        move: of a move of the local search.
        most: effort beyond which next to nothing is found.
        parts: what runs and moves get: one part in so many of all seconds.
    """

    run: float
    run_per_rank: float
    move: float
    most: Effort
    parts: tuple[int, int] = (2, 2)


SINGLE = Pace(20, 3, 14, Effort(runs=4000, moves=120_000))
WALKS = Pace(20, 3, 14, Effort(runs=6000, moves=90_000))
STATES = Pace(20, 3, 25, Effort(runs=3000, moves=600_000))
PAIRS = Pace(50, 30, 24, Effort(runs=20_000, moves=700_000), (3, 1))  # for 8 ranks, 32 microbatches


def effort_of(problem: Problem, seconds: float, pace: Pace, most: Effort | None = None) -> Effort:
    """Estimate runs and moves for so many seconds; plain Python only has time for some runs."""
    most, (of_runs, of_moves) = most or pace.most, pace.parts
    per_pass = pace.run + pace.run_per_rank * problem.placement.pipeline_size
    run = problem.num_passes * per_pass * 1e-9
    if not available():
        return Effort(runs=min(_PLAIN_RUNS, int(seconds / (_SLOWER * run))), moves=0)
    move = problem.num_passes * (pace.move * 1e-9)
    return Effort(
        runs=min(most.runs, int(seconds / of_runs / run)),
        moves=min(most.moves, int(seconds / of_moves / move)),
    )
