"""The schedules of torch.distributed.pipelining as the benchmarks compare with them."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import beside_others
import pytest
import torch_schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.schedules.families import split_interleaved
from megatron_zb.schedules.interchange import from_csv, to_csv
from megatron_zb.schedules.rules import LastFirstRules

pytestmark = pytest.mark.usefixtures("brief_searches")

SIZES = [(2, 4), (4, 8), (8, 16)]


def makespan(schedule: schedules.Schedule) -> float:
    p = schedule.placement.pipeline_size
    costs = schedules.Costs.uniform(pipeline_size=p, forward=1, backward=1, weight=1)
    return schedules.simulate(schedule, costs).makespan


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_torchs_1f1b_is_ours(p: int, m: int) -> None:
    theirs = torch_schedules.torch_schedule("1F1B", p, m)
    assert theirs.ranks == schedules.build("1f1b", pipeline_size=p, num_microbatches=m).ranks


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_their_makespans_at_equal_costs_are_the_known_ones(p: int, m: int) -> None:
    found = torch_schedules.torch_schedules(p, m).schedules
    assert len(found) == len(torch_schedules.NAMES)
    work = 3 * m
    assert makespan(found["torch-GPipe"]) == work + 3 * (p - 1)
    assert makespan(found["torch-1F1B"]) == work + 3 * (p - 1)
    assert makespan(found["torch-Interleaved1F1B"]) == work + 3 * (p - 1) / 2
    assert makespan(found["torch-ZBVZeroBubble"]) == work + (p - 1) / 2
    assert makespan(found["torch-ZBVZeroBubble"]) <= makespan(found["torch-InterleavedZeroBubble"])


def test_chunks_are_a_choice_of_the_looped_ones_alone() -> None:
    found = torch_schedules.torch_schedules(4, 8, chunks=(2, 3)).schedules
    assert found["torch-LoopedBFSx3"].placement.chunks == 3
    assert makespan(found["torch-Interleaved1F1Bx3"]) < makespan(found["torch-Interleaved1F1B"])
    assert [name for name in found if name.endswith("x3")] == [
        f"torch-{name}x3" for name in torch_schedules.LOOPED
    ]


def test_what_torch_refuses_has_its_reason() -> None:
    offer = torch_schedules.torch_schedules(3, 2)
    assert set(offer.refused) == {"torch-1F1B", "torch-DualPipeV"}
    assert "Number of microbatches (2)" in offer.refused["torch-1F1B"]
    with pytest.raises(torch_schedules.Refused, match="at least as many microbatches as stages"):
        torch_schedules.torch_schedule("DualPipeV", 3, 2)


def test_a_table_that_lacks_a_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch_schedules.get_schedule_ops("ZBVZeroBubble", 2, 4)

    def without_the_last(*sizes: object) -> list[list[Any]]:
        return [[action for action in row if action is not None][:-1] for row in whole]

    monkeypatch.setattr(torch_schedules, "get_schedule_ops", without_the_last)
    with pytest.raises(torch_schedules.Refused, match="does not have every pass once"):
        torch_schedules.torch_schedule("ZBVZeroBubble", 2, 4)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("chunks", [2, 4])
def test_a_split_loop_is_torchs_interleaved_zero_bubble(p: int, m: int, chunks: int) -> None:
    theirs = torch_schedules.torch_schedule("InterleavedZeroBubble", p, m, chunks=chunks)
    assert split_interleaved(p, m, chunks)[0].ranks == theirs.ranks


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_auto_is_never_slower_than_what_torch_has_in_its_memory(p: int, m: int) -> None:
    costs = schedules.Costs.uniform(pipeline_size=p, forward=1, backward=1.2, weight=0.8, p2p=0.05)
    auto = schedules.build("auto", pipeline_size=p, num_microbatches=m, costs=costs)
    ours = schedules.simulate(auto, costs).makespan
    found = torch_schedules.torch_schedules(p, m, chunks=(2, 4, 8)).schedules
    timelines = {name: schedules.simulate(theirs, costs) for name, theirs in found.items()}
    within = {name for name, line in timelines.items() if max(line.peak_activation) <= p}
    assert {"torch-1F1B", "torch-ZBVZeroBubble"} <= within
    for name in within:
        assert ours <= timelines[name].makespan * (1 + 1e-9), name


def test_auto_has_the_memory_of_what_it_stands_beside() -> None:
    costs = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1.2, weight=0.8)
    shipped = dict(beside_others._shipped(4, 8, costs))
    assert len(shipped) == 4 + 2 * 3 + 2
    names = ["Megatron-LM 1F1B", "torch DualPipeV", "torch InterleavedZeroBubble, 4 chunks"]
    for row in (beside_others._row(name, shipped[name], costs) for name in names):
        assert row["auto_peak_of_1f1b"] <= row["peak_of_1f1b"] * (1 + 1e-6)
        assert (row["auto_faster"] >= 0) == (row["auto_bubble"] <= row["bubble"])


def test_interleaved_has_its_fastest_group_size() -> None:
    costs = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1, weight=1, p2p=0.5)
    tuned = schedules.simulate(beside_others._interleaved(4, 16, 2, costs), costs)
    for group in (4, 8, 16):
        other = schedules.build(
            "interleaved", pipeline_size=4, num_microbatches=16, chunks=2, group_size=group
        )
        assert tuned.makespan <= schedules.simulate(other, costs).makespan


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_split_ones_keep_our_rules(name: str) -> None:
    """They are tables like ours: valid, and the same after a round trip."""
    schedule = torch_schedules.torch_schedule(name, 4, 8).validate()
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule


def written_by_torch(name: str, p: int, m: int, chunks: int | None) -> str:
    """The table of a schedule, as torch's _dump_csv writes it."""
    text = io.StringIO()
    csv.writer(text).writerows(get_schedule_ops(name, p, m, chunks))
    return text.getvalue()


WITH_CHUNKS = [(name, None) for name in ("GPipe", *torch_schedules.V_SHAPED)] + [
    (name, chunks) for name in torch_schedules.LOOPED for chunks in (2, 3)
]


@pytest.mark.parametrize(("name", "chunks"), WITH_CHUNKS)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_torchs_own_table_is_read_and_timed(p: int, m: int, name: str, chunks: int | None) -> None:
    found = from_csv(written_by_torch(name, p, m, chunks))
    theirs = torch_schedules.torch_schedule(name, p, m, chunks=chunks)
    assert (found.ranks, found.placement.rank_of) == (theirs.ranks, theirs.placement.rank_of)
    assert makespan(found.without_pairs()) == makespan(theirs)
    assert from_csv(to_csv(found)) == found
    timeline = schedules.simulate(
        found, schedules.Costs.uniform(pipeline_size=p, forward=1, backward=1, weight=1)
    )
    assert schedules.lower(found, timeline)


def test_loops_that_begin_with_the_last_backward_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bfs.csv"
    path.write_text(written_by_torch("LoopedBFS", 2, 4, 2), encoding="utf-8")
    for more in ([], ["--output", str(tmp_path / "bfs.html")], ["--p2p", "0.5"]):
        assert cli.main(["show", "--csv", str(path), *more]) == 0
    assert "bfs.csv" in capsys.readouterr().out
    rules = from_csv(path).rules
    assert isinstance(rules, LastFirstRules)
    assert from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n").rules != rules


def test_only_part_of_the_backwards_from_the_last_on_is_refused() -> None:
    with pytest.raises(schedules.InvalidSchedule, match="'microbatch order'"):
        from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B1,1B0\n")
    with pytest.raises(schedules.InvalidSchedule, match="'microbatch order'"):
        from_csv("0F1,0F0,0B1,0B0\n1F1,1F0,1B1,1B0\n")
