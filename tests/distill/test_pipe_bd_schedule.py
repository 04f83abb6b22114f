"""Pipe-BD as a schedule: its rules, its simulation, its program, and how far ranks run ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendezvous import finishes

from megatron_zb.distill.schedule.distribution import (
    BlockCosts,
    Distribution,
    RelayCosts,
    evenly,
)
from megatron_zb.distill.schedule.pipe_bd import pipe_bd
from megatron_zb.distill.schedule.relay import Relay
from megatron_zb.distill.schedule.step_by_step import step_by_step
from megatron_zb.errors import UsageError
from megatron_zb.schedules import InvalidSchedule, Pass, PassKind, Schedule, lower, simulate
from megatron_zb.schedules.lowering import PostReceive, Run, Send, WaitReceive, unfinished
from megatron_zb.schedules.passes import Pass as P
from megatron_zb.schedules.placement import grouped
from megatron_zb.schedules.simulator import Timeline, peak_held_chunks

T, S, U = PassKind.T, PassKind.S, PassKind.U
HYBRID = Distribution.of([(2, 1), (1, 2), (3, 4), (1, 1)])

degrees = st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=5)
distributions = degrees.map(lambda found: Distribution.of((1, k) for k in found))
times = st.floats(0.01, 5)


def timeline_of(
    distribution: Distribution, microbatches: int, steps: int, run_ahead: int, costs: BlockCosts
) -> Timeline:
    schedule = pipe_bd(distribution, microbatches, steps, run_ahead).validate()
    return simulate(schedule, RelayCosts(costs, distribution))


def begins_and_ends(timeline: Timeline, rank: int) -> tuple[list[float], list[float]]:
    """When a rank begins each step and ends it."""
    passes = timeline.schedule.ranks[rank]
    updates = [i for i, p in enumerate(passes) if p.kind is U]
    begins = [0, *(i + 1 for i in updates[:-1])]
    return [timeline.start[rank][i] for i in begins], [timeline.end[rank][i] for i in updates]


def test_a_rank_relays_studies_and_updates() -> None:
    schedule = pipe_bd(Distribution.of([(1, 1), (1, 2)]), 2, steps=2).validate()
    said = [" ".join(map(str, rank)) for rank in schedule.ranks]
    assert said == [
        "0T0 0S0 0T1 0S1 0U0 0T2 0S2 0T3 0S3 0U1",
        "1T0 1S0 1U0 1T2 1S2 1U1",
        "1T1 1S1 1U0 1T3 1S3 1U1",
    ]


@settings(max_examples=40, deadline=None)
@given(distributions, st.sampled_from([4, 8]), st.integers(1, 4), st.integers(0, 3))
def test_every_pass_once_and_no_deadlock(
    distribution: Distribution, m: int, steps: int, run_ahead: int
) -> None:
    schedule = pipe_bd(distribution, m, steps, run_ahead).validate()
    passes = [p for rank in schedule.ranks for p in rank]
    for kind in (T, S):
        found = sorted(p[1:] for p in passes if p.kind is kind)
        expected = [(s, j) for s in range(len(distribution.ranges)) for j in range(m * steps)]
        assert found == expected
    program = lower(schedule)
    assert unfinished(program) == {}
    assert finishes(program)
    messages = [at.message for rank in program.ranks for at in rank if isinstance(at, Send)]
    relayed = [message for message in messages if not message.is_step_done]
    assert len(relayed) == len(set(relayed)) == (len(distribution.ranges) - 1) * m * steps
    for kind_of_end in (PostReceive, WaitReceive):
        ends = [at.message for r in program.ranks for at in r if isinstance(at, kind_of_end)]
        assert sorted(map(repr, ends)) == sorted(map(repr, messages))
    told = [message for message in messages if message.is_step_done]
    waits = max(steps - 1 - run_ahead, 0)
    first = len(distribution.ranges[0][1])
    assert len(told) == waits * first * (distribution.num_ranks - 1)


def test_a_rank_that_waits_names_the_message_or_the_step_and_the_sender() -> None:
    schedule = pipe_bd(Distribution.of([(1, 1), (1, 1)]), 1, steps=2, run_ahead=0).validate()
    words = {
        schedule.rules.awaited_in_words(schedule.placement, at.message, f"rank {at.channel.source}")
        for rank in lower(schedule).ranks
        for at in rank
        if isinstance(at, WaitReceive)
    }
    assert words == {
        *(f"the activation for stage 1, microbatch {j}, from rank 0" for j in range(2)),
        "rank 1 to update its students in step 0",
    }


@settings(max_examples=40, deadline=None)
@given(distributions, st.sampled_from([4, 8]), st.integers(0, 3), st.integers(1, 8))
def test_steps_one_at_a_time_are_those_of_the_whole_program(
    distribution: Distribution, m: int, run_ahead: int, steps: int
) -> None:
    whole = lower(pipe_bd(distribution, m, steps, run_ahead))
    steady = step_by_step(distribution, m, run_ahead)
    for rank, instructions in enumerate(whole.ranks):
        joined = [at for step in range(steps) for at in steady.of_step(rank, step, 0, steps)]
        assert joined == list(instructions)


def test_a_later_run_of_steps_has_later_numbers() -> None:
    steady = step_by_step(HYBRID, 4, 1)
    for rank in range(HYBRID.num_ranks):
        early = [at for n in range(4) for at in steady.of_step(rank, n, 0, 4)]
        late = [at for n in range(10, 14) for at in steady.of_step(rank, n, 10, 14)]
        assert len(early) == len(late)
        for a, b in zip(early, late, strict=True):
            if isinstance(a, Run):
                assert isinstance(b, Run)
                shift = 10 if a.work.kind is U else 40
                assert b.work == a.work._replace(microbatch=a.work.microbatch + shift)


@settings(max_examples=40, deadline=None)
@given(distributions, st.integers(0, 2), st.data())
def test_no_rank_is_further_ahead_than_allowed(
    distribution: Distribution, run_ahead: int, data: st.DataObject
) -> None:
    blocks = distribution.num_blocks
    each = st.lists(times, min_size=blocks, max_size=blocks)
    costs = BlockCosts.of(
        teacher=data.draw(each), student=data.draw(each), update=data.draw(each), reduce=0.5
    )
    timeline = timeline_of(distribution, 4, 6, run_ahead, costs)
    spans = [begins_and_ends(timeline, rank) for rank in range(distribution.num_ranks)]
    for begins, _ in spans:
        for _, ends in spans:
            for step in range(1 + run_ahead, 6):
                assert begins[step] >= ends[step - 1 - run_ahead]


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_fast_first_stage_runs_ahead_as_far_as_allowed(run_ahead: int) -> None:
    """The last stage is slow: the first one begins a step at the moment it may."""
    costs = BlockCosts.of(teacher=[0.25] * 3, student=[0.25, 0.5, 4.0], update=0.5)
    timeline = timeline_of(evenly(3, 3), 4, 6, run_ahead, costs)
    begins, _ = begins_and_ends(timeline, 0)
    _, ends = begins_and_ends(timeline, 2)
    for step in range(1 + run_ahead, 6):
        assert begins[step] == ends[step - 1 - run_ahead]
    if run_ahead:
        assert begins[run_ahead] < ends[0]


@settings(max_examples=30, deadline=None)
@given(distributions, st.data())
def test_the_slowest_stage_sets_the_pace(distribution: Distribution, data: st.DataObject) -> None:
    blocks = distribution.num_blocks
    each = st.lists(times, min_size=blocks, max_size=blocks)
    names = ("teacher", "student", "update", "relay", "reduce")
    costs = BlockCosts.of(**{name: data.draw(each) for name in names})
    m, steps = 4, 40
    run_ahead = steps  # nothing but the stages' own work
    timeline = timeline_of(distribution, m, steps, run_ahead, costs)
    slowest = costs.slowest(distribution, m)
    seconds = timeline.costs.seconds
    fill = sum(seconds[T]) + sum(
        m * (seconds[T][s] + seconds[S][s]) + seconds[U][s] for s in range(len(distribution.ranges))
    )
    assert steps * slowest <= timeline.makespan * (1 + 1e-9)
    assert timeline.makespan <= (steps * slowest + fill) * (1 + 1e-9)


def test_the_only_bubble_is_fill_and_drain() -> None:
    teacher, student, update, m, steps = 1.0, 2.5, 0.5, 8, 5
    costs = BlockCosts.of(teacher=[teacher] * 4, student=[student] * 4, update=update)
    timeline = timeline_of(evenly(4, 4), m, steps, 1, costs)
    work = steps * (m * (teacher + student) + update)
    assert timeline.makespan == pytest.approx(work + 3 * teacher)
    assert timeline.utilisation == pytest.approx([work / timeline.makespan] * 4)
    assert timeline.bubble_rate == pytest.approx(1 - work / timeline.makespan)
    assert timeline.peak_activation == (1, 1, 1, 1)


def test_an_update_waits_for_the_ranks_of_its_stage() -> None:
    costs = BlockCosts.of(teacher=[1.0, 3.0], student=[0.0, 0.0], update=1.0)
    timeline = timeline_of(Distribution.of([(1, 1), (1, 2)]), 2, 1, 0, costs)
    # microbatch 1 leaves the first stage at 2, so that its rank comes to U at 5, the other at 4
    assert [times[-1] for times in timeline.start] == [2.0, 5.0, 5.0]


@settings(max_examples=30, deadline=None)
@given(distributions, st.data())
def test_ranks_of_a_stage_update_together(distribution: Distribution, data: st.DataObject) -> None:
    blocks = distribution.num_blocks
    each = st.lists(times, min_size=blocks, max_size=blocks)
    costs = BlockCosts.of(teacher=data.draw(each), student=data.draw(each), update=1.0)
    timeline = timeline_of(distribution, 8, 3, 1, costs)
    for _, group in distribution.ranges:
        for step in range(3):
            last_studies, updates = set(), set()
            for rank in group:
                passes = timeline.schedule.ranks[rank]
                at = [i for i, p in enumerate(passes) if p.kind is U][step]
                last_studies.add(timeline.end[rank][at - 1])
                updates.add(timeline.start[rank][at])
            assert updates == {max(last_studies)}


def test_others_wait_for_the_last_study_of_a_step_alone() -> None:
    schedule = pipe_bd(Distribution.of([(1, 2)]), 4, steps=2)
    graph = schedule.graph
    waited = {
        f"{rank}: {p}": [divmod(code, graph.units)[1] for code in graph.others(at)]
        for rank, passes in enumerate(schedule.ranks)
        for p in passes
        if (at := graph.code_of(p, rank)) in graph.more and p.kind is U
    }
    assert waited == {"0: 0U0": [3], "1: 0U0": [2], "0: 0U1": [7], "1: 0U1": [6]}


def test_what_is_taught_is_held_until_it_is_studied() -> None:
    order = [P(T, 0, 0), P(S, 0, 0), P(T, 0, 1), P(U, 0, 0), P(T, 0, 2), P(S, 0, 1), P(S, 0, 2)]
    rules = Relay(num_microbatches=1, steps=3, run_ahead=1)
    assert peak_held_chunks(order, rules) == 2
    assert peak_held_chunks(order[:4], rules) == 1


def swapped(passes: tuple[Pass, ...], a: int, b: int) -> tuple[Pass, ...]:
    changed = list(passes)
    changed[a], changed[b] = changed[b], changed[a]
    return tuple(changed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: swapped(r, 0, 1), r"position 0, pass 0S0: rule 'order': its T has not run"),
        (lambda r: swapped(r, 3, 4), r"pass 0U0: rule 'order': not every S of step 0 has run"),
        (lambda r: (*r[:4], r[5], r[6], r[4], *r[7:]), "pass 0S2: rule 'order': the U of step 0"),
        (lambda r: swapped(r, 0, 2), "pass 0T1: rule 'microbatch order': the next T .* 0"),
        (lambda r: r[:-1], "rank 0, stage 0: rule 'completeness': 1 of 2 U passes are listed"),
        (lambda r: (*r, r[-1]), "there is no U of stage 0 left to run"),
        (lambda r: (*r, P(T, 1, 0)), "rule 'placement': stage 1 does not live on rank 0"),
        (lambda r: (*r, P(PassKind.F, 0, 0)), "a relay has no F passes"),
    ],
)
def test_a_broken_order_is_refused_by_its_rule(
    change: Callable[[tuple[Pass, ...]], tuple[Pass, ...]], said: str
) -> None:
    schedule = pipe_bd(evenly(2, 2), 2, steps=2)
    broken = replace(schedule, ranks=(change(schedule.ranks[0]), schedule.ranks[1]))
    with pytest.raises(InvalidSchedule, match=said):
        broken.validate()


def test_the_next_teacher_pass_may_run_before_the_update() -> None:
    schedule = pipe_bd(evenly(2, 2), 2, steps=2, run_ahead=1)
    first = schedule.ranks[0]
    early = replace(schedule, ranks=(swapped(first, 4, 5), schedule.ranks[1])).validate()
    assert [str(p) for p in early.ranks[0][4:6]] == ["0T2", "0U0"]
    lower(early)


def test_ranks_that_wait_for_one_another_are_found() -> None:
    """With run_ahead 0 the first T of step 1 waits for the U of step 0 of the very same stage."""
    schedule = pipe_bd(Distribution.of([(1, 2)]), 2, steps=2, run_ahead=0)
    ranks = tuple(swapped(rank, 2, 3) for rank in schedule.ranks)
    stuck = replace(schedule, ranks=ranks)
    with pytest.raises(InvalidSchedule, match=r"rule 'progress'.*rank 0 at 0T2; rank 1 at 0T3"):
        stuck.validate()
    with pytest.raises(InvalidSchedule, match=r"rule 'progress'.*rank 0 at 0T2; rank 1 at 0T3"):
        lower(stuck)
    with pytest.raises(InvalidSchedule, match="can never run"):
        simulate(
            stuck, RelayCosts(BlockCosts.of(teacher=[1], student=[1]), Distribution.of([(1, 2)]))
        )


def test_a_program_in_which_a_rank_never_comes_is_found_on_paper() -> None:
    program = lower(pipe_bd(Distribution.of([(1, 1), (1, 2)]), 8, steps=1))
    assert unfinished(program) == {}
    no_receives = tuple(
        tuple(at for at in rank if not isinstance(at, PostReceive)) for rank in program.ranks
    )
    assert set(unfinished(replace(program, ranks=no_receives))) == {0, 1, 2}
    no_last = (program.ranks[0], program.ranks[1][:-2], program.ranks[2])
    assert list(unfinished(replace(program, ranks=no_last))) == [2]  # waits in U for its peer


def test_an_update_that_waits_for_a_peer_is_part_of_the_order() -> None:
    """Rank 0 runs T of step 1 before its U, and that T waits for the U that rank 1 shares."""
    schedule = pipe_bd(Distribution.of([(1, 2)]), 2, steps=2, run_ahead=0)
    stuck = replace(schedule, ranks=(swapped(schedule.ranks[0], 2, 3), schedule.ranks[1]))
    with pytest.raises(
        InvalidSchedule,
        match=r"'progress': .*rank 0 to receive the end of step .*from rank 1; rank 1 to run 0U0",
    ):
        lower(stuck)


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_a_rank_may_send_all_of_the_steps_that_it_may_be_ahead_by(run_ahead: int) -> None:
    program = lower(pipe_bd(Distribution.of([(1, 2), (1, 1), (1, 4)]), 8, 12, run_ahead))
    assert program.send_slots == 8 * (run_ahead + 1)


def test_passes_of_a_relay_have_no_place_elsewhere() -> None:
    schedule = Schedule("by hand", grouped([[0], [1]]), 1, ((P(T, 0, 0),), (P(T, 1, 0),)))
    with pytest.raises(InvalidSchedule, match="a training step has no T passes"):
        schedule.validate()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: pipe_bd(HYBRID, 6), "6 microbatches per step .* to the 4 ranks of stage 2"),
        (lambda: pipe_bd(HYBRID, 0), "0 microbatches per step were asked for: give 1 or more"),
        (lambda: pipe_bd(HYBRID, 4, 0), "0 steps were asked for"),
        (lambda: pipe_bd(HYBRID, 4, 1, -1), "-1 steps to run ahead were asked for: give 0"),
        (lambda: step_by_step(HYBRID, 4, -1), "-1 steps to run ahead"),
        (lambda: grouped([[0], [0, 1]]), "the groups of ranks .* are no placement"),
        (lambda: grouped([[0], []]), "are no placement"),
        (
            lambda: simulate(
                pipe_bd(HYBRID, 4),
                RelayCosts(BlockCosts.of(teacher=[1], student=[1]), evenly(1, 1)),
            ),
            "the placement has stages on other ranks",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        wrong()


def test_a_schedule_has_one_step_and_runs_one_ahead_unless_told() -> None:
    assert pipe_bd(HYBRID, 4) == pipe_bd(HYBRID, 4, steps=1, run_ahead=1)
