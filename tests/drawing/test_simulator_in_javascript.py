"""The simulator of the pages: every time is the package's own, to the last bit."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from browser import find_browser
from cost_tables import changed
from javascript import MISSING, Evaluate, find_node, in_browser, in_node
from packaged_orders import packaged

from megatron_zb import schedules
from megatron_zb.drawing import html_drawing
from megatron_zb.drawing.chart import MILLISECONDS, memory_lines
from megatron_zb.schedules import Costs, Pass, PassKind, Schedule, Timeline
from megatron_zb.schedules.families import dualpipe_v_order
from megatron_zb.schedules.features.adapters import Adapter, Adapters
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.placement import Placement, looped
from megatron_zb.schedules.rules import LastFirstRules, TrainingRules
from megatron_zb.schedules.units import Units, with_columns

pytestmark = pytest.mark.skipif(find_node() is None and find_browser() is None, reason=MISSING)

TIMES = ("forward", "backward", "weight", "p2p")
COSTS = [(1.0, 1.0, 1.0, 0.0), (1.0, 1.2, 0.9, 0.05), (1.3, 1.7, 0.4, 0.3), (1.0, 2.0, 0.0, 0.1)]
_RESULT = (
    "{start: t.start, end: t.end, makespan: t.makespan, bubble: t.bubble, peaks: t.peaks,"
    " lines: t.lines, ranks: t.ranks.map((passes) =>"
    " passes.map((q) => [pipelines.kinds[q.kind], q.stage, q.microbatch]))}"
)


@pytest.fixture
def evaluate(request: pytest.FixtureRequest) -> Evaluate:
    if find_node() is not None:
        return in_node
    return partial(in_browser, request.getfixturevalue("browser"))


def of_the_reader(
    evaluate: Evaluate, order: html_drawing.Order, all_times: list[dict[str, float]]
) -> Any:
    """Timelines of an order on equal ranks, for several times of the passes."""
    return evaluate(
        f"(() => {{ const order = pipelines.decode({json.dumps(order)});"
        f" return {json.dumps(all_times)}.map((times) => {{"
        " const t = pipelines.timeline(order, pipelines.equalCosts(order.place, times));"
        f" return {_RESULT}; }}); }})()"
    )


def of_the_page(evaluate: Evaluate, timeline: Timeline, costs: str = "table") -> Any:
    """The timeline of a picture's data, for an expression of its table of costs."""
    data = json.dumps(html_drawing.data(timeline, "drawn", MILLISECONDS))
    return evaluate(
        f"(() => {{ const data = {data}; const order = pipelines.decode(data.order);"
        " const table = pipelines.costsOf(order.place, data.costs);"
        f" const t = pipelines.timeline(order, {costs}); return {_RESULT}; }})()"
    )


def check_timeline(found: dict[str, Any], timeline: Timeline) -> None:
    """Every time to the last bit."""
    passes = [[[*p] for p in rank] for rank in timeline.schedule.ranks]
    assert found["ranks"] == passes
    assert found["start"] == [list(times) for times in timeline.start]
    assert found["end"] == [list(times) for times in timeline.end]
    assert found["makespan"] == timeline.makespan
    assert found["bubble"] == pytest.approx(timeline.bubble_rate, abs=1e-12)
    for mine, line in zip(found["lines"], memory_lines(timeline), strict=True):
        assert mine["times"] == list(line.times)
        assert mine["held"] == pytest.approx(line.held, abs=1e-9)


@pytest.mark.parametrize("name", html_drawing.order_names())
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (4, 16), (8, 16)])
def test_times_agree_to_the_last_bit(name: str, p: int, m: int, evaluate: Evaluate) -> None:
    schedule = packaged(name, p, m)
    now = [dict(zip(TIMES, costs, strict=True)) for costs in COSTS]
    found = of_the_reader(evaluate, html_drawing.encode_order(schedule), now)
    for mine, times in zip(found, now, strict=True):
        check_timeline(mine, schedules.simulate(schedule, Costs.uniform(pipeline_size=p, **times)))


def test_pairs_agree_to_the_last_bit(evaluate: Evaluate) -> None:
    stages = range(8)
    costs = Costs.of_slices(
        pipeline_size=4,
        forward=[0.3 + 0.1 * s for s in stages],
        backward=[0.4 + 0.07 * s for s in stages],
        weight=[0.2 + 0.03 * s for s in stages],
        whole=[0.5 + 0.09 * s for s in stages],
        p2p=0.013,
    ).having(
        Communication(
            forward=[0.1 + 0.01 * s for s in stages],
            backward=[0.11 + 0.02 * s for s in stages],
            pair_loss=0.03,
        )
    )
    timeline = schedules.simulate(dualpipe_v_order(4, 10), costs)
    check_timeline(of_the_page(evaluate, timeline), timeline)


def unequal_stages() -> Costs:
    return Costs.of_slices(
        pipeline_size=4,
        forward=[0.7, 1.0, 1.1, 1.9],
        backward=[0.9, 1.3, 1.2, 2.3],
        weight=[0.4, 0.8, 0.9, 1.2],
        p2p=[[0.0 if a == b else 0.01 * (a + 2 * b) for b in range(4)] for a in range(4)],
        activation=[3e9, 2e9, 2e9, 5e9],
        held_for_weight=[1e9, 1e9, 5e8, 2e9],
    )


def test_unequal_stages_agree_to_the_last_bit(evaluate: Evaluate) -> None:
    costs = unequal_stages()
    timeline = schedules.simulate(packaged("v-half", 4, 8), costs)
    check_timeline(of_the_page(evaluate, timeline), timeline)
    for time in TIMES:  # twice a mean is twice every stage's
        before = dict.fromkeys(TIMES, 1.0)
        now = json.dumps({**before, time: 2.0})
        scaled = f"pipelines.scaledCosts(order.place, table, {json.dumps(before)}, {now})"
        if time == "p2p":
            other = replace(costs, p2p=tuple(tuple(2 * v for v in row) for row in costs.p2p))
        else:
            kind = {"forward": PassKind.F, "backward": PassKind.B, "weight": PassKind.W}[time]
            other = changed(costs, **{time: [2 * v for v in costs.seconds[kind]]})
        check_timeline(
            of_the_page(evaluate, timeline, scaled), schedules.simulate(timeline.schedule, other)
        )


# --- units that differ ----------------------------------------------------------------------------

ADAPTERS = (Adapter("french", 3, steps=2), Adapter("german", 2), Adapter("dutch", 1, steps=3))


@pytest.mark.parametrize("update", [0.0, 0.7])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1"])
def test_updates_of_adapters_agree_to_the_last_bit(
    name: str, update: float, evaluate: Evaluate
) -> None:
    """Whatever the reader's times are, W of all units come before the update, and F after it."""
    adapters = Adapters(ADAPTERS, update=update)
    schedule = schedules.build(name, pipeline_size=3, adapters=adapters)
    order = html_drawing.encode_order(schedule)
    assert (
        order["turns"]["U"][0] == [unit for unit, *_ in schedule.rules.spans]
        and "inputs" not in order
    )
    now = [{**dict(zip(TIMES, costs, strict=True)), "update": update} for costs in COSTS]
    for mine, costs in zip(of_the_reader(evaluate, order, now), COSTS, strict=True):
        times = dict(zip(TIMES, costs, strict=True))
        timeline = schedules.simulate(schedule, Costs.uniform(pipeline_size=3, **times))
        check_timeline(mine, timeline)
        kept_in_order(mine, schedule)


def kept_in_order(found: dict[str, Any], schedule: Schedule) -> None:
    """Check in the times themselves what an update waits for, and what waits for it."""
    at = {
        tuple(p): (start, end)
        for passes, starts, ends in zip(found["ranks"], found["start"], found["end"], strict=True)
        for p, start, end in zip(passes, starts, ends, strict=True)
    }
    checked, rules = 0, schedule.rules
    assert isinstance(rules, TrainingRules)
    for stage in range(schedule.placement.num_stages):
        for unit, last in rules.updates_on(stage):
            kind = "W" if ("W", stage, last) in at else "BW"
            assert at[kind, stage, last][1] <= at["U", stage, unit][0]
        for unit, by in rules.waits_on(stage):
            assert at["U", stage, by][1] <= at["F", stage, unit][0]
            checked += 1
    assert checked


def test_updates_agree_on_unequal_stages(evaluate: Evaluate) -> None:
    adapters = Adapters(ADAPTERS, update=0.3)
    schedule = schedules.build("v-zb", pipeline_size=4, adapters=adapters, costs=unequal_stages())
    timeline = schedules.simulate(schedule, unequal_stages())
    check_timeline(of_the_page(evaluate, timeline), timeline)


def passes_of(text: str) -> tuple[Pass, ...]:
    """Read passes such as ``0F1 0B1``."""
    return tuple(Pass(PassKind(it[1]), int(it[0]), int(it[2])) for it in text.split())


ROUTES = {
    "two directions": (
        Placement("both ways", 2, (0, 1, 1, 0)),
        Units.of(((0, 1), (2, 3))),
        ("0F0 3F1 3B1 3W1 0B0 0W0", "2F1 1F0 1B0 1W0 2B1 2W1"),
    ),
    "a stage left out": (
        looped(3),
        Units.of([(0, 1, 2), (0, 2)]),
        ("0F0 0F1 0B0 0B1 0W0 0W1", "1F0 1B0 1W0", "2F0 2B0 2F1 2B1 2W0 2W1"),
    ),
}


@pytest.mark.parametrize("name", ROUTES)
def test_units_with_routes_agree_to_the_last_bit(name: str, evaluate: Evaluate) -> None:
    placement, columns, ranks = ROUTES[name]
    table = Schedule(name, placement, len(columns), tuple(map(passes_of, ranks)))
    schedule = with_columns(table, columns).validate()
    costs = Costs.uniform(
        pipeline_size=placement.pipeline_size, forward=1.0, backward=1.5, weight=0.5, p2p=0.25
    )
    timeline = schedules.simulate(schedule, costs)
    assert "inputs" in html_drawing.encode_order(schedule)
    check_timeline(of_the_page(evaluate, timeline), timeline)


def test_backwards_that_begin_with_the_last_microbatch_keep_their_numbers(
    evaluate: Evaluate,
) -> None:
    ranks = tuple(
        (
            *(Pass(PassKind.F, rank, unit) for unit in range(3)),
            *(Pass(PassKind.BW, rank, unit) for unit in (2, 1, 0)),
        )
        for rank in range(2)
    )
    schedule = Schedule("last first", looped(2), 3, ranks, rules=LastFirstRules()).validate()
    assert html_drawing.decode_order(html_drawing.encode_order(schedule)).ranks == ranks
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0, p2p=0.25)
    timeline = schedules.simulate(schedule, costs)
    check_timeline(of_the_page(evaluate, timeline), timeline)
