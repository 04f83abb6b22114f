"""Pairs, a forward and a backward in one pass: their rules, times, messages and memory."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import drawn_sizes
import hypothesis
import pytest
from hypothesis import strategies as st

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules.bounds import lower_bound
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.families import dualpipe_v_order, overlapped
from megatron_zb.schedules.features.pairs import Communication, search_pairs, without_communication
from megatron_zb.schedules.lowering import (
    Run,
    RunPair,
    Send,
    WaitReceive,
    lower,
    peak_with_messages,
    rollback,
    runs_of,
)
from megatron_zb.schedules.passes import Message, Pair, Pass, PassKind
from megatron_zb.schedules.placement import Placement, looped, v_shape, wave
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.search import kernels
from megatron_zb.schedules.search.hill_climbing import Effort
from megatron_zb.schedules.search.place_w import fuse_for_free, join_all, split_all
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.stage_costs import communicates

F, B, W, BW = PassKind.F, PassKind.B, PassKind.W, PassKind.BW


def equal_costs(p: int, comm: float = 0.5, pair_loss: float = 0.0) -> Costs:
    """Costs of a microbatch on a whole rank: F, B, W = 1, 1.2, 0.8 and a latency of 0.05."""
    costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.2, weight=0.8, p2p=0.05)
    return costs.having(Communication(forward=comm, backward=comm, pair_loss=pair_loss))


def two_ranks() -> Schedule:
    """Rank 0 runs F of microbatch 2 and BW of microbatch 0 as one."""
    ranks = (
        (*(Pass(F, 0, j) for j in range(3)), *(Pass(BW, 0, j) for j in range(3))),
        tuple(Pass(kind, 1, j) for j in range(3) for kind in (F, BW)),
    )
    pairs = frozenset({Pass(F, 0, 2)})
    return Schedule("two ranks", looped(2, 1), 3, ranks, pairs=pairs).validate()


def test_a_pair_waits_for_both_inputs_and_ends_both_outputs() -> None:
    """Rank 1: F0 from 1.55 to 3.05, BW0 to 5.55; F and BW of rank 0 begin together at 5.6."""
    timeline = simulate(two_ranks(), equal_costs(2))
    assert timeline.start[0][2:4] == pytest.approx([5.6, 5.6])
    assert timeline.end[0][2:4] == pytest.approx([8.6, 8.6]), "1 + 1.2 + .8 hide .5 and .5"
    second_f = simulate(two_ranks().without_pairs(), equal_costs(2)).start[0][2]
    assert second_f == pytest.approx(3.0), "alone it waits for nothing"


@pytest.mark.parametrize(
    ("forward", "backward", "loss", "seconds"),
    [
        (0.5, 0.5, 0.0, 3.0),  # the sum of what is computed
        (2.0, 2.0, 0.0, 4.0),  # the sum of what is exchanged, as long as BW alone
        (0.0, 4.0, 0.0, 6.0),  # all of BW
        (2.5, 2.5, 0.0, 5.0),  # the sum of what is exchanged
        (0.5, 0.5, 0.1, 3.3),
    ],
)
def test_the_seconds_of_a_pair(
    forward: float, backward: float, loss: float, seconds: float
) -> None:
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.2, weight=0.8)
    costs = costs.having(Communication(forward=forward, backward=backward, pair_loss=loss))
    table = costs.for_placement(looped(2))
    pair = Pair(Pass(F, 0, 1), Pass(BW, 0, 0))
    assert table.pair_seconds(pair) == pytest.approx(seconds)
    assert table.duration(pair.forward) == pytest.approx(1.0 + forward)
    assert table.duration(pair.backward) == pytest.approx(2.0 + backward)
    assert table.duration(Pass(W, 0, 0)) == pytest.approx(0.8), "W has no all-to-all"


def test_communication_is_spread_over_the_stages_of_a_rank() -> None:
    table = equal_costs(4, comm=0.6).for_placement(v_shape(4))
    assert table.exchange[PassKind.F] == pytest.approx([0.3] * 8)
    assert table.seconds[PassKind.F] == pytest.approx([0.8] * 8)
    assert table.seconds[PassKind.B] == pytest.approx([0.9] * 8)
    assert not communicates(equal_costs(4, comm=0.0).for_placement(v_shape(4)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"forward": -1.0, "backward": 0.0}, "forward_comm is"),
        ({"forward": 0.1, "backward": [0.1]}, "backward_comm has 1 entries, 2 are needed"),
        ({"forward": 0.1, "backward": 0.1, "pair_loss": float("nan")}, "pair_loss is"),
    ],
)
def test_wrong_communication_is_refused(options: dict[str, float], said: str) -> None:
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0)
    with pytest.raises(UsageError, match=said):
        costs.having(Communication(**options))


@pytest.mark.parametrize("comm", [0.3, 0.5, 0.8])
def test_dualpipe_v_with_its_pairs_takes_the_published_time(comm: float) -> None:
    """p = 8, m = 32: 114.7 at .3 and 118.7 at .5, as another simulator has it."""
    schedule = dualpipe_v_order(8, 32).validate()
    timeline = simulate(schedule, equal_costs(8, comm))
    alone = simulate(schedule.without_pairs(), equal_costs(8, comm))
    assert timeline.makespan < 0.93 * alone.makespan
    assert timeline.makespan == pytest.approx({0.3: 114.7, 0.5: 118.7, 0.8: 124.7}[comm])
    assert max(timeline.peak_activation) == 8.5
    busy = [sum(e - s for s, e in set(zip(*of, strict=True))) for of in _spans(schedule, comm)]
    assert timeline.bubble_rate == pytest.approx(1 - sum(busy) / (8 * timeline.makespan))


def _spans(schedule: Schedule, comm: float) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    timeline = simulate(schedule, equal_costs(8, comm))
    return list(zip(timeline.start, timeline.end, strict=True))


@pytest.mark.parametrize(
    ("paired", "said"),
    [
        (Pass(F, 0, 0), r"rank 0, position 0, .*rule 'pair': a pair is an F and the B or BW"),
        (Pass(BW, 0, 2), r"rank 0, position 5, .*rule 'pair': a pair is an F and the B or BW"),
        (Pass(F, 1, 0), r"rank 1, position 0, .*rule 'pair': 1BW0 needs what it makes"),
        (Pass(F, 1, 7), r"rule 'pair': no rank runs 1F7"),
    ],
)
def test_what_is_no_pair_is_refused(paired: Pass, said: str) -> None:
    with pytest.raises(InvalidSchedule, match=said):
        replace(two_ranks(), pairs=frozenset({paired})).validate()


def test_pairs_that_wait_for_each_other_are_refused() -> None:
    """F1 of rank 0 feeds F1 of rank 1, whose pair makes the gradient that F1's pair waits for."""
    ranks = (
        (Pass(F, 0, 0), Pass(F, 0, 1), Pass(BW, 0, 0), Pass(BW, 0, 1)),
        (Pass(F, 1, 0), Pass(F, 1, 1), Pass(BW, 1, 0), Pass(BW, 1, 1)),
    )
    alone = Schedule("circle", looped(2, 1), 2, ranks).validate()
    circle = replace(alone, pairs=frozenset({Pass(F, 0, 1), Pass(F, 1, 1)}))
    assert circle.blocked() == "rank 0 at 0F1; rank 1 at 1F1"
    with pytest.raises(InvalidSchedule, match="rule 'progress'"):
        circle.validate()
    with pytest.raises(InvalidSchedule, match="rule 'progress'"):
        simulate(circle, equal_costs(2))
    with pytest.raises(InvalidSchedule, match="rule 'progress'"):
        lower(circle)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("p", [2, 3, 8])
def test_a_pair_takes_both_inputs_and_sends_both_outputs(p: int, captured: bool) -> None:
    schedule = dualpipe_v_order(p, 2 * p + 3).validate()
    program = lower(schedule, simulate(schedule, equal_costs(p)), captured=captured)
    for rank, instructions in enumerate(program.ranks):
        assert [run.work for run in runs_of(instructions)] == list(schedule.ranks[rank])
        pairs = [at for at in instructions if isinstance(at, RunPair)]
        assert {at.work.forward for at in pairs} == schedule.pairs & set(schedule.ranks[rank])
        assert pairs
        taken: set[Message] = set()
        made: set[Message] = set()
        for at in instructions:
            if isinstance(at, WaitReceive):
                taken.add(at.message)
            elif isinstance(at, Run | RunPair):
                runs = list(runs_of([at]))
                arrived = {m for run in runs for m in run.reads}
                assert {m for m in arrived if _travels(schedule, m)} == taken
                assert not made, "all was sent before the next pass"
                made = {run.makes for run in runs if run.makes is not None and not run.makes_local}
                taken = set()
            elif isinstance(at, Send):
                made.remove(at.message)
        assert not made


def _travels(schedule: Schedule, message: Message) -> bool:
    rank_of, stage = schedule.placement.rank_of, message.stage
    return rank_of[stage] != rank_of[stage + 1 if message.is_gradient else stage - 1]


def test_a_pair_holds_what_its_forward_takes_until_it_ends() -> None:
    """Rank 0 of two holds three microbatches while the pair runs, and two after it."""
    schedule = two_ranks()
    timeline = simulate(schedule, equal_costs(2))
    assert timeline.memory_steps(0)[2:4] == ((3.0, 3.0), (3.0, 2.0))
    program = lower(schedule, timeline)
    assert peak_with_messages(program, 0, timeline.costs, 0.0) == 3.0
    posted = peak_with_messages(program, 0, timeline.costs, 10.0)
    assert posted > 12.0


def test_a_rollback_ends_before_the_first_pair() -> None:
    program = lower(dualpipe_v_order(2, 6))
    for rank, end in zip(program.ranks, rollback(program).ends, strict=True):
        assert all(run.work.kind is F for run in runs_of(rank[:end]))
        assert not any(isinstance(at, RunPair) for at in rank[:end])


def test_pairs_stay_joined_where_passes_are_fused_and_split() -> None:
    schedule = dualpipe_v_order(4, 12)
    split = split_all(schedule).validate()
    assert split.pairs == schedule.pairs and not any(
        p.kind is BW for rank in split.ranks for p in rank
    )
    assert join_all(split).validate().pairs == schedule.pairs
    again = fuse_for_free(split, equal_costs(4)).validate()
    for rank, passes in enumerate(again.ranks):
        paired = (again.pair_at(rank, i) for i in range(len(passes)))
        assert all(pair.backward.kind is B for pair in paired if pair is not None)
    before, after = (simulate(s, equal_costs(4)).makespan for s in (split, again))
    assert after <= before * (1 + 1e-9)


def test_an_evaluation_has_no_pairs() -> None:
    forwards = dualpipe_v_order(2, 4).forwards().validate()
    assert not forwards.pairs
    assert not any(isinstance(at, RunPair) for rank in lower(forwards).ranks for at in rank)


@pytest.mark.parametrize(("chunks", "alone", "paired"), [(2, 143.5, 118.7), (4, 138.1, 117.45)])
def test_interleaved_with_overlap_is_megatrons(chunks: int, alone: float, paired: float) -> None:
    """At .5: the figures of another simulator, with one forward more of warm-up."""
    costs = equal_costs(8)
    given: dict[str, Any] = {"pipeline_size": 8, "num_microbatches": 32, "chunks": chunks}
    schedule = schedules.build("interleaved", **given, costs=costs)
    assert schedule == overlapped(8, 32, chunks)
    upstream = schedules.build("interleaved", **given)
    assert not upstream.pairs
    assert simulate(upstream, costs).makespan == pytest.approx(alone)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == pytest.approx(paired)
    more = max(timeline.peak_activation) - max(simulate(upstream, costs).peak_activation)
    assert 0 < more <= 0.5


def test_interleaved_keeps_a_limit_that_pairs_would_break() -> None:
    costs = equal_costs(8)
    given: dict[str, Any] = {"pipeline_size": 8, "num_microbatches": 32}
    schedule = schedules.build("interleaved", **given, costs=costs, memory_limit=11.5 / 8)
    assert not schedule.pairs


_communication = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.8, 2.0])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, Costs]:
    """A zig-zag or a loop with costs and a limit of its own for every rank."""
    p, m = draw(st.integers(2, 5)), draw(st.integers(1, 7))
    chunks = draw(st.sampled_from([1, 2, 3, 4]))
    place = draw(st.sampled_from([looped(p, chunks), wave(p, chunks)]))
    times = [draw(st.lists(st.floats(0.2, 2.0), min_size=p, max_size=p)) for _ in range(3)]
    costs = Costs.of_slices(
        pipeline_size=p, forward=times[0], backward=times[1], weight=times[2], p2p=0.05
    ).having(
        Communication(
            forward=[draw(_communication) for _ in range(p)],
            backward=[draw(_communication) for _ in range(p)],
            pair_loss=draw(st.sampled_from([0.0, 0.03])),
        )
    )
    limit = tuple(draw(st.sampled_from([1.0, 1.5, 2.5, 6.0])) for _ in range(p))
    split = draw(st.booleans())
    return Problem(place, m, costs.for_placement(place), limit, split), costs


def _one_by_one(place: Placement, m: int, split: bool) -> Schedule:
    """Every microbatch through all stages before the next: the least memory."""
    backward = (B, W) if split else (BW,)
    ranks = tuple(
        tuple(
            Pass(kind, stage, j)
            for j in range(m)
            for kinds, stages in (((F,), held), (backward, held[::-1]))
            for stage in stages
            for kind in kinds
        )
        for held in place.stages_of
    )
    return Schedule("one by one", place, m, ranks)


@hypothesis.settings(max_examples=60 if drawn_sizes.IS_FULL else 25, deadline=None)
@hypothesis.given(problems())
def test_what_is_found_runs_within_its_memory_and_is_no_slower_than_what_was_known(
    drawn: tuple[Problem, Costs],
) -> None:
    problem, costs = drawn
    place, m = problem.placement, problem.num_microbatches
    known = _one_by_one(place, m, problem.split)
    effort = Effort(runs=8, moves=150)
    found = search_pairs("found", problem, effort, 0.0, [known]).validate()
    timeline, before = simulate(found, costs), simulate(known, costs)
    assert timeline.makespan <= before.makespan * (1 + 1e-12)
    for peak, most in zip(timeline.peak_memory, problem.limit, strict=True):
        assert peak <= most * (1 + 1e-6)
    bound = lower_bound(place, m, timeline.costs, problem.limit)
    assert timeline.makespan >= bound * (1 - 1e-9)
    for captured in (False, True):
        lower(found, timeline, captured=captured)
    lower(found)


@pytest.mark.parametrize("name", ["v-zb", "v-half", "dualpipe-v", "auto"])
@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 9)])
def test_pairs_are_no_slower_than_the_same_request_without_them(
    name: str, p: int, m: int, brief_searches: None
) -> None:
    costs = equal_costs(p, 0.5)
    at = {"memory_limit": 1.0, "placement": v_shape(p)}
    limit: dict[str, Any] = at if name == "auto" else {}
    given: dict[str, Any] = {"pipeline_size": p, "num_microbatches": m}
    paired = schedules.build(name, **given, costs=costs, **limit)
    alone = schedules.build(name, **given, costs=without_communication(costs), **limit)
    assert not alone.pairs
    assert simulate(paired, costs).makespan <= simulate(alone, costs).makespan * (1 + 1e-9)
    allowed = max(simulate(alone, costs).peak_activation)
    promised = schedules.catalog.family(name).peak
    allowed = max(allowed, p if promised is None else promised(p, m))
    assert max(simulate(paired, costs).peak_activation) <= allowed + 1e-9


def drawn_costs(rng: random.Random, p: int) -> Costs:
    """Costs of 2p stages that all differ."""

    def each(low: float, high: float) -> list[float]:
        return [rng.uniform(low, high) for _ in range(2 * p)]

    return Costs.of_slices(
        pipeline_size=p,
        forward=each(0.5, 1.5),
        backward=each(0.5, 1.5),
        weight=each(0.3, 1),
        p2p=0.05,
        activation=each(0.5, 1.5),
    ).having(Communication(forward=each(0, 0.8), backward=each(0, 0.8)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", drawn_sizes.first(1, [3, 5, 6, 7, 8]))
def test_auto_is_no_slower_than_a_named_schedule_with_pairs(seed: int) -> None:
    rng = random.Random(seed)
    p = rng.choice([2, 3, 4])
    m, costs = rng.randint(p, 3 * p), drawn_costs(rng, p)
    limit = rng.choice([0.6, 0.8, 1.0, 1.5])

    def seconds(name: str, **more: Any) -> float:
        schedule = schedules.build(
            name, pipeline_size=p, num_microbatches=m, costs=costs, memory_limit=limit, **more
        )
        return simulate(schedule, costs).makespan

    best = seconds("auto", placement=v_shape(p))
    for name in ("v-zb", "v-half", "v-min", "1f1b-v", "dualpipe-v"):
        assert best <= seconds(name) * (1 + 1e-9)


def test_pairs_pay_where_there_is_communication() -> None:
    costs = equal_costs(4, 0.5)
    given: dict[str, Any] = {"pipeline_size": 4, "num_microbatches": 16}
    paired = schedules.build("v-zb", **given, costs=costs)
    alone = schedules.build("v-zb", **given, costs=without_communication(costs))
    assert paired.pairs
    assert paired.report is not None and paired.report.gap >= 0
    assert simulate(paired, costs).makespan < 0.97 * simulate(alone, costs).makespan


def test_costs_without_communication_give_schedules_without_pairs() -> None:
    costs = equal_costs(4, 0.0)
    plain = Costs.uniform(pipeline_size=4, forward=1.0, backward=1.2, weight=0.8, p2p=0.05)
    given: dict[str, Any] = {"pipeline_size": 4, "num_microbatches": 8}
    for name in ("v-half", "interleaved", "dualpipe-v"):
        built = [schedules.build(name, **given, costs=each) for each in (costs, plain)]
        assert built[0] == built[1] and not built[0].pairs


@pytest.mark.skipif(not kernels.available(), reason="numba compiles the inner loops")
@pytest.mark.parametrize("split", [False, True])
def test_compiled_inner_loops_find_the_same(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    costs, place = equal_costs(3), v_shape(3)
    problem = Problem(place, 5, costs.for_placement(place), (2.0,) * 3, split)
    known = [_one_by_one(place, 5, split)]
    found = []
    for made in (kernels.Plain, kernels.Compiled):
        monkeypatch.setattr("megatron_zb.schedules.features.pairs.engine", lambda _, m=made: m())
        found.append(search_pairs("found", problem, Effort(60, 2000), 0.0, known))
    assert found[0] == found[1]


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 2), (3, 4), (4, 6), (5, 13)])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_with_overlap_runs_at_every_size(p: int, m: int, chunks: int) -> None:
    """A rank whose forwards all come before its backwards joins none: it would wait for ever."""
    schedule = overlapped(p, m, chunks).validate()
    lower(schedule)
    assert bool(schedule.pairs) or m < 2 * p


def test_no_pair_takes_longer_by_default() -> None:
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0)
    hiding = costs.having(Communication(forward=0.5, backward=0.5))
    table = hiding.for_placement(v_shape(2))
    pair = Pair(Pass(PassKind.F, 0, 1), Pass(PassKind.B, 3, 0))
    # each stage has half of a rank's second, and exchanges for a quarter of one
    assert table.pair_seconds(pair) == pytest.approx(0.5 + 0.5)
