"""Activations that are recomputed: rules, times, memory, bounds and search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import drawn_sizes
import hypothesis
import pytest
from brief_searches import briefly
from drawn_limits import within_a_limit
from hypothesis import strategies as st

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules import interchange
from megatron_zb.schedules.bounds import lower_bound
from megatron_zb.schedules.costs import Costs, with_all_kept
from megatron_zb.schedules.features import recomputation
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.lowering import Run, lower, peak_with_messages
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import looped, wave
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.search import kernels
from megatron_zb.schedules.search.hill_climbing import Effort
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.simulator import simulate

F, B, W, BW, R = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.R


def costs_of(p: int, kept: float = 0.1, **times: float) -> Costs:
    """Costs of a microbatch on a whole rank: F, B, W = 1, 1.2, 0.8 and a latency of 0.05."""
    usual = {"forward": 1.0, "backward": 1.2, "weight": 0.8, "p2p": 0.05} | times
    return Costs.uniform(pipeline_size=p, **usual).having(Recomputation(kept_input=kept))


def two_ranks() -> Schedule:
    """Rank 0 recomputes microbatch 0 while rank 1 runs its B."""
    ranks = (
        tuple(Pass(kind, 0, j) for kind, j in ((F, 0), (F, 1), (R, 0), (BW, 0), (BW, 1))),
        tuple(Pass(kind, 1, j) for j in range(2) for kind in (F, BW)),
    )
    return Schedule("two ranks", looped(2, 1), 2, ranks).validate()


def test_what_is_recomputed_holds_its_input_until_its_r() -> None:
    timeline = simulate(two_ranks(), costs_of(2))
    assert two_ranks().recomputed == {(0, 0)}
    # F0, F1 with 0's input; R0 adds the rest; BW frees a whole one
    assert timeline.memory_curve(0) == pytest.approx((0.1, 1.1, 2.0, 2.0, 1.0))
    assert timeline.peak_activation == (2.0, 1.0)
    # BW of rank 1 ends at 1.05 + 1 + 2; R runs meanwhile, from 2 to 3
    assert timeline.start[0] == pytest.approx((0.0, 1.0, 2.0, 4.1, 7.1))
    program = lower(two_ranks())
    table = costs_of(2).for_placement(looped(2, 1))
    assert peak_with_messages(program, 0, table, 0.0) == pytest.approx(2.0)
    again = [at for at in program.ranks[0] if isinstance(at, Run) and at.work.kind is R]
    assert again == [Run(Pass(R, 0, 0), (), None, False)], "it reads and sends nothing"


@pytest.mark.parametrize(
    ("rank", "passes", "said"),
    [
        (0, "F0 R1 F1 BW0 BW1", r"pass 0R1: rule 'recomputation': its F has not run yet"),
        (0, "F0 F1 BW0 R0 BW1", r"pass 0R0: rule 'recomputation': its B has run already"),
        (0, "F0 F1 R0 R0 BW0 BW1", r"pass 0R0: rule 'recomputation': it has run before"),
        (1, "F0 R0 BW0 F1 BW1", r"rule 'recomputation': the last stage's B follows its F at once"),
    ],
)
def test_what_cannot_be_made_again_is_refused(rank: int, passes: str, said: str) -> None:
    lines = list(two_ranks().ranks)
    lines[rank] = tuple(Pass(PassKind(text[:-1]), rank, int(text[-1])) for text in passes.split())
    with pytest.raises(InvalidSchedule, match=said):
        replace(two_ranks(), ranks=tuple(lines)).validate()


def test_a_table_keeps_r_and_an_evaluation_has_none() -> None:
    table = interchange.to_csv(two_ranks())
    assert "0R0" in table
    assert interchange.from_csv(table).ranks == two_ranks().ranks
    assert not two_ranks().forwards().validate().recomputed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Recomputation(kept_input=-1.0), "kept_input is"),
        (Recomputation(kept_input=0.1, seconds=[1.0]), "recompute has 1 entries, 2 are needed"),
    ],
)
def test_wrong_costs_are_refused(given: Recomputation, said: str) -> None:
    costs = Costs.uniform(pipeline_size=2, forward=1, backward=1, weight=1)
    with pytest.raises(UsageError, match=said):
        costs.having(given)


@pytest.mark.slow
def test_below_every_order_memory_is_had_by_dropping() -> None:
    """p = 4, a sixth of 1F1B: orders alone need a quarter, one microbatch in each chunk."""
    given: dict[str, Any] = {"pipeline_size": 4, "num_microbatches": 8, "memory_limit": 0.17}
    with pytest.raises(UsageError, match=r"needs at least 0\.25 of 1F1B"):
        schedules.build("v-half", **given, costs=with_all_kept(costs_of(4)))
    with briefly():
        found = schedules.build("v-half", **given, costs=costs_of(4, kept=0.05))
    assert found.recomputed
    assert max(simulate(found, costs_of(4, kept=0.05)).peak_memory) <= 0.17 * 4 + 1e-9
    with pytest.raises(UsageError, match=r"needs at least 0\.1375 of 1F1B"):
        schedules.build("v-half", **(given | {"memory_limit": 0.1}), costs=costs_of(4, kept=0.05))


@pytest.mark.slow
def test_a_limit_of_half_is_met_faster_by_dropping_some() -> None:
    given: dict[str, Any] = {"pipeline_size": 4, "num_microbatches": 16, "memory_limit": 0.5}
    costs = costs_of(4, kept=0.03)
    mixed = schedules.build("v-half", **given, costs=costs)
    kept = schedules.build("v-half", **given, costs=with_all_kept(costs))
    assert 0 < len(mixed.recomputed) < 128
    assert simulate(mixed, costs).makespan < 0.97 * simulate(kept, costs).makespan


def test_where_nothing_can_be_gained_nothing_is_recomputed() -> None:
    """Full memory: the order without R is as fast as its bound."""
    costs = costs_of(2)
    given: dict[str, Any] = {"pipeline_size": 2, "num_microbatches": 4, "memory_limit": 2.0}
    assert schedules.build("v-zb", **given, costs=costs).ranks == (
        schedules.build("v-zb", **given, costs=with_all_kept(costs)).ranks
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, Costs]:
    """A zig-zag or a loop with drawn costs of every rank, within a drawn memory limit."""
    p, m = draw(st.integers(2, 5)), draw(st.integers(1, 7))
    place = draw(st.sampled_from([looped, wave]))(p, draw(st.sampled_from([1, 2, 4])))
    hypothesis.assume(place.num_stages > 1)
    times = [draw(st.lists(st.floats(0.2, 2.0), min_size=p, max_size=p)) for _ in range(4)]
    held = draw(st.lists(st.floats(0.5, 2.0), min_size=p, max_size=p))
    costs = Costs.of_slices(
        pipeline_size=p,
        forward=times[0],
        backward=times[1],
        weight=times[2],
        p2p=0.05,
        activation=held,
        held_for_weight=[h * draw(st.floats(0.0, 1.0)) for h in held],
    ).having(Recomputation(kept_input=draw(st.floats(0.0, 0.2)), seconds=times[3]))
    return within_a_limit(draw, place, m, costs), costs


@hypothesis.given(problems())
@hypothesis.settings(max_examples=40 if drawn_sizes.IS_FULL else 10, deadline=None)
def test_every_search_keeps_rules_limit_and_bound(found: tuple[Problem, Costs]) -> None:
    problem, costs = found
    bound = lower_bound(problem.placement, problem.num_microbatches, problem.costs, problem.limit)
    schedule = recomputation.search_recompute("any", problem, Effort(30, 60), bound, [])
    if schedule is None:  # the W of other chunks may need the room
        return
    timeline = simulate(schedule.validate(), costs)
    for held, most in zip(timeline.peak_memory, problem.limit, strict=True):
        assert held <= most * (1 + 1e-8)
    assert timeline.makespan >= bound * (1 - 1e-9)
    lower(schedule, timeline)


@pytest.mark.skipif(not kernels.available(), reason="numba is not installed")
def test_compiled_or_not_the_result_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_of(3, kept=0.05)
    place = wave(3, 2)
    problem = Problem(place, 4, costs.for_placement(place), (1.2,) * 3)
    found = []
    for engine in (kernels.Plain, kernels.Compiled):
        made = engine()
        monkeypatch.setattr(recomputation, "engine", lambda passes, made=made: made)
        found.append(recomputation.search_recompute("any", problem, Effort(20, 200), 0.0, []))
    assert found[0] == found[1]
    assert found[0] is not None
    assert found[0].recomputed


@pytest.mark.slow
@hypothesis.given(st.integers(2, 4), st.integers(1, 8), st.floats(0.3, 1.0))
@hypothesis.settings(max_examples=drawn_sizes.SEARCHES, deadline=None)
def test_recomputation_and_offload_never_make_a_request_slower(
    p: int, m: int, limit: float
) -> None:
    given: dict[str, Any] = {
        "pipeline_size": p,
        "num_microbatches": m,
        "memory_limit": max(limit, 1.01 / p),
    }
    costs = costs_of(p, kept=0.05)
    mixed = schedules.build("v-zb", **given, costs=costs)
    kept = schedules.build("v-zb", **given, costs=with_all_kept(costs))
    assert simulate(mixed, costs).makespan <= simulate(kept, costs).makespan * (1 + 1e-9)
    assert mixed.report is not None
    assert mixed.report.makespan >= mixed.report.lower_bound * (1 - 1e-9)
