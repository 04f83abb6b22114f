"""Schedules of two copies of the model, found by a brief search."""

from __future__ import annotations

from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.hill_climbing import search
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.runner import Effort
from megatron_zb.schedules.units import UnitRules, Units


def both_ways(p: int, n: int, v: int, *, split: bool = False) -> Schedule:
    down = [*range(p), *(range(p)[::-1] if v == 2 else ())]
    ranks = (*down, *(p - 1 - r for r in down))
    ways = tuple(range(len(down))), tuple(range(len(down), len(ranks)))
    rules = UnitRules(Units.of([ways[j % 2] for j in range(n)]))
    pl = Placement("both ways", p, ranks, copies=2)
    costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=1.0)
    problem = Problem(pl, n, costs.for_placement(pl), (float(p),) * p, split=split, rules=rules)
    found = search(problem, Effort(60, 2000), 0.0, [])
    return Schedule(
        "chimera" if v == 1 else "bitpipe", pl, n, tuple(map(tuple, found.ranks)), rules=rules
    ).validate()
