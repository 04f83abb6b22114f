"""The shortest schedule there is with recomputation and offload, by OR-Tools' CP-SAT.

For small sizes, on any placement, with costs in whole numbers. Every unit but those of the last
stage is kept, recomputed, or offloaded, by the rules of the simulator;
microbatches run F, B and W of a stage in turn. A fused BW is left out: B and W side by side take as
long and let the previous stage go earlier.

tests/schedules/test_exact_recomputation.py compares ``auto`` and the lower bound with the optima of
small problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ortools.sat.python import cp_model

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules.bounds import lower_bound
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.stage_costs import StageCosts

_SCALE = 1000  # whole numbers of memory in one activation of a rank


@dataclass(frozen=True)
class Optimum:
    """The shortest makespan if ``proven``, else the shortest found; ``schedule`` takes it."""

    makespan: float
    proven: bool
    schedule: Schedule


@dataclass(frozen=True)
class Problem:
    """What may be done with activations, and a limit in those of a rank's microbatch."""

    placement: Placement
    num_microbatches: int
    recomputes: bool
    offloads: bool
    limit: float

    @property
    def costs(self) -> Costs:
        p = self.placement.pipeline_size
        costs = Costs.uniform(pipeline_size=p, forward=20, backward=24, weight=16, p2p=1)
        if self.recomputes:
            costs = costs.having(Recomputation(kept_input=0.1))
        return costs.having(Offload(seconds=18)) if self.offloads else costs

    @property
    def limits(self) -> tuple[float, ...]:
        return (self.limit,) * self.placement.pipeline_size

    @property
    def lower_bound(self) -> float:
        table = self.costs.for_placement(self.placement)
        return lower_bound(self.placement, self.num_microbatches, table, self.limits)

    def found(self) -> float | None:
        """Return the makespan of ``auto``, None where it refuses the limit."""
        p = self.placement.pipeline_size
        try:
            found = schedules.build(
                "auto",
                pipeline_size=p,
                num_microbatches=self.num_microbatches,
                costs=self.costs,
                placement=self.placement,
                memory_limit=(self.limit + 1e-6) / p,
            )
        except UsageError:
            return None
        return simulate(found, self.costs).makespan


def optimum(
    placement: Placement,
    num_microbatches: int,
    costs: Costs,
    limit: Sequence[float],
    *,
    seconds: float = 60.0,
    workers: int = 2,
) -> Optimum | None:
    """Search for the shortest schedule within a limit of each rank; None if there is none."""
    model = _Model(placement, num_microbatches, costs.for_placement(placement), limit)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model.cp)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    schedule = model.schedule(solver).validate()
    makespan = simulate(schedule, costs).makespan
    return Optimum(makespan, solver.best_objective_bound >= makespan - 1e-6, schedule)


class _Unit:
    """Start times of the passes of one stage and microbatch, and its state."""

    def __init__(self, model: _Model, stage: int, microbatch: int) -> None:
        self.stage, self.microbatch = stage, microbatch
        cp, costs = model.cp, model.costs
        at = {kind: model.time() for kind in (PassKind.F, PassKind.B, PassKind.W)}
        self.seconds = {kind: round(costs.seconds[kind][stage]) for kind in at}
        self.state: dict[PassKind, Any] = {}
        is_last = stage == model.placement.num_stages - 1
        if "kept_input" in costs.memory and not is_last:
            self.state[PassKind.R] = cp.new_bool_var("dropped")
            at[PassKind.R] = model.time()
            self.seconds[PassKind.R] = round(costs.seconds[PassKind.R][stage])
        if costs.copies is not None and not is_last:
            self.state[PassKind.H] = cp.new_bool_var("moved")
            at |= {PassKind.D: model.time(), PassKind.H: model.time()}
            self.seconds |= {PassKind.D: 0, PassKind.H: 0}
        self.kept = cp.new_bool_var("kept")
        cp.add_exactly_one([self.kept, *self.state.values()])
        self.at = at
        self._add_order(model)

    def is_present(self, kind: PassKind) -> Any:
        """Return whether a pass runs."""
        return self.state.get(PassKind.H if kind is PassKind.D else kind, 1)

    def end(self, kind: PassKind) -> Any:
        return self.at[kind] + self.seconds[kind]

    def _add_order(self, model: _Model) -> None:
        cp, at = model.cp, self.at
        cp.add(at[PassKind.B] >= self.end(PassKind.F))
        cp.add(at[PassKind.W] >= self.end(PassKind.B))
        if PassKind.R in at:
            cp.add(at[PassKind.R] >= self.end(PassKind.F))
            cp.add(at[PassKind.B] >= self.end(PassKind.R)).only_enforce_if(self.state[PassKind.R])
        if PassKind.H not in at:
            return
        moved, copy = self.state[PassKind.H], round(model.copy_seconds[self.stage])
        self.out, self.back = model.time(), model.time()
        cp.add(self.out >= self.end(PassKind.F))
        cp.add(at[PassKind.D] >= self.out + copy).only_enforce_if(moved)
        cp.add(at[PassKind.H] >= at[PassKind.D]).only_enforce_if(moved)
        cp.add(self.back >= at[PassKind.H])
        cp.add(at[PassKind.B] >= self.back + copy).only_enforce_if(moved)
        self.copies = [
            cp.new_optional_fixed_size_interval_var(start, copy, moved, "")
            for start in (self.out, self.back)
        ]

    def held(self, costs: StageCosts) -> Iterator[tuple[Any, Any, float, Any]]:
        """Yield from when to when it holds how much memory, and whether it does."""
        at, end = self.at, self.end(PassKind.B)
        whole, rest = (
            costs.memory["activation"][self.stage],
            costs.memory["held_for_weight"][self.stage],
        )
        yield at[PassKind.F], end, whole, self.kept
        yield end, self.end(PassKind.W), rest, 1
        if PassKind.R in at:
            dropped = self.state[PassKind.R]
            yield at[PassKind.F], at[PassKind.R], costs.memory["kept_input"][self.stage], dropped
            yield at[PassKind.R], end, whole, dropped
        if PassKind.H in at:
            moved = self.state[PassKind.H]
            yield at[PassKind.F], at[PassKind.D], whole, moved
            yield at[PassKind.H], end, whole, moved


class _Model:
    def __init__(
        self, placement: Placement, m: int, costs: StageCosts, limit: Sequence[float]
    ) -> None:
        self.placement, self.m, self.costs = placement, m, costs
        self.cp = cp_model.CpModel()
        self.copy_seconds = () if costs.copies is None else costs.copies.seconds
        kinds = (PassKind.F, PassKind.B, PassKind.W, PassKind.R)
        work = sum(sum(costs.seconds[kind]) for kind in kinds) + 2 * sum(self.copy_seconds)
        latencies = sum(costs.latency[PassKind.F]) + sum(costs.latency[PassKind.B])
        self.horizon = round(m * (work + latencies)) + 1
        self.units = [[_Unit(self, s, j) for j in range(m)] for s in range(placement.num_stages)]
        self.last = self.time()
        for row in self.units:
            for kind in (PassKind.F, PassKind.B, PassKind.W):
                for one, other in pairwise(row):
                    self.cp.add(other.at[kind] >= one.end(kind))
                self.cp.add(self.last >= row[-1].end(kind))
        self._add_messages()
        for rank, most in enumerate(limit):
            self._add_rank([u for s in placement.stages_of[rank] for u in self.units[s]], most)
        self.cp.minimize(self.last)

    def time(self) -> Any:
        return self.cp.new_int_var(0, self.horizon, "")

    def _add_messages(self) -> None:
        costs = self.costs
        for stage, (row, following) in enumerate(pairwise(self.units)):
            there, back = costs.latency[PassKind.F][stage], costs.latency[PassKind.B][stage + 1]
            for one, other in zip(row, following, strict=True):
                self.cp.add(other.at[PassKind.F] >= one.end(PassKind.F) + round(there))
                self.cp.add(one.at[PassKind.B] >= other.end(PassKind.B) + round(back))

    def _add_rank(self, units: Sequence[_Unit], limit: float) -> None:
        cp = self.cp
        cp.add_no_overlap(
            cp.new_optional_fixed_size_interval_var(
                unit.at[kind], unit.seconds[kind], unit.is_present(kind), ""
            )
            for unit in units
            for kind in unit.at
        )
        intervals, demands = [], []
        for unit in units:
            for start, end, memory, present in unit.held(self.costs):
                size = cp.new_int_var(0, self.horizon, "")
                intervals.append(cp.new_optional_interval_var(start, size, end, present, ""))
                demands.append(round(memory * _SCALE))
        cp.add_cumulative(intervals, demands, round(limit * _SCALE))
        copying = [unit.copies for unit in units if PassKind.H in unit.at]
        for engine in zip(*copying, strict=True):
            cp.add_no_overlap(engine)

    def schedule(self, solver: cp_model.CpSolver) -> Schedule:
        """Return the passes of each rank in the order of their times."""
        ranks = []
        for held in self.placement.stages_of:
            timed = [
                (solver.value(at), unit.seconds[kind], Pass(kind, unit.stage, unit.microbatch))
                for stage in held
                for unit in self.units[stage]
                for kind, at in unit.at.items()
                if solver.value(unit.is_present(kind))
            ]
            ranks.append(tuple(p for _, _, p in sorted(timed, key=_by_time)))
        return Schedule("exact", self.placement, self.m, tuple(ranks))


def _by_time(timed: tuple[int, int, Pass]) -> tuple[int, int, int]:
    """Let what frees memory go first, then what takes it, then what takes time."""
    at, seconds, p = timed
    return at, min(seconds, 1), (PassKind.D, PassKind.H).index(p.kind) if seconds == 0 else 0
