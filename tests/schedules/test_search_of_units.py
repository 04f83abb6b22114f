"""Orders that a search finds for units with routes, owners and versions, beside known formulas."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement, looped
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.hill_climbing import search
from megatron_zb.schedules.search.kernels import available
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.runner import Effort
from megatron_zb.schedules.simulator import Timeline, simulate
from megatron_zb.schedules.stage_costs import StageCosts
from megatron_zb.schedules.units import UnitRules, Units

pytestmark = pytest.mark.skipif(not available(), reason="plain Python has no time for a search")

UPDATE = 0.02


@dataclass(frozen=True)
class Equal:
    """Costs of equal stages: one backward of both gradients, and the update."""

    stages: int
    forward: float
    backward: float

    def for_placement(self, placement: Placement) -> StageCosts:
        none = (0.0,) * self.stages
        forward, backward = (self.forward,) * self.stages, (self.backward,) * self.stages
        seconds = {PassKind.F: forward, PassKind.B: backward, PassKind.W: none}
        seconds |= {PassKind.BW: backward, PassKind.U: (UPDATE,) * self.stages}
        return StageCosts(
            seconds,
            latency=dict.fromkeys((PassKind.F, PassKind.B, PassKind.BW), none),
            memory={"activation": forward, "held_for_weight": none},
        )


def found(placement: Placement, rules: UnitRules, costs: Equal, effort: Effort) -> Timeline:
    """The order found with at most as many units of memory as there are ranks."""
    table, p, n = costs.for_placement(placement), placement.pipeline_size, len(rules.columns)
    problem = Problem(placement, n, table, (float(p),) * p, split=False, rules=rules)
    order = search(problem, effort, 0.0)
    timeline = simulate(Schedule("found", placement, n, order.ranks, rules=rules).validate(), costs)
    assert timeline.makespan == pytest.approx(order.makespan)
    assert max(timeline.peak_memory) <= p * (1 + 1e-6)
    return timeline


@pytest.mark.parametrize(
    ("chunks", "backward", "idle"),
    [(1, 2.0, 1 / 4), (1, 1.0, 1 / 5), (2, 2.0, 1 / 7), (2, 1.0, 1 / 9)],
    ids=["Chimera, B = 2F", "Chimera, B = F", "BitPipe, B = 2F", "BitPipe, B = F"],
)
def test_two_directions_meet_the_published_bubble(
    chunks: int, backward: float, idle: float
) -> None:
    """On 4 ranks with 4 microbatches: arXiv 2107.06925, table 2; arXiv 2410.19367, table 1."""
    p = 4
    down = [*range(p), *(range(p)[::-1] if chunks == 2 else ())]
    ranks = (*down, *(p - 1 - rank for rank in down))
    ways = tuple(range(len(down))), tuple(range(len(down), len(ranks)))
    rules = UnitRules(Units.of([ways[j % 2] for j in range(p)]))
    costs = Equal(len(ranks), 1 / chunks, backward / chunks)
    both_ways = Placement("both ways", p, ranks)
    timeline = found(both_ways, rules, costs, Effort(runs=3000, moves=60_000))
    assert timeline.bubble_rate == pytest.approx(idle)


@pytest.mark.parametrize(
    ("p", "adapters", "m", "steps", "idle"),
    [
        (4, 1, 8, 1, 3 / 11),
        (4, 4, 8, 1, 3 / 35),
        (8, 8, 8, 1, 7 / 71),
        (4, 4, 8, 4, 3 / 131),
        (8, 4, 8, 4, 7 / 135),
        (8, 2, 8, 4, 7 / 71),  # 8 units of another between two steps, of 7 that are needed
        (8, 2, 4, 4, 1 / 3),  # only 4
        (4, 1, 8, 4, 3 / 11),  # none: a flush after each
    ],
)
def test_owners_fill_the_bubbles_of_each_other(
    p: int, adapters: int, m: int, steps: int, idle: float
) -> None:
    """A frozen base: F and B of 1, and an update between two steps of an adapter."""
    owners = [t * adapters + a for t in range(steps) for a in range(adapters) for _ in range(m)]
    versions = [max(-1, owner - adapters) for owner in owners]
    columns = Units.of([tuple(range(p))] * len(owners), owners, versions)
    costs = Equal(p, 1.0, 1.0)
    effort = Effort(runs=1000, moves=20_000)
    timeline = found(looped(p), UnitRules(columns, has_updates=True), costs, effort)
    assert timeline.bubble_rate <= idle + 1e-3
    kinds = [pass_.kind for pass_ in timeline.schedule.ranks[0]]
    assert kinds.count(PassKind.U) == adapters * steps


@pytest.mark.parametrize("delay", [0, 1])
def test_an_update_that_comes_a_step_late_needs_no_flush(delay: int) -> None:
    p = m = 4
    steps = 6
    owners = [t for t in range(steps) for _ in range(m)]
    versions = [max(-1, t - 1 - delay) for t in owners]
    columns = Units.of([tuple(range(p))] * len(owners), owners, versions)
    costs, effort = Equal(p, 1.0, 2.0), Effort(runs=1000, moves=20_000)
    timeline = found(looped(p), UnitRules(columns, has_updates=True), costs, effort)
    step = m * 3.0 + UPDATE
    ramp = (p - 1) * 3.0
    expected = steps * step + ramp if delay else steps * (step + ramp)
    assert timeline.makespan == pytest.approx(expected, rel=0.01)
