"""Token slices: orders, times and memory counted here by hand, limits, and the exact optimum."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from brief_searches import briefly
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_zb import schedules
from megatron_zb.cli.main import main
from megatron_zb.errors import UsageError
from megatron_zb.job.settings import ScheduleSettings
from megatron_zb.job.shared_build import pack, unpack
from megatron_zb.megatron_core.current_schedule import CurrentSchedule, JobSizes
from megatron_zb.schedules import (
    Costs,
    InvalidSchedule,
    Pass,
    PassKind,
    Schedule,
    lower,
    simulate,
)
from megatron_zb.schedules.bounds import Grain, lower_bound
from megatron_zb.schedules.features.slices import SlicedRules, Slicing, least_tokens, slicing_of
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.lowering import WaitReceive
from megatron_zb.schedules.placement import looped, v_shape
from megatron_zb.schedules.request import LimitTooSmall
from megatron_zb.schedules.search.inner_loops import INFINITY
from megatron_zb.schedules.search.kernels import Plain
from megatron_zb.schedules.search.priority_weights import PRESETS, PriorityWeights
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.runner import Runner

F, B, W, BW = PassKind.F, PassKind.B, PassKind.W, PassKind.BW
NAMES = tuple(schedules.names())


def _costs(p: int, p2p: float = 0.0625, **choices: float) -> Costs:
    return Costs.uniform(
        pipeline_size=p, forward=1.0, backward=1.25, weight=0.75, p2p=p2p, **choices
    )


def _held_in_part(p: int) -> Costs:
    """B frees three quarters of an activation."""
    held = [0.25] * p
    times = [[1.0] * p, [1.25] * p, [0.75] * p]
    return Costs.of_slices(
        pipeline_size=p,
        **dict(zip(("forward", "backward", "weight"), times, strict=True)),
        p2p=0.0625,
        held_for_weight=held,
    )


def _build(
    name: str, p: int, m: int, slices: int | Slicing, costs: Costs | None = None, **choices: Any
) -> Schedule:
    costs = _costs(p) if costs is None else costs
    sizes: dict[str, Any] = {"pipeline_size": p, "num_microbatches": m}
    with briefly():
        return schedules.build(name, **sizes, costs=costs, slices=slices, **choices)


class ByHand:
    """Times, memory and orders of a sliced schedule, from the lengths of its slices alone."""

    def __init__(self, schedule: Schedule, slicing: Slicing, costs: Costs) -> None:
        self.schedule, self.costs, self.joined = schedule, costs, bool(slicing.joins_weight)
        self.n, self.attention = slicing.slices, slicing.attention
        borders = [sum(slicing.lengths[:i]) / sum(slicing.lengths) for i in range(self.n + 1)]
        self.spans = list(itertools.pairwise(borders))
        self.last = schedule.placement.num_stages - 1
        self.chunks = schedule.placement.chunks

    def length(self, p: Pass) -> float:
        start, end = self.spans[p.microbatch % self.n]
        return end - start

    def seconds(self, p: Pass) -> float:
        start, end = self.spans[p.microbatch % self.n]
        grown = (1 - self.attention) * (end - start) + self.attention * (end**2 - start**2)
        whole = self.joined and p.microbatch % self.n == 0
        weight = (
            self.costs.seconds[PassKind.W][0] * (1.0 if whole else self.length(p)) / self.chunks
        )
        backward = self.costs.seconds[PassKind.B][0] * grown / self.chunks
        forward = self.costs.seconds[PassKind.F][0] * grown / self.chunks
        return {F: forward, B: backward, W: weight, BW: backward + weight}[p.kind]

    def inputs(self, p: Pass) -> Iterator[Pass]:
        """What a pass needs of other stages and of the slices of its microbatch."""
        n, unit = self.n, p.microbatch
        if p.kind is F:
            yield from [p._replace(stage=p.stage - 1)] if p.stage else []
            yield from [p._replace(microbatch=unit - 1)] if unit % n else []
        elif p.kind is not W:
            above = [Pass(k, p.stage + 1, unit) for k in (B, BW) if p.stage < self.last]
            behind = [Pass(k, p.stage, unit + 1) for k in (B, BW) if unit % n < n - 1]
            yield from [*above, *behind, Pass(F, p.stage, unit)]
        elif self.joined:
            yield from (Pass(k, p.stage, unit + i) for i in range(n) for k in (B, BW))
        else:
            yield Pass(B, p.stage, unit)

    def ends(self) -> dict[Pass, float]:
        """Ends of all passes: relax every dependency until nothing changes."""
        rank_of = self.schedule.placement.rank_of
        ends = {p: 0.0 for rank in self.schedule.ranks for p in rank}
        changed, rounds = True, 0
        while changed:
            changed, rounds = False, rounds + 1
            assert rounds <= len(ends) + 1, "passes wait in a circle"
            for rank in self.schedule.ranks:
                now = 0.0
                for p in rank:
                    for maker in filter(ends.__contains__, self.inputs(p)):
                        travels = rank_of[maker.stage] != rank_of[p.stage]
                        latency = self.costs.p2p[0][1] * self.length(p) if travels else 0.0
                        now = max(now, ends[maker] + latency)
                    now += self.seconds(p)
                    changed |= ends[p] != now
                    ends[p] = now
        return ends

    def peaks(self) -> list[float]:
        """The most memory of every rank, in microbatches of a whole rank."""
        kept = self.costs.memory["held_for_weight"][0] / self.chunks
        found = []
        for rank in self.schedule.ranks:
            held = most = 0.0
            for p in rank:
                length, share = self.length(p), 1.0 / self.chunks
                if p.kind is F:
                    held += length * share
                most = max(most, held)
                if p.kind in (B, BW):
                    held -= length * (share - kept)
                if p.kind in (W, BW):
                    held -= (1.0 if self.joined else length) * kept
            found.append(most)
        return found

    def orders(self) -> dict[tuple[PassKind, int], list[int]]:
        """Units of every stage by what runs of them, in their order."""
        found: dict[tuple[PassKind, int], list[int]] = {}
        for rank in self.schedule.ranks:
            for kind, stage, unit in rank:
                for role in (B, W) if kind is BW else (kind,):
                    found.setdefault((role, stage), []).append(unit)
        return found


def _checked(schedule: Schedule, costs: Costs) -> ByHand:
    """Check a schedule against what is counted by hand."""
    slicing = slicing_of(schedule)
    assert slicing is not None
    by_hand = ByHand(schedule, slicing, costs)
    timeline = simulate(schedule.validate(), costs)
    lower(schedule, timeline)
    ends = by_hand.ends()
    found = {
        p: end
        for rank, times in zip(schedule.ranks, timeline.end, strict=True)
        for p, end in zip(rank, times, strict=True)
    }
    assert found == pytest.approx(ends)
    for rank in schedule.ranks:
        for at, p in enumerate(rank):
            near = {q for q in by_hand.inputs(p) if q in ends}
            assert all(ends[q] <= ends[p] for q in near), rank[at]
    assert timeline.peak_memory == pytest.approx(by_hand.peaks())
    n, m = slicing.slices, schedule.num_microbatches // slicing.slices
    falling = [j * n + i for j in range(m) for i in reversed(range(n))]
    weights = [j * n for j in range(m)] if slicing.joins_weight else falling
    wanted = {F: list(range(n * m)), B: falling, W: weights}
    assert by_hand.orders() == {
        (kind, stage): order for kind, order in wanted.items() for stage in range(by_hand.last + 1)
    }
    assert schedule.report is not None
    assert schedule.report.lower_bound <= timeline.makespan * (1 + 1e-9)
    return by_hand


@settings(deadline=None, max_examples=12)
@given(
    st.sampled_from(NAMES),
    st.integers(2, 4),
    st.integers(1, 3),
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.sampled_from([None, False, True]),
    st.sampled_from([0.0, 0.5]),
    st.floats(0.2, 1.5),
)
@example("zb-h1", 2, 2, [1, 1], True, 0.0, 0.5)  # one W holds what all slices need
@example("zb-h1", 2, 2, [2, 1], None, 0.0, 1.0)  # unequal slices hold more than 1F1B's share
@example("auto", 2, 1, [2, 1, 2], None, 0.0, 1.0)  # and than so many of those beside one another
def test_schedules_keep_their_limit_or_name_the_smallest(
    name: str,
    p: int,
    m: int,
    lengths: list[int],
    joined: bool | None,
    attention: float,
    limit: float,
) -> None:
    slicing = Slicing(tuple(map(float, lengths)), attention, joins_weight=joined)
    costs = _held_in_part(p) if m == 2 else _costs(p)
    choices: dict[str, Any] = {"memory_limit": limit, "chunks": 1 if name == "auto" else None}
    try:
        schedule = _build(name, p, m, slicing, costs, **choices)
    except LimitTooSmall as error:
        choices["memory_limit"] = limit = error.needed / p * (1 + 1e-9)
        schedule = _build(name, p, m, slicing, costs, **choices)
    assert max(_checked(schedule, costs).peaks()) <= limit * p + 1e-6


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("name", ["v-half", "v-min", "v-zb", "auto"])
def test_one_microbatch_of_memory_is_enough_for_a_search(name: str, joined: bool) -> None:
    slicing = Slicing((3.0, 2.0, 2.0), 0.5, joins_weight=joined)
    schedule = _build(name, 3, 3, slicing, memory_limit=1 / 3)
    assert max(_checked(schedule, _costs(3)).peaks()) == pytest.approx(1.0)
    with pytest.raises(LimitTooSmall, match="at least 0\\.3334 of 1F1B"):
        _build(name, 3, 3, slicing, memory_limit=0.33)


@pytest.mark.parametrize("n", [3, 4, 6])
def test_fixed_orders_hold_what_the_literature_has(n: int) -> None:
    p, m, group = 4, 4, n * -(-4 // n)
    held = {
        name: max(simulate(s, _costs(p)).peak_memory)
        for name in ("1f1b", "zb-h1", "interleaved")
        for s in [_build(name, p, m, n)]
    }
    assert held["1f1b"] == held["zb-h1"] == pytest.approx((n + p - 1) / n)
    assert held["interleaved"] == pytest.approx((n + 2 * (p - 1) + group) / (2 * n))


def test_sliced_1f1b_waits_for_one_slice() -> None:
    """Bubble (p - 1)(F + B + W) of one slice, without p2p latency and attention."""
    p, m, n = 4, 4, 5
    costs = _costs(p, p2p=0.0)
    schedule = _build("1f1b", p, m, n, costs)
    makespan = simulate(schedule, costs).makespan
    assert makespan == pytest.approx(3.0 * m + (p - 1) * 3.0 / n)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_one_slice_is_the_schedule_of_microbatches(name: str) -> None:
    whole = _build(name, 3, 4, 1)
    assert whole == _build(name, 3, 4, Slicing((7.0,), 0.5))
    assert slicing_of(whole) is None
    with briefly():
        assert whole == schedules.build(name, pipeline_size=3, num_microbatches=4, costs=_costs(3))


def _swapped(schedule: Schedule, rank: int, a: Pass, b: Pass) -> Schedule:
    other = {a: b, b: a}
    ranks = [
        tuple(other.get(p, p) for p in passes) if r == rank else passes
        for r, passes in enumerate(schedule.ranks)
    ]
    return replace(schedule, ranks=tuple(ranks))


@pytest.mark.parametrize("kind", [F, B, W])
def test_slices_in_another_order_are_refused(kind: PassKind) -> None:
    schedule = _build("zb-h1", 2, 2, Slicing.equal(3, joins_weight=False), _costs(2, p2p=0.0))
    split = [p for p in schedule.ranks[1] if p.kind is kind]
    words = f"the next {kind} of stage 1 is slice {split[0].microbatch}"
    with pytest.raises(InvalidSchedule, match=f"rule 'microbatch order': {words}"):
        _swapped(schedule, 1, split[0], split[1]).validate()


def test_a_first_backward_before_the_last_slice_is_refused() -> None:
    schedule = _build("1f1b", 2, 2, 3)
    first = next(p for p in schedule.ranks[1] if p.kind is BW)
    passes = [first, *(p for p in schedule.ranks[1] if p != first)]
    with pytest.raises(InvalidSchedule, match="rule 'order': its F has not run yet"):
        replace(schedule, ranks=(schedule.ranks[0], tuple(passes))).validate()
    earlier = next(p for p in schedule.ranks[0] if p.kind is BW)
    passes = [*schedule.ranks[0][:2], earlier]
    passes += [p for p in schedule.ranks[0] if p not in passes]
    with pytest.raises(InvalidSchedule, match="rule 'order'"):
        replace(schedule, ranks=(tuple(passes), schedule.ranks[1])).validate()


def test_a_joined_weight_gradient_is_due_once_and_last() -> None:
    schedule = _build("v-zb", 2, 2, Slicing.equal(3, joins_weight=True))
    (rank, due), *_ = [
        (r, p) for r, passes in enumerate(schedule.ranks) for p in passes if p.kind is W
    ]
    with pytest.raises(InvalidSchedule, match=f"the next W of stage {due.stage} is slice"):
        replace(
            schedule,
            ranks=tuple(
                tuple(p._replace(microbatch=1) if p == due else p for p in passes)
                for passes in schedule.ranks
            ),
        ).validate()
    before = due._replace(kind=B)
    with pytest.raises(InvalidSchedule, match="its B has not run yet"):
        _swapped(schedule, rank, due, before).validate()


def test_a_loss_of_single_weight_gradients_joins_them() -> None:
    alike = Slicing.equal(3)
    for slicing, joined in ((alike, False), (replace(alike, weight_loss=1.0), True)):
        found = slicing_of(_build("v-zb", 2, 4, slicing, memory_limit=2.0))
        assert found is not None
        assert found.joins_weight is joined
    lossy = replace(alike, weight_loss=1.0, joins_weight=False)
    schedule = _build("1f1b", 2, 4, lossy)
    busy = sum(simulate(schedule, _costs(2)).utilisation)
    makespan = simulate(schedule, _costs(2)).makespan
    assert busy * makespan == pytest.approx(2 * 4 * 3.75)


def test_slices_of_equal_time() -> None:
    costs = _costs(2)
    slicing = Slicing.of_equal_time(5, costs, attention=0.6)
    rows = slicing.costs(costs, 1).microbatches
    times = [
        sum(map(sum, (row.seconds[PassKind.F], row.seconds[PassKind.B], row.seconds[PassKind.W])))
        for row in rows
    ]
    assert times == pytest.approx([6.0 / 5] * 5)
    assert list(slicing.lengths) == sorted(slicing.lengths, reverse=True)


def test_unequal_microbatches_are_cut_each() -> None:
    costs = _costs(2, p2p=0.0).of_lengths((1.0, 2.0))
    schedule = _build("v-zb", 2, 2, 2, costs)
    timeline = simulate(schedule, costs)
    lengths = {
        p.microbatch: end - start
        for p, start, end in zip(schedule.ranks[0], timeline.start[0], timeline.end[0], strict=True)
        if p.kind is F
    }
    assert lengths == pytest.approx({0: 0.25, 1: 0.25, 2: 0.5, 3: 0.5})


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", None), ("interleaved", 2)])
def test_auto_is_never_slower_than_fused_orders_in_their_memory(
    name: str, chunks: int | None
) -> None:
    p, m, costs = 4, 4, _costs(4)
    for slicing in (Slicing.equal(4, attention=0.5), Slicing((4.0, 3.0, 2.0))):
        fused = _build(name, p, m, slicing, chunks=chunks)
        timeline = simulate(fused, costs)
        limit = max(timeline.peak_memory) / p
        found = _build("auto", p, m, slicing, memory_limit=limit, chunks=chunks or 1)
        assert simulate(found, costs).makespan <= timeline.makespan * (1 + 1e-9)


@pytest.mark.parametrize("lengths", [(8.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 8.0)])
def test_no_run_gets_stuck_in_the_memory_of_one_microbatch(lengths: tuple[float, ...]) -> None:
    p, m, placement = 3, 3, v_shape(3)
    slicing = Slicing(lengths, joins_weight=False)
    table, rules = slicing.costs(_costs(p), m), SlicedRules(slicing)
    for share in (1.0, 1.2, 1.5):
        costs = table.for_placement(placement)
        problem = Problem(placement, m * 4, costs, (share,) * p, rules=rules)
        runner = Runner(problem, Plain())
        for numbers in PRESETS:
            assert runner.makespan(PriorityWeights.from_preset(numbers, 2, p)) < INFINITY


# --- the optimum of a small problem


@cache
def _interleaved_orders(forwards: int, slices: int) -> list[list[tuple[PassKind, int]]]:
    """Every order of one rank: F rise, B fall within a microbatch, W follow B in their order."""
    falling = [j * slices + i for j in range(forwards // slices) for i in reversed(range(slices))]
    found = []

    def extend(order: list[tuple[PassKind, int]], f: int, b: int, w: int) -> None:
        if w == forwards:
            found.append(order)
            return
        if f < forwards:
            extend([*order, (F, f)], f + 1, b, w)
        if b < forwards and f > b // slices * slices + slices - 1:
            extend([*order, (B, falling[b])], f, b + 1, w)
        if w < b:
            extend([*order, (W, falling[w])], f, b, w + 1)

    extend([], 0, 0, 0)
    return found


def _fits(order: list[tuple[PassKind, int]], most: int) -> bool:
    held = itertools.accumulate({F: 1, B: 0, W: -1}[kind] for kind, _ in order)
    return max(held) <= most


def _makespan_of_two(
    orders: tuple[list[tuple[PassKind, int]], ...], seconds: dict[tuple[PassKind, int], int]
) -> float:
    """Time two ranks of a stage each; inf if they wait for each other."""
    at, clock = [0, 0], [0, 0]
    ends: dict[tuple[PassKind, int, int], int] = {}
    moved = True
    while moved:
        moved = False
        for rank in (0, 1):
            while at[rank] < len(orders[rank]):
                kind, unit = orders[rank][at[rank]]
                needed = {(F, 1): (F, 0), (B, 0): (B, 1)}.get((kind, rank))
                ready = 0 if needed is None else ends.get((*needed, unit), -1)
                if ready < 0:
                    break
                clock[rank] = max(clock[rank], ready) + seconds[kind, unit]
                ends[kind, rank, unit] = clock[rank]
                at[rank] += 1
                moved = True
    done = all(i == len(order) for i, order in zip(at, orders, strict=True))
    return max(clock) if done else float("inf")


@pytest.mark.parametrize(("m", "held"), [(1, 2), (2, 2), (2, 3), (2, 4)])
def test_searches_find_the_optimum_of_a_small_problem(m: int, held: int) -> None:
    """Two ranks, microbatches of two slices, every order; F and B of a slice 2 and 6, W 4."""
    orders = [order for order in _interleaved_orders(2 * m, 2) if _fits(order, held)]
    seconds = {
        (kind, unit): {F: (2, 6), B: (2, 6), W: (4, 4)}[kind][unit % 2]
        for kind in (F, B, W)
        for unit in range(4)
    }
    optimum = min(_makespan_of_two(pair, seconds) for pair in itertools.product(orders, orders))
    costs = Costs.uniform(pipeline_size=2, forward=8.0, backward=8.0, weight=8.0)
    slicing = Slicing.equal(2, attention=1.0, joins_weight=False)
    choices = {"memory_limit": held / 4, "chunks": 1}
    schedule = _build("auto", 2, m, slicing, costs, **choices)
    report = schedule.report
    assert report is not None
    assert report.lower_bound <= optimum == pytest.approx(report.makespan)


def test_the_bound_counts_the_messages_before_a_rank_has_work() -> None:
    """With all memory, a rank waits only for its first slice: an F of 4 and half a message."""
    costs = Costs.uniform(pipeline_size=2, forward=8.0, backward=8.0, weight=8.0, p2p=0.25)
    of_slices = Slicing.equal(2, joins_weight=False).costs(costs, 8).for_placement(looped(2))
    found = lower_bound(looped(2), len(of_slices.microbatches), of_slices, (100.0, 100.0), Grain(2))
    assert found == pytest.approx(4.0 + 0.25 / 2 + 8 * 3 * 8.0)


# --- words, pictures, the command line


def test_passes_are_named_by_microbatch_and_slice() -> None:
    schedule = _build("1f1b", 2, 2, 3)
    assert [str(p) for p in schedule.ranks[1][:5]] == ["1F0.0", "1F0.1", "1F0.2", "1BW0.2", "1F1.0"]
    p = Pass(B, 1, 4)
    assert schedule.rules.pass_in_words(p) == "B of stage 1, microbatch 1, slice 1"
    takes = (at for rank in lower(schedule).ranks for at in rank if isinstance(at, WaitReceive))
    messages = {at.message for at in takes}
    words = {schedule.rules.message_in_words(None, message) for message in messages}
    assert "the gradient for stage 0, microbatch 1, slice 2" in words
    assert len(words) == 2 * 6


def test_show_and_export(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--pipeline-size", "2", "--num-microbatches", "1", "--slices"]
    with briefly():
        main(["show", "v-zb", *sizes, "3,2,1", "--attention", "0.5"])
        main(["export", "1f1b", *sizes, "2", "--format", "chrome-trace", "--output", "-"])
    shown = capsys.readouterr().out
    assert "2 ranks, 1 microbatches of 3 slices" in shown
    assert "F0.1" in shown
    assert '"name": "1BW0.1"' in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["1f1b", "--slices", "2", "--offload", "1"], "1f1b has a fixed order"),
        (["v-zb", "--slices", "2", "--forward-comm", "1"], "communication in F and B"),
        (["v-zb", "--slices", "2", "--output", "x.html"], "no page for slices"),
        (["1f1b", "--slices", "2", "--memory-limit", "0.5"], "needs at least 0.75 of 1F1B"),
    ],
)
def test_what_has_no_slices_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *arguments, "--pipeline-size", "2", "--num-microbatches", "2"]) != 0
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        {"lengths": ()},
        {"lengths": (1.0, 0.0)},
        {"lengths": (1.0, float("inf"))},
        {"lengths": (1.0,), "attention": 2.0},
    ],
)
def test_numbers_that_cut_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="slices"):
        Slicing(**given)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "v-zb", "auto"])
def test_a_packed_order_is_the_same_when_it_is_unpacked(name: str, joins: bool) -> None:
    request: dict[str, Any] = {
        "pipeline_size": 2,
        "num_microbatches": 3,
        "slices": Slicing((3.0, 2.0, 1.0), attention=0.3, joins_weight=joins),
        "costs": Costs.uniform(pipeline_size=2, forward=1.0, backward=1.2, weight=0.8),
        "memory_limit": 1.0,
    }
    built = schedules.build(name, **request)
    assert unpack(pack(built), name, request).ranks == built.ranks
    assert unpack(pack(built), name, request).rules == built.rules
    with pytest.raises(UsageError, match="microbatches"):
        unpack(pack(built), name, request | {"num_microbatches": 2})


def test_slices_are_read_from_a_number_or_lengths_and_must_divide_the_sequence() -> None:
    assert Slicing.given(4).borders(32) == (0, 8, 16, 24, 32)
    assert Slicing.given("2,1,1").borders(32) == (0, 16, 24, 32)
    assert Slicing.given(str(Slicing.given("12,12,8"))) == Slicing.given("12,12,8")
    for wrong in ("x", "0", "2000", "1,x", "1,-1"):
        with pytest.raises(UsageError):
            Slicing.given(wrong)
    sizes = JobSizes(pipeline_size=2, num_microbatches=2, layers=Layers(4), sequence=30)
    asked = ScheduleSettings(pipeline_schedule="v-half", pipeline_slices=4)
    with pytest.raises(UsageError, match="30 tokens cannot be cut into slices 4"):
        CurrentSchedule.named(asked, sizes)


@pytest.mark.parametrize(
    ("m", "tokens", "tensor", "slices"),
    [(4, 65536, 1, 32), (4, 65536, 16, 4), (4, 10002, 1, 2), (100, 65536, 1, 1), (4, 2000, 1, 1)],
    ids=["by gain", "by length", "by divisor", "many microbatches", "too short"],
)
def test_auto_takes_slices_until_twice_as_many_gain_little(
    m: int, tokens: int, tensor: int, slices: int
) -> None:
    sizes = JobSizes(
        pipeline_size=4, num_microbatches=m, layers=Layers(8), sequence=tokens, spread=tensor
    )
    asked = ScheduleSettings(pipeline_schedule="1f1b", pipeline_slices="auto")
    found = CurrentSchedule.named(asked, sizes)
    assert (1 if found.slicing is None else found.slicing.slices) == slices
    (line,) = found.remarks
    said = "whole microbatches" if slices == 1 else f"{slices} slices of {tokens // slices} tokens"
    assert line.startswith(said)


def test_the_gain_of_twice_as_many_slices_is_that_of_1f1b() -> None:
    """Without attention, the formula is the simulated makespan."""
    costs = Costs.uniform(pipeline_size=4, forward=1.0, backward=1.0, weight=1.0)

    def makespan(slices: int) -> float:
        report = schedules.build(
            "1f1b", pipeline_size=4, num_microbatches=4, costs=costs, slices=slices
        ).report
        assert report is not None
        return report.makespan

    slices = Slicing.enough(4, 4, 65536, 1024).slices
    before, found, more = map(makespan, (slices // 2, slices, 2 * slices))
    assert found == pytest.approx(3 * (4 + 3 / slices))
    assert found < 0.98 * before
    assert more > 0.98 * found


@pytest.mark.parametrize(
    ("hidden", "tokens"), [(None, 1024), (16384, 1024), (8192, 1024), (4096, 4096), (2048, 16384)]
)
def test_slices_of_narrow_models_are_longer(hidden: int | None, tokens: int) -> None:
    """A layer of so many tokens does as much as one of 1024 at a hidden size of 8192."""
    assert least_tokens(hidden) == tokens
