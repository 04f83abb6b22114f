"""Updates one step late: how long a step takes, which weights a pass sees, and what is refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
from brief_searches import briefly
from checkpoint_pass import PART

from megatron_zb.errors import UsageError
from megatron_zb.schedules import build, catalog, families, interchange
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.adapters import Adapters
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.second_model import SecondModel, SecondRole
from megatron_zb.schedules.features.update_delay import (
    BUILT,
    Calls,
    DelayedRules,
    calls_of,
    in_groups,
    with_delay,
)
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.lowering import lower, unfinished
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement, looped
from megatron_zb.schedules.request import Limit, LimitTooSmall, Request
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.simulator import Timeline, simulate
from megatron_zb.schedules.units import Updates

F, B, W, BW, U = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.U

UPDATE = 0.1
NAMES = ["1f1b", "zb-h1", "v-min", "v-half", "v-zb", "auto", "interleaved"]
EQUAL, UNEQUAL = (1.0, 1.0, 1.0), (1.0, 1.2, 0.8)
"""Seconds of F, B and W."""
NO_REPEAT = ["gpipe", "wave", "dualpipe-v", "1f1b-v"]


def costs_of(p: int, seconds: tuple[float, float, float] = EQUAL) -> Costs:
    forward, backward, weight = seconds
    return Costs.uniform(pipeline_size=p, forward=forward, backward=backward, weight=weight)


@cache
def late(
    name: str, p: int = 4, m: int = 8, seconds: tuple[float, float, float] = EQUAL
) -> Schedule:
    """A schedule for given sizes, built once."""
    return late_with(name, p, m, costs=costs_of(p, seconds))


def late_costs(costs: Costs) -> Costs:
    """Costs with those of an update, which take nothing if they are not given."""
    return costs.having(Updates(UPDATE))


def late_with(name: str = "v-half", p: int = 4, m: int | None = 8, **choices: Any) -> Schedule:
    choices.setdefault("costs", costs_of(p))
    choices.setdefault("updates", Updates(UPDATE))
    return build(name, pipeline_size=p, num_microbatches=m, **{"update_delay": 1, **choices})


def period_of(schedule: Schedule) -> float:
    assert schedule.report is not None and schedule.report.period is not None
    return schedule.report.period


def is_one_sentence(error: pytest.ExceptionInfo[Exception]) -> bool:
    text = str(error.value)
    return "\n" not in text and ". " not in text and not text.endswith(".")


# --- how long a step takes

SMALL, LARGE = [(4, 4), (4, 8)], [(8, 8), (8, 16), (8, 32)]


def sizes() -> list[Any]:
    """All names, sizes and costs; of the larger sizes a usual run tries two chunk shapes."""
    found = []
    for name, (p, m), seconds in product(NAMES, [*SMALL, *LARGE], [EQUAL, UNEQUAL]):
        if (name, seconds) == ("v-min", UNEQUAL):  # it has an interval of its own, see below
            continue
        usual = p == 4 or (m == 8 and name in ("zb-h1", "v-min") and seconds == EQUAL)
        marks = () if usual else pytest.mark.slow if m == 8 else pytest.mark.full
        found.append(pytest.param(name, p, m, seconds, marks=marks))
    return found


@pytest.mark.parametrize(("name", "p", "m", "seconds"), sizes())
def test_a_step_takes_what_its_ranks_compute(
    name: str, p: int, m: int, seconds: tuple[float, float, float]
) -> None:
    schedule = late(name, p, m, seconds)
    work = m * sum(seconds) + UPDATE
    assert work * (1 - 1e-9) <= period_of(schedule) <= 1.01 * work
    peak = max(simulate(schedule, costs_of(p, seconds)).peak_memory)
    own = catalog.family(name).peak_microbatches(p, 100 * p)
    assert peak <= own * (1 + 1e-9), "no more memory than a long step takes"


@pytest.mark.parametrize(("p", "m"), [(4, 4), (4, 8), pytest.param(8, 32, marks=pytest.mark.full)])
def test_v_min_keeps_its_interval(p: int, m: int) -> None:
    """Its passes are in threes, each of which takes as long as the longest of F and B."""
    found = period_of(late("v-min", p, m, UNEQUAL))
    assert found <= 1.01 * (m * 3 * max(UNEQUAL[:2]) + UPDATE)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "v-half"])
def test_a_step_with_a_flush_takes_longer(name: str) -> None:
    with briefly():
        flushed = build(name, pipeline_size=4, num_microbatches=8, costs=costs_of(4))
    assert flushed.report is not None and flushed.report.period is None
    least = 1.02 if name == "v-half" else 1.1
    assert flushed.report.makespan + UPDATE >= least * period_of(late(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_report_tells_the_work_of_the_busiest_rank(name: str) -> None:
    schedule = late(name)
    costs, report = costs_of(4), schedule.report
    assert report is not None
    timeline = simulate(schedule, late_costs(costs))
    assert report.makespan == pytest.approx(timeline.makespan)
    groups = schedule.num_microbatches // 8
    assert report.lower_bound == pytest.approx(groups * (8 * 3.0 + UPDATE))
    assert report.makespan >= report.lower_bound


def test_an_update_takes_its_seconds() -> None:
    for seconds in (0.0, 2.5):
        found = late_with("v-min", m=4, updates=Updates(seconds))
        assert period_of(found) == pytest.approx(12 + seconds)


SLOW = 0.1
"""Share of the passes of a step that a slow update takes, and as much again its reduction."""


@pytest.mark.parametrize(
    ("name", "p", "m"),
    [
        *((name, 4, 4) for name in NAMES),
        ("interleaved", 4, 8),
        ("interleaved", 8, 8),
        *(
            pytest.param(name, 8, m, marks=pytest.mark.full)
            for name in NAMES
            for m in (8, 16, 32)
            if (name, m) != ("interleaved", 8)
        ),
    ],
)
def test_a_slow_reduction_and_update_are_hidden(name: str, p: int, m: int) -> None:
    slow = SLOW * 3 * m
    found = late_with(name, p, m, updates=Updates(slow, slow))
    assert period_of(found) == pytest.approx(3 * m + slow)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reduction", [0.0, 0.4, 5.0])
def test_an_update_waits_for_the_reduction_behind_the_last_w(name: str, reduction: float) -> None:
    updates = Updates(UPDATE, reduction)
    schedule = late_with(name, m=4, updates=updates)
    timeline = simulate(schedule, costs_of(4).having(updates))
    reduced, first = dict[int, float](), dict[int, float]()
    for passes, start, end in zip(schedule.ranks, timeline.start, timeline.end, strict=True):
        last = dict[tuple[int, int], float]()
        for p, begin, until in zip(passes, start, end, strict=True):
            group = p.microbatch // 4
            if p.kind in (W, BW):
                last[group, p.stage] = until
            elif p.kind is U:
                first[group] = min(first.get(group, begin), begin)
        for group in {group for group, _ in last}:  # one chunk behind the other
            seconds = 0.0
            for at in sorted(until for (of, _), until in last.items() if of == group):
                seconds = max(seconds, at) + reduction / schedule.placement.chunks
            reduced[group] = max(reduced.get(group, 0.0), seconds)
    assert reduced.keys() == first.keys()
    for group, begin in first.items():
        assert begin >= reduced[group] - 1e-9
    assert any(begin < reduced[group] + 2 for group, begin in first.items())


@pytest.mark.parametrize(
    ("name", "p", "m"),
    [
        *((name, 4, 8) for name in NAMES),
        *((name, 4, 4) for name in ("v-half", "v-zb")),
        *(
            pytest.param(name, 8, m, marks=pytest.mark.full)
            for name in NAMES
            for m in (8, 16, 32)
            if (name, m) not in (("1f1b", 8), ("zb-h1", 8))
        ),
    ],
)
def test_a_gathering_behind_the_update_is_hidden(name: str, p: int, m: int) -> None:
    """Weights of two bytes take half of the time of gradients of four."""
    slow = SLOW * 3 * m
    found = late_with(name, p, m, updates=Updates(slow, slow, slow / 2))
    assert period_of(found) == pytest.approx(3 * m + slow)


@pytest.mark.parametrize("name", NAMES)
def test_time_is_left_for_what_has_no_seconds(name: str) -> None:
    """Of the time between the last W and the next step but one, on both sides of the update."""
    schedule = late(name, m=8)
    timeline = simulate(schedule, costs_of(4).having(Updates(0.0)))
    last, needed, made = -math.inf, math.inf, math.inf
    for passes, start, end in zip(schedule.ranks, timeline.start, timeline.end, strict=True):
        for p, begin, until in zip(passes, start, end, strict=True):
            if p.kind in (W, BW) and p.microbatch < 8:
                last = max(last, until)
            elif p.kind is F and p.microbatch == 16:
                needed = min(needed, begin)
            elif p.kind is U and p.microbatch == 0:
                made = min(made, begin)
    slack = needed - last
    assert slack > 2
    assert slack / 2 <= made - last and 0 < needed - made <= slack / 3 + 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gathering", [0.0, 0.4, 5.0])
def test_the_next_step_but_one_waits_for_the_gathering(name: str, gathering: float) -> None:
    updates = Updates(UPDATE, gathering=gathering)
    schedule = late_with(name, m=4, updates=updates)
    timeline = simulate(schedule, costs_of(4).having(updates))
    waited = 0
    for passes, start, end in zip(schedule.ranks, timeline.start, timeline.end, strict=True):
        updated = dict[tuple[int, int], float]()
        for p, begin, until in zip(passes, start, end, strict=True):
            group = p.microbatch // 4
            if p.kind is U:
                updated[group, p.stage] = until
            elif p.kind is F and group >= 2:
                assert begin >= updated[group - 2, p.stage] + gathering - 1e-9
                waited += 1
    assert waited == 4 * schedule.placement.num_stages * (schedule.num_microbatches // 4 - 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_all_ranks_update_at_one_time(name: str, seconds: float) -> None:
    """Each between two passes, so that a long update moves what is behind it and nothing more."""
    schedule = late_with(name, updates=Updates(seconds))
    timeline = simulate(schedule, costs_of(4).having(Updates(0.0)))
    times: dict[int, list[float]] = {}
    for passes, start in zip(schedule.ranks, timeline.start, strict=True):
        for p, begin in zip(passes, start, strict=True):
            if p.kind is U and 8 <= p.microbatch < 16:
                times.setdefault(p.microbatch, []).append(begin)
    longest = 2.0  # of any pass: BW
    assert times
    for of_update in times.values():
        assert max(of_update) - min(of_update) <= longest
    assert period_of(schedule) == pytest.approx(24 + seconds)


# --- memory


@pytest.mark.parametrize(
    ("name", "limit"),
    [("v-half", 0.5), ("v-zb", 0.75), ("auto", 0.5), ("1f1b", 1.0), ("interleaved", 1.375)],
)
def test_a_memory_limit_is_kept(name: str, limit: float) -> None:
    costs = costs_of(4)
    schedule = late_with(name, m=8 if name == "interleaved" else 4, memory_limit=limit)
    assert max(simulate(schedule, costs).peak_memory) <= limit * costs.one_f_one_b_peak() + 1e-9


def test_a_limit_chooses_another_order() -> None:
    """With unequal costs the faster order of two takes more memory."""
    costs = costs_of(4, UNEQUAL)
    free, tight = (late_with(m=4, costs=costs, memory_limit=it) for it in (None, 0.5))
    peaks = [max(simulate(it, costs).peak_memory) for it in (free, tight)]
    assert peaks == pytest.approx([3.0, 2.0])
    assert period_of(free) < period_of(tight)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("v-half", 0.2),
        ("v-min", 0.49),
        ("1f1b", 0.9),
        ("zb-h1", 0.5),
        ("interleaved", 0.7),
        ("auto", 0.4),
        ("v-zb", Limit(bytes=1.0)),
    ],
)
def test_a_limit_that_is_too_small_is_refused(name: str, limit: Any) -> None:
    m = 8 if name == "interleaved" else 4
    with pytest.raises(LimitTooSmall, match=f"{name} cannot keep the memory limit") as error:
        late_with(name, m=m, memory_limit=limit)
    assert "needs at least" in str(error.value) and is_one_sentence(error)
    needed = error.value.needed
    share = needed / costs_of(4).one_f_one_b_peak()
    late_with(name, m=m, memory_limit=share)
    with pytest.raises(LimitTooSmall):
        late_with(name, m=m, memory_limit=0.99 * share)


# --- which weights a pass sees

ORDERED = [(name, p, m) for name in NAMES for p, m in ((2, 4), (4, 8))] + [
    ("1f1b", 4, 1),
    ("1f1b", 4, 5),
    ("zb-h1", 4, 3),
    ("v-half", 4, 4),
    ("v-zb", 2, 1),
    ("v-zb", 4, 3),
    ("v-min", 3, 5),
]


def check_weights(schedule: Schedule, m: int) -> None:
    """Count the updates of each stage in front of every pass.

    Group g computes with the weights after g - 1 updates. A rank keeps the newest weights and those
    before, so no pass comes behind the update of its own group. F of a group may come behind the
    update of the group before, which is due for an earlier stage, or made on all ranks at one time.
    """
    for rank, passes in enumerate(schedule.ranks):
        stages = [s for s, of in enumerate(schedule.placement.rank_of) if of == rank]
        updated = dict.fromkeys(stages, 0)
        for p in passes:
            group = p.microbatch // m
            if p.kind is U:
                assert group == updated[p.stage], "updates come in turn"
                updated[p.stage] += 1
                continue
            wanted = max(group - 1, 0)
            if p.kind is F:
                assert updated[p.stage] >= wanted, (rank, p)
            assert all(wanted in (n, n - 1) for n in updated.values()), (rank, p)


def check_updates_are_last(schedule: Schedule, m: int) -> None:
    """Every update comes behind all W of its group on the stages of its rank."""
    for passes in schedule.ranks:
        weights = Counter[int]()
        stages = {p.stage for p in passes}
        for p in passes:
            weights[p.microbatch // m] += p.kind in (W, BW)
            if p.kind is U:
                assert weights[p.microbatch // m] == m * len(stages), p


def check_complete(schedule: Schedule, m: int) -> None:
    """Every stage has each pass of each unit once, and W in turn."""
    units = range(schedule.num_microbatches)
    for stage, rank in enumerate(schedule.placement.rank_of):
        own = [p for p in schedule.ranks[rank] if p.stage == stage]
        assert [p.microbatch for p in own if p.kind is F] == [*units]
        assert [p.microbatch for p in own if p.kind in (B, BW)] == [*units]
        assert [p.microbatch for p in own if p.kind in (W, BW)] == [*units]
        assert [p.microbatch for p in own if p.kind is U] == [*units][::m]
    assert {p.kind for rank in schedule.ranks for p in rank} <= {F, B, W, BW, U}


@pytest.mark.parametrize(("name", "p", "m"), ORDERED)
def test_every_pass_sees_the_weights_of_its_group(name: str, p: int, m: int) -> None:
    schedule = late(name, p, m)
    assert schedule.num_microbatches % m == 0 and schedule.num_microbatches >= 3 * m
    check_complete(schedule, m)
    check_weights(schedule, m)
    check_updates_are_last(schedule, m)
    assert unfinished(lower(schedule)) == {}


@pytest.mark.parametrize("name", NAMES)
def test_an_update_waits_for_the_last_w_of_all_ranks(name: str) -> None:
    """For the norm of all gradients, by simulation with messages that take time."""
    schedule = late(name)
    timeline = simulate(schedule, costs_of(4))
    ends: dict[int, float] = {}
    starts: dict[int, float] = {}
    for rank, passes in enumerate(schedule.ranks):
        for p, start, end in zip(passes, timeline.start[rank], timeline.end[rank], strict=True):
            group = p.microbatch // 8
            if p.kind in (W, BW):
                ends[group] = max(ends.get(group, 0.0), end)
            if p.kind is U:
                starts[group] = min(starts.get(group, start), start)
    assert starts.keys() == ends.keys()
    assert all(starts[group] >= ends[group] - 1e-9 for group in ends)


@pytest.mark.parametrize("name", ["1f1b", "v-half"])
def test_a_forward_in_front_of_its_update_breaks_a_rule(name: str) -> None:
    schedule = late(name)
    rank = list(schedule.ranks[0])
    update = rank.index(Pass(U, 0, 0))
    first = rank.index(Pass(F, 0, 16))
    assert first > update
    rank.insert(first, rank.pop(update))
    with pytest.raises(InvalidSchedule, match="update of group 0 has not run yet") as error:
        replace(schedule, ranks=(tuple(rank), *schedule.ranks[1:])).validate()
    assert (error.value.rank, error.value.position) == (0, first - 1)
    assert is_one_sentence(error)


def test_an_update_in_front_of_its_w_breaks_a_rule() -> None:
    schedule = late("v-half")
    rank = list(schedule.ranks[0])
    last = max(i for i, p in enumerate(rank) if p.kind in (W, BW) and p.microbatch == 7)
    update = rank.index(Pass(U, rank[last].stage, 0))
    rank.insert(last, rank.pop(update))
    with pytest.raises(InvalidSchedule, match="not every W of group 0 has run yet"):
        replace(schedule, ranks=(tuple(rank), *schedule.ranks[1:])).validate()


def test_passes_are_told_by_their_group() -> None:
    rules = DelayedRules.of(4, 8)
    assert rules.pass_in_words(Pass(F, 1, 19)) == "F of stage 1, group 2, microbatch 3"
    assert rules.pass_in_words(Pass(U, 1, 16)) == "U of stage 1, group 2"
    schedule = late("v-half")
    assert schedule.rules == rules
    assert rules.sizes_in_words(schedule) == (
        "4 groups of 8 microbatches, each updated one step late"
    )
    assert rules.step_microbatches(schedule) == 8
    assert rules.whole_microbatches(schedule) == 32
    assert rules.microbatch_of(19) == 3
    assert rules.columns.version[::8] == (-1, -1, 0, 1)


# --- calls


def passes_of(text: str) -> tuple[Pass, ...]:
    """The passes of a text such as ``0F2 0BW1``."""
    found = []
    for word in text.split():
        letters = "".join(c for c in word if c.isalpha())
        stage, microbatch = word.split(letters)
        found.append(Pass(PassKind(letters), int(stage), int(microbatch)))
    return tuple(found)


HAND = Calls(
    looped(2),
    2,
    (
        passes_of("0BW0 0F3 0BW1 0U0 0F4"),
        passes_of("1BW0 1F2 1BW1 1F3 1U0"),
    ),
)
"""A call in which rank 0 runs the first F of the next group, and not that of its own."""


def test_some_passes_of_a_call() -> None:
    assert HAND.some({0}) == [list(passes_of("0BW0 0BW1 0U0")), list(passes_of("1BW0 1BW1 1U0"))]
    assert HAND.some({1, 2}) == [list(passes_of("0F3 0F4")), list(passes_of("1F2 1F3"))]
    assert HAND.some(()) == [[], []]
    assert HAND.reads_ahead
    assert not replace(HAND, ranks=tuple(map(tuple, HAND.some({0, 1})))).reads_ahead


def test_consecutive_calls() -> None:
    """What has begun in no call before stands first; the last one reads nothing ahead."""
    found = HAND.consecutive("by hand", 3)
    assert found.num_microbatches == 6 and found.name == "by hand"
    assert found.rules == DelayedRules.of(3, 2)
    assert found.ranks == (
        passes_of("0F0 0F1 0F2 0BW0 0F3 0BW1 0U0 0F4 0BW2 0F5 0BW3 0U2 0BW4 0BW5 0U4"),
        passes_of("1F0 1F1 1BW0 1F2 1BW1 1F3 1U0 1BW2 1F4 1BW3 1F5 1U2 1BW4 1BW5 1U4"),
    )
    assert len(HAND.consecutive("by hand", 1).ranks[1]) == 5


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_found_again_in_their_row(name: str) -> None:
    schedule = late(name)
    calls = calls_of(schedule)
    assert calls.group == 8 and calls.placement == schedule.placement
    assert calls.consecutive(schedule.name, 4).ranks == schedule.ranks
    for groups in (4, 5, 8):
        again = calls.consecutive(schedule.name, groups).validate()
        check_complete(again, 8)
        check_weights(again, 8)
        assert calls_of(again) == calls


@pytest.mark.parametrize("name", NAMES)
def test_a_call_has_every_pass_of_a_group_once(name: str) -> None:
    calls = calls_of(late(name))
    for rank, passes in enumerate(calls.ranks):
        found = Counter((p.kind, p.stage, p.microbatch % 8) for p in passes)
        assert set(found.values()) == {1}
        for stage in (s for s, of in enumerate(calls.placement.rank_of) if of == rank):
            kinds = Counter(kind for kind, of, _ in found if of == stage)
            assert kinds[F] == kinds[B] + kinds[BW] == kinds[W] + kinds[BW] == 8
            assert kinds[U] == 1
        assert all(p.microbatch // 8 == 0 for p in passes if p.kind is U)
        assert {p.microbatch // 8 for p in passes if p.kind is F} <= {1, 2}
        assert {p.microbatch // 8 for p in passes if p.kind in (W, BW)} <= {0, 1}


@pytest.mark.parametrize("name", NAMES)
def test_no_pass_of_a_call_needs_a_later_one(name: str) -> None:
    """All ranks may meet behind a call: what is in front of that runs by itself."""
    calls = calls_of(late(name))
    groups = 4
    ranks: list[list[Pass]] = [[] for _ in calls.ranks]
    ready: set[Pass] = set()
    last = calls.placement.num_stages - 1
    for call in range(-1, groups):
        now = [
            [p._replace(microbatch=p.microbatch + (call - 1) * 8) for p in rank]
            for rank in calls.ranks
        ]
        now = [[p for p in rank if p.microbatch >= 0] for rank in now]
        while any(now):
            moved = False
            for rank, passes in zip(ranks, now, strict=True):
                while passes and needs(passes[0], last) <= ready:
                    p = passes.pop(0)
                    rank.append(p)
                    ready |= {p, p._replace(kind=B), p._replace(kind=W)} if p.kind is BW else {p}
                    moved = True
            assert moved, (call, [passes[:1] for passes in now])


def needs(p: Pass, last: int) -> set[Pass]:
    """What F and the backwards read, of the first groups on; U is not of interest here."""
    if p.kind is F:
        return {p._replace(stage=p.stage - 1)} if p.stage else set()
    if p.kind in (B, BW):
        after = {Pass(B, p.stage + 1, p.microbatch)} if p.stage < last else set()
        return after | {p._replace(kind=F)}
    return {p._replace(kind=B)} if p.kind is W else set()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "interleaved"])
def test_the_period_is_what_one_more_step_takes(name: str) -> None:
    schedule = late(name)
    calls = calls_of(schedule)
    costs = late_costs(costs_of(4))
    assert calls.period(name, costs) == pytest.approx(period_of(schedule))
    ends = [simulate(calls.consecutive(name, groups), costs).makespan for groups in (9, 10)]
    assert ends[1] - ends[0] == pytest.approx(period_of(schedule))
    slower = late_costs(costs_of(4, (2.0, 2.0, 2.0)))
    assert calls.period(name, slower) == pytest.approx(2 * period_of(schedule) - UPDATE)


def test_calls_of_a_schedule_without_a_delay_are_refused() -> None:
    schedule = build("1f1b", pipeline_size=4, num_microbatches=8)
    with pytest.raises(UsageError, match="1f1b: the schedule was built without an update") as error:
        calls_of(schedule)
    assert is_one_sentence(error)


# --- tables


@pytest.mark.parametrize("name", NAMES)
def test_a_table_is_read_back_with_its_groups(name: str) -> None:
    request: dict[str, Any] = {
        "pipeline_size": 4,
        "num_microbatches": 8,
        "costs": costs_of(4),
        "update_delay": 1,
    }
    schedule = late(name)
    again = catalog.from_table(name, interchange.to_csv(schedule), request)
    assert again == schedule
    assert calls_of(again) == calls_of(schedule)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (3, "v-half: 32 units are listed, which are no groups of 3 microbatches"),
        (64, "v-half: 32 units are listed, which are no groups of 64 microbatches"),
        (4, "rule 'order': the update of group 0 has not run yet"),
        (16, "rule 'order': not every W of group 0 has run yet"),
    ],
)
def test_a_table_of_other_groups_is_refused(group: int, words: str) -> None:
    table = interchange.to_csv(late("v-half"))
    request = {"pipeline_size": 4, "num_microbatches": group, "update_delay": 1}
    with pytest.raises(UsageError, match=words) as error:
        catalog.from_table("v-half", table, request)
    assert is_one_sentence(error)


def test_a_table_of_a_step_with_a_flush_has_no_groups() -> None:
    table = interchange.to_csv(build("1f1b", pipeline_size=4, num_microbatches=8))
    request = {"pipeline_size": 4, "num_microbatches": 8, "update_delay": 1}
    with pytest.raises(InvalidSchedule, match="0 of 1 U passes are listed"):
        catalog.from_table("1f1b", table, request)


def test_groups_of_a_schedule() -> None:
    plain = build("1f1b", pipeline_size=2, num_microbatches=6)
    assert in_groups(plain, 2).rules == DelayedRules.of(3, 2)
    with pytest.raises(UsageError, match="6 units are listed, which are no groups of 4"):
        in_groups(plain, 4)


# --- what is refused


@pytest.mark.parametrize("name", NO_REPEAT)
def test_orders_that_do_not_repeat_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: its order does not repeat") as error:
        late_with(name)
    assert str(error.value) == (
        f"{name}: its order does not repeat from step to step, which an update delay needs: give "
        "1f1b, interleaved, auto, or a schedule whose name begins with v- or zb-"
    )


@pytest.mark.parametrize(("p", "m"), [(4, 2), (4, 3), (8, 4)])
def test_too_few_microbatches_are_refused(p: int, m: int) -> None:
    """Where the orders hold more than a step of them; the block of a schedule holds less."""
    request = Request(p, m, late_costs(costs_of(p)), Limit())
    long = replace(request, num_microbatches=BUILT * m, costs=costs_of(p))
    orders = [families.interleaved(long)]
    with pytest.raises(UsageError, match=f"interleaved: .* more microbatches than {m} ") as error:
        with_delay("interleaved", request, orders, lambda placement: [math.inf] * p)
    assert is_one_sentence(error)
    assert late_with("interleaved", p, m).report is not None


@pytest.mark.parametrize("delay", [2, -1, 7])
def test_another_delay_is_refused(delay: int) -> None:
    words = f"an update delay of {delay} steps was asked for: give 0 or 1"
    with pytest.raises(UsageError, match=words) as error:
        late_with("v-half", update_delay=delay)
    assert is_one_sentence(error)


def with_feature(feature: Any) -> dict[str, Any]:
    return {"costs": costs_of(4).having(feature)}


CONFLICTS: dict[str, dict[str, Any]] = {
    "vocabulary parallelism": with_feature(Vocabulary(output=0.1, weight=0.1)),
    "recomputation": with_feature(Recomputation(kept_input=0.05)),
    "offload": with_feature(Offload(seconds=0.1)),
    "communication in F and B": with_feature(Communication(forward=0.1, backward=0.1)),
    "passes N": with_feature(PART),
    "token slices": {"slices": 2},
    "adapters": {"m": None, "adapters": Adapters.equal(2, microbatches=4, update=0.1)},
    "a second model": {"second_model": SecondModel(SecondRole.ENCODER, forward=0.1, backward=0.2)},
    "back_to_back": {"back_to_back": True},
    "costs of unequal microbatches": {"costs": costs_of(4).of_lengths([1.0, 2.0] * 4)},
    "two directions": {"name": "chimera"},
}


@pytest.mark.parametrize("other", CONFLICTS)
def test_what_a_delay_cannot_be_combined_with_is_refused(other: str) -> None:
    with pytest.raises(UsageError, match="cannot be combined with") as error:
        late_with(**CONFLICTS[other])
    assert str(error.value).startswith(f"an update delay cannot be combined with {other}: ")
    assert is_one_sentence(error)


@pytest.mark.parametrize("choices", [{"placement": looped(4)}, {"chunks": 1}, {"num_layers": 4}])
def test_auto_keeps_to_a_placement(choices: dict[str, Any]) -> None:
    assert late_with("auto", m=4, **choices).placement.chunks == 1


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_seconds_of_an_update_are_checked(seconds: float) -> None:
    for what, updates in (
        ("an update", Updates(seconds)),
        ("a reduction", Updates(0.1, seconds)),
        ("a gathering", Updates(0.1, 0.1, seconds)),
    ):
        with pytest.raises(UsageError, match=f"{what} takes {seconds} s") as error:
            late_with("1f1b", updates=updates)
        assert is_one_sentence(error)


def test_seconds_of_a_reduction_need_a_delay() -> None:
    with pytest.raises(UsageError, match="a reduction that takes 1") as error:
        build("1f1b", pipeline_size=2, num_microbatches=2, updates=Updates(0.0, 1.0))
    assert is_one_sentence(error)


# --- the block of interleaved 1F1B


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("chunks", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_the_block_of_a_loop_never_meets_itself(p: int, chunks: int, microbatches: int) -> None:
    """F takes one unit and BW two; they fill the interval of every rank without a gap."""
    block = families.interleaved_block(p, chunks, microbatches)
    assert block.interval == 3 * chunks * microbatches
    few = range(microbatches + 1)  # with the first one of the next block
    f, b = (
        [[block.start(Pass(kind, stage, i)) for stage in range(p * chunks)] for i in few]
        for kind in (F, B)
    )
    for rank in range(p):
        taken: list[int] = []
        for i, stage in product(range(microbatches), range(rank, p * chunks, p)):
            units = (f[i][stage], b[i][stage], b[i][stage] + 1)
            taken += [unit % block.interval for unit in units]
        assert sorted(taken) == [*range(block.interval)]
    for i in few:
        for before, stage in zip(range(p * chunks), range(1, p * chunks), strict=False):
            assert f[i][before] + 1 <= f[i][stage]
            assert b[i][stage] + 2 <= b[i][before]
        assert f[i][-1] + 1 <= b[i][-1]
    assert any(f[i][-1] + 1 == b[i][-1] for i in few)
    for one, next_one in pairwise(few):
        assert f[one][0] < f[next_one][0] and b[one][0] < b[next_one][0]


@pytest.mark.parametrize(("p", "chunks"), [(4, 2), (6, 2), (8, 2), (6, 6)])
def test_a_block_of_two_microbatches_ends_earlier(p: int, chunks: int) -> None:
    one, two = (families.interleaved_block(p, chunks, microbatches) for microbatches in (1, 2))
    last = Pass(B, 0, 1)
    assert two.start(last) < one.start(last)


def test_groups_of_microbatches_that_are_asked_for_are_kept() -> None:
    """An order of other groups would be as fast, or faster, and is not taken."""
    found = late_with("interleaved", 4, 8, group_size=4)
    first = [p.microbatch for p in found.ranks[0] if p.kind is F and p.stage == 0][:4]
    ahead = [p for p in found.ranks[0] if p.kind is F][:5]
    assert first == [0, 1, 2, 3] and ahead[-1].stage == 4
    with pytest.raises(UsageError, match="more microbatches than 4"):
        late_with("interleaved", 8, 4, group_size=8)
    assert late_with("interleaved", 8, 4).report is not None


def test_interleaved_takes_its_block_where_its_own_order_is_too_long() -> None:
    """Its own order holds more, so that the next step begins too late with few microbatches."""
    few, many = late("interleaved", 8, 8), late("interleaved", 8, 16)
    peaks = [max(simulate(it, costs_of(8)).peak_microbatches) for it in (few, many)]
    assert peaks == [6.5, 11.5]
    assert [period_of(it) for it in (few, many)] == pytest.approx([24.1, 48.1])


# --- building blocks with their W

V_BLOCKS = {
    "v-min": families.v_min_offsets,
    "v-half": families.v_half_offsets,
    "v-zb": families.v_zb_offsets,
}
PEAKS: dict[str, Callable[[int], float]] = {
    "v-min": families.v_min_peak,
    "v-half": families.v_half_peak,
    "v-zb": float,
    "1f1b": float,
}


def block_of(name: str, p: int) -> families.BuildingBlock:
    if name == "1f1b":
        return families.one_f_one_b_block(p)
    return families.v_block(p, V_BLOCKS[name])


BLOCKS = [(name, p) for name in PEAKS for p in (2, 3, 4, 5, 6, 8)]


def held(passes: Sequence[Pass]) -> int:
    """The most chunks whose F has run and whose W has not."""
    most = now = 0
    for p in passes:
        now += (p.kind is F) - (p.kind is W)
        most = max(most, now)
    return most


@pytest.mark.parametrize(("name", "p"), BLOCKS)
def test_a_block_is_repeated_with_its_w(name: str, p: int) -> None:
    m = 4 * p
    block = block_of(name, p)
    plain, ranks = block.repeat(m), block.repeat_with_w(m)
    chunks = block.placement.chunks
    for rank, passes in enumerate(ranks):
        assert [it for it in passes if it.kind is not W] == plain[rank]
        for stage in {it.stage for it in passes}:
            own = [it for it in passes if it.stage == stage]
            assert [it.microbatch for it in own if it.kind is W] == [*range(m)]
            for microbatch in range(m):
                assert own.index(Pass(B, stage, microbatch)) < own.index(Pass(W, stage, microbatch))
        assert held(passes) <= chunks * PEAKS[name](p)


@pytest.mark.parametrize(("name", "p"), [it for it in BLOCKS if it[0] != "1f1b"])
def test_no_two_passes_of_a_block_take_the_same_unit(name: str, p: int) -> None:
    """Six passes of a unit each in an interval of six, in the same order again and again."""
    m = 8 * p
    block = block_of(name, p)
    for rank, passes in enumerate(block.repeat_with_w(m)):
        middle = len(passes) // 2 - 12
        turns = [(it.kind, it.stage) for it in passes[middle : middle + 24]]
        assert turns[:6] * 4 == turns and len(set(turns[:6])) == 6, rank
    ends = [whole_block(block, count, p).makespan for count in (m, m + 10)]
    assert ends[1] - ends[0] == pytest.approx(10 * block.interval / 2)


def whole_block(block: families.BuildingBlock, m: int, p: int) -> Timeline:
    ranks = tuple(map(tuple, block.repeat_with_w(m)))
    return simulate(Schedule("block", block.placement, m, ranks).validate(), costs_of(p))


@pytest.mark.parametrize("p", [2, 4, 5])
def test_a_full_block_has_w_right_behind_b(p: int) -> None:
    for passes in families.one_f_one_b_block(p).repeat_with_w(3 * p):
        for i, it in enumerate(passes):
            if it.kind is B:
                assert passes[i + 1] == it._replace(kind=W)


def test_w_takes_the_first_free_unit_of_a_block() -> None:
    """F at 0 and 1, B of stage 1 at 2 and of stage 0 at 3: two units are free in every six."""
    block = families.BuildingBlock(Placement("one", 1, (0, 0)), (0, 1), (3, 2), 6)
    (passes,) = block.repeat_with_w(2)
    assert " ".join(map(str, passes)) == "0F0 1F0 1B0 0B0 1W0 0W0 0F1 1F1 1B1 0B1 1W1 0W1"


@pytest.mark.parametrize("name", NO_REPEAT)
def test_some_schedules_have_no_repeating_order(name: str) -> None:
    request = request_of(4, 8)
    assert families.repeating_orders(name, request) == []


@pytest.mark.parametrize(("name", "count"), [("1f1b", 1), ("zb-h1", 2), ("v-half", 4), ("auto", 8)])
def test_orders_that_repeat_are_valid(name: str, count: int) -> None:
    found = families.repeating_orders(name, request_of(4, 24))
    assert len(found) == count
    for order in found:
        assert order.validate().num_microbatches == 24


def request_of(p: int, m: int) -> Request:
    return Request(p, m, costs_of(p), Limit())
