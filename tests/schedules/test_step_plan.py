"""Plans of steps whose microbatches take unequal work."""

from __future__ import annotations

import random
from functools import cache
from statistics import median

import drawn_sizes
import pytest
from drawn_lengths import ATTENTION, KINDS, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules import Costs, Schedule, simulate
from megatron_zb.schedules.costs import with_frozen
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.request import keeps
from megatron_zb.schedules.search import kernels
from megatron_zb.schedules.step_plan import (
    AttentionWork,
    Lengths,
    StepPlan,
    costs_of_work,
    plan_forwards,
    plan_step,
    rules,
    usual_limit,
)

DRAWS = 20


def _costs(p: int) -> Costs:
    """Of a microbatch in whose F attention takes a fifth of what linear layers do."""
    return Costs.uniform(pipeline_size=p, forward=1.2, backward=1.5, weight=1.0, p2p=0.02)


@cache
def _table(name: str, p: int, m: int) -> Schedule:
    return schedules.build(name, pipeline_size=p, num_microbatches=m, costs=_costs(p))


def _gain(name: str, p: int, m: int, kind: str, seed: int) -> float:
    """What a plan saves of the given order under the table for equal microbatches, as a share.

    Checks that its memory is at most 1F1B's own, or that of a family's share.
    """
    table = _table(name, p, m)
    costs = costs_of_work(_costs(p), drawn(kind, m, seed), ATTENTION)
    share = schedules.catalog.family(name).peak_microbatches(p, m) / min(p, m)
    limit = [share * costs.one_f_one_b_peak()] * p
    plan = plan_step(table, costs, limit)
    assert plan is not None
    as_fed = simulate(table, costs)
    gain = as_fed.makespan / _checked(plan, costs, limit) - 1
    if keeps(as_fed.peak_memory, limit):
        assert gain >= -1e-9
    return gain


def _checked(plan: StepPlan, costs: Costs, limit: list[float]) -> float:
    """The seconds of a plan that is valid and within its limit, by the simulator."""
    assert sorted(plan.order) == list(range(plan.schedule.num_microbatches))
    plan.schedule.validate()
    in_order = costs.in_order(plan.order)
    assert plan.costs == in_order
    timeline = simulate(plan.schedule, in_order)
    assert timeline.peak_memory == pytest.approx(plan.peaks)
    assert keeps(timeline.peak_memory, limit)
    schedules.lower(plan.schedule, timeline)
    return timeline.makespan


@pytest.mark.slow
@pytest.mark.parametrize(("p", "m"), drawn_sizes.first(1, [(4, 8), (8, 16), (8, 32), (8, 4)]))
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_never_slower_than_the_given_order(p: int, m: int, kind: str) -> None:
    few = 4 if m == 32 else DRAWS
    gains = [_gain("v-zb", p, m, kind, seed) for seed in range(few)]
    if (p, m) == (4, 8):
        least = {"first fit": 0.03, "single": 0.06}.get(kind, 0.0)
        assert median(gains) >= least


@pytest.mark.parametrize("name", ["zb-h1", "v-half", "1f1b-v", "interleaved", "1f1b"])
def test_every_family_keeps_its_memory(name: str) -> None:
    for seed in range(5):
        _gain(name, 4, 8, "first fit", seed)


def test_a_planned_order_is_kept_if_asked_for() -> None:
    costs = costs_of_work(_costs(4), drawn("four", 8, 0), ATTENTION)
    plan = plan_step(_table("v-zb", 4, 8), costs, [1e9] * 4, keeps_order=True)
    assert plan is not None
    assert plan.order == tuple(range(8))
    assert plan.schedule.ranks != _table("v-zb", 4, 8).ranks


@pytest.mark.parametrize("name", ["interleaved", "v-half"])
def test_passes_are_kept_if_asked_for(name: str) -> None:
    table = _table(name, 4, 8)
    costs = costs_of_work(_costs(4), drawn("four", 8, 0), ATTENTION)
    plan = plan_step(table, costs, [1e9] * 4, keeps_passes=True)
    assert plan is not None
    assert plan.schedule.ranks == table.ranks
    assert plan.order != tuple(range(8))


def test_no_plan_is_found_where_the_longest_microbatch_is_too_long() -> None:
    costs = costs_of_work(_costs(4), Lengths.of([1.0] * 7 + [50.0]))
    longest = costs.for_placement(_table("v-half", 4, 8).placement).largest_activation
    needed = longest[0] + longest[-1]
    assert plan_step(_table("v-half", 4, 8), costs, [0.99 * needed] * 4) is None
    assert plan_step(_table("v-half", 4, 8), costs, [needed] * 4) is not None


def test_a_table_with_further_passes_keeps_them() -> None:
    """Such as those of a recomputation: the order of the microbatches is chosen alone."""
    costs = _costs(2).having(Recomputation(kept_input=0.05))
    table = schedules.build(
        "v-zb", pipeline_size=2, num_microbatches=4, costs=costs, memory_limit=0.4
    )
    assert table.recomputed
    unequal = costs_of_work(costs, Lengths.of([8.0, 1.0, 2.0, 4.0]))
    plan = plan_step(table, unequal, [1e9] * 2)
    assert plan is not None
    assert plan.schedule.ranks == table.ranks
    as_fed = simulate(table, unequal).makespan
    assert simulate(plan.schedule, plan.costs).makespan <= as_fed


@pytest.mark.parametrize("name", ["v-half", "v-zb", "zb-h1", "interleaved"])
def test_forwards_alone_are_never_slower_than_in_the_given_order(name: str) -> None:
    table = _table(name, 4, 8)
    for kind in KINDS:
        costs = costs_of_work(_costs(4), drawn(kind, 8, 1), ATTENTION)
        plan = plan_forwards(table, costs)
        given = plan_forwards(table, costs, keeps_order=True)
        plan.schedule.validate()
        assert given.order == tuple(range(8))
        seconds = [simulate(each.schedule, each.costs).makespan for each in (plan, given)]
        assert seconds[0] <= seconds[1] * (1 + 1e-9)


def test_compiled_and_plain_loops_find_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same effort: plain Python has time for less."""
    assert kernels.available(), "the tests' environment has numba"
    from megatron_zb.schedules import step_plan

    monkeypatch.setattr(step_plan, "COMPILED", step_plan.PLAIN)
    table = _table("v-zb", 4, 8)
    costs = costs_of_work(_costs(4), drawn("four", 8, 0), ATTENTION)
    limit = [costs.one_f_one_b_peak()] * 4
    plain = plan_step(table, costs, limit, engine=kernels.Plain())
    assert plain is not None
    assert plan_step(table, costs, limit, engine=kernels.fastest()) == plain


# --- lengths and their work


def test_rules_put_the_longest_in_the_middle_or_first() -> None:
    assert rules([3.0, 1.0, 2.0, 5.0, 4.0]) == [(1, 0, 3, 4, 2), (3, 4, 0, 2, 1)]


def test_passes_grow_with_what_they_compute() -> None:
    costs = Costs.of_slices(
        pipeline_size=1,
        forward=[2.0],
        backward=[3.0],
        weight=[1.0],
        activation=[4.0],
        whole=[3.6],
    )
    # a pair of tokens counts for half a token in F, for a quarter in B
    rows = costs_of_work(costs, Lengths.of([1.0, 3.0], [2.0, 6.0]), AttentionWork(0.5, 0.25))
    assert [row.seconds[PassKind.W][0] for row in rows.microbatches] == [0.5, 1.5]
    assert [row.memory["activation"][0] for row in rows.microbatches] == [2.0, 6.0]
    assert [row.seconds[PassKind.F][0] for row in rows.microbatches] == [1.0, 3.0]
    assert [row.seconds[PassKind.B][0] for row in rows.microbatches] == [1.5, 4.5]
    squared = costs_of_work(costs, Lengths.of([1.0, 3.0]), AttentionWork(1.0, 0.0))
    # F takes 1 + 1 and 3 + 9 tokens, 7 on average; B 1 and 3, W the same
    assert [row.seconds[PassKind.F][0] for row in squared.microbatches] == pytest.approx(
        [4 / 7, 24 / 7]
    )
    assert [row.seconds[PassKind.BW][0] for row in squared.microbatches] == pytest.approx(
        [1.8, 5.4]
    )
    links = costs_of_work(_costs(2), Lengths.of([1.0, 3.0]))
    assert [row.p2p[0][1] for row in links.microbatches] == pytest.approx([0.01, 0.03])
    both = costs_of_work(costs, Lengths.of([1.0, 3.0]), AttentionWork(0.0, 1.0))
    # B takes 2 / 7 and 12 / 7 of its 3 s, W 1 / 2 and 3 / 2 of its second, together 3.6 / 4 of it
    assert [row.seconds[PassKind.BW][0] for row in both.microbatches] == pytest.approx(
        [0.9 * (6 / 7 + 0.5), 0.9 * (36 / 7 + 1.5)]
    )


def test_frozen_weights_shorten_w_and_whole_backwards() -> None:
    costs = Costs.of_slices(
        pipeline_size=2,
        forward=[2.0] * 2,
        backward=[3.0] * 2,
        weight=[1.0] * 2,
        activation=[4.0] * 2,
        held_for_weight=[2.0] * 2,
        whole=[3.6] * 2,
    )
    frozen = with_frozen(costs_of_work(costs, Lengths.of([1.0, 3.0])), [0.75, 0.0])
    assert (frozen.seconds[PassKind.W], frozen.seconds[PassKind.B]) == ((0.25, 1.0), (3.0, 3.0))
    assert frozen.seconds[PassKind.BW] == pytest.approx((2.85, 3.6))
    assert frozen.memory["held_for_weight"] == (0.5, 2.0)
    assert [row.seconds[PassKind.W] for row in frozen.microbatches] == [(0.125, 0.5), (0.375, 1.5)]


@settings(max_examples=50)
@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=8))
def test_equal_work_in_all_is_that_of_the_model(tokens: list[float]) -> None:
    rows = costs_of_work(_costs(2), Lengths.of(tokens), ATTENTION).microbatches
    one = _costs(2)
    for kind in (PassKind.F, PassKind.B, PassKind.W):
        total = sum(row.seconds[kind][0] for row in rows)
        assert total == pytest.approx(len(tokens) * one.seconds[kind][0])
    held = sum(row.memory["activation"][0] for row in rows)
    assert held == pytest.approx(len(tokens) * one.memory["activation"][0])


@pytest.mark.parametrize(
    ("tokens", "squares", "expected"),
    [
        ([], None, "tokens are []"),
        ([1.0, -1.0], None, "give positive numbers"),
        ([1.0, float("nan")], None, "give positive numbers"),
        ([1.0, 2.0], [1.0], "2 tokens and 1 squares"),
    ],
    ids=str,
)
def test_lengths_are_checked(
    tokens: list[float], squares: list[float] | None, expected: str
) -> None:
    with pytest.raises(UsageError) as found:
        Lengths.of(tokens, squares)
    assert expected in str(found.value)


def test_shapes_go_with_their_microbatches() -> None:
    lengths = Lengths.of([3.0, 5.0], shapes=[(3, 1), (5, 2)])
    assert lengths.in_order([1, 0]) == Lengths.of([5.0, 3.0], shapes=[(5, 2), (3, 1)])
    assert Lengths.of([3.0]).in_order([0]).shapes is None


@pytest.mark.parametrize("shapes", [[(3, 1)], [(3, 1), (0, 1)]])
def test_shapes_are_of_every_microbatch(shapes: list[tuple[int, int]]) -> None:
    with pytest.raises(UsageError, match="give a sequence length and a batch size"):
        Lengths.of([3.0, 5.0], shapes=shapes)


@pytest.mark.parametrize("seed", drawn_sizes.first(3, range(10)))
def test_a_table_whose_passes_keep_their_order_runs_nearly_equal_microbatches(seed: int) -> None:
    """Vocabulary parallelism has passes that a plan does not move."""
    rng = random.Random(seed)
    costs = _costs(4).having(Vocabulary(2.0, 1.0, held=1.0))
    table = schedules.build("v-half", pipeline_size=4, num_microbatches=9, costs=costs)
    lengths = Lengths.of([1.0 + 0.1 * rng.random() for _ in range(9)])
    unequal = costs_of_work(costs, lengths)
    limit = usual_limit(table, costs, unequal, follows_costs=True)
    assert plan_step(table, unequal, [limit] * 4) is not None


@pytest.mark.slow
@pytest.mark.parametrize("seed", drawn_sizes.first(3, range(10)))
def test_a_limit_is_kept_without_recomputation_if_no_order_of_its_table_keeps_it(seed: int) -> None:
    plain = _costs(4)
    costs = plain.having(Recomputation(kept_input=0.1, seconds=plain.seconds[PassKind.F]))
    table = schedules.build(
        "v-zb", pipeline_size=4, num_microbatches=6, costs=costs, memory_limit=0.7
    )
    assert table.recomputed
    rng = random.Random(seed)
    unequal = costs_of_work(costs, Lengths.of([rng.randint(2, 16) for _ in range(6)]))
    limit = [0.7 * unequal.one_f_one_b_peak()] * 4
    plan = plan_step(table, unequal, limit)
    assert plan is not None
    _checked(plan, unequal, limit)
