"""A vocabulary-parallel embedding: its rules, and its places in an order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn_sizes import every_value

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.vocabulary import (
    EmbeddingRules,
    Vocabulary,
    shards_embedding,
    with_prediction,
)
from megatron_zb.schedules.interchange import from_csv, to_csv
from megatron_zb.schedules.lowering import Run, Send
from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.placement import looped
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.task_graph import TaskGraph

pytestmark = pytest.mark.usefixtures("brief_searches")

F, B, BW, O, P, V, E, G, M, K = map(PassKind, "F B BW O P V E G M K".split())  # noqa: E741


def _costs(p: int, lookup: float | None = 0.02) -> Costs:
    costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.2, weight=0.8, p2p=0.05)
    return costs.having(Vocabulary(output=4.4, weight=1.6, held=0.05 * p, lookup=lookup))


FIRST = (Pass(E, 2, 0), Pass(F, 0, 0), Pass(O, 2, 0), Pass(V, 2, 0), Pass(BW, 0, 0), Pass(G, 2, 0))
LAST = (
    *(Pass(E, 3, 0), Pass(F, 1, 0), Pass(O, 3, 0), Pass(P, 1, 0)),
    *(Pass(BW, 1, 0), Pass(V, 3, 0), Pass(G, 3, 0)),
)


def _by_hand(first: tuple[Pass, ...] = FIRST, last: tuple[Pass, ...] = LAST) -> Schedule:
    """Two ranks of one chunk, one microbatch: rank 0 has the tokens."""
    return Schedule("by hand", looped(2, 1), 1, (first, last), rules=EmbeddingRules((0, 1)))


def test_an_order_by_hand_is_timed() -> None:
    """Sums by hand: tokens go to rank 1 and its rows come back, before the first F."""
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0, p2p=0.5)
    costs = costs.having(Vocabulary(output=2.0, weight=2.0, lookup=0.2))
    timeline = schedules.simulate(_by_hand().validate(), costs)
    first = dict(zip(FIRST, timeline.start[0], strict=True))
    last = dict(zip(LAST, timeline.start[1], strict=True))
    assert last[Pass(E, 3, 0)] == pytest.approx(0.1 + 0.5)
    assert first[Pass(F, 0, 0)] == pytest.approx(0.7 + 0.5)
    end = first[Pass(BW, 0, 0)] + 2.0
    assert first[Pass(G, 2, 0)] == pytest.approx(end)
    assert last[Pass(G, 3, 0)] == pytest.approx(end + 0.5)


def test_messages_go_where_they_are_read() -> None:
    placement, rules = looped(4), EmbeddingRules((0, 1, 3))
    graph = TaskGraph.of(rules, placement, 2)

    def sent(kind: PassKind, stage: int, rank: int) -> tuple[Message | None, tuple[int, ...]]:
        code = graph.code_of(Pass(kind, stage, 1), rank)
        return graph.message_of(code), graph.reader_ranks(code)

    assert sent(E, 4, 0) == (Message(False, 9, 1), (1, 3))  # tokens
    assert sent(B, 0, 0) == (Message(True, 9, 1), (1, 3))  # gradients of rows
    assert sent(E, 7, 3) == (Message(False, 4 + 1 + 3, 1), (0,))  # rows of rank 3
    assert sent(O, 5, 1) == (Message(True, 4 + 1 + 1, 1), (3,))  # a part of the loss
    assert sent(V, 5, 1) == (None, ())
    peers = rules.more_peers(placement)
    assert peers == {(0, 3), (1, 3)}, "0 and 1, which are neighbours, have a link already"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Message(False, 9, 3), "the tokens"),
        (Message(True, 9, 3), "the gradient of the embedding"),
        (Message(False, 10, 3), "the embedding of later tokens"),
        (Message(True, 10, 3), "the gradient of the embedding of later tokens"),
        (Message(False, 6, 3), "a part of the embedding"),
        (Message(True, 6, 3), "a part of the loss"),
        (Message(False, 4, 3), "the output of the last stage"),
        (Message(True, 2, 3), "the gradient for stage 2"),
    ],
)
def test_messages_are_said_as_what_they_are(message: Message, said: str) -> None:
    rules = EmbeddingRules((0, 1, 2, 3))
    assert rules.message_in_words(looped(4), message) == f"{said}, microbatch 3"


@pytest.mark.parametrize("name", ["zb-h1", "v-half", "1f1b"])
def test_with_prediction_the_ends_send_each_other_rows(name: str) -> None:
    """M right behind the first stage's F, K behind the last one's backward; in a V nothing goes."""
    without = schedules.build(name, pipeline_size=4, num_microbatches=3, costs=_costs(4))
    assert {M, K}.isdisjoint(it.kind for order in without.ranks for it in order)
    schedule = schedules.build(
        name, pipeline_size=4, num_microbatches=3, costs=with_prediction(_costs(4))
    )
    schedule.validate()
    assert from_csv(to_csv(schedule)).rules == schedule.rules
    last = schedule.placement.num_stages - 1
    sent = {}
    for kind, stage, follows in ((M, 0, (F,)), (K, last, (B, BW))):
        rank = schedule.placement.rank_of[stage]
        order = schedule.ranks[rank]
        found = [(order[i - 1], p) for i, p in enumerate(order) if p.kind is kind]
        assert [p for _, p in found] == [Pass(kind, stage, j) for j in range(3)]
        assert all(of.kind in follows and of[1:] == p[1:] for of, p in found)
        code = schedule.graph.code_of(Pass(kind, stage, 1), rank)
        sent[kind] = schedule.graph.message_of(code), schedule.graph.reader_ranks(code)
    ends = last + 1 + 4 + 2
    assert sent == (
        {M: (None, ()), K: (None, ())}
        if name == "v-half"
        else {M: (Message(False, ends, 1), (3,)), K: (Message(True, ends, 1), (0,))}
    )
    program = schedules.lower(schedule.forwards().validate())
    kinds = {at.work.kind for rank in program.ranks for at in rank if isinstance(at, Run)}
    assert kinds == {E, F, M, O, P}


def _swapped(passes: tuple[Pass, ...], one: Pass, other: Pass) -> tuple[Pass, ...]:
    places = {one: other, other: one}
    return tuple(places.get(p, p) for p in passes)


def test_a_broken_order_is_refused() -> None:
    with pytest.raises(InvalidSchedule, match="its E has not run yet"):
        _by_hand(first=_swapped(FIRST, Pass(E, 2, 0), Pass(F, 0, 0))).validate()
    with pytest.raises(InvalidSchedule, match="its B has not run yet"):
        _by_hand(first=_swapped(FIRST, Pass(BW, 0, 0), Pass(G, 2, 0))).validate()
    with pytest.raises(InvalidSchedule, match="its E has not run yet"):
        _by_hand(last=_swapped(LAST, Pass(E, 3, 0), Pass(G, 3, 0))).validate()
    with pytest.raises(InvalidSchedule, match="0 of 1 G passes are listed"):
        _by_hand(last=LAST[:-1]).validate()
    with pytest.raises(InvalidSchedule, match="no E of stage 3 is due on rank 0"):
        _by_hand(first=(*FIRST, Pass(E, 3, 0))).validate()


def test_ranks_that_wait_for_rows_in_a_circle_are_refused() -> None:
    """Rank 1 looks up what rank 0 waits for after a pass that follows from it."""
    late = _swapped(LAST, Pass(E, 3, 0), Pass(F, 1, 0))
    with pytest.raises(InvalidSchedule, match="wait for one another in a circle"):
        _by_hand(last=late).validate()


@pytest.mark.parametrize(
    ("name", "p"), every_value(["v-half", "zb-h1", "1f1b", "interleaved", "auto"], [2, 4])
)
def test_the_rows_are_there_when_the_first_stage_wants_them(name: str, p: int) -> None:
    """Nothing but the beginning takes longer, and no program can hang."""
    m = 2 * p
    whole, cut = (
        schedules.build(name, pipeline_size=p, num_microbatches=m, costs=_costs(p, lookup))
        for lookup in (None, 0.02)
    )
    costs = _costs(p)
    timeline = schedules.simulate(cut, costs)
    added = m * 2 * 0.02 / p + 4 * 0.05 + 0.04  # the passes themselves, and the first messages
    assert timeline.makespan <= schedules.simulate(whole, _costs(p, None)).makespan + added
    assert max(timeline.peak_memory) == pytest.approx(
        max(schedules.simulate(whole, _costs(p, None)).peak_memory)
    )
    stages = cut.placement.num_stages
    for rank, passes in enumerate(cut.ranks):
        for kind in (E, G):
            found = [q for q in passes if q.kind is kind]
            assert found == [Pass(kind, stages + rank, j) for j in range(m)]
    program = schedules.lower(cut, timeline)
    schedules.lower(cut, timeline, captured=True)
    start = cut.placement.rank_of[0]
    tokens = [
        at.channel.target
        for at in program.ranks[start]
        if isinstance(at, Send) and at.message[:2] == (False, stages + p + 1)
    ]
    assert sorted(tokens) == sorted(r for r in range(p) for _ in range(m) if r != start)
    evaluation = schedules.lower(cut.forwards().validate())
    kinds = {at.work.kind for rank in evaluation.ranks for at in rank if isinstance(at, Run)}
    assert kinds == {E, F, O, P}


def test_a_table_keeps_the_passes() -> None:
    schedule = _by_hand().validate()
    text = to_csv(schedule)
    assert "2E0" in text and "3G0" in text
    again = from_csv(text, name="by hand")
    assert (again.ranks, again.rules) == (schedule.ranks, schedule.rules)
    without = _by_hand(*(tuple(p for p in row if p.kind not in (E, G)) for row in (FIRST, LAST)))
    assert type(from_csv(to_csv(without)).rules) is EmbeddingRules.__mro__[1]


def test_costs_of_lookups_are_checked_and_scaled() -> None:
    with pytest.raises(UsageError, match=r"lookup of the vocabulary is -1\.0"):
        _costs(2, -1.0)
    assert shards_embedding(_costs(2))
    assert not shards_embedding(_costs(2, None))
    slow = replace(_costs(2), slowdown=(1.0, 3.0)).for_placement(looped(2))
    assert slow.seconds[E][2:] == pytest.approx((0.01, 0.03))
    assert slow.seconds[G] == slow.seconds[E]
