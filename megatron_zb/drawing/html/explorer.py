"""Data of a page's explorer: orders that this package has built, and a setting.

The explorer carries orders out with the reader's costs and makes none. It has the page's own
schedules with the page's costs; those of :data:`QUICK` built for the same costs; and, where all
ranks are alike, the orders that come with the package (see :mod:`megatron_zb.drawing.html.orders`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from megatron_zb.drawing.html import drawing, orders
from megatron_zb.drawing.palette import COST_UNIT, TimeUnit
from megatron_zb.errors import UsageError
from megatron_zb.schedules import Costs, Schedule, Timeline, catalog, simulate

_FAMILIES = tuple(map(catalog.family, catalog.names()))
FIXED = tuple(family.name for family in _FAMILIES if not family.follows_costs)
"""Schedules whose order does not depend on costs."""
QUICK = tuple(family.name for family in _FAMILIES if not family.searches)
"""Schedules whose order is built at once, without a search."""
MOST_PASSES = 60_000
"""Most passes of a page's schedule; more take minutes to draw, and a file of many megabytes."""
_TIMES = ("forward", "backward", "weight", "p2p")
_EQUAL = {**dict(zip(_TIMES, (1.0, 1.0, 1.0, 0.0), strict=True)), "limit": None}


def check_size(schedule: Schedule) -> None:
    """Reject a schedule that is too large for a page.

    Raises:
        UsageError: the schedule has more than :data:`MOST_PASSES` passes.
    """
    passes = sum(map(len, schedule.ranks))
    if passes > MOST_PASSES:
        raise UsageError(
            f"{schedule.name}: {passes} passes are too many for a page: give fewer ranks or "
            f"microbatches, for at most {MOST_PASSES}"
        )


def context(
    own: Sequence[Timeline],
    costs: Costs | None = None,
    limit: float | None = None,
    unit: TimeUnit = COST_UNIT,
) -> dict[str, Any]:
    """Return the variables of the explorer's template.

    Args:
        own: the schedules of the page, of one pipeline size and number of microbatches; the first
            is drawn first. Those with passes that the scripts lack are left out; where all
            are, 1F1B is drawn.
        costs: the costs of all of them; None where their stages differ, as layers spread
            in several ways do.
        limit: the memory limit they were built for, as a share of 1F1B's peak.
        unit: unit of the times on the page.
    """
    if costs is not None:
        costs = replace(costs.with_all_kept(), vocabulary=None)
    known = [timeline for timeline in own if orders.is_text(timeline.schedule)]
    own, limit = (known, limit) if known else ([_stock(own[0], costs)], None)
    first = own[0]
    p, m = first.schedule.placement.pipeline_size, first.schedule.num_microbatches
    alike = costs is not None and _is_alike(costs)
    times = _means(first, costs, unit)
    built: dict[str, float | None] = {**times, "limit": limit}
    entries: dict[tuple[str, int, int], dict[str, Any]] = {}
    for timeline in own:
        _add(entries, timeline, built, alike)
    if costs is not None:
        for name in QUICK if p * m <= MOST_PASSES // 6 else ():
            schedule = catalog.build(name, pipeline_size=p, num_microbatches=m, costs=costs)
            _add(entries, simulate(schedule, costs), {**built, "limit": None}, alike)
    for order in orders.packaged() if alike else ():
        entries.setdefault(
            (order["name"], order["p"], order["m"]),
            {
                "order": order,
                "costs": None,
                "built": None if order["name"] in FIXED else _EQUAL,
                "choices": "",
            },
        )
    names = dict.fromkeys(entry["order"]["name"] for entry in entries.values())
    return {
        "data": {
            "initial": {"schedule": first.schedule.name, "p": p, "m": m, **built},
            "names": list(names),
            "orders": list(entries.values()),
            "alike": alike,
            "unit": asdict(unit),
        }
    }


def _stock(timeline: Timeline, costs: Costs | None) -> Timeline:
    """Return 1F1B of the same sizes, for equal costs where none are given."""
    p, m = timeline.schedule.placement.pipeline_size, timeline.schedule.num_microbatches
    costs = costs or Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=1.0)
    return simulate(catalog.build("1f1b", pipeline_size=p, num_microbatches=m), costs)


def _add(
    entries: dict[tuple[str, int, int], dict[str, Any]],
    timeline: Timeline,
    built: dict[str, float | None],
    alike: bool,
) -> None:
    schedule = timeline.schedule
    sizes = schedule.placement.pipeline_size, schedule.num_microbatches
    entries.setdefault(
        (schedule.name, *sizes),
        {
            "order": orders.encode(schedule),
            "costs": None if alike else drawing.costs(timeline.costs),
            "built": None if schedule.name in FIXED else built,
            "choices": _choices(schedule),
        },
    )


def _is_alike(costs: Costs) -> bool:
    """Return whether all ranks and links cost the same, as in :meth:`Costs.uniform`."""
    p = costs.pipeline_size
    return costs == Costs.uniform(
        pipeline_size=p,
        forward=costs.forward[0],
        backward=costs.backward[0],
        weight=costs.weight[0],
        p2p=costs.p2p[0][1],
    )


def _means(timeline: Timeline, costs: Costs | None, unit: TimeUnit) -> dict[str, float]:
    """Return times of a microbatch on a rank and of a transfer; rounded means if stages differ."""
    if costs is not None and _is_alike(costs):
        times = (costs.forward[0], costs.backward[0], costs.weight[0], costs.p2p[0][1])
        return dict(zip(_TIMES, (time * unit.scale for time in times), strict=True))
    table, p = timeline.costs, timeline.schedule.placement.pipeline_size
    hops = [hop for hop in (*table.forward_hop, *table.backward_hop) if hop > 0]
    means = [sum(times) / p for times in (table.forward, table.backward, table.weight)]
    means.append(sum(hops) / len(hops) if hops else 0.0)
    return {
        name: float(f"{mean * unit.scale:.4g}") for name, mean in zip(_TIMES, means, strict=True)
    }


def _choices(schedule: Schedule) -> str | None:
    """Return the flags that a schedule needs besides its name; None where it has no name."""
    if schedule.name not in catalog.names():
        return None
    family, chunks = catalog.family(schedule.name), schedule.placement.chunks
    choices = [f"--chunks {chunks}"] if family.takes_chunks else []
    if family.takes_group_size:
        stage = schedule.placement.stages_of[0][0]
        group = next(
            (i for i, p in enumerate(schedule.ranks[0]) if p.stage != stage),
            schedule.num_microbatches,
        )
        choices.append(f"--group-size {group}")
    return " ".join(choices)
