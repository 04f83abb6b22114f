"""Properties that every schedule of the catalog keeps, and the rules that the validator names."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import drawn_sizes
import pytest
from brief_searches import at_length
from cost_tables import changed
from hypothesis import given, settings
from hypothesis import strategies as st
from rendezvous import finishes

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules import auto as auto_module
from megatron_zb.schedules import catalog, families, lowering
from megatron_zb.schedules import families as wave_module
from megatron_zb.schedules.catalog import family
from megatron_zb.schedules.families import split_interleaved
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement, looped, v_shape, wave
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.search.place_w import fuse_for_free

pytestmark = pytest.mark.usefixtures("brief_searches")

_SECONDS = st.floats(0.1, 10)


@st.composite
def costs_of(draw: st.DrawFn, pipeline_size: int) -> schedules.Costs:
    """Costs that differ between slices, ranks and links."""
    slices = draw(st.sampled_from([1, pipeline_size, 2 * pipeline_size, pipeline_size + 1]))
    times = st.lists(_SECONDS, min_size=slices, max_size=slices)
    link = st.lists(st.floats(0, 2), min_size=pipeline_size, max_size=pipeline_size)
    return schedules.Costs.of_slices(
        pipeline_size=pipeline_size,
        forward=draw(times),
        backward=draw(times),
        weight=draw(times),
        p2p=draw(st.lists(link, min_size=pipeline_size, max_size=pipeline_size)),
        slowdown=draw(st.lists(st.floats(0.5, 2), min_size=pipeline_size, max_size=pipeline_size)),
    )


@st.composite
def problems(
    draw: st.DrawFn,
    most_ranks: int = drawn_sizes.RANKS,
    most_microbatches: int = drawn_sizes.MICROBATCHES,
) -> tuple[int, int, schedules.Costs]:
    pipeline_size = draw(st.integers(2, most_ranks))
    return pipeline_size, draw(st.integers(1, most_microbatches)), draw(costs_of(pipeline_size))


# A search of `auto` takes as long as all others together.
_NAMED = [name for name in schedules.names() if name != "auto"]


@pytest.mark.parametrize("name", _NAMED)
@settings(max_examples=drawn_sizes.EXAMPLES, deadline=None)
@given(problem=problems())
def test_every_schedule_is_valid_and_within_its_memory(
    name: str, problem: tuple[int, int, schedules.Costs]
) -> None:
    _check(name, problem)


@settings(max_examples=drawn_sizes.SEARCHES, deadline=None)
@given(problem=problems(most_ranks=5, most_microbatches=12))
def test_auto_is_valid_and_within_its_memory(problem: tuple[int, int, schedules.Costs]) -> None:
    _check("auto", problem)


def _check(name: str, problem: tuple[int, int, schedules.Costs]) -> None:
    p, m, costs = problem
    schedule = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs)
    schedule.validate()
    timeline = schedules.simulate(schedule, costs)
    assert max(timeline.peak_activation) <= family(name).peak_microbatches(p, m) + 1e-9
    assert 0 <= timeline.bubble_rate < 1
    assert schedule.report is not None
    assert schedule.report.makespan == pytest.approx(timeline.makespan)
    assert schedule.report.gap >= -1e-9
    for program in (
        schedules.lower(schedule),
        schedules.lower(schedule, timeline),
        schedules.lower(schedule, timeline, captured=True),
        schedules.lower(schedule.forwards()),
    ):
        assert finishes(program)
        assert lowering.unfinished(program) == {}
        assert _without_messages(program) == [list(rank) for rank in program.schedule.ranks]
    again = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs)
    assert again == schedule


def _without_messages(program: schedules.Program) -> list[list[Pass]]:
    return [[i.work for i in rank if isinstance(i, lowering.Run)] for rank in program.ranks]


@st.composite
def tables(draw: st.DrawFn) -> Schedule:
    """A valid schedule in no sensible order at all, on any placement."""
    p, chunks, m = draw(st.integers(2, 6)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    order = draw(st.permutations(list(range(p)) * chunks))
    splits = draw(st.lists(st.booleans(), min_size=p * chunks, max_size=p * chunks))
    choose = draw(st.randoms(use_true_random=False))
    last = p * chunks - 1
    done = {letter: [0] * (last + 1) for letter in "FBW"}

    def may_run(letter: str, stage: int) -> bool:
        j = done[letter][stage]
        if letter == "F":
            return j < m and (stage == 0 or done["F"][stage - 1] > j)
        if letter == "W":
            return splits[stage] and done["B"][stage] > j
        return j < m and done["F"][stage] > j and (stage == last or done["B"][stage + 1] > j)

    ranks: list[list[Pass]] = [[] for _ in range(p)]
    while ready := [(x, s) for x in "FBW" for s in range(last + 1) if may_run(x, s)]:
        letter, stage = choose.choice(ready)
        kind = PassKind.BW if letter == "B" and not splits[stage] else PassKind(letter)
        ranks[order[stage]].append(Pass(kind, stage, done[letter][stage]))
        done[letter][stage] += 1
    return Schedule("any", Placement("any", p, tuple(order)), m, tuple(map(tuple, ranks)))


@settings(max_examples=150, deadline=None)
@given(table=tables(), data=st.data())
def test_any_valid_table_finishes_under_blocking_rendezvous(
    table: Schedule, data: st.DataObject
) -> None:
    table.validate()
    costs = data.draw(costs_of(table.placement.pipeline_size))
    for schedule in (table, table.forwards()):
        program = schedules.lower(schedule, schedules.simulate(schedule, costs))
        assert finishes(program)
        assert _without_messages(program) == [list(rank) for rank in schedule.ranks]


@settings(max_examples=150, deadline=None)
@given(table=tables(), data=st.data())
def test_two_replays_agree_on_programs_that_may_not_finish(
    table: Schedule, data: st.DataObject
) -> None:
    """Two instructions change places somewhere, as often as not into a deadlock."""
    program = schedules.lower(table)
    rank = data.draw(st.integers(0, len(program.ranks) - 1))
    instructions = list(program.ranks[rank])
    a, b = (data.draw(st.integers(0, len(instructions) - 1)) for _ in range(2))
    instructions[a], instructions[b] = instructions[b], instructions[a]
    ranks = (*program.ranks[:rank], tuple(instructions), *program.ranks[rank + 1 :])
    changed = replace(program, ranks=ranks)
    assert finishes(changed) == (not lowering.unfinished(changed))


def test_ranks_that_both_send_first_are_refused_and_named() -> None:
    """What a buffer between them would hide: both wait for the other to receive."""
    there, back = lowering.Channel(0, 1), lowering.Channel(1, 0)
    forward, gradient = lowering.Message(False, 1, 1), lowering.Message(True, 0, 0)
    program = schedules.lower(schedules.build("1f1b", pipeline_size=2, num_microbatches=2))
    crossed = (
        (lowering.Send(there, forward), lowering.PostReceive(back, gradient)),
        (lowering.Send(back, gradient), lowering.PostReceive(there, forward)),
    )
    with pytest.raises(
        InvalidSchedule,
        match=r"'progress': .* wait in a circle: rank 0 to send the activation for stage 1, "
        r"microbatch 1, to rank 1; rank 1 to send the gradient for stage 0, microbatch 0, to rank",
    ):
        lowering.check_progress(replace(program, ranks=crossed))


@pytest.mark.parametrize("name", _NAMED)
@settings(max_examples=drawn_sizes.EXAMPLES, deadline=None)
@given(problem=problems(most_ranks=6, most_microbatches=9))
def test_the_simulator_agrees_with_brute_force(
    name: str, problem: tuple[int, int, schedules.Costs]
) -> None:
    p, m, costs = problem
    built = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs)
    _check_ends(built, costs)


@settings(max_examples=50, deadline=None)
@given(table=tables(), data=st.data())
def test_the_simulator_agrees_with_brute_force_on_any_table(
    table: Schedule, data: st.DataObject
) -> None:
    costs = data.draw(costs_of(table.placement.pipeline_size))
    _check_ends(table, costs)
    shares = [data.draw(st.sampled_from([0.0, 0.25, 1.0])) for _ in costs.memory["activation"]]
    kept = tuple(x * share for x, share in zip(costs.memory["activation"], shares, strict=True))
    _check_memory(table, changed(costs, held_for_weight=kept))


def _check_memory(schedule: Schedule, costs: schedules.Costs) -> None:
    """Pass by pass: B leaves what W needs."""
    table = costs.for_placement(schedule.placement)
    peaks = schedules.simulate(schedule, costs).peak_memory
    for rank, peak in zip(schedule.ranks, peaks, strict=True):
        held = [0.0]
        for kind, stage, _ in rank:
            whole, kept = table.memory["activation"][stage], table.memory["held_for_weight"][stage]
            change = {"F": whole, "B": kept - whole, "W": -kept, "BW": -whole}
            held.append(held[-1] + change[kind.value])
        assert peak == pytest.approx(max(held))


def _check_ends(schedule: Schedule, costs: schedules.Costs) -> None:
    timeline = schedules.simulate(schedule, costs)
    ends = _longest_paths(schedule, costs)
    for rank, passes in enumerate(schedule.ranks):
        for position, p_ in enumerate(passes):
            assert timeline.end[rank][position] == pytest.approx(ends[p_])


def _longest_paths(schedule: Schedule, costs: schedules.Costs) -> dict[Pass, float]:
    """Ends of all passes by relaxing every constraint until nothing moves: no shared code."""
    table, placement = costs.for_placement(schedule.placement), schedule.placement
    last = placement.num_stages - 1
    seconds = {
        "F": table.seconds[PassKind.F],
        "B": table.seconds[PassKind.B],
        "W": table.seconds[PassKind.W],
        "BW": [
            b + w for b, w in zip(table.seconds[PassKind.B], table.seconds[PassKind.W], strict=True)
        ],
    }
    edges: list[tuple[Pass, Pass, float]] = []
    by_key = {}
    for passes in schedule.ranks:
        edges += [(a, b, 0.0) for a, b in pairwise(passes)]
        for p in passes:
            by_key[("B" if p.kind.value == "BW" else p.kind.value, p.stage, p.microbatch)] = p
    for (kind, stage, microbatch), p in by_key.items():
        if kind == "F" and stage < last:
            latency = costs.p2p[placement.rank_of[stage]][placement.rank_of[stage + 1]]
            edges.append((p, by_key["F", stage + 1, microbatch], latency))
        if kind == "B" and stage > 0:
            latency = costs.p2p[placement.rank_of[stage]][placement.rank_of[stage - 1]]
            latency = 0.0 if placement.rank_of[stage] == placement.rank_of[stage - 1] else latency
            edges.append((p, by_key["B", stage - 1, microbatch], latency))
    same_rank = {
        (a, b) for a, b, _ in edges if placement.rank_of[a.stage] == placement.rank_of[b.stage]
    }
    start = {p: 0.0 for passes in schedule.ranks for p in passes}
    moved = True
    while moved:
        moved = False
        for a, b, latency in edges:
            delay = 0.0 if (a, b) in same_rank else latency
            earliest = start[a] + seconds[a.kind.value][a.stage] + delay
            if earliest > start[b] + 1e-12:
                start[b], moved = earliest, True
    return {p: t + seconds[p.kind.value][p.stage] for p, t in start.items()}


@settings(max_examples=100, deadline=None)
@given(table=tables(), data=st.data())
def test_joining_b_and_w_makes_no_pass_late(table: Schedule, data: st.DataObject) -> None:
    """Also where a whole backward takes longer than its halves, or less long."""
    costs = data.draw(costs_of(table.placement.pipeline_size))
    if data.draw(st.booleans()):
        shares = [data.draw(st.sampled_from([0.8, 1.0, 1.5])) for _ in costs.seconds[PassKind.W]]
        halves = zip(shares, costs.seconds[PassKind.B], costs.seconds[PassKind.W], strict=True)
        costs = changed(costs, whole=tuple(share * (b + w) for share, b, w in halves))
    joined = fuse_for_free(table, costs).validate()
    before, after = _starts(table, costs), _starts(joined, costs)
    late = {key for key, start in after.items() if start > before[key] + 1e-9 * (1 + start)}
    assert not late


def _starts(schedule: Schedule, costs: schedules.Costs) -> dict[tuple[str, int, int], float]:
    """By the first letter of the kind: a backward begins where its first half did."""
    timeline = schedules.simulate(schedule, costs)
    return {
        (p.kind.value[0], p.stage, p.microbatch): start
        for passes, starts in zip(schedule.ranks, timeline.start, strict=True)
        for p, start in zip(passes, starts, strict=True)
    }


def test_splitting_pays() -> None:
    """The order of the bubbles that the papers promise, at the costs of a transformer layer."""
    costs = schedules.Costs.uniform(
        pipeline_size=8, forward=1.0, backward=1.2, weight=0.8, p2p=0.05
    )
    bubble = {}
    with at_length():
        for name in ("v-zb", "zb-h1", "v-half", "1f1b"):
            schedule = schedules.build(name, pipeline_size=8, num_microbatches=32, costs=costs)
            bubble[name] = schedules.simulate(schedule, costs).bubble_rate
    assert bubble["v-zb"] < bubble["zb-h1"] < bubble["v-half"] < bubble["1f1b"]


def test_one_f_one_b_is_the_textbook_one() -> None:
    costs = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1, weight=1)
    schedule = schedules.build("1f1b", pipeline_size=4, num_microbatches=8, costs=costs)
    assert [str(p) for p in schedule.ranks[2][:5]] == ["2F0", "2F1", "2BW0", "2F2", "2BW1"]
    timeline = schedules.simulate(schedule, costs)
    assert timeline.makespan == (8 + 4 - 1) * 3
    assert timeline.bubble_rate == pytest.approx(3 / 11)
    assert timeline.peak_activation == (4, 3, 2, 1)


@pytest.mark.parametrize("name", schedules.names())
def test_a_family_splits_its_backward_where_its_schedules_have_a_w(name: str) -> None:
    schedule = schedules.build(name, pipeline_size=4, num_microbatches=8)
    kinds = {p.kind for passes in schedule.ranks for p in passes}
    assert family(name).splits_backward is (PassKind.W in kinds)


def test_schedules_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['megatron'] = None\n"
        "from megatron_zb import schedules\n"
        "schedules.lower(schedules.build('v-half', pipeline_size=4, num_microbatches=8))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@cache
def _example(name: str = "v-half") -> Schedule:
    return schedules.build(name, pipeline_size=4, num_microbatches=6)


def _with_rank(schedule: Schedule, rank: int, passes: list[Pass]) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(passes)
    return replace(schedule, ranks=tuple(ranks))


def test_the_validator_names_a_missing_pass() -> None:
    schedule = _example()
    with pytest.raises(InvalidSchedule, match=r"rank 1, .*'completeness'"):
        _with_rank(schedule, 1, list(schedule.ranks[1])[:-1]).validate()


def test_the_validator_names_a_pass_on_the_wrong_rank() -> None:
    schedule = _example()
    stray = [*schedule.ranks[2], Pass(PassKind.F, 0, 0)]
    with pytest.raises(InvalidSchedule, match=r"rank 2, .*'placement'"):
        _with_rank(schedule, 2, stray).validate()


def test_the_validator_names_a_backward_before_its_forward() -> None:
    schedule = _example("1f1b")
    passes = list(schedule.ranks[3])
    passes[0], passes[1] = passes[1], passes[0]
    with pytest.raises(InvalidSchedule, match=r"rank 3, position 0, pass 3BW0: rule 'order'"):
        _with_rank(schedule, 3, passes).validate()


def test_the_validator_names_microbatches_out_of_order() -> None:
    schedule = _example("1f1b")
    passes = list(schedule.ranks[0])
    passes[0], passes[1] = passes[1], passes[0]
    with pytest.raises(InvalidSchedule, match="'microbatch order'"):
        _with_rank(schedule, 0, passes).validate()


def test_the_validator_names_a_circular_wait() -> None:
    placement = v_shape(2)
    f, b = PassKind.F, PassKind.BW
    ranks = (
        (Pass(f, 0, 0), Pass(f, 3, 0), Pass(b, 3, 0), Pass(b, 0, 0)),
        (Pass(f, 2, 0), Pass(f, 1, 0), Pass(b, 2, 0), Pass(b, 1, 0)),
    )
    with pytest.raises(InvalidSchedule, match=r"'progress'.*rank 1 at 2F0"):
        Schedule("circle", placement, 1, ranks).validate()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_shuffled_schedules_are_valid_only_if_they_run(seed: int) -> None:
    """Two neighbours swapped somewhere: either every rule still holds, or a rule is named."""
    shuffle = random.Random(seed)
    schedule = _example(shuffle.choice(schedules.names()))
    rank = shuffle.randrange(4)
    passes = list(schedule.ranks[rank])
    at = shuffle.randrange(len(passes) - 1)
    passes[at], passes[at + 1] = passes[at + 1], passes[at]
    swapped = _with_rank(schedule, rank, passes)
    try:
        swapped.validate()
    except InvalidSchedule as error:
        assert "rule '" in str(error)
    else:
        costs = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1, weight=1)
        assert schedules.simulate(swapped, costs).makespan > 0
        assert lowering.unfinished(schedules.lower(swapped)) == {}


@pytest.mark.parametrize("name", schedules.names())
def test_the_deadlock_check_sees_what_would_deadlock(name: str) -> None:
    """Every message that is lost stops somebody, and the check says whom."""
    program = schedules.lower(_example(name))
    for rank, instructions in enumerate(program.ranks):
        sends = [i for i in instructions if isinstance(i, lowering.Send)]
        ranks = list(program.ranks)
        ranks[rank] = tuple(i for i in instructions if i is not sends[len(sends) // 2])
        assert lowering.unfinished(replace(program, ranks=tuple(ranks)))


def test_the_deadlock_check_knows_that_a_message_needs_a_receive() -> None:
    program = schedules.lower(_example())
    none_posted = tuple(
        tuple(i for i in rank if not isinstance(i, lowering.PostReceive)) for rank in program.ranks
    )
    stuck = lowering.unfinished(replace(program, ranks=none_posted))
    kinds = {type(instruction) for instruction in stuck.values()}
    assert kinds == {lowering.Send, lowering.WaitReceive}


@pytest.mark.parametrize("name", drawn_sizes.AUTO_WITH_FULL)
def test_few_receives_are_open_at_once(name: str) -> None:
    """As many buffers as that are held beside what the passes hold."""
    program = schedules.lower(schedules.build(name, pipeline_size=5, num_microbatches=13))
    peak, chunks = family(name).peak, program.schedule.placement.chunks
    holds_all = peak is not None and peak(5, 13) >= 13
    most = 13 if holds_all and chunks > 1 else 6  # where a chunk ends before the next begins
    for instructions in program.ranks:
        opened = itertools.accumulate(
            isinstance(i, lowering.PostReceive) - isinstance(i, lowering.WaitReceive)
            for i in instructions
        )
        assert max(opened) <= most


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown pipeline schedule 'v-haf': did you mean v-half"):
        schedules.build("v-haf", pipeline_size=4, num_microbatches=8)


@pytest.mark.parametrize("name", schedules.names())
def test_pipeline_size_one_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="at least 2 pipeline ranks"):
        schedules.build(name, pipeline_size=1, num_microbatches=8)


def test_no_microbatches_are_refused() -> None:
    with pytest.raises(UsageError, match="0 microbatches"):
        schedules.build("v-half", pipeline_size=4, num_microbatches=0)


def test_an_infeasible_memory_limit_names_the_smallest() -> None:
    said = r"limit of 0.2 of 1F1B: rank \d \(Megatron's pipeline rank \d\) needs at least 0.25"
    with pytest.raises(UsageError, match=said):
        schedules.build("v-min", pipeline_size=4, num_microbatches=8, memory_limit=0.2)
    fits = schedules.build("v-min", pipeline_size=4, num_microbatches=8, memory_limit=0.5)
    assert fits.name == "v-min"


@pytest.mark.parametrize(
    ("argument", "value"), [("forward", -1.0), ("weight", float("nan")), ("forward", 0.0)]
)
def test_costs_that_cannot_be_are_refused(argument: str, value: float) -> None:
    times = {"forward": 1.0, "backward": 1.0, "weight": 1.0, argument: value}
    with pytest.raises(UsageError, match=argument):
        schedules.Costs.uniform(pipeline_size=4, **times)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_cutting_the_model_keeps_its_total(data: st.DataObject) -> None:
    p = data.draw(st.integers(2, 8))
    costs = data.draw(costs_of(p))
    placement = wave(p, data.draw(st.sampled_from([2, 4]))) if p > 2 else looped(p, 3)
    plain = replace(costs, slowdown=(1.0,) * p)
    assert sum(plain.for_placement(placement).seconds[PassKind.F]) == pytest.approx(
        sum(costs.seconds[PassKind.F])
    )
    assert sum(plain.for_placement(placement).memory["activation"]) == pytest.approx(p)


def test_a_v_goes_there_and_back() -> None:
    placement = v_shape(3)
    assert placement.rank_of == (0, 1, 2, 2, 1, 0)
    assert placement.stages_of == ((0, 5), (1, 4), (2, 3))
    assert [placement.chunk_of(s) for s in range(6)] == [0, 0, 0, 1, 1, 1]


@settings(max_examples=40, deadline=None)
@given(problem=problems(most_ranks=6, most_microbatches=9), data=st.data())
def test_cheaper_passes_never_take_longer(
    problem: tuple[int, int, schedules.Costs], data: st.DataObject
) -> None:
    """The simulator is monotone: less of any cost never ends a schedule later."""
    p, m, costs = problem
    name = data.draw(st.sampled_from(["1f1b", "zb-h1", "zb-h2", "interleaved"]))
    schedule = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs)
    share = st.floats(0, 1)
    cheaper = changed(
        replace(costs, p2p=tuple(tuple(x * data.draw(share) for x in row) for row in costs.p2p)),
        forward=[x * data.draw(share) + 1e-3 for x in costs.seconds[PassKind.F]],
        weight=[x * data.draw(share) for x in costs.seconds[PassKind.W]],
    )
    cheaper = changed(
        cheaper, forward=[*map(min, cheaper.seconds[PassKind.F], costs.seconds[PassKind.F])]
    )
    before = schedules.simulate(schedule, costs).makespan
    assert schedules.simulate(schedule, cheaper).makespan <= before * (1 + 1e-12)


@pytest.mark.parametrize(
    ("p", "m", "times"),
    [
        (2, 5, (1.0, 1.2, 0.8, 0.05)),
        pytest.param(3, 6, (1.0, 1.33, 0.5, 0.05), marks=pytest.mark.full),
        pytest.param(4, 8, (1.0, 1.0, 1.0, 0.0), marks=pytest.mark.full),
    ],
)
def test_more_memory_never_makes_auto_slower(
    p: int, m: int, times: tuple[float, float, float, float]
) -> None:
    costs = schedules.Costs.uniform(
        pipeline_size=p,
        **dict(zip(("forward", "backward", "weight", "p2p"), times, strict=True)),
    )
    build = partial(schedules.build, "auto", pipeline_size=p, num_microbatches=m, costs=costs)
    limits = (0.5, 0.55, 0.625, 0.75, 1.0, 1.5)
    reports = [build(memory_limit=limit).report for limit in limits]
    spans = [report.makespan for report in reports if report is not None]
    assert len(spans) == len(limits)
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(spans))


@pytest.mark.parametrize("chunks", [2, 4])
def test_split_loops_are_valid_and_hold_what_they_say(chunks: int) -> None:
    for p, m in itertools.product((2, 3, 5), (1, 2, 5, 6, 11)):
        costs = schedules.Costs.uniform(pipeline_size=p, forward=1, backward=1, weight=1)
        found = split_interleaved(p, m, chunks)
        assert len(found) == 2
        for schedule in found:
            schedule.validate()
            schedules.lower(schedule)
        if m % p == 0:
            assert schedules.simulate(found[0], costs).peak_activation == (p,) * p


@pytest.mark.parametrize(
    ("placement", "limit"),
    [
        (looped(3), 1.0),
        (v_shape(3), 1.0),
        (v_shape(3), 0.8),
        (wave(3, 4), 1.0),
        (looped(3, 2), 2.0),
    ],
)
def test_auto_is_never_slower_than_a_named_schedule_of_its_placement(
    placement: Placement, limit: float
) -> None:
    """For unequal costs, every family of the catalog that has the placement and keeps the limit."""
    p, m = 3, 5
    costs = schedules.Costs.of_slices(
        pipeline_size=p,
        forward=[1.0, 1.1, 1.4],
        backward=[1.1, 1.2, 1.9],
        weight=[0.8, 0.9, 1.1],
        p2p=0.07,
    )
    build = partial(
        schedules.build, pipeline_size=p, num_microbatches=m, costs=costs, memory_limit=limit
    )
    found = schedules.simulate(build("auto", placement=placement), costs).makespan
    compared = 0
    for name in schedules.names():
        family = catalog.family(name)
        chunks = placement.chunks if family.takes_chunks else None
        if family.placement is None or (family.takes_chunks and placement.chunks == 1):
            continue
        if family.placement(p, chunks) != placement:
            continue
        try:
            named = build(name, chunks=chunks)
        except UsageError as error:
            assert "cannot keep the memory limit" in str(error)
            continue
        compared += 1
        assert found <= schedules.simulate(named, costs).makespan * (1 + 1e-12), name
    assert compared


def test_a_limit_that_is_too_small_names_the_rank_of_the_schedule_and_of_a_job() -> None:
    build = partial(schedules.build, pipeline_size=4, num_microbatches=8, memory_limit=0.01)
    with pytest.raises(UsageError, match=r": rank 0 \(Megatron's pipeline rank 3\) needs at least"):
        build("v-half")
    with pytest.raises(UsageError, match=": rank 0 needs at least"):
        build("zb-h1")


def test_every_family_of_the_catalog_takes_part_in_auto() -> None:
    """A schedule that is added to the catalog has to be added to auto, too."""
    taking_part = {*auto_module._SEARCHED_ONE_CHUNK, *auto_module._FIXED_ONE_CHUNK}
    taking_part |= {*auto_module._V}
    taking_part |= {families.interleaved, wave_module.wave}
    builds = {catalog.family(name).build for name in schedules.names()}
    assert builds - taking_part == {auto_module.auto}


def test_auto_with_chunks_takes_placements_with_so_many() -> None:
    for chunks in (1, 2, 3):
        found = schedules.build("auto", pipeline_size=2, num_microbatches=4, chunks=chunks)
        assert found.placement.chunks == chunks
    with pytest.raises(UsageError, match="0 model chunks per rank"):
        schedules.build("auto", pipeline_size=2, num_microbatches=4, chunks=0)


def test_auto_takes_a_loop_where_it_is_the_fastest() -> None:
    costs = schedules.Costs.uniform(pipeline_size=8, forward=1, backward=1.2, weight=0.8, p2p=0.05)
    found = schedules.build("auto", pipeline_size=8, num_microbatches=32, costs=costs)
    assert found.placement == looped(8, 4)
    assert "looped with 4 chunks" in found.reason
    v_zb = schedules.build("v-zb", pipeline_size=8, num_microbatches=32, costs=costs)
    timelines = [schedules.simulate(schedule, costs) for schedule in (found, v_zb)]
    assert timelines[0].makespan < timelines[1].makespan
    assert max(timelines[0].peak_activation) <= 8


def test_auto_on_a_loop_serves_any_number_of_microbatches() -> None:
    """A model that has been placed evaluates on other numbers than it trains on."""
    for chunks, m in itertools.product((2, 3, 4), (1, 3, 7)):
        found = schedules.build(
            "auto", pipeline_size=2, num_microbatches=m, placement=looped(2, chunks)
        )
        assert found.placement == looped(2, chunks)


def test_a_large_loop_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = schedules.build("auto", pipeline_size=4, num_microbatches=8, placement=looped(4, 8))
    monkeypatch.setattr(auto_module, "_LARGE", 0)
    found = schedules.build("auto", pipeline_size=4, num_microbatches=8, placement=looped(4, 8))
    costs = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1, weight=1)
    known, _ = split_interleaved(4, 8, 8)
    seconds = [schedules.simulate(s, costs).makespan for s in (searched, found, known)]
    assert seconds[0] <= seconds[1] == seconds[2]
