"""Pairs beside what is recomputed, and beside the passes of vocabulary parallelism."""

from __future__ import annotations

from typing import Any

import drawn_sizes
import hypothesis
import pytest
from drawn_limits import within_a_limit
from hypothesis import strategies as st

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules import interchange
from megatron_zb.schedules.bounds import lower_bound
from megatron_zb.schedules.costs import Costs, with_all_kept
from megatron_zb.schedules.features import pairs, recomputation
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import (
    Communication,
    search_paired_recompute,
    without_communication,
)
from megatron_zb.schedules.features.recomputation import Recomputation, runner_with_r
from megatron_zb.schedules.features.vocabulary import Vocabulary, with_prediction
from megatron_zb.schedules.lowering import RunPair, lower
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import looped, v_shape, wave
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search import kernels
from megatron_zb.schedules.search.hill_climbing import Effort
from megatron_zb.schedules.search.place_w import GapFiller
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.simulator import simulate

F, B, W, R, M, K = map(PassKind, "FBWRMK")


def costs_of(p: int, exchange: float = 0.5) -> Costs:
    """F, B, W of 1, 1.2 and 0.8 on a whole rank, and an exchange in F and in B."""
    costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.2, weight=0.8, p2p=0.05)
    costs = costs.having(Communication(forward=exchange, backward=exchange, pair_loss=0.03))
    return costs.having(Recomputation(kept_input=0.05))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, Costs]:
    """A zig-zag or a loop with drawn costs of every rank, within a drawn memory limit."""
    p, m = draw(st.integers(2, 4)), draw(st.integers(1, 6))
    place = draw(st.sampled_from([looped, wave]))(p, draw(st.sampled_from([2, 4])))
    times = [draw(st.lists(st.floats(0.2, 2.0), min_size=p, max_size=p)) for _ in range(6)]
    costs = Costs.of_slices(
        pipeline_size=p, forward=times[0], backward=times[1], weight=times[2], p2p=0.05
    ).having(Communication(forward=times[3], backward=times[4], pair_loss=0.03))
    costs = costs.having(Recomputation(kept_input=draw(st.floats(0.0, 0.2)), seconds=times[5]))
    return within_a_limit(draw, place, m, costs), costs


@hypothesis.given(problems())
@hypothesis.settings(max_examples=60 if drawn_sizes.IS_FULL else 20, deadline=None)
def test_what_is_found_keeps_rules_limit_and_bound(drawn: tuple[Problem, Costs]) -> None:
    """R stands right before its B, or before the pair of this, and never within a pair."""
    problem, costs = drawn
    place, m = problem.placement, problem.num_microbatches
    bound = lower_bound(place, m, problem.costs, problem.limit)
    found = search_paired_recompute("any", problem, Effort(30, 400), bound, [])
    if found is None:  # the W of other chunks may need the room
        return
    timeline = simulate(found.validate(), costs)
    for held, most in zip(timeline.peak_memory, problem.limit, strict=True):
        assert held <= most * (1 + 1e-8)
    assert timeline.makespan >= bound * (1 - 1e-9)
    for captured in (False, True):
        lower(found, timeline, captured=captured)
    for passes in found.ranks:
        for place_of, p in enumerate(passes):
            if p.kind is R:
                behind = passes[place_of + 1 :][:2]
                backward = behind[1] if behind[0] in found.pairs else behind[0]
                assert backward == p._replace(kind=B)
    again = interchange.from_csv(interchange.to_csv(found))
    assert (again.ranks, again.pairs) == (found.ranks, found.pairs)


@pytest.mark.full
@pytest.mark.skipif(not kernels.available(), reason="numba compiles the inner loops")
def test_compiled_inner_loops_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, place = costs_of(3), v_shape(3)
    problem = Problem(place, 5, costs.for_placement(place), (1.4,) * 3)
    found = []
    for made in (kernels.Plain, kernels.Compiled):
        for module in (recomputation, pairs):
            monkeypatch.setattr(module, "engine", lambda _, m=made: m())
        found.append(search_paired_recompute("any", problem, Effort(60, 2000), 0.0, []))
    assert found[0] == found[1]
    assert found[0] is not None and found[0].pairs and found[0].recomputed


def test_the_inner_loops_time_what_they_find_as_the_simulator_does() -> None:
    costs, place = costs_of(3), v_shape(3)
    problem = Problem(place, 6, costs.for_placement(place), (1.4,) * 3)
    found = search_paired_recompute("any", problem, Effort(60, 1000), 0.0, [])
    assert found is not None
    runner = runner_with_r(problem, Effort(1, 1), pairs=True)
    codes = runner.coded([[p for p in rank if p.kind is not R] for rank in found.ranks])
    m = problem.num_microbatches
    flags = [0] * runner.block
    for stage, microbatch in found.recomputed:
        flags[stage * m + microbatch] += 2
    for _, stage, microbatch in found.pairs:
        flags[stage * m + microbatch] += 1
    seconds, _ = runner.polished((codes, flags), 0, 0.0, 0.0, 0)
    assert seconds == pytest.approx(simulate(found, costs).makespan)


def test_what_is_made_again_exchanges_again() -> None:
    """Nothing hides it: R runs alone."""
    table = costs_of(4).for_placement(v_shape(4))
    assert table.seconds[PassKind.R] == table.seconds[PassKind.F] == (0.75,) * 8
    told = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0)
    told = told.having(Communication(forward=0.5, backward=0.5))
    told = told.having(Recomputation(kept_input=0.1, seconds=[1.2, 1.2]))
    assert told.for_placement(looped(2)).seconds[PassKind.R] == pytest.approx((1.7, 1.7))
    alone = without_communication(told).feature(Recomputation)
    assert alone is not None and alone.seconds == pytest.approx((1.7, 1.7))


@pytest.mark.long
@pytest.mark.full
def test_below_1f1bs_memory_pairs_with_recomputed_units_beat_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recomputation, "SECONDS", 2.0)
    costs = costs_of(4)
    given: dict[str, Any] = {"pipeline_size": 4, "num_microbatches": 12, "memory_limit": 0.5}
    made = {
        "both": costs,
        "pairs": with_all_kept(costs),
        "dropped": without_communication(costs),
    }
    built = {name: schedules.build("v-half", **given, costs=of) for name, of in made.items()}
    seconds = {name: simulate(schedule, costs).makespan for name, schedule in built.items()}
    both = built["both"]
    assert both.pairs and both.recomputed
    assert seconds["both"] < 0.97 * min(seconds["pairs"], seconds["dropped"])
    assert max(simulate(both, costs).peak_memory) <= 2.0 + 1e-9


def test_offload_has_no_pairs_to_go_with() -> None:
    costs = costs_of(2).having(Offload(seconds=0.1))
    with pytest.raises(UsageError, match=r"offload .* pairs of F and B keep every activation"):
        schedules.build("v-zb", pipeline_size=2, num_microbatches=3, memory_limit=1.0, costs=costs)


# --- vocabulary parallelism


def sharded(costs: Costs, more: str) -> Costs:
    lookup = 0.05 if more else None
    costs = costs.having(Vocabulary(output=2.0, weight=1.0, loss=0.05, held=0.1, lookup=lookup))
    return with_prediction(costs) if more == "prediction" else costs


@pytest.mark.parametrize("more", ["", "embedding", "prediction"])
@pytest.mark.parametrize("name", ["v-half", "v-zb", "interleaved", "1f1b-v"])
def test_pairs_beside_shards_are_no_slower_than_the_same_request_without(
    name: str, more: str, brief_searches: None
) -> None:
    costs = sharded(with_all_kept(costs_of(3)), more)
    given: dict[str, Any] = {"pipeline_size": 3, "num_microbatches": 9}
    joined = schedules.build(name, **given, costs=costs).validate()
    alone = schedules.build(name, **given, costs=without_communication(costs))
    timeline = simulate(joined, costs)
    assert not alone.pairs
    assert joined.pairs or name == "v-half"  # a brief search may find none in half the memory
    assert timeline.makespan <= simulate(alone, costs).makespan * (1 + 1e-9)
    assert joined.report is not None
    assert timeline.makespan >= joined.report.lower_bound * (1 - 1e-9)
    peak = schedules.catalog.family(name).peak_microbatches(3, 9) + 1
    assert max(timeline.peak_memory) <= peak + 1e-9
    for captured in (False, True):
        program = lower(joined, timeline, captured=captured)
        pairs = [at.work for rank in program.ranks for at in rank if isinstance(at, RunPair)]
        assert {pair.forward for pair in pairs} == joined.pairs
    lower(joined.forwards().validate())
    again = interchange.from_csv(interchange.to_csv(joined))
    assert (again.ranks, again.pairs, again.rules) == (joined.ranks, joined.pairs, joined.rules)


def test_a_filled_order_takes_the_time_of_its_pairs() -> None:
    """As the simulator has it; and W fills no gap within a pair."""
    first = [Pass(kind, 0, j) for kind in (F, B) for j in range(3)]
    last = [
        Pass(F, 1, 0),
        Pass(F, 1, 1),
        Pass(B, 1, 0),
        Pass(F, 1, 2),
        Pass(B, 1, 1),
        Pass(B, 1, 2),
    ]
    order, costs = (first, last), costs_of(2)
    table, pairs = costs.for_placement(looped(2)), frozenset({Pass(F, 1, 1), Pass(F, 1, 2)})
    problem = Problem(looped(2), 3, table, (3.0, 3.0))
    filler = GapFiller(problem, order, kernels.Plain(), pairs)
    for eagerness in (1.0, 0.0):
        filled = filler.fill(eagerness, of_shards=0.0)
        assert filled is not None
        ranks = filler.passes_of(filled)
        schedule = Schedule("filled", looped(2), 3, ranks, pairs=pairs).validate()
        makespan = simulate(schedule, costs).makespan
        assert filled.seconds(back_to_back=False) == pytest.approx(makespan)
        assert makespan < simulate(schedule.without_pairs(), costs).makespan - 0.5
