"""Token slices beside vocabulary parallelism: orders, times, memory, and their texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from brief_searches import briefly
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_zb import schedules
from megatron_zb.job.shared_build import pack, unpack
from megatron_zb.schedules import (
    Costs,
    InvalidSchedule,
    Pass,
    PassKind,
    Schedule,
    lower,
    simulate,
)
from megatron_zb.schedules.features.slices import Slicing, slicing_of
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.request import LimitTooSmall
from megatron_zb.schedules.simulator import Timeline

F, B, W, BW, O, P, V, E, G = map(PassKind, ("F", "B", "W", "BW", "O", "P", "V", "E", "G"))  # noqa: E741
NAMES = tuple(schedules.names())
HOP, OUTPUT, HELD = 0.0625, 2.0, 0.25
LOGITS = 3  # slices whose logits a rank holds at once, at most


def _costs(p: int) -> Costs:
    costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.25, weight=0.75, p2p=HOP)
    return costs.having(Vocabulary(output=OUTPUT, weight=1.0, held=HELD * p, lookup=0.0))


def _built(name: str, p: int, m: int, slicing: Slicing, **choices: Any) -> Schedule:
    sizes: dict[str, Any] = {"pipeline_size": p, "num_microbatches": m, "slices": slicing}
    with briefly():
        return schedules.build(name, costs=_costs(p), **sizes, **choices)


def _inputs(schedule: Schedule, p: Pass, n: int) -> Iterator[Pass]:
    """What a pass of the shards, or at an end of the model, needs; some alternatives never run."""
    last, ranks = schedule.placement.num_stages - 1, range(len(schedule.ranks))
    if p.kind is O:
        yield Pass(F, last, p.microbatch)
    elif p.kind is P:
        yield from (Pass(O, last + 1 + rank, p.microbatch) for rank in ranks)
    elif p.kind is V:
        yield Pass(P, last, p.microbatch)
    elif p.kind in (B, BW) and p.stage == last:
        yield Pass(P, last, p.microbatch)
        yield Pass(P, last, p.microbatch // n * n + n - 1)
    elif p.kind is F and p.stage == 0:
        yield from (Pass(E, last + 1 + rank, p.microbatch) for rank in ranks)
    elif p.kind is G:
        yield from (Pass(kind, 0, p.microbatch) for kind in (B, BW))


def _check_times(timeline: Timeline, n: int, latency: float) -> None:
    ends, rank_of = {}, {}
    for rank, passes in enumerate(timeline.schedule.ranks):
        for p, end in zip(passes, timeline.end[rank], strict=True):
            ends[p], rank_of[p] = end, rank
    for rank, passes in enumerate(timeline.schedule.ranks):
        for p, start in zip(passes, timeline.start[rank], strict=True):
            for maker in filter(ends.__contains__, _inputs(timeline.schedule, p, n)):
                least = latency if rank_of[maker] != rank else 0.0
                assert start >= ends[maker] + least - 1e-9, (p, maker)


def _check_orders(schedule: Schedule, slicing: Slicing) -> None:
    n, m = slicing.slices, schedule.num_microbatches // slicing.slices
    falling = [j * n + i for j in range(m) for i in reversed(range(n))]
    for passes in schedule.ranks:
        for kind, rising in ((O, True), (P, True), (V, True), (E, True), (G, False)):
            found = [int(p.microbatch) for p in passes if p.kind is kind]
            assert found in ([], list(range(n * m)) if rising else falling), kind


def _logits(schedule: Schedule, lengths: list[float]) -> float:
    """The most that a rank's shard holds from O to V."""
    most = 0.0
    for passes in schedule.ranks:
        held = 0.0
        for p in passes:
            held += ((p.kind is O) - (p.kind is V)) * lengths[p.microbatch % len(lengths)]
            most = max(most, HELD * held)
    return most


@settings(deadline=None, max_examples=16)
@given(
    st.sampled_from(NAMES),
    st.integers(2, 4),
    st.integers(1, 3),
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.sampled_from([None, False, True]),
    st.sampled_from([0.0, 0.5]),
    st.floats(0.3, 1.5),
)
@example("zb-h1", 2, 2, [2, 1], True, 0.0, 1.0)
@example("auto", 4, 1, [1, 1, 1, 1], None, 0.5, 0.75)
@example("1f1b", 2, 2, [1, 1], True, 0.0, 0.5)  # a whole backward frees what all slices have left
@example("1f1b", 2, 1, [1, 2, 4, 4], None, 0.0, 1.0)  # the shortest slice takes a short latency
def test_slices_of_shards_keep_their_order_and_their_limit(
    name: str, p: int, m: int, lengths: list[int], joined: bool | None, att: float, limit: float
) -> None:
    slicing = Slicing(tuple(map(float, lengths)), att, joins_weight=joined)
    choices: dict[str, Any] = {"memory_limit": limit, "chunks": 1 if name == "auto" else None}
    try:
        schedule = _built(name, p, m, slicing, **choices)
    except LimitTooSmall as error:
        choices["memory_limit"] = limit = error.needed / p * (1 + 1e-9)
        schedule = _built(name, p, m, slicing, **choices)
    timeline = simulate(schedule.validate(), _costs(p))
    lower(schedule, timeline)
    lower(schedule.forwards().validate())
    found = slicing_of(schedule)
    assert found is not None and found.lengths == slicing.lengths
    shares = [length / sum(lengths) for length in slicing.lengths]
    _check_times(timeline, slicing.slices, HOP * min(shares))
    _check_orders(schedule, found)
    assert _logits(schedule, shares) <= LOGITS * HELD * max(shares) * (1 + 1e-9)
    assert max(timeline.peak_memory) <= limit * p + 1e-6
    assert schedule.report is not None
    assert schedule.report.lower_bound <= timeline.makespan * (1 + 1e-9)
    request = {"pipeline_size": p, "num_microbatches": m, "slices": slicing, **choices}
    again = unpack(pack(schedule), name, request | {"costs": _costs(p)})
    assert (again.ranks, again.rules) == (schedule.ranks, schedule.rules)


def test_the_bubble_is_that_of_slices() -> None:
    """A step of whole microbatches with a vocabulary-parallel output layer takes far longer."""
    p, m, costs = 4, 4, _costs(4)
    whole, cut = (
        simulate(s, costs).makespan
        for s in (_built("v-half", p, m, Slicing.equal(n)) for n in (1, 8))
    )
    assert cut < 0.9 * whole
    work = m * (1.0 + 1.25 + 0.75 + (OUTPUT + 1.0) / p)
    assert cut < 1.15 * work


def test_a_backward_before_the_loss_of_its_slice_is_refused() -> None:
    schedule = _built("v-half", 2, 1, Slicing.equal(2))
    (rank,) = (r for r in schedule.ranks if any(p.kind is P for p in r))
    loss = next(at for at, p in enumerate(rank) if p.kind is P and p.microbatch == 1)
    start = next(at for at, p in enumerate(rank) if p.kind in (B, BW))
    assert loss < start
    order = [*rank[:loss], *rank[loss + 1 : start + 1], rank[loss], *rank[start + 1 :]]
    ranks = tuple(tuple(order) if each is rank else each for each in schedule.ranks)
    broken = Schedule("broken", schedule.placement, 2, ranks, rules=schedule.rules)
    with pytest.raises(InvalidSchedule, match="its P has not run yet"):
        broken.validate()
    words = {schedule.rules.pass_in_words(p) for each in schedule.ranks for p in each}
    assert "O of its rows of the vocabulary, microbatch 0, slice 1" in words
    assert "P of stage 3, microbatch 0, slice 0" in words


def test_passes_of_shards_are_all_there() -> None:
    schedule = _built("zb-h1", 3, 2, Slicing.equal(3))
    found = {(p.kind, p.stage, int(p.microbatch)) for rank in schedule.ranks for p in rank}
    units, shards = range(6), range(3, 6)
    assert found >= {*itertools.product((O, V, E, G), shards, units)}
    assert found >= {*itertools.product((P,), (2,), units)}
