"""Two directions: published idle times, the bound, tables, drawings, words, and what is refused."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from brief_searches import briefly
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zb.bridge.settings import Settings
from megatron_zb.cli.main import main
from megatron_zb.errors import UsageError
from megatron_zb.plan import strategy
from megatron_zb.schedules import build, catalog, interchange
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.adapters import Adapters
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.two_directions import (
    BothWaysRules,
    TwoDirections,
    X,
    Y,
    both_ways,
)
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.lowering import lower, unfinished
from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.simulator import Timeline, simulate

F, B, W, BW = PassKind.F, PassKind.B, PassKind.W, PassKind.BW
NAMES = ("chimera", "bitpipe")


def costs_of(p: int, backward: float = 2.0) -> Costs:
    """F of 1 and a whole backward of 2, or another length."""
    return Costs.uniform(pipeline_size=p, forward=1.0, backward=backward, weight=0.0)


def timed(name: str, p: int, m: int, backward: float = 2.0, **choices: Any) -> Timeline:
    choices.setdefault("costs", costs_of(p, backward))
    schedule = build(name, pipeline_size=p, num_microbatches=m, **choices)
    return simulate(schedule, choices["costs"])


# --- how long it takes


PUBLISHED = [
    ("chimera", 4, 2.0, 0.250),
    ("chimera", 4, 1.0, 0.200),
    ("chimera", 8, 2.0, 0.333),
    ("chimera", 8, 1.0, 0.273),
    ("bitpipe", 4, 2.0, 0.143),
    ("bitpipe", 4, 1.0, 0.111),
    ("bitpipe", 8, 2.0, 0.200),
    ("bitpipe", 8, 1.0, 0.158),
    pytest.param("bitpipe", 16, 2.0, 0.226, marks=pytest.mark.long),
    pytest.param("bitpipe", 16, 1.0, 0.179, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "p", "backward", "idle"), PUBLISHED)
def test_as_many_microbatches_as_ranks_idle_as_published(
    name: str, p: int, backward: float, idle: float
) -> None:
    """Chimera (arXiv 2107.06925, table 2) and BitPipe (arXiv 2410.19367, table 1), by search."""
    timeline = timed(name, p, p, backward)
    assert timeline.bubble_rate == pytest.approx(idle, abs=6e-4)
    assert max(timeline.peak_microbatches) <= p


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_bubble_is_the_formula_of_the_catalog(
    name: str, forward: float, backward: float, groups: int
) -> None:
    """Also for several groups of as many microbatches as ranks, which run into one another."""
    p = 4
    costs = Costs.uniform(pipeline_size=p, forward=forward, backward=backward, weight=0.0)
    with briefly():
        timeline = timed(name, p, groups * p, costs=costs)
    seconds = argparse.Namespace(
        forward=forward, backward=backward, weight=0.0, total=forward + backward
    )
    bubble = catalog.family(name).bubble(p, seconds, timeline.schedule.placement.chunks)
    assert timeline.makespan == pytest.approx(groups * p * (forward + backward) + bubble)


def test_a_joined_backward_takes_as_long_as_b_and_w() -> None:
    halves = Costs.uniform(pipeline_size=4, forward=1.0, backward=1.0, weight=1.0)
    with briefly():
        assert timed("bitpipe", 4, 4, costs=halves).bubble_rate == pytest.approx(1 / 7)


@pytest.mark.parametrize("limit", [0.5, 0.75])
@pytest.mark.parametrize("name", NAMES)
def test_the_users_limit_is_kept(name: str, limit: float) -> None:
    with briefly():
        timeline = timed(name, 4, 8, memory_limit=limit)
    assert max(timeline.peak_microbatches) <= 4 * limit
    assert timeline.bubble_rate > timed(name, 4, 8).bubble_rate


# --- the bound


@pytest.mark.parametrize(
    ("name", "p", "m"),
    [("chimera", 2, 4), ("bitpipe", 2, 4), ("chimera", 4, 4), ("bitpipe", 4, 4), ("bitpipe", 8, 8)],
)
def test_the_bound_is_met_where_f_takes_as_long_as_its_backward(name: str, p: int, m: int) -> None:
    with briefly():
        schedule = build(name, pipeline_size=p, num_microbatches=m, costs=costs_of(p, 1.0))
    assert schedule.report is not None
    assert schedule.report.lower_bound == pytest.approx(schedule.report.makespan)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_schedule_is_faster_than_the_bound_and_each_is_valid(data: st.DataObject) -> None:
    name, p = data.draw(st.sampled_from(NAMES)), data.draw(st.sampled_from([2, 4]))
    m = data.draw(st.integers(2, 9))
    seconds = st.sampled_from([0.25, 1.0, 2.0])
    costs = Costs.of_slices(
        pipeline_size=p,
        forward=[data.draw(seconds) for _ in range(2 * p)],
        backward=[data.draw(seconds) for _ in range(2 * p)],
        weight=[data.draw(st.sampled_from([0.0, 1.0])) for _ in range(2 * p)],
        p2p=data.draw(st.sampled_from([0.0, 0.5])),
    ).having(TwoDirections(exchange=data.draw(st.sampled_from([0.0, 3.0]))))
    if data.draw(st.booleans()):
        costs = costs.of_lengths([data.draw(seconds) for _ in range(m)])
    with briefly():
        schedule = build(name, pipeline_size=p, num_microbatches=m, costs=costs).validate()
    assert schedule.report is not None
    assert schedule.report.gap >= -1e-9
    assert unfinished(lower(schedule, simulate(schedule, costs))) == {}
    assert read(schedule) == (schedule.ranks, schedule.rules, schedule.placement)


def read(schedule: Schedule) -> tuple[object, ...]:
    again = interchange.from_csv(interchange.to_csv(schedule), name=schedule.name)
    return again.ranks, again.rules, again.placement


# --- what an order is


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [2, 5, 9])
def test_even_microbatches_go_down_and_odd_ones_up(name: str, m: int) -> None:
    with briefly():
        schedule = timed(name, 4, m).schedule
    down, up = sorted(schedule.placement.ways, key=lambda way: schedule.placement.rank_of[way[0]])
    for rank, passes in enumerate(schedule.ranks):
        for p in passes:
            assert schedule.placement.rank_of[p.stage] == rank
            assert p.stage in (up if p.microbatch % 2 else down)
    kinds = [p.kind for rank in schedule.ranks for p in rank]
    assert kinds.count(F) == kinds.count(BW) == m * len(down)
    assert kinds.count(X) == kinds.count(Y) == schedule.placement.num_stages


def test_copies_lie_in_mirror_image_on_other_ranks() -> None:
    assert both_ways(4, 1).rank_of == (3, 2, 1, 0, 0, 1, 2, 3)
    placement = both_ways(4, 2)
    assert placement.stages_of[0] == (0, 7, 11, 12)
    assert placement.peers == {(a, b) for a in range(4) for b in range(4) if abs(a - b) == 1}
    rules = BothWaysRules.of(placement, 4)
    for stage, rank in enumerate(placement.rank_of):
        assert placement.rank_of[rules.copy_of(stage)] == 3 - rank


@pytest.mark.parametrize("seconds", [0.0, 0.5, 8.0])
def test_gradients_of_copies_are_added_once_both_are_complete(seconds: float) -> None:
    costs = costs_of(4).having(TwoDirections(exchange=seconds))
    with briefly():
        timeline, free = timed("bitpipe", 4, 6, costs=costs), timed("bitpipe", 4, 6)
    schedule = timeline.schedule
    rules = schedule.rules
    assert isinstance(rules, BothWaysRules)
    start, end = (
        {
            p: time
            for passes, times in zip(schedule.ranks, each, strict=True)
            for p, time in zip(passes, times, strict=True)
        }
        for each in (timeline.start, timeline.end)
    )
    for stage in range(schedule.placement.num_stages):
        copy = rules.copy_of(stage)
        own = max(at for p, at in end.items() if p.kind is BW and p.stage == stage)
        other = max(at for p, at in end.items() if p.kind is BW and p.stage == copy)
        added = rules.on(Y, stage)
        assert start[added] >= max(own, other)
        assert end[added] - start[added] == pytest.approx(seconds / 4)
    assert timeline.makespan <= free.makespan + seconds + 1e-9


def test_the_exchange_fills_waits() -> None:
    """The ranks in the middle end before those at both ends, whose exchange alone comes later."""
    costs = costs_of(8).having(TwoDirections(exchange=1.0))
    with briefly():
        assert timed("chimera", 8, 8, costs=costs).makespan <= timed("chimera", 8, 8).makespan + 1.0


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("2F0,", "", "its F has not run yet"),
        ("2F0,", "2F1,", "the next F of stage 2 is microbatch 0"),
        ("2X0,", "", "its X has not run yet"),
        (",2Y0", "", "0 of 1 Y passes are listed"),
        ("2B0,2X0", "2X0,2B0", "its W has not run yet"),
    ],
)
def test_a_broken_table_is_refused(before: str, after: str, words: str) -> None:
    table = interchange.to_csv(timed("chimera", 2, 2).schedule)
    assert table.count(before) == 1, table
    with pytest.raises(InvalidSchedule, match=words):
        interchange.from_csv(table.replace(before, after))


def test_ranks_that_wait_for_one_another_are_refused() -> None:
    """Each runs all of the microbatch that comes from the other end before its own."""
    first = "1F1,1B1,1X1,2F0,2B0,2X0,1Y1,2Y0"
    second = "3F0,3B0,3X0,0F1,0B1,0X1,3Y0,0Y1"
    with pytest.raises(InvalidSchedule, match="the ranks wait for one another in a circle"):
        interchange.from_csv(f"{first}\n{second}\n")


def test_a_table_of_other_places_is_refused() -> None:
    rows = "0F0,0B0,0X0,0Y0,1F0,1B0,1X0,1Y0", "2F1,2B1,2X1,2Y1,3F1,3B1,3X1,3Y1"
    with pytest.raises(UsageError, match=r"stages are on rows \[1, 1, 2, 2\]: give a table of"):
        interchange.from_csv("\n".join(rows))


def test_passes_and_messages_are_told_by_their_direction() -> None:
    rules = BothWaysRules.of(both_ways(4, 1), 4)
    assert rules.pass_in_words(Pass(F, 2, 3)) == "F of stage 2 upwards, microbatch 3"
    assert rules.pass_in_words(Pass(Y, 5, 2)) == "Y of stage 1 downwards"
    words = rules.message_in_words(None, Message(True, 1, 3))
    assert words == "the gradient for stage 1 upwards, microbatch 3"
    words = rules.message_in_words(None, Message(True, 1, 2, made_by=X))
    assert words == "the weight gradient of the copy of stage 1 upwards"


# --- commands


def show(*words: str) -> int:
    return main(["show", "bitpipe", "-p", "4", "-m", "4", "--weight", "0", *words])


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_it_is_drawn_into_a_file(tmp_path: Path, ending: str) -> None:
    with briefly():
        assert show("--output", str(tmp_path / f"drawn.{ending}")) == 0
    assert (tmp_path / f"drawn.{ending}").stat().st_size > 1000


def test_it_is_drawn_in_the_terminal_and_read_from_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with briefly():
        assert show() == 0
        drawn = capsys.readouterr().out
        assert "11.1%" in drawn
        table = str(tmp_path / "table.csv")
        sizes = ("-p", "4", "-m", "4", "--weight", "0", "--format", "csv", "--output", table)
        assert main(["export", "bitpipe", *sizes]) == 0
    capsys.readouterr()
    assert main(["show", "--csv", table, "--weight", "0"]) == 0
    again = capsys.readouterr().out
    assert "11.1%" in again
    assert again.splitlines()[1:] == drawn.splitlines()[1:], "all but the name"


def test_there_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show("--output", str(tmp_path / "page.html")) != 0
    assert "there is no page for bitpipe, in two directions" in capsys.readouterr().err


# --- what is refused


@pytest.mark.parametrize("name", NAMES)
def test_what_has_one_copy_of_the_model_refuses_it(name: str) -> None:
    words = f"{name} needs two copies of every stage.*give v-zb"
    with pytest.raises(UsageError, match=words):
        Settings(pipeline_schedule=name, num_microbatches=8)
    with pytest.raises(UsageError, match=words):
        strategy.of_family(name)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_schedules_with_one_copy_leave_it_out(name: str) -> None:
    assert name in catalog.all_names()
    assert name not in catalog.names()


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"pipeline_size": 5}, "two directions on 5 ranks: .*give an even number of ranks"),
        ({"num_microbatches": 1}, "give 2 or more microbatches"),
        ({"back_to_back": True}, "leave back_to_back out"),
        ({"chunks": 2}, "chimera has no choice of chunks"),
        ({"memory_limit": 0.4}, "cannot keep the memory limit of 0.4 of 1F1B: rank 0 needs"),
        ({"slices": 2}, "token slices"),
        ({"adapters": Adapters.equal(2, microbatches=2), "num_microbatches": None}, "adapters"),
        ({"costs": costs_of(4).having(Recomputation(kept_input=0.05))}, "recomputation"),
        ({"costs": costs_of(4).having(Offload(seconds=0.1))}, "offload"),
        ({"costs": costs_of(4).having(Vocabulary(output=0.1, weight=0.1))}, "vocabulary"),
        ({"costs": costs_of(4).having(Communication(forward=0.1, backward=0.1))}, "communication"),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_sentence(choices: dict[str, Any], words: str) -> None:
    asked: dict[str, Any] = {"pipeline_size": 4, "num_microbatches": 4, **choices}
    with pytest.raises(UsageError, match=words):
        build("chimera", **asked)


def test_negative_seconds_are_refused() -> None:
    with pytest.raises(UsageError, match=r"costs: exchange is \[-1.0\]"):
        costs_of(4).having(TwoDirections(exchange=-1.0))


def test_hand_made_orders_are_checked_as_any() -> None:
    schedule = timed("chimera", 2, 2).schedule
    ranks = (schedule.ranks[0][::-1], schedule.ranks[1])
    with pytest.raises(InvalidSchedule):
        replace(schedule, ranks=ranks).validate()
