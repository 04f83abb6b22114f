"""A vocabulary-parallel output layer: its rules, its orders and their memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from drawn_sizes import every_value

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules.bounds import lower_bound, period_bound
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.vocabulary import Vocabulary, VocabularyRules
from megatron_zb.schedules.interchange import from_csv, to_csv
from megatron_zb.schedules.lowering import PostReceive, Run, Send, WaitReceive
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import looped
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule

pytestmark = pytest.mark.usefixtures("brief_searches")

F, B, W, BW, O, P, V = (PassKind(kind) for kind in ("F", "B", "W", "BW", "O", "P", "V"))  # noqa: E741


def _costs(p: int, **more: Any) -> Costs:
    """Passes of 1, 1.2 and 0.8 on each rank, and an output layer of two ranks' time."""
    costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.2, weight=0.8, p2p=0.05)
    given: dict[str, Any] = {"output": 4.4, "weight": 1.6, "held": 0.05 * p, **more}
    return costs.having(Vocabulary(**given))


def _by_hand(**changed: tuple[Pass, ...]) -> Schedule:
    """Two ranks of one chunk, two microbatches: rank 1 has the loss."""
    first: tuple[Pass, ...] = (
        Pass(F, 0, 0),
        Pass(F, 0, 1),
        Pass(O, 2, 0),
        Pass(V, 2, 0),
        Pass(BW, 0, 0),
    )
    first += (Pass(O, 2, 1), Pass(BW, 0, 1), Pass(V, 2, 1))
    last: tuple[Pass, ...] = (
        Pass(F, 1, 0),
        Pass(O, 3, 0),
        Pass(P, 1, 0),
        Pass(B, 1, 0),
        Pass(V, 3, 0),
    )
    last += (Pass(F, 1, 1), Pass(O, 3, 1), Pass(P, 1, 1), Pass(B, 1, 1))
    last += (Pass(W, 1, 0), Pass(W, 1, 1), Pass(V, 3, 1))
    ranks = (changed.get("first", first), changed.get("last", last))
    return Schedule("by hand", looped(2, 1), 2, ranks, rules=VocabularyRules((0, 1)))


def test_an_order_by_hand_is_valid_and_timed() -> None:
    """Sums by hand: the only wait of rank 1 at its beginning is for P, which waits for rank 0."""
    schedule = _by_hand().validate()
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0, p2p=0.5)
    timeline = schedules.simulate(
        schedule, costs.having(Vocabulary(output=2.0, weight=1.0, loss=0.1))
    )
    starts = dict(zip(schedule.ranks[1], timeline.start[1], strict=True))
    assert starts[Pass(F, 1, 0)] == 1.5
    assert starts[Pass(O, 3, 0)] == 2.5
    # X arrives on rank 0 at 3.0, whose O ends at 4.0 and whose part arrives at 4.5.
    assert starts[Pass(P, 1, 0)] == 4.5
    assert starts[Pass(B, 1, 0)] == 4.6
    first = dict(zip(schedule.ranks[0], timeline.start[0], strict=True))
    assert first[Pass(V, 2, 0)] == pytest.approx(5.1)  # told at the end of P, and a message later


def _swapped(passes: tuple[Pass, ...], one: Pass, other: Pass) -> tuple[Pass, ...]:
    places = {one: other, other: one}
    return tuple(places.get(p, p) for p in passes)


@pytest.mark.parametrize(
    ("rank", "one", "other", "said"),
    [
        ("first", Pass(O, 2, 0), Pass(V, 2, 0), "its O has not run yet"),
        ("first", Pass(O, 2, 0), Pass(O, 2, 1), "the next O of stage 2 is microbatch 0"),
        ("last", Pass(F, 1, 0), Pass(O, 3, 0), "its F has not run yet"),
        ("last", Pass(O, 3, 0), Pass(P, 1, 0), "its O has not run yet"),
        ("last", Pass(P, 1, 0), Pass(B, 1, 0), "its P has not run yet"),
        ("last", Pass(P, 1, 0), Pass(V, 3, 0), "its P has not run yet"),
    ],
)
def test_a_broken_order_is_refused(rank: str, one: Pass, other: Pass, said: str) -> None:
    passes = _by_hand().ranks[rank == "last"]
    with pytest.raises(InvalidSchedule, match=said):
        _by_hand(**{rank: _swapped(passes, one, other)}).validate()


def test_what_is_missing_or_on_another_rank_is_refused() -> None:
    first = _by_hand().ranks[0]
    with pytest.raises(InvalidSchedule, match="1 of 2 V passes are listed"):
        _by_hand(first=first[:-1]).validate()
    with pytest.raises(InvalidSchedule, match="no O of stage 3 is due on rank 0"):
        _by_hand(first=(*first[:2], Pass(O, 3, 0), *first[2:])).validate()
    with pytest.raises(InvalidSchedule, match="no P of stage 1 is due on rank 0"):
        _by_hand(first=(*first[:2], Pass(P, 1, 0), *first[2:])).validate()
    with pytest.raises(InvalidSchedule, match=r"[BW] passes are listed"):
        _by_hand(first=tuple(p for p in first if p != Pass(BW, 0, 1))).validate()


@pytest.mark.parametrize(
    ("name", "p"), every_value(["v-half", "zb-h1", "1f1b", "interleaved"], [2, 4])
)
def test_every_schedule_has_an_order_that_cannot_hang(name: str, p: int) -> None:
    """Validated by build(), lowered with a proof, within its memory, evaluations included."""
    m, costs = 2 * p, _costs(p)
    schedule = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs)
    timeline = schedules.simulate(schedule, costs)
    for rank, passes in enumerate(schedule.ranks):
        stage = schedule.placement.num_stages + rank
        assert [q for q in passes if q.kind is O] == [Pass(O, stage, j) for j in range(m)]
        assert [q for q in passes if q.kind is V] == [Pass(V, stage, j) for j in range(m)]
    program = schedules.lower(schedule, timeline)
    schedules.lower(schedule, timeline, captured=True)
    end = schedule.placement.rank_of[-1]
    hidden = [
        at.channel.target
        for at in program.ranks[end]
        if isinstance(at, Send)
        and not at.message.is_gradient
        and at.message.stage == schedule.placement.num_stages
    ]
    assert sorted(hidden) == sorted(r for r in range(p) for _ in range(m) if r != end)
    evaluation = schedule.forwards().validate()
    kinds = {
        at.work.kind
        for rank in schedules.lower(evaluation).ranks
        for at in rank
        if isinstance(at, Run)
    }
    assert kinds == {F, O, P}
    peak = schedules.catalog.family(name).peak_microbatches(p, m) + 1
    assert max(timeline.peak_memory) <= peak + 1e-9
    assert schedule.report is not None
    assert timeline.makespan >= schedule.report.lower_bound - 1e-9


@pytest.mark.parametrize("limit", [0.5, 0.625, 0.75])
@pytest.mark.parametrize(("name", "chunks"), [("v-half", 2), ("zb-h1", 1), ("1f1b", 1)])
def test_a_limit_is_kept_to_the_last_chunk(name: str, chunks: int, limit: float) -> None:
    """Logits take no memory here: whole chunks fill what four ranks may hold, and none is more."""
    costs = _costs(4, held=0.0)
    schedule = schedules.build(
        name, pipeline_size=4, num_microbatches=12, costs=costs, memory_limit=limit
    )
    peak = max(schedules.simulate(schedule, costs).peak_memory)
    assert peak == int(4 * limit * chunks) / chunks


@pytest.mark.parametrize("evaluates", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", ["v-half", "zb-h1"])
def test_a_rank_that_waits_is_told_for_what(name: str, evaluates: bool) -> None:
    """By the pass that makes the message, as the program has it."""
    schedule = schedules.build(name, pipeline_size=4, num_microbatches=4, costs=_costs(4))
    program = schedules.lower(schedule.forwards() if evaluates else schedule)
    rules, stages = schedule.rules, schedule.placement.num_stages
    makers = {
        instruction.makes: instruction.work
        for rank in program.ranks
        for instruction in rank
        if isinstance(instruction, Run)
    }
    found = set()
    for rank in program.ranks:
        for instruction in rank:
            if not isinstance(instruction, WaitReceive):
                continue
            kind, stage, microbatch = makers[instruction.message]
            if kind is F:
                what = f"the activation for stage {stage + 1}"
                what = "the output of the last stage" if stage == stages - 1 else what
            else:
                words = {O: "a part of the loss", P: "the gradient of the loss"}
                what = words.get(kind, f"the gradient for stage {stage - 1}")
            awaited = rules.awaited_in_words(schedule.placement, instruction.message, "rank 2")
            assert awaited == f"{what}, microbatch {microbatch}, from rank 2"
            found.add(what.split(" for ")[0])
    trained = {"the gradient", "the gradient of the loss"}
    forward = {"the activation", "the output of the last stage", "a part of the loss"}
    assert found == (forward if evaluates else forward | trained)


def test_a_pass_of_a_shard_is_named_by_its_rows() -> None:
    rules = VocabularyRules((0, 1))
    assert [rules.pass_in_words(Pass(kind, 2, 3)) for kind in (O, V)] == [
        "O of its rows of the vocabulary, microbatch 3",
        "V of its rows of the vocabulary, microbatch 3",
    ]
    assert rules.pass_in_words(Pass(P, 1, 3)) == "P of stage 1, microbatch 3"


def test_the_bound_counts_the_work_on_every_shard() -> None:
    """Sums by hand: rank 0 begins at once and has 8 of F, B, W, O and V; rank 1 begins at 1.05."""
    p, m = 2, 8
    costs = _costs(p).for_placement(looped(p))
    work = m * (1.0 + 1.2 + 0.8 + 2.2 + 0.8)
    assert lower_bound(looped(p), m, costs, [float(m)] * p) == pytest.approx(1.05 + work)
    assert period_bound(looped(p), m, costs, [float(m)] * p) == pytest.approx(work)


@pytest.mark.parametrize(("chunks", "layers", "found"), [(1, None, 1), (2, None, 2), (None, 6, 1)])
def test_auto_keeps_to_the_chunks_and_layers_that_are_given(
    chunks: int | None, layers: int | None, found: int
) -> None:
    costs = _costs(4)
    schedule = schedules.build(
        "auto",
        pipeline_size=4,
        num_microbatches=4,
        costs=costs,
        memory_limit=1.5,
        chunks=chunks,
        num_layers=layers,
    )
    assert schedule.placement.chunks == found


def test_an_evaluation_tells_no_rank_its_loss() -> None:
    evaluation = _by_hand().forwards()
    program = schedules.lower(evaluation)
    received = [at.message for at in program.ranks[0] if isinstance(at, PostReceive)]
    assert {message.is_gradient for message in received} == {False}


def test_the_memory_of_the_shards_is_within_the_limit() -> None:
    """Logits of 0.4 microbatches on each rank leave room for less."""
    p, m = 4, 8
    costs = _costs(p, held=0.4 * p)
    schedule = schedules.build("v-zb", pipeline_size=p, num_microbatches=m, costs=costs)
    timeline = schedules.simulate(schedule, costs)
    assert max(timeline.peak_memory) <= p + 1 + 1e-9
    without = replace(
        schedule,
        ranks=tuple(tuple(q for q in rank if q.kind not in (O, P, V)) for rank in schedule.ranks),
    )
    holds = max(
        schedules.simulate(
            replace(
                without, rules=schedules.build("1f1b", pipeline_size=2, num_microbatches=2).rules
            ),
            replace(costs, features=()),
        ).peak_memory
    )
    assert max(timeline.peak_memory) > holds
    with pytest.raises(UsageError, match="cannot keep the memory limit"):
        schedules.build("v-zb", pipeline_size=p, num_microbatches=m, costs=costs, memory_limit=0.3)


def test_a_rank_without_a_share_runs_no_shard() -> None:
    p, m = 4, 8
    costs = _costs(p, shares=[0.5, 0.25, 0.25, 0.0])
    schedule = schedules.build("zb-1p", pipeline_size=p, num_microbatches=m, costs=costs)
    kinds = [{q.kind for q in rank} & {O, P, V} for rank in schedule.ranks]
    assert kinds == [{O, V}, {O, V}, {O, V}, {P}]
    schedules.lower(schedule)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"output": -1.0, "weight": 1.0}, "output of the vocabulary is -1.0"),
        ({"output": 1.0, "weight": float("inf")}, "weight of the vocabulary is inf"),
        ({"output": 1.0, "weight": 1.0, "shares": [0.5, 0.6]}, "1 in all"),
        ({"output": 1.0, "weight": 1.0, "shares": [1.0]}, "each of the 2 ranks"),
    ],
)
def test_costs_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0)
    with pytest.raises(UsageError, match=said):
        costs.having(Vocabulary(**given))


def test_a_table_has_letters_for_the_shards() -> None:
    schedule = _by_hand().validate()
    text = to_csv(schedule)
    assert "2O0" in text and "1P0" in text and "3V1" in text
    read = from_csv(text, name=schedule.name)
    assert read == schedule
    with pytest.raises(InvalidSchedule, match=r"row 1, column 3, '3O0': .*no O of stage 3"):
        from_csv(text.replace("2O0", "3O0", 1))
    with pytest.raises(InvalidSchedule, match="the table has no F"):
        from_csv("2O0\n3O0\n")


def test_messages_to_all_ranks_may_take_longer_than_one() -> None:
    """The sums of the order by hand, with 0.3 s more to all ranks and 0.4 s more back."""
    schedule = _by_hand().validate()
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0, p2p=0.5)
    costs = costs.having(Vocabulary(output=2.0, weight=1.0, loss=0.1, scatter=0.3, gather=0.4))
    timeline = schedules.simulate(schedule, costs)
    first, last = (dict(zip(schedule.ranks[r], timeline.start[r], strict=True)) for r in (0, 1))
    assert first[Pass(O, 2, 0)] == pytest.approx(2.5 + 0.5 + 0.3)
    assert last[Pass(P, 1, 0)] == pytest.approx(3.3 + 1.0 + 0.5 + 0.4)
    assert first[Pass(V, 2, 0)] == pytest.approx(5.2 + 0.1 + 0.5)  # the loss is a small message
    assert costs.for_placement(looped(2, 1)).latency[O] == (0.0, 0.0, 0.9, 0.0)


def test_logits_beyond_the_memory_of_a_schedule_are_refused_in_a_sentence() -> None:
    costs = _costs(4, held=40.0)
    with pytest.raises(UsageError, match="v-half cannot keep the memory limit of its own: rank"):
        schedules.build("v-half", pipeline_size=4, num_microbatches=8, costs=costs)


def test_a_sharded_output_layer_takes_nothing_that_is_not_given() -> None:
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0)
    found = costs.having(Vocabulary(output=3.0, weight=2.0)).feature(Vocabulary)
    assert found == Vocabulary(
        3.0, 2.0, loss=0.0, held=0.0, scatter=0.0, gather=0.0, shares=(0.5, 0.5), lookup=None
    )
