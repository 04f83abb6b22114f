"""What drawn requests are built as: the same request gives the same schedule in every release.

A job that goes on from a checkpoint runs the passes that it ran before, and nobody's step becomes
longer by a change of the search that was not meant. The requests are those of
benchmarks/schedule_digest.py; one that is built otherwise, or refused in other words, is named.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
import schedule_digest
from recorded import OF_PYTHON, assert_as_recorded

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules import interchange, step_plan, waiting_kernels
from megatron_zb.schedules.bounds import lower_bound
from megatron_zb.schedules.request import Limit, Request
from megatron_zb.schedules.search import varied_passes

RECORDED = Path(__file__).parent / "recorded"
pytestmark = OF_PYTHON
COUNTS = {
    "plain": 60,
    "pairs": 6,
    "R": 5,
    "DH": 1,
    "R+DH": 1,
    "vocabulary": 6,
    "embedding": 4,
    "stages": 14,
    "lengths": 14,
    "slices": 14,
    "joined": 12,
    "slice lengths": 12,
}


def of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def number(value: float) -> str:
    return f"{value:.7g}"


def costs_of(pipeline_size: int) -> schedules.Costs:
    times = {"forward": 1.0, "backward": 1.1, "weight": 0.9, "p2p": 0.05}
    return schedules.Costs.uniform(pipeline_size=pipeline_size, **times)


def result(name: str, given: dict[str, Any]) -> str:
    """Describe the schedule of a request: its times, memory and messages, or why there is none."""
    sizes = f"{name} p={given['pipeline_size']} m={given['num_microbatches']}"
    try:
        schedule = schedules.build(name, **given)
    except UsageError as error:
        return f"{sizes}: {error}"
    costs = given["costs"]
    cut = given.get("slices")
    table = of_text(interchange.to_csv(schedule))
    if cut is not None:
        return f"{sizes}: passes {sum(map(len, schedule.ranks))}, table {table}"
    stages = costs.for_placement(schedule.placement)
    timeline = schedules.simulate(schedule, costs)
    program = schedules.lower(schedule, timeline)
    peaks = timeline.peak_activation
    waiting = waiting_kernels.waiting_kernels(program, stages)
    found = {
        "makespan": number(timeline.makespan),
        "bubble": number(timeline.bubble_rate),
        "back to back": number(timeline.bubble_rate_back_to_back),
        "peaks": ",".join(map(number, peaks)),
        "bound": number(lower_bound(schedule.placement, schedule.num_microbatches, stages, peaks)),
        "slots": program.send_slots,
        "waiting": of_text(repr(waiting)),
        "program": of_text(repr(program.ranks)),
        "captured": of_text(repr(schedules.lower(schedule, captured=True).ranks)),
        "table": table,
    }
    return f"{sizes}: " + ", ".join(f"{key} {value}" for key, value in found.items())


@pytest.mark.long
@pytest.mark.parametrize("kind", COUNTS)
def test_a_request_is_built_as_it_was(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != schedule_digest.PLAIN:
        for module, name, brief in schedule_digest.BRIEF:
            monkeypatch.setattr(module, name, brief)
    requests = schedule_digest.requests(kind, COUNTS[kind], seed=7)
    lines = [f"{i}: {result(*each)}" for i, each in enumerate(requests)]
    assert_as_recorded("\n".join(lines), RECORDED / f"{kind.replace(' ', '_')}.txt")


def test_a_step_of_unequal_lengths_is_planned_as_it_was() -> None:
    chance = random.Random(3)
    lines = []
    for name in ("1f1b", "zb-h1", "interleaved", "v-zb", "v-half", "wave"):
        for p, m in ((2, 6), (4, 8)):
            costs = costs_of(p)
            table = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs)
            lengths = step_plan.Lengths.of([chance.uniform(0.4, 2.0) for _ in range(m)])
            work = step_plan.AttentionWork.counted(0.2, 1.0)
            unequal = step_plan.costs_of_work(costs, lengths, work)
            limit = step_plan.usual_limit(table, costs, unequal, follows_costs=True)
            plan = step_plan.plan_step(table, unequal, [limit] * p)
            assert plan is not None
            seconds = schedules.simulate(plan.schedule, plan.costs).makespan
            said = of_text(interchange.to_csv(plan.schedule))
            peaks = ",".join(map(number, plan.peaks))
            lines.append(
                f"{name} p={p} m={m}: order {plan.order}, {number(seconds)}, {peaks}, table {said}"
            )
    assert_as_recorded("\n".join(lines), RECORDED / "unequal_steps.txt")


def test_passes_vary_as_they_did() -> None:
    lines = []
    for name in ("1f1b", "zb-h1", "v-zb", "v-half"):
        costs = costs_of(4)
        table = schedules.build(name, pipeline_size=4, num_microbatches=8, costs=costs)
        request = Request(4, 8, costs, Limit())
        lines.append(f"{name}: {number(varied_passes.mean_seconds(table, request))}")
    assert_as_recorded("\n".join(lines), RECORDED / "varied_passes.txt")
