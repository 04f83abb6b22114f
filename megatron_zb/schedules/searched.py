"""Fill a placement by searching, within a number of microbatches per rank."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_zb.schedules.bounds import lower_bound
from megatron_zb.schedules.compiled import available
from megatron_zb.schedules.fusing import fuse_for_free
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Request
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search import Effort, Problem, search
from megatron_zb.schedules.simulator import Timeline, simulate

NAMED_SECONDS = 0.25
"""About how long the search for a named schedule takes, if it is compiled."""


def searched(
    name: str,
    placement: Placement,
    request: Request,
    peak_microbatches: float,
    *,
    split: bool = True,
    known: Sequence[Schedule] = (),
    seconds: float = NAMED_SECONDS,
) -> Schedule:
    """The fastest order found in which no rank holds more than ``peak_microbatches``.

    ``known`` schedules of the same placement take part if they keep the limit.

    Raises:
        UsageError: the limit is below one microbatch in each chunk.
    """
    table = request.costs.for_placement(placement)
    limit = request.limits(placement, peak_microbatches)
    problem = Problem(placement, request.num_microbatches, table, limit, split)
    ranks = range(placement.pipeline_size)
    request.check_feasible(name, limit, [problem.smallest_limit(r) for r in ranks])
    bound = lower_bound(placement, request.num_microbatches, table, limit)
    fitting = [s.ranks for s in known if _fits(simulate(s, request.costs), limit)]
    found = search(problem, _effort(problem, seconds), bound, fitting)
    schedule = Schedule(name, placement, request.num_microbatches, found.ranks)
    return fuse_for_free(schedule, request.costs) if split else schedule


def _fits(timeline: Timeline, limit: Sequence[float]) -> bool:
    return all(
        peak <= most * (1 + 1e-9) + 1e-9
        for peak, most in zip(timeline.peak_memory, limit, strict=True)
    )


def _effort(problem: Problem, seconds: float) -> Effort:
    """Runs and moves that take about so long, from counts alone so that every rank agrees.

    A compiled run takes about 20 + 3p nanoseconds a pass and a move 20; plain Python is some forty
    times slower, so there it looks at less.
    """
    run = problem.num_passes * (20 + 3 * problem.placement.pipeline_size) * 1e-9
    move = problem.num_passes * 20e-9
    if not available():
        return Effort(runs=min(100, int(seconds / (40 * run))), moves=0)
    return Effort(
        runs=min(4000, int(seconds / 2 / run)), moves=min(120_000, int(seconds / 2 / move))
    )
