"""Slices that are recomputed or offloaded, to keep a memory limit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_zb import schedules
from megatron_zb.drawing.chart import title_of
from megatron_zb.errors import UsageError
from megatron_zb.schedules import Costs, Schedule
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.sliced_memory import (
    _with_early_weights,
    fitted,
    least_with_recomputation,
    with_recomputation,
)
from megatron_zb.schedules.features.slices import SlicedRules, Slicing
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.request import keeps
from megatron_zb.schedules.simulator import simulate

pytestmark = pytest.mark.usefixtures("brief_searches")

P, M, N = 4, 6, 4
KEPT = Costs.uniform(pipeline_size=P, forward=1.0, backward=1.0, weight=1.0)
RECOMPUTED = KEPT.having(Recomputation(kept_input=0.01))
OFFLOADED = KEPT.having(Offload(seconds=0.3))
WHOLE = KEPT.one_f_one_b_peak()
SLICES = Slicing.equal(N, attention=0.3, attention_backward=0.4, kept=0.03)


def built(name: str, costs: Costs, limit: float | None, slices: Slicing = SLICES) -> Schedule:
    return schedules.build(
        name, pipeline_size=P, num_microbatches=M, costs=costs, slices=slices, memory_limit=limit
    ).validate()


@pytest.mark.parametrize(
    "name",
    ["v-half", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v-zb", "v-min"))],
)
@pytest.mark.parametrize("costs", [RECOMPUTED, OFFLOADED], ids=["recomputed", "offloaded"])
def test_a_limit_is_kept_in_no_more_time(name: str, costs: Costs) -> None:
    """Than by keeping all, where that fits; below, by dropping or moving."""
    seen = set()
    for limit in (0.22, 0.3, 0.5, None):
        try:
            schedule = built(name, costs, limit)
        except UsageError as error:
            assert "cannot keep the memory limit" in str(error)
            assert limit == 0.22
            continue
        timeline = simulate(schedule, costs)
        if limit is not None:
            assert max(timeline.peak_memory) <= limit * WHOLE * (1 + 1e-9)
        try:
            all_kept = built(name, KEPT, limit)
        except UsageError:
            assert schedule.recomputed or schedule.offloaded
        else:
            assert timeline.makespan <= simulate(all_kept, KEPT).makespan + 1e-9
        seen.add(bool(schedule.recomputed or schedule.offloaded))
    assert seen == {True, False} or name != "v-half"


@pytest.mark.parametrize("costs", [RECOMPUTED, OFFLOADED], ids=["recomputed", "offloaded"])
def test_the_least_limit_is_named_in_the_users_terms(costs: Costs) -> None:
    """The refusal gives it as a share of 1F1B's memory, and a schedule for it can be built."""
    with pytest.raises(UsageError, match=r"limit of 0.02 of 1F1B: rank .* at least") as refused:
        built("v-half", costs, 0.02)
    least = float(str(refused.value).split()[-3])
    assert 0.02 < least <= 0.25  # what keeping all needs
    schedule = built("v-half", costs, least)
    timeline = simulate(schedule, costs)
    assert max(timeline.peak_memory) <= least * WHOLE * (1 + 1e-9)


def tiny() -> tuple[Schedule, Costs]:
    """An order of three stages, one microbatch in three slices and another, all kept."""
    costs = Costs.uniform(pipeline_size=3, forward=1.0, backward=1.0, weight=1.0)
    costs = costs.having(Recomputation(kept_input=0.05))
    slicing = Slicing((3.0, 2.0, 1.0), kept=0.02)
    order = schedules.build(
        "1f1b", pipeline_size=3, num_microbatches=2, costs=costs, slices=slicing
    )
    return order, costs


def held(order: Schedule, costs: Costs) -> list[float]:
    return list(simulate(order, costs).peak_memory)


def test_nothing_is_recomputed_where_there_is_room() -> None:
    order, costs = tiny()
    assert with_recomputation(order, costs, held(order, costs)) == order
    (same,) = fitted([order], costs, held(order, costs))
    assert same.schedule == order


def test_all_that_can_be_is_recomputed_at_the_least_limit() -> None:
    """Each R right before its B; below, nothing fits. The last stage recomputes slices, too."""
    order, costs = tiny()
    least = least_with_recomputation(order, costs)
    found = with_recomputation(order, costs, least)
    assert found is not None
    found.validate()
    assert keeps(held(found, costs), least)
    assert {stage for stage, _ in found.recomputed} == {0, 1, 2}
    for rank in found.ranks:
        for before, behind in pairwise(rank):
            if before.kind is PassKind.R:
                assert behind.kind is PassKind.BW
                assert (behind.stage, behind.microbatch) == (before.stage, before.microbatch)
    for short in range(3):
        less = [most - 0.01 * (rank == short) for rank, most in enumerate(least)]
        assert with_recomputation(order, costs, less) is None


def test_no_slice_could_be_kept_beside_the_others() -> None:
    """At any limit: keeping one more of those that are recomputed exceeds it."""
    order, costs = tiny()
    least, most = least_with_recomputation(order, costs), held(order, costs)
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        limit = [a + share * max(0.0, b - a) for a, b in zip(least, most, strict=True)]
        found = with_recomputation(order, costs, limit)
        assert found is not None
        assert keeps(held(found.validate(), costs), limit)
        for unit in found.recomputed:
            again = Pass(PassKind.R, *unit)
            ranks = tuple(tuple(p for p in rank if p != again) for rank in found.ranks)
            assert not keeps(held(replace(found, ranks=ranks), costs), limit), unit


def test_keys_and_values_of_recomputed_and_offloaded_slices_stay() -> None:
    """A limit that is kept with none of them is not kept with them."""
    order = built("1f1b", KEPT, None)
    of_rules = [replace(order, rules=SlicedRules(replace(SLICES, kept=k))) for k in (0.0, 0.2)]
    for costs in (RECOMPUTED, OFFLOADED):
        without, beside = of_rules
        *others, last = held(without, costs)  # the last rank keeps all
        limit = [*(0.6 * most for most in others), last]
        found = fitted([without], costs, limit)[0]
        again = replace(found.schedule, rules=beside.rules)
        assert not keeps(held(again, costs), limit)
        fitting = fitted([beside], costs, limit)
        assert fitting and all(keeps(each.peak_memory, limit) for each in fitting)


@pytest.mark.parametrize("joins", [False, True])
def test_weight_gradients_right_behind_their_b_hold_least(joins: bool) -> None:
    """That of a microbatch behind the B of its first slice, which is the last."""
    order = built("v-zb", KEPT, None, replace(SLICES, joins_weight=joins))
    early = _with_early_weights(order).validate()
    assert [sorted(rank) for rank in early.ranks] == [sorted(rank) for rank in order.ranks]
    for rank in early.ranks:
        for before, behind in pairwise(rank):
            if behind.kind is PassKind.W:
                assert before == behind._replace(kind=PassKind.B)
    least = least_with_recomputation(order, RECOMPUTED)
    assert with_recomputation(order, RECOMPUTED, least) is None
    assert with_recomputation(early, RECOMPUTED, least) is not None


def test_less_than_a_microbatch_is_enough() -> None:
    """A rank keeps all slices of a microbatch before its first B, unless it recomputes some."""
    schedule = built("v-zb", RECOMPUTED, 0.125)
    timeline = simulate(schedule, RECOMPUTED)
    last = schedule.placement.num_stages - 1
    assert any(stage == last for stage, _ in schedule.recomputed)
    peak = max(timeline.peak_microbatches)
    assert peak == pytest.approx(max(timeline.peak_memory))  # of a microbatch a rank
    assert max(timeline.peak_activation) / N < peak <= 0.125 * P * (1 + 1e-9) < 1
    share = f"{peak:.6g} microbatches ({peak / P:.2f} of 1F1B's)"
    assert title_of(timeline).endswith(f"peak activation memory {share}")


def test_slices_of_the_last_stage_move_too() -> None:
    schedule = built("v-zb", OFFLOADED, 0.1)
    timeline = simulate(schedule, OFFLOADED)
    last = schedule.placement.num_stages - 1
    assert any(stage == last for stage, _ in schedule.offloaded)
    assert max(timeline.peak_microbatches) == pytest.approx(max(timeline.peak_memory))
    assert max(timeline.peak_activation) / N < max(timeline.peak_memory) <= 0.1 * P * (1 + 1e-9)
