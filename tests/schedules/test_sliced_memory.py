"""Slices that are recomputed or offloaded, to keep a memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_zb import schedules
from megatron_zb.drawing.chart import title_of
from megatron_zb.errors import UsageError
from megatron_zb.schedules import Costs, Schedule
from megatron_zb.schedules.features import recomputation
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.recompute_or_offload import (
    dropped_in_place,
    with_early_weights,
)
from megatron_zb.schedules.features.slices import SlicedRules, Slicing
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.request import Limit, Request, keeps
from megatron_zb.schedules.search.place_w import least_memory
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.simulator import simulate

pytestmark = pytest.mark.usefixtures("brief_searches")


@pytest.fixture(autouse=True)
def brief_search_for_what_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "SECONDS", 0.2)


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


@pytest.mark.long
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
            kept = simulate(all_kept, KEPT).makespan
            if schedule.recomputed or schedule.offloaded:  # never for nothing
                assert timeline.makespan < kept
            else:
                assert timeline.makespan <= kept + 1e-9
        seen.add(bool(schedule.recomputed or schedule.offloaded))
    assert True in seen
    # offload lets v-half run more forwards ahead, which is faster at every limit
    assert name != "v-half" or seen == ({True} if costs is OFFLOADED else {True, False})


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


def request_of(order: Schedule, costs: Costs) -> Request:
    """For the units of an order."""
    rules = order.rules
    assert isinstance(rules, SlicedRules)
    m = order.num_microbatches
    units = rules.slicing.costs(costs, m // rules.slicing.slices)
    return Request(len(order.ranks), m, units, Limit(), rules=rules)


def with_recomputation(order: Schedule, costs: Costs, limit: Sequence[float]) -> Schedule | None:
    """The order with the R that keep a limit, None where no number of R does."""
    request, feature = request_of(order, costs), costs.feature(Recomputation)
    assert feature is not None
    split = any(p.kind is PassKind.W for rank in order.ranks for p in rank)
    table = request.costs.for_placement(order.placement)
    sizes = order.placement, order.num_microbatches, table, tuple(limit), split
    found = list(feature.in_place(order, request, Problem(*sizes, rules=request.rules)))
    return found[0] if found else None


def least_with_recomputation(order: Schedule, costs: Costs) -> list[float]:
    """The memory of each rank that recomputes every slice that it can."""
    request = request_of(order, costs)
    table = request.costs.for_placement(order.placement)
    return least_memory(order.ranks, table, request.rules, drops=True)


def fitted(order: Schedule, costs: Costs, limit: Sequence[float]) -> list[Schedule]:
    return dropped_in_place(order, request_of(order, costs), tuple(limit))


def test_nothing_is_recomputed_where_there_is_room() -> None:
    order, costs = tiny()
    assert with_recomputation(order, costs, held(order, costs)) == order
    assert fitted(order, costs, held(order, costs)) == [order]


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
        found = fitted(without, costs, limit)[0]
        again = replace(found, rules=beside.rules)
        assert not keeps(held(again, costs), limit)
        fitting = fitted(beside, costs, limit)
        assert fitting and all(keeps(held(each, costs), limit) for each in fitting)


@pytest.mark.parametrize("joins", [False, True])
def test_weight_gradients_right_behind_their_b_hold_least(joins: bool) -> None:
    """That of a microbatch behind the B of its first slice, which is the last."""
    order = built("v-zb", KEPT, None, replace(SLICES, joins_weight=joins))
    early = with_early_weights(order).validate()
    assert [sorted(rank) for rank in early.ranks] == [sorted(rank) for rank in order.ranks]
    for rank in early.ranks:
        for before, behind in pairwise(rank):
            if behind.kind is PassKind.W:
                assert before == behind._replace(kind=PassKind.B)
    least = least_with_recomputation(order, RECOMPUTED)
    assert not keeps(held(order, RECOMPUTED), least)
    for each in (order, early):  # a W that stands too late comes earlier
        found = with_recomputation(each, RECOMPUTED, least)
        assert found is not None
        assert keeps(held(found.validate(), RECOMPUTED), least)


def test_the_order_that_holds_the_least_is_the_last_resort() -> None:
    """A joined W holds all slices of a microbatch, and no search starts below that."""
    slices = replace(SLICES, joins_weight=True)
    with pytest.raises(UsageError, match=r"limit of 0.02 of 1F1B: rank .* at least") as refused:
        built("v-half", RECOMPUTED, 0.02, slices)
    least = float(str(refused.value).split()[-3])
    schedule = built("v-half", RECOMPUTED, least, slices)
    assert max(simulate(schedule, RECOMPUTED).peak_memory) <= least * WHOLE * (1 + 1e-9)
    assert least < 1.0 / P  # all slices of a microbatch in both chunks


def test_less_than_a_microbatch_is_enough() -> None:
    """A rank keeps all slices of a microbatch before its first B, unless it recomputes some."""
    schedule = built("v-zb", RECOMPUTED, 0.13)
    timeline = simulate(schedule, RECOMPUTED)
    last = schedule.placement.num_stages - 1
    assert any(stage == last for stage, _ in schedule.recomputed)
    peak = max(timeline.peak_microbatches)
    assert peak == pytest.approx(max(timeline.peak_memory))  # of a microbatch a rank
    assert max(timeline.peak_activation) / N < peak <= 0.13 * P * (1 + 1e-9) < 1
    share = f"{peak:.6g} microbatches ({peak / P:.2f} of 1F1B's)"
    assert title_of(timeline).endswith(f"peak activation memory {share}")


def test_slices_of_the_last_stage_move_too() -> None:
    schedule = built("v-zb", OFFLOADED, 0.1)
    timeline = simulate(schedule, OFFLOADED)
    last = schedule.placement.num_stages - 1
    assert any(stage == last for stage, _ in schedule.offloaded)
    assert max(timeline.peak_microbatches) == pytest.approx(max(timeline.peak_memory))
    assert max(timeline.peak_activation) / N < max(timeline.peak_memory) <= 0.1 * P * (1 + 1e-9)
