"""Overheads of a schedule that the seconds of a plan do not show."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console
from small_models import WHOLE, a100, small

from megatron_zb.parsing import GIB
from megatron_zb.plan import table
from megatron_zb.plan.prediction import overheads
from megatron_zb.plan.search import Plan, search
from megatron_zb.plan.settings import PlanJob
from megatron_zb.plan.strategy import Choices, candidates_of
from megatron_zb.schedules import lower, simulate
from megatron_zb.schedules.waiting_kernels import waiting_kernels


def plan(tensor: int) -> Plan:
    choices = Choices(tensor=(tensor,), pipeline=(4,), microbatch=(1,), recompute=("none",))
    gpus = 4 * tensor
    job = PlanJob(small(), a100(), gpus, 40 * GIB, 32, 1024, choices, features=WHOLE)
    return search(job, candidates_of(["zb-h1", "1f1b"]))


def test_waiting_kernels_are_those_of_the_replayed_program() -> None:
    (row,) = (row for row in plan(1).ranked if row.candidate == "zb-h1")
    found = overheads(row)
    assert found is not None and row.schedule is not None and row.costs is not None
    timeline = simulate(row.schedule, row.costs)
    ranks = waiting_kernels(lower(row.schedule, timeline), timeline.costs)
    assert found.waiting == pytest.approx(sum(rank.mean for rank in ranks) / 4)
    assert found.waiting > 0


def test_collectives_that_a_split_backward_exposes_are_a_share_of_the_iteration() -> None:
    rows = {row.candidate: row for row in plan(2).ranked}
    split, whole = overheads(rows["zb-h1"]), overheads(rows["1f1b"])
    assert split is not None and whole is not None
    load = rows["zb-h1"].load
    # Two reduce-scatters in each layer: half of the bytes of a microbatch travel to one other rank.
    link = load.device.collectives.in_node
    each = 2 * link.seconds(2 * load.tokens * load.model.hidden_size / 2)
    seconds = 32 * load.model.layers / 4 * each
    assert split.exposed == pytest.approx(seconds / rows["zb-h1"].seconds)
    assert whole.exposed == 0


def test_what_weight_gradients_are_too_short_for_is_exposed_under_megatron_too() -> None:
    (row,) = (row for row in plan(2).ranked if row.candidate == "zb-h1")
    collectives = row.load.device.collectives
    slow = collectives.model_copy(
        update={"in_node": collectives.in_node.model_copy(update={"latency": 1.0})}
    )
    device = row.load.device.model_copy(update={"collectives": slow})
    found = overheads(replace(row, load=replace(row.load, device=device)))
    assert found is not None
    weight = sum(row.load.layer(i).weight for i in range(row.load.model.layers))
    assert found.exposed == pytest.approx(32 * weight / 4 / row.seconds)


def test_megatrons_own_rows_have_none() -> None:
    rows = [row for row in plan(1).ranked if row.candidate.startswith("Megatron")]
    assert [overheads(row) for row in rows] == [None] * len(rows) != []


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_table_names_the_overheads_of_its_first_row(tensor: int) -> None:
    found = plan(tensor)
    first = next(row for row in found.ranked if row.candidate == "zb-h1")
    found = replace(found, ranked=(first, *found.ranked))
    console = Console(record=True, width=200)
    table.print_plan(found, console, 1)
    printed = console.export_text()
    beside = overheads(first)
    assert beside is not None
    assert f"zb-h1: on average, {beside.waiting:.2f} NCCL kernels for messages wait" in printed
    assert (f"a split backward cannot: they are {beside.exposed:.1%}" in printed) is (tensor == 2)
    row = table.as_json(found)["ranked"][0]
    assert row["waiting_kernels"] == beside.waiting
    assert row["exposed_tensor_parallel"] == beside.exposed
