"""The exact solver against exhaustive search, and our schedules against the exact solver."""

from __future__ import annotations

import itertools
from functools import cache
from typing import TypeAlias

import exact
import pytest
from brief_searches import briefly
from exact import Problem

from megatron_zb import schedules
from megatron_zb.schedules.bounds import lower_bound
from megatron_zb.schedules.simulator import peak_held_chunks

# Of one rank: when it is free, and how often it has run F and B of both its stages, and W.
RankState: TypeAlias = tuple[int, tuple[int, ...]]
# When the inputs that have not been read arrive, for each (is backward, stage).
Arrivals: TypeAlias = tuple[tuple[int, ...], ...]


class Exhaustive:
    """Every order of passes on every rank, in the order of their starts: no shared code."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.p, self.m = problem.pipeline_size, problem.num_microbatches
        self.last = 2 * self.p - 1
        self.best = 10**9
        self.seen: set[tuple[int, tuple[RankState, ...], Arrivals]] = set()

    def shortest(self) -> int:
        arrivals = [() for _ in range(2 * (self.last + 1))]
        first = [(0,) * self.m, *arrivals[1:]]
        self.explore(0, tuple((0, (0,) * 5) for _ in range(self.p)), tuple(first))
        return self.best

    def explore(self, now: int, ranks: tuple[RankState, ...], arrivals: Arrivals) -> None:
        state = (now, ranks, arrivals)
        if state in self.seen or self.least(ranks) >= self.best:
            return
        self.seen.add(state)
        if all(sum(counts) == 6 * self.m for _, counts in ranks):
            self.best = max(clock for clock, _ in ranks)
            return
        for rank, column in itertools.product(range(self.p), range(5)):
            self.run(now, ranks, arrivals, rank, column)

    def least(self, ranks: tuple[RankState, ...]) -> int:
        """No rank can be done earlier than after all of its work."""
        f, b, w = self.problem.forward, self.problem.backward, self.problem.weight
        total = 2 * self.m * (f + b + w)
        done = [(c[0] + c[1]) * f + (c[2] + c[3]) * b + c[4] * w for _, c in ranks]
        return max(clock + total - d for (clock, _), d in zip(ranks, done, strict=True))

    def run(
        self,
        now: int,
        ranks: tuple[RankState, ...],
        arrivals: Arrivals,
        rank: int,
        column: int,
    ) -> None:
        """Go on with one more pass, if the rank may run it and it starts no earlier than `now`."""
        clock, counts = ranks[rank]
        waiting = list(arrivals)
        if column == 4:
            if counts[4] == counts[2] + counts[3]:
                return
            start, seconds = clock, self.problem.weight
        else:
            is_backward, chunk = divmod(column, 2)
            stage = (rank, self.last - rank)[chunk]
            queue = 2 * stage + is_backward
            if not waiting[queue]:
                return
            if not is_backward and counts[0] + counts[1] - counts[4] == self.problem.slots:
                return
            arrival, *rest = waiting[queue]
            waiting[queue] = tuple(rest)
            start = max(clock, arrival)
            seconds = self.problem.backward if is_backward else self.problem.forward
            self.deliver(waiting, stage, bool(is_backward), start + seconds)
        if start < now:
            return
        after = list(ranks)
        changed = tuple(n + (i == column) for i, n in enumerate(counts))
        after[rank] = (start + seconds, changed)
        self.explore(start, tuple(after), tuple(waiting))

    def deliver(
        self, waiting: list[tuple[int, ...]], stage: int, is_backward: bool, end: int
    ) -> None:
        if is_backward and stage == 0:
            return
        if not is_backward and stage == self.last:
            target, is_backward = stage, True
        else:
            target = stage - 1 if is_backward else stage + 1
        stays = target in (stage, self.last - stage)
        queue = 2 * target + is_backward
        waiting[queue] = (*waiting[queue], end if stays else end + self.problem.p2p)


@pytest.mark.parametrize(
    ("p", "m", "times", "slots"),
    [
        (2, 1, (1, 1, 1, 0), 2),
        (2, 2, (2, 3, 1, 0), 2),
        (2, 2, (2, 3, 1, 1), 3),
        (2, 2, (3, 4, 5, 2), 4),
        (2, 3, (2, 2, 1, 1), 3),
        (3, 1, (2, 3, 2, 1), 2),
        (3, 2, (2, 3, 2, 1), 3),
    ],
)
def test_the_solver_agrees_with_exhaustive_search(
    p: int, m: int, times: tuple[int, int, int, int], slots: int
) -> None:
    problem = Problem(p, m, *times, slots=slots)
    found = exact.optimum(problem)
    assert found.proven
    assert found.makespan == Exhaustive(problem).shortest()


PROBLEMS = [
    Problem(p, 3, *times, slots=slots)
    for p in (2, 3)
    for times in ((1, 1, 1, 0), (10, 12, 8, 1), (10, 11, 5, 3))
    for slots in (2, p + 1, 2 * p)
]


@cache
def optimum(problem: Problem) -> exact.Optimum:
    return exact.optimum(problem)


def ours(problem: Problem) -> dict[str, schedules.Schedule]:
    return exact.ours(problem, ("v-min", "v-half", "v-zb"))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_no_schedule_of_ours_beats_the_optimum(problem: Problem) -> None:
    """In our simulator, by the rules of our validator: one of the three would be wrong."""
    found = optimum(problem)
    assert found.proven
    found.schedule.validate()
    assert schedules.simulate(found.schedule, problem.costs).makespan == found.makespan
    assert max(map(peak_held_chunks, found.schedule.ranks)) <= problem.slots
    with briefly():
        built = ours(problem)
    for name, schedule in built.items():
        makespan = schedules.simulate(schedule, problem.costs).makespan
        assert makespan >= found.makespan - 1e-6, name


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_lower_bound_is_one(problem: Problem) -> None:
    costs = problem.costs.for_placement(problem.placement)
    limit = [problem.slots / 2] * problem.pipeline_size
    bound = lower_bound(problem.placement, problem.num_microbatches, costs, limit)
    makespan = optimum(problem).makespan
    assert 0.7 * makespan < bound <= makespan + 1e-6


@pytest.mark.parametrize(
    "problem",
    [
        p if p.p2p else pytest.param(p, marks=pytest.mark.full)  # equal costs are the easiest
        for p in PROBLEMS
        if p.slots > 2
    ],
    ids=str,
)
def test_our_best_is_near_the_optimum(problem: Problem) -> None:
    found = ours(problem).values()
    best = min(schedules.simulate(s, problem.costs).makespan for s in found)
    assert best <= 1.02 * optimum(problem).makespan


def test_a_schedule_to_start_from_is_a_bound_from_above() -> None:
    problem = Problem(3, 4, 10, 12, 8, 1, slots=6)
    known = schedules.build("v-zb", pipeline_size=3, num_microbatches=4, costs=problem.costs)
    best = exact.optimum(problem)
    assert exact.optimum(problem, known=known, lower_bound=best.makespan).makespan == best.makespan
    with pytest.raises(exact.Infeasible):
        exact.optimum(problem, known=best.schedule, lower_bound=best.makespan + 1)


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(exact.Infeasible, match="no schedule keeps 1 chunk activations"):
        exact.optimum(Problem(2, 1, 1, 1, 1, 0, slots=1))
    with pytest.raises(exact.Unsolved, match=r"no schedule was found in 1e-09 s"):
        exact.optimum(Problem(4, 16, 10, 12, 8, 1, slots=8), seconds=1e-9)
