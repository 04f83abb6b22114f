"""The shortest schedule there is for the V placement, by OR-Tools' CP-SAT: for small sizes.

Two chunks per rank in a V, equal whole-number costs on all stages, at most ``slots`` chunk
activations on a rank, each held from the start of F to the end of W, and otherwise the rules of
the simulator. Nothing is assumed beyond that; what the model leaves out costs nothing:

- A fused BW: B and W side by side take as long and let the previous stage go earlier.
- Microbatches out of order: they are alike, so in any schedule the k-th F (B) of a stage can be
  that of microbatch k, and everything still has its input in time.
- The identity of W: the stages of a rank cost the same, so its j-th W can be that of its j-th B.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ortools.sat.python import cp_model

from megatron_zb.errors import UsageError
from megatron_zb.schedules.catalog import build
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement, v_shape
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import peak_held_chunks, simulate


@dataclass(frozen=True)
class Problem:
    """Times are whole numbers: of one pass of one chunk, and of one transfer between ranks."""

    pipeline_size: int
    num_microbatches: int
    forward: int
    backward: int
    weight: int
    p2p: int
    slots: int

    @property
    def placement(self) -> Placement:
        return v_shape(self.pipeline_size)

    @property
    def costs(self) -> Costs:
        """The same costs for the simulator and the schedulers: for a rank, so for two chunks."""
        return Costs.uniform(
            pipeline_size=self.pipeline_size,
            forward=2 * self.forward,
            backward=2 * self.backward,
            weight=2 * self.weight,
            p2p=self.p2p,
        )

    @property
    def memory_limit(self) -> float:
        """``slots`` as a fraction of 1F1B's memory, with room for rounding."""
        return (self.slots + 1e-3) / (2 * self.pipeline_size)


@dataclass(frozen=True)
class Optimum:
    """``bound <= shortest makespan <= makespan``; ``schedule`` takes ``makespan``."""

    makespan: int
    bound: int
    schedule: Schedule

    @property
    def proven(self) -> bool:
        return self.bound >= self.makespan


class Infeasible(ValueError):
    """No schedule keeps the limit."""


class Unsolved(RuntimeError):
    """The time was not enough to find any schedule."""


def optimum(
    problem: Problem,
    *,
    known: Schedule | None = None,
    lower_bound: int = 0,
    seconds: float = 60.0,
    workers: int = 2,
) -> Optimum:
    """Search for the shortest schedule, and for the proof that none is shorter.

    Args:
        known: a schedule of the V within the limit, to start from.
        lower_bound: what is known to be no more than the optimum. ``proven`` relies on it.

    Raises:
        Infeasible: there is no schedule.
        Unsolved: the time was not enough to find one.
    """
    model = _Model(problem, lower_bound)
    if known is not None:
        model.start_from(known)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model.cp)
    if status == cp_model.INFEASIBLE:
        raise Infeasible(f"no schedule keeps {problem.slots} chunk activations")
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise Unsolved(f"no schedule was found in {seconds:g} s")
    schedule = model.schedule(solver)
    # Where the time was not enough, the solver's times may have waits that its order does not need.
    makespan = round(simulate(schedule, problem.costs).makespan)
    return Optimum(makespan, round(solver.best_objective_bound), schedule)


def ours(
    problem: Problem, names: Iterable[str], *, any_placement: bool = False
) -> dict[str, Schedule]:
    """The named schedules that the catalog has for a problem: on the V and within the limit."""
    found = {}
    for name in names:
        with suppress(UsageError):
            schedule = build(
                name,
                pipeline_size=problem.pipeline_size,
                num_microbatches=problem.num_microbatches,
                costs=problem.costs,
                memory_limit=problem.memory_limit,
            )
            peak = max(map(peak_held_chunks, schedule.ranks)) / schedule.placement.chunks
            fits = peak <= problem.slots / 2
            if fits and (any_placement or schedule.placement == problem.placement):
                found[name] = schedule
    return found


class _Model:
    """Start times of all passes: F and B by stage and microbatch, W by rank and number."""

    def __init__(self, problem: Problem, lower_bound: int) -> None:
        self.problem, self.placement = problem, problem.placement
        self.cp = cp_model.CpModel()
        self.seconds = {
            PassKind.F: problem.forward,
            PassKind.B: problem.backward,
            PassKind.W: problem.weight,
        }
        self.horizon = self._horizon()
        self.end = self.cp.new_int_var(lower_bound, self.horizon, "end")
        stages, m = self.placement.num_stages, problem.num_microbatches
        self.forward = [self._chain(PassKind.F, f"F{s}", m) for s in range(stages)]
        self.backward = [self._chain(PassKind.B, f"B{s}", m) for s in range(stages)]
        ranks = range(problem.pipeline_size)
        self.weight = [self._chain(PassKind.W, f"W{r}", 2 * m) for r in ranks]
        self._add_dependencies()
        for rank in ranks:
            self._add_rank(rank)
        self.cp.minimize(self.end)

    def _horizon(self) -> int:
        """Everything one after another: more than any schedule takes."""
        passes = self.placement.num_stages * self.problem.num_microbatches
        return passes * (sum(self.seconds.values()) + 2 * self.problem.p2p)

    def _chain(self, kind: PassKind, name: str, length: int) -> list[Any]:
        """Passes of one kind that run one after the other."""
        seconds = self.seconds[kind]
        starts = [self.cp.new_int_var(0, self.horizon, f"{name}-{i}") for i in range(length)]
        for earlier, later in pairwise(starts):
            self.cp.add(later >= earlier + seconds)
        self.cp.add(self.end >= starts[-1] + seconds)
        return starts

    def _add_dependencies(self) -> None:
        f, b = self.problem.forward, self.problem.backward
        last = self.placement.num_stages - 1
        for k in range(self.problem.num_microbatches):
            for stage in range(last):
                latency = self._latency(stage)
                self.cp.add(self.forward[stage + 1][k] >= self.forward[stage][k] + f + latency)
                self.cp.add(self.backward[stage][k] >= self.backward[stage + 1][k] + b + latency)
            self.cp.add(self.backward[last][k] >= self.forward[last][k] + f)

    def _latency(self, stage: int) -> int:
        rank_of = self.placement.rank_of
        return 0 if rank_of[stage] == rank_of[stage + 1] else self.problem.p2p

    def _add_rank(self, rank: int) -> None:
        stages = self.placement.stages_of[rank]
        rows = [(PassKind.F, self.forward[s]) for s in stages]
        rows += [(PassKind.B, self.backward[s]) for s in stages]
        rows += [(PassKind.W, self.weight[rank])]
        self.cp.add_no_overlap(
            self.cp.new_fixed_size_interval_var(start, self.seconds[kind], "")
            for kind, starts in rows
            for start in starts
            if self.seconds[kind] > 0
        )
        one, other = stages
        self._wait_for_backwards(rank, one, other)
        self._wait_for_memory(rank, one, other)

    def _wait_for_backwards(self, rank: int, one: int, other: int) -> None:
        """The j-th W runs after the j-th B of the rank, whichever stage that is of."""
        weight, m = self.weight[rank], self.problem.num_microbatches
        first = self._order(self.backward[one], self.backward[other], self.problem.backward)
        for k in range(m):
            for mine, theirs, is_first in (
                (self.backward[one], self.backward[other], lambda k, j: first[k][j]),
                (self.backward[other], self.backward[one], lambda k, j: ~first[j][k]),
            ):
                end = mine[k] + self.problem.backward
                for j in range(len(theirs)):  # at most j of theirs are earlier
                    self.cp.add(weight[k + j] >= end).only_enforce_if(is_first(k, j))
                self.cp.add(weight[k + m] >= end)

    def _wait_for_memory(self, rank: int, one: int, other: int) -> None:
        """The n-th F of the rank (from 0) waits until W number n - slots has ended."""
        weight, slots = self.weight[rank], self.problem.slots
        first = self._order(self.forward[one], self.forward[other], self.problem.forward)

        def wait(start: Any, n: int) -> list[Any]:
            if n < slots:
                return []
            return [self.cp.add(start >= weight[n - slots] + self.problem.weight)]

        for k in range(self.problem.num_microbatches):
            for mine, is_first in (
                (self.forward[one], lambda k, j: first[k][j]),
                (self.forward[other], lambda k, j: ~first[j][k]),
            ):
                wait(mine[k], k)
                for j in range(self.problem.num_microbatches):  # at least j + 1 are earlier
                    for constraint in wait(mine[k], k + j + 1):
                        constraint.only_enforce_if(~is_first(k, j))

    def _order(self, one: list[Any], other: list[Any], seconds: int) -> list[list[Any]]:
        """Booleans ``[k][j]``: pass k of one chain runs before pass j of the other."""
        before = [[self.cp.new_bool_var("") for _ in other] for _ in one]
        for k, a in enumerate(one):
            for j, b in enumerate(other):
                self.cp.add(b >= a + seconds).only_enforce_if(before[k][j])
                self.cp.add(a >= b + seconds).only_enforce_if(~before[k][j])
                if k > 0:
                    self.cp.add_implication(before[k][j], before[k - 1][j])
                if j > 0:
                    self.cp.add_implication(before[k][j - 1], before[k][j])
        return before

    def start_from(self, known: Schedule) -> None:
        """Hint at the times of a schedule, which also bound the optimum from above."""
        timeline = simulate(known, self.problem.costs)
        self.cp.add(self.end <= round(timeline.makespan))
        for rank, passes in enumerate(known.ranks):
            weights = iter(self.weight[rank])
            for p, start in zip(passes, timeline.start[rank], strict=True):
                for kind, begin in self._parts(p, round(start)):
                    chains = {PassKind.F: self.forward, PassKind.B: self.backward}
                    variable = (
                        next(weights) if kind is PassKind.W else chains[kind][p.stage][p.microbatch]
                    )
                    self.cp.add_hint(variable, begin)

    def _parts(self, p: Pass, start: int) -> Iterator[tuple[PassKind, int]]:
        if p.kind is PassKind.BW:
            yield PassKind.B, start
            yield PassKind.W, start + self.problem.backward
        else:
            yield p.kind, start

    def schedule(self, solver: cp_model.CpSolver) -> Schedule:
        """The passes of each rank in the order of their times; W named after the oldest B."""
        ranks = tuple(
            tuple(self._passes(solver, rank)) for rank in range(self.problem.pipeline_size)
        )
        return Schedule("exact", self.placement, self.problem.num_microbatches, ranks)

    def _passes(self, solver: cp_model.CpSolver, rank: int) -> Iterator[Pass]:
        timed: list[tuple[int, int, Pass | None]] = []
        for stage in self.placement.stages_of[rank]:
            for kind, chain in ((PassKind.F, self.forward), (PassKind.B, self.backward)):
                for k, start in enumerate(chain[stage]):
                    timed.append((solver.value(start), 0, Pass(kind, stage, k)))
        timed += [(solver.value(start), 1, None) for start in self.weight[rank]]
        pending: list[Pass] = []
        for _, _, p in sorted(timed, key=lambda entry: entry[:2]):
            if p is None:
                yield pending.pop(0)
                continue
            if p.kind is PassKind.B:
                pending.append(Pass(PassKind.W, p.stage, p.microbatch))
            yield p
