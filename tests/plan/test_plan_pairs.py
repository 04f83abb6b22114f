"""Pairs that hide the expert all-to-all, in plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from brief_searches import briefly
from small_models import WHOLE, a100, load, small

from megatron_zb.parsing import GIB
from megatron_zb.plan.features.pairs import PlanPairs
from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.rows import Prediction
from megatron_zb.plan.search import Plan, search
from megatron_zb.plan.settings import PlanJob
from megatron_zb.plan.stages import cut_into_stages, worth_a_simulation
from megatron_zb.plan.strategy import (
    MEGATRON_1F1B,
    MEGATRON_INTERLEAVED,
    MEGATRON_OVERLAP,
    Choices,
    candidates_of,
)
from megatron_zb.plan.table import flags, setting_of
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.simulator import simulate

FLAG = "--overlap-moe-expert-parallel-comm"
ONE = Choices(tensor=(1,), pipeline=(4,), microbatch=(4,), recompute=("none",), expert=(16,))


def experts(dense: int = 0, **sizes: Any) -> ModelConfig:
    shape = {"experts": 16, "top_k": 4, "ffn_hidden_size": 1024, "dense_layers": dense}
    return small(experts=shape, **sizes)


def plan(names: list[str], **changes: Any) -> Plan:
    """Experts lie on 16 of 64 GPUs: in two nodes, so that their all-to-all is over slow links."""
    first = PlanJob(experts(), a100(), 64, 60 * GIB, 512, 1024, ONE, features=WHOLE)
    with briefly():
        return search(replace(first, **changes), candidates_of(names), tries=1)


def rows_of(found: Plan) -> dict[str, Prediction]:
    return {row.candidate: row for row in found.ranked}


@pytest.fixture(scope="module")
def rows() -> dict[str, Prediction]:
    return rows_of(plan(["v-zb", "auto"]))


def test_megatrons_own_overlap_stands_beside_its_other_schedules(
    rows: dict[str, Prediction],
) -> None:
    hidden, shown = rows[MEGATRON_OVERLAP], rows[MEGATRON_INTERLEAVED]
    assert MEGATRON_1F1B in rows
    assert hidden.schedule is not None
    assert hidden.schedule.pairs
    assert hidden.seconds < shown.seconds
    assert FLAG in flags(hidden, 512)
    assert FLAG not in flags(shown, 512)
    assert not any(words.startswith("--pipeline-schedule") for words in flags(hidden, 512))


def test_a_schedule_with_pairs_takes_the_place_of_a_slower_one(rows: dict[str, Prediction]) -> None:
    row = rows["v-zb"]
    assert row.runs.overlaps_all_to_all
    assert row.schedule is not None
    assert row.schedule.pairs
    assert FLAG in flags(row, 512)
    assert setting_of(row).endswith(" pairs")


def test_the_bubble_of_a_row_counts_a_pair_once(rows: dict[str, Prediction]) -> None:
    """The all-to-all that a pass or a pair does not hide is work, as in rows without pairs."""
    for row in (rows["v-zb"], rows[MEGATRON_OVERLAP], rows[MEGATRON_INTERLEAVED]):
        assert row.schedule is not None
        assert row.costs is not None
        timeline = simulate(row.schedule, row.costs)
        assert row.schedule.num_microbatches == row.num_microbatches
        assert row.bubble == pytest.approx(timeline.bubble_rate, abs=1e-6)


def test_auto_is_as_fast_as_every_order_with_pairs(rows: dict[str, Prediction]) -> None:
    assert rows["auto"].seconds == min(row.seconds for row in rows.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"choices": replace(ONE, expert=(1,))},
        {"choices": replace(ONE, recompute=("full",))},
        {"post_validation": True},
        {"model": small(), "choices": replace(ONE, expert=None)},
    ],
    ids=["whole experts", "full recomputation", "post-validation", "no experts"],
)
def test_nothing_is_hidden_where_nothing_can_be(changes: dict[str, Any]) -> None:
    found = rows_of(plan(["v-half"], **changes))
    assert MEGATRON_OVERLAP not in found
    assert not any(row.runs.overlaps_all_to_all for row in found.values())


def test_passes_of_a_pair_compute_for_what_they_take_without_the_exchange() -> None:
    (candidate,) = candidates_of(["v-half"])[2:]
    asked = load(experts(), expert=8, data=8)
    hidden = cut_into_stages(asked, replace(candidate, overlaps_all_to_all=True), None)
    assert hidden is not None
    whole = replace(hidden, features=())
    assert hidden.hidden == tuple(
        pytest.approx(len(layers) * asked.all_to_all(0)) for layers in hidden.layers_of
    )
    assert sum(hidden.hidden) > 0
    table, alone = (
        staged.costs(blocking=False).for_placement(staged.placement) for staged in (hidden, whole)
    )
    for with_it, without in (
        (table.seconds[PassKind.F], alone.seconds[PassKind.F]),
        (table.seconds[PassKind.B], alone.seconds[PassKind.B]),
    ):
        assert with_it == pytest.approx(without)
    assert table.exchange[PassKind.F] == pytest.approx(hidden.hidden)


def test_layouts_count_what_pairs_hide_and_what_they_do_not() -> None:
    """Dense first layers weigh as much as others beside a hidden all-to-all, and less otherwise."""
    (candidate,) = candidates_of(["v-half"])[2:]
    overlapping = replace(candidate, overlaps_all_to_all=True)
    asked = load(experts(dense=4, layers=16), expert=8, data=8)
    found = worth_a_simulation(asked, overlapping, None)
    assert len(found) > 1
    assert {staged.features for staged in found} == {(PlanPairs(),)}
    assert found[0].interval(in_groups=False) == min(s.interval(in_groups=False) for s in found)
    assert len(worth_a_simulation(asked, candidate, None)) == 1
