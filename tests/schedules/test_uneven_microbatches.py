"""Microbatches that do not cost the same: times, memory, bounds and searches count each."""

from __future__ import annotations

from dataclasses import replace

import drawn_sizes
import pytest
from cost_tables import changed
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zb import schedules
from megatron_zb.drawing import html_drawing
from megatron_zb.errors import UsageError
from megatron_zb.schedules import Costs, Pass, PassKind, Schedule, simulate
from megatron_zb.schedules.placement import looped, v_shape
from megatron_zb.schedules.request import LimitTooSmall
from megatron_zb.schedules.search.kernels import Plain
from megatron_zb.schedules.search.priority_weights import PRESETS, PriorityWeights
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.runner import Runner

LENGTHS = (1, 2, 1, 4)
SEARCHED = ("zb-1p", "v-half", "1f1b-v")


def _costs(p: int, p2p: float = 0.125) -> Costs:
    return Costs.uniform(pipeline_size=p, forward=1.0, backward=1.25, weight=0.75, p2p=p2p)


def _build(name: str, p: int, m: int, costs: Costs) -> Schedule:
    return schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs)


def _ends(schedule: Schedule, costs: Costs, lengths: tuple[float, ...]) -> dict[Pass, float]:
    """Ends of all passes by relaxing every dependency until nothing changes."""
    placement = schedule.placement
    table, last = costs.for_placement(placement), placement.num_stages - 1
    ends = {p: 0.0 for rank in schedule.ranks for p in rank}

    def input_of(p: Pass) -> float:
        length = lengths[p.microbatch]
        if p.kind is PassKind.F and p.stage > 0:
            latency = table.latency[PassKind.F][p.stage - 1]
            return ends[Pass(PassKind.F, p.stage - 1, p.microbatch)] + latency * length
        if p.kind in (PassKind.B, PassKind.BW) and p.stage < last:
            latency, others = table.latency[PassKind.B][p.stage + 1], (PassKind.B, PassKind.BW)
            made = (ends.get(Pass(kind, p.stage + 1, p.microbatch), 0.0) for kind in others)
            return max(made) + latency * length
        return 0.0

    changed = True
    while changed:
        before = dict(ends)
        for rank in schedule.ranks:
            now = 0.0
            for p in rank:
                now = max(now, input_of(p)) + table.seconds[p.kind][p.stage] * lengths[p.microbatch]
                ends[p] = now
        changed = ends != before
    return ends


@pytest.mark.parametrize(("p2p", "expected"), [(0.0, 12.0), (0.5, 14.0)])
def test_forwards_of_two_ranks_by_hand(p2p: float, expected: float) -> None:
    forwards = _build("gpipe", 2, 4, _costs(2, p2p)).forwards()
    assert simulate(forwards, _costs(2, p2p).of_lengths(LENGTHS)).makespan == expected


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-2p", "interleaved", "v-half"])
def test_ends_are_those_of_a_relaxation(name: str) -> None:
    schedule = _build(name, 2, 4, _costs(2))
    timeline = simulate(schedule, _costs(2).of_lengths(LENGTHS))
    ends = _ends(schedule, _costs(2), LENGTHS)
    found = [end for rank in timeline.end for end in rank]
    assert found == pytest.approx([ends[p] for rank in schedule.ranks for p in rank])
    assert timeline.makespan != simulate(schedule, _costs(2)).makespan


def test_memory_counts_each_microbatch() -> None:
    costs = _costs(2).of_lengths(LENGTHS)
    timeline = simulate(_build("1f1b", 2, 4, costs), costs)
    assert timeline.peak_memory == (5.0, 4.0)  # 1 and 4 in flight on the first rank
    assert costs.one_f_one_b_peak() == 5.0


@pytest.mark.parametrize("placement", [looped(3), v_shape(3)], ids=str)
@pytest.mark.parametrize("split", [True, False])
def test_the_inner_loops_time_orders_as_the_simulator_does(
    placement: schedules.Placement, split: bool
) -> None:
    costs = _costs(3).of_lengths(LENGTHS)
    table = costs.for_placement(placement)
    limit = tuple(2 * sum(table.largest_activation[s] for s in h) for h in placement.stages_of)
    runner = Runner(Problem(placement, 4, table, limit, split), Plain())
    makespan = runner.makespan(PriorityWeights.from_preset(PRESETS[0], placement.chunks, 3))
    polished, best = runner.polished(runner.copied(), 200, 1.0, 0.0, 0)
    assert polished <= makespan
    for seconds, order in ((makespan, runner.copied()), (polished, best)):
        schedule = Schedule("found", placement, 4, runner.passes(order)).validate()
        timeline = simulate(schedule, costs)
        assert timeline.makespan == pytest.approx(seconds)
        assert max(timeline.peak_memory) <= max(limit) * (1 + 1e-9)


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("lengths", [(1, 2, 1, 4), (4, 1, 2, 1)], ids=str)
def test_a_search_for_uneven_costs_does_not_lose_to_one_for_even_costs(
    name: str, lengths: tuple[float, ...]
) -> None:
    costs = _costs(3).of_lengths(lengths)
    schedule = _build(name, 3, 4, costs)
    timeline = simulate(schedule, costs)
    replayed = simulate(_build(name, 3, 4, _costs(3)), costs)
    assert timeline.makespan <= replayed.makespan * (1 + 1e-9)
    assert schedule.report is not None
    assert schedule.report.lower_bound <= timeline.makespan * (1 + 1e-9)
    schedules.lower(schedule, timeline)


def test_uneven_costs_change_what_is_found() -> None:
    costs = _costs(3).of_lengths((4, 1, 1, 1, 2, 1))
    assert _build("zb-1p", 3, 6, costs).ranks != _build("zb-1p", 3, 6, _costs(3)).ranks


@pytest.mark.parametrize("name", SEARCHED)
def test_equal_lengths_are_even_costs(name: str) -> None:
    even = _build(name, 3, 4, _costs(3))
    assert _build(name, 3, 4, _costs(3).of_lengths([1.0] * 4)) == even


def test_equal_lengths_share_a_row() -> None:
    table = _costs(2).of_lengths(LENGTHS).for_placement(looped(2))
    assert table.of(0) is table.of(2)
    assert [count for count, _ in table.rows(4)] == [2, 1, 1]


def test_a_microbatch_may_recompute_alone() -> None:
    costs = _costs(2)
    again = changed(costs, backward=(2.25, 2.25))
    uneven = replace(costs, microbatches=(costs, again))
    timeline = simulate(_build("1f1b", 2, 2, costs), uneven)
    seconds = [timeline.costs.duration(Pass(PassKind.B, 0, j)) for j in (0, 1)]
    assert seconds == [1.25, 2.25]


def test_costs_of_another_number_of_microbatches_are_refused() -> None:
    costs = _costs(2).of_lengths(LENGTHS)
    with pytest.raises(UsageError, match="costs are for 4 microbatches, the schedule has 6"):
        _build("zb-1p", 2, 6, costs)
    with pytest.raises(UsageError, match="costs are for 4 microbatches, the schedule has 6"):
        simulate(_build("1f1b", 2, 6, _costs(2)), costs)


@pytest.mark.parametrize("lengths", [(), (1.0, 0.0), (1.0, float("inf"))], ids=str)
def test_lengths_are_positive_numbers(lengths: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="give positive numbers"):
        _costs(2).of_lengths(lengths)


def test_a_page_refuses_uneven_microbatches() -> None:
    table = _costs(2).of_lengths(LENGTHS).for_placement(looped(2))
    with pytest.raises(UsageError, match="microbatches that all cost the same"):
        html_drawing.costs(table)


@pytest.mark.slow
@settings(max_examples=60 if drawn_sizes.IS_FULL else 15)
@given(
    name=st.sampled_from(["zb-h1", "v-min", "v-half", "v-zb", "1f1b-v", "zb-2p"]),
    p=st.integers(2, 4),
    lengths=st.lists(st.floats(0.25, 8.0), min_size=2, max_size=12),
)
def test_a_family_keeps_its_share_of_1f1bs_memory_in_tokens(
    name: str, p: int, lengths: list[float]
) -> None:
    costs, m = _costs(p).of_lengths(lengths), len(lengths)
    peak = schedules.catalog.family(name).peak_microbatches(p, m)
    promised = peak / min(p, m) * costs.one_f_one_b_peak()
    try:
        found = simulate(_build(name, p, m, costs), costs)
    except LimitTooSmall as error:
        largest = max(lengths)  # in every chunk of a rank, which is one activation in all
        assert largest > promised
        assert error.needed == pytest.approx(largest)
    else:
        assert max(found.peak_memory) <= promised * (1 + 1e-9)


def test_a_refusal_of_unequal_microbatches_names_the_share_they_need() -> None:
    costs = _costs(4).of_lengths([1.0, 1.0, 1.0, 12.0, 1.0])
    with pytest.raises(LimitTooSmall, match=r"v-half cannot .* at least 0\.8 of 1F1B"):
        _build("v-half", 4, 5, costs)
