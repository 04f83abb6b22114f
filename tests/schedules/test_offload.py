"""Activations that are offloaded: rules, times, memory, bounds and search."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import drawn_sizes
import hypothesis
import pytest
from hypothesis import strategies as st

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules import interchange
from megatron_zb.schedules.bounds import lower_bound
from megatron_zb.schedules.costs import Costs, with_all_kept
from megatron_zb.schedules.features.offload import Offload, place_offload, with_recomputed
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.lowering import Run, lower, unfinished
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import looped, wave
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.simulator import simulate
from megatron_zb.schedules.stage_costs import StageCosts
from megatron_zb.schedules.task_graph import Copy

F, B, W, BW, R = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.R
D, H = PassKind.D, PassKind.H


def costs_of(p: int, copy: float = 0.5, **more: Any) -> Costs:
    """Costs of a microbatch on a whole rank: F, B, W = 1, 1.2, 0.8 and a latency of 0.05."""
    costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.2, weight=0.8, p2p=0.05)
    return costs.having(Offload(seconds=copy, **more))


def two_ranks(*first: tuple[PassKind, int]) -> Schedule:
    """Build an order of two ranks, one chunk each; ``first`` are the passes of rank 0."""
    m = sum(kind is F for kind, _ in first)
    ranks = (
        tuple(Pass(kind, 0, j) for kind, j in first),
        tuple(Pass(kind, 1, j) for j in range(m) for kind in (F, BW)),
    )
    return Schedule("two ranks", looped(2, 1), m, ranks)


MOVES = two_ranks((F, 0), (F, 1), (D, 0), (H, 0), (F, 2), (BW, 0), (BW, 1), (BW, 2))


def test_copies_run_beside_the_passes_and_what_needs_them_waits() -> None:
    timeline = simulate(MOVES.validate(), costs_of(2, 2.5))
    assert MOVES.offloaded == {(0, 0)}
    # F0 ends at 1, its copy out at 3.5, for which D waits; H begins then, and F runs beside it
    assert timeline.copies[0] == (Copy(0, 0, True, 1.0, 3.5), Copy(0, 0, False, 3.5, 6.0))
    assert timeline.copies[1] == ()
    assert timeline.start[0][:6] == pytest.approx((0.0, 1.0, 3.5, 3.5, 3.5, 6.0))
    assert timeline.memory_curve(0) == (1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 2.0, 1.0)
    assert timeline.memory_steps(0)[2] == (2.0, 1.0), "D frees what was offloaded"
    assert timeline.host_curve(0) == (0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    assert timeline.peak_host == (1.0, 0.0)
    slow = simulate(MOVES, costs_of(2, 9.0))
    assert slow.memory_curve(0) == timeline.memory_curve(0), "slow copies change time alone"
    assert slow.makespan > timeline.makespan


def test_each_engine_copies_in_turn_and_both_share_one_without_duplex() -> None:
    order = two_ranks(
        (F, 0), (F, 1), (D, 0), (H, 0), (D, 1), (BW, 0), (H, 1), (BW, 1)
    ).validate()  # fmt: skip
    both = [copy[2:] for copy in simulate(order, costs_of(2, 2.0)).copies[0]]
    # out 1 to 3, then 3 to 5; in from 3 to 5, and again when BW 0 has run, from 5 to 7
    assert both == [(True, 1.0, 3.0), (True, 3.0, 5.0), (False, 3.0, 5.0), (False, 7.0, 9.0)]
    shared = simulate(order, costs_of(2, 2.0, full_duplex=False)).copies[0]
    assert [copy[2:] for copy in shared][:3] == [
        (True, 1.0, 3.0),
        (True, 3.0, 5.0),
        (False, 5.0, 7.0),
    ]


def test_moves_become_runs_that_read_and_send_nothing() -> None:
    program = lower(MOVES)
    assert unfinished(program) == {}
    moves = [at for at in program.ranks[0] if isinstance(at, Run) and at.work.kind in (D, H)]
    assert moves == [Run(Pass(kind, 0, 0), (), None, False) for kind in (D, H)]


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (((D, 0), (F, 0), (H, 0), (BW, 0)), "'offload': its F has not run yet"),
        (((F, 0), (H, 0), (D, 0), (BW, 0)), "'offload': its D has not run yet"),
        (((F, 0), (D, 0), (D, 0), (H, 0), (BW, 0)), "'offload': it has run before"),
        (((F, 0), (D, 0), (H, 0), (H, 0), (BW, 0)), "'offload': it has run before"),
        (((F, 0), (D, 0), (BW, 0), (H, 0)), "'offload': its B has run already"),
        (((F, 0), (D, 0), (BW, 0)), "'offload': 0D0 has no H"),
        (
            ((F, 0), (D, 0), (R, 0), (BW, 0)),
            "'recomputation': a unit is either recomputed",
        ),
        (((F, 0), (R, 0), (D, 0), (BW, 0)), "'offload': a unit is either recomputed"),
    ],
)
def test_orders_of_moves_are_checked(first: tuple[tuple[PassKind, int], ...], why: str) -> None:
    with pytest.raises(InvalidSchedule, match=why):
        two_ranks(*first).validate()


def test_the_last_stage_is_not_offloaded() -> None:
    ranks = (
        (Pass(F, 0, 0), Pass(BW, 0, 0)),
        tuple(Pass(kind, 1, 0) for kind in (F, D, H, BW)),
    )
    with pytest.raises(InvalidSchedule, match="'offload': the last stage's B follows"):
        Schedule("last", looped(2, 1), 1, ranks).validate()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"seconds": -1.0}, "copy is"),
        ({"seconds": [1.0, 2.0, 3.0]}, "copy has 3 entries, 2 are needed"),
        ({"seconds": 1.0, "host_limit": -1.0}, "host_limit is -1.0"),
    ],
)
def test_costs_of_copies_are_checked(given: dict[str, Any], why: str) -> None:
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0)
    with pytest.raises(UsageError, match=why):
        costs.having(Offload(**given))


def test_copies_are_cut_with_the_stages_and_grow_with_the_microbatch() -> None:
    costs = costs_of(2, 0.6).of_lengths([1.0, 2.0])
    table = costs.for_placement(wave(2, 2))
    assert copy_seconds(table, 0) == pytest.approx((0.3,) * 4)
    assert copy_seconds(table, 1) == pytest.approx((0.6,) * 4)
    assert with_all_kept(costs).for_placement(wave(2, 2)).keeps_all


def copy_seconds(table: StageCosts, microbatch: int) -> Sequence[float]:
    copies = table.of(microbatch).copies
    assert copies is not None
    return copies.seconds


@pytest.mark.full
def test_recomputation_and_offload_split_the_pairs_of_a_published_order() -> None:
    """R, D and H stand between an F and its B, and a pair has nothing to hide here."""
    costs = costs_of(2, 0.3).having(Recomputation(kept_input=0.05))
    built = schedules.build(
        "dualpipe-v", pipeline_size=2, num_microbatches=8, costs=costs, memory_limit=0.6
    )
    assert built.recomputed or built.offloaded
    assert not built.pairs


def test_moves_keep_a_limit_that_no_order_keeps() -> None:
    """An eighth of 1F1B's memory for 8 % of a step, with copies of 0.3 of the passes' time."""
    p, m = 8, 16
    costs = costs_of(p, 0.9)
    order = schedules.build(
        "interleaved", pipeline_size=p, num_microbatches=m, chunks=4, costs=with_all_kept(costs)
    )
    offloaded = place_offload(order, costs, (1.0,) * p)
    assert offloaded is not None
    timeline = simulate(offloaded.validate(), costs)
    assert max(timeline.peak_memory) <= 1.0 + 1e-9
    assert timeline.makespan < 1.05 * simulate(order, costs).makespan
    assert place_offload(order, costs_of(p, 0.9, host_limit=1.0), (1.0,) * p) is None
    assert place_offload(order, costs, (0.2,) * p) is None, "below one activation"


def test_what_fits_anyway_is_not_offloaded() -> None:
    costs = costs_of(4)
    given: dict[str, Any] = {"pipeline_size": 4, "num_microbatches": 8}
    order = schedules.build("1f1b", **given, costs=with_all_kept(costs))
    kept = place_offload(order, costs, (4.0,) * 4)
    assert kept is not None
    assert kept.offloaded == frozenset()


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(st.data())
def test_placed_moves_keep_every_rule_and_limit(data: st.DataObject) -> None:
    p, chunks = data.draw(st.sampled_from([(2, 1), (3, 1), (2, 2), (4, 2)]), "sizes")
    m = p * data.draw(st.integers(1, 3), "groups")
    limit = data.draw(st.floats(1.0 / chunks, 2.0 * p), "limit")
    full_duplex, copy = data.draw(st.booleans(), "duplex"), data.draw(st.floats(0.0, 3.0), "copy")
    costs = costs_of(p, copy, full_duplex=full_duplex)
    alone = with_all_kept(costs)
    name: Any = "interleaved" if chunks > 1 else data.draw(st.sampled_from(["1f1b", "gpipe"]))
    more: dict[str, Any] = {"chunks": chunks} if chunks > 1 else {}
    order = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=alone, **more)
    offloaded = place_offload(order, costs, (limit,) * p)
    if offloaded is None:
        return
    timeline = simulate(offloaded.validate(), costs)
    assert max(timeline.peak_memory) <= limit * (1 + 1e-6)
    assert unfinished(lower(offloaded, timeline)) == {}
    table = costs.for_placement(offloaded.placement)
    bound = lower_bound(offloaded.placement, m, table, (limit,) * p)
    assert bound <= timeline.makespan * (1 + 1e-9)
    for rank, copies in enumerate(timeline.copies):
        for way in (True, False):
            of_way = [c for c in copies if c.to_host is way or not full_duplex]
            ends = [c.end for c in of_way]
            assert all(c.start >= end for c, end in zip(of_way[1:], ends, strict=False))
        assert len(copies) == 2 * sum(
            s in offloaded.placement.stages_of[rank] for s, _ in offloaded.offloaded
        )


@pytest.mark.slow
def test_auto_moves_where_memory_is_short_and_is_never_slower_for_it(brief_searches: None) -> None:
    p, m = 4, 8
    given: dict[str, Any] = {"pipeline_size": p, "num_microbatches": m, "chunks": 2}
    costs = costs_of(p, 0.6)
    with pytest.raises(UsageError, match="auto"):
        schedules.build("auto", **given, costs=with_all_kept(costs), memory_limit=0.2)
    found = schedules.build("auto", **given, costs=costs, memory_limit=0.2)
    assert found.offloaded
    timeline = simulate(found, costs)
    assert max(timeline.peak_memory) <= 0.2 * p + 1e-9
    assert found.report is not None
    assert found.report.lower_bound <= timeline.makespan
    kept = schedules.build("auto", **given, costs=with_all_kept(costs), memory_limit=0.5)
    moves = schedules.build("auto", **given, costs=costs, memory_limit=0.5)
    assert simulate(moves, costs).makespan <= simulate(kept, costs).makespan * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_auto_on_one_chunk_moves_and_is_as_fast_as_1f1b_in_all_of_its_memory(
    brief_searches: None, p: int, m: int
) -> None:
    """Its search begins with that order, and stays far behind without it."""
    costs = costs_of(p, 0.1)
    given: dict[str, Any] = {"pipeline_size": p, "num_microbatches": m}
    usual = schedules.build("1f1b", **given, costs=with_all_kept(costs))
    limit = 1.2 / p  # of one microbatch, and what W keeps of another
    found = schedules.build("auto", **given, costs=costs, memory_limit=limit, chunks=1)
    timeline = simulate(found, costs)
    assert max(timeline.peak_memory) <= limit * p + 1e-9
    assert timeline.makespan <= simulate(usual, costs).makespan


@pytest.mark.full
def test_where_copies_take_long_some_units_are_recomputed_instead(brief_searches: None) -> None:
    """In one order; no slower than what may only offload, or only recompute."""
    sizes: dict[str, Any] = {"pipeline_size": 4, "num_microbatches": 12, "memory_limit": 0.3}
    sizes["placement"] = looped(4, 4)
    moving = costs_of(4, 3.0)
    both = moving.having(Recomputation(kept_input=0.06))
    dropping = both.without(lambda it: isinstance(it, Offload))
    found = schedules.build("auto", **sizes, costs=both)
    assert found.recomputed and found.offloaded
    assert not found.recomputed & found.offloaded
    timeline = simulate(found.validate(), both)
    assert max(timeline.peak_memory) <= 0.3 * 4 * (1 + 1e-9)
    for costs in (moving, dropping):
        other = schedules.build("auto", **sizes, costs=costs)
        assert timeline.makespan <= simulate(other, costs).makespan * (1 + 1e-9)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.3, 2), (0.5, 4), (1.0, 8)])
def test_a_share_of_the_units_of_each_stage_is_recomputed(share: float, count: int) -> None:
    order = schedules.build("interleaved", pipeline_size=2, num_microbatches=8, chunks=2)
    found = with_recomputed(order, share).validate()
    stages = [stage for stage, _ in found.recomputed]
    assert [stages.count(stage) for stage in range(4)] == [count] * 3 + [0]
    for rank in found.ranks:
        for p, behind in pairwise(rank):
            assert p.kind is not R or behind == Pass(BW, p.stage, p.microbatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "p", "smallest"),
    drawn_sizes.first(1, [("v-half", 2, 0.25), ("v-min", 4, 0.125), ("auto", 2, 0.125)]),
)
def test_limits_are_served_down_to_one_activation(
    brief_searches: None, name: str, p: int, smallest: float
) -> None:
    """Of one stage: the smallest limit that is told is one that can be kept, and none below."""
    costs = costs_of(p)
    for limit in (smallest, 1.5 * smallest):
        found = schedules.build(
            name, pipeline_size=p, num_microbatches=4, costs=costs, memory_limit=limit
        )
        assert max(simulate(found.validate(), costs).peak_memory) <= limit * p * (1 + 1e-9)
    needs = rf"rank \d \(Megatron's pipeline rank \d\) needs at least {smallest} of 1F1B"
    with pytest.raises(UsageError, match=needs):
        schedules.build(
            name, pipeline_size=p, num_microbatches=4, costs=costs, memory_limit=0.99 * smallest
        )


def test_a_table_with_moves_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "moves.csv"
    file.write_text(interchange.to_csv(MOVES), encoding="utf-8")
    assert interchange.from_csv(file).ranks == MOVES.ranks


def test_moves_are_no_slower_than_the_bound_of_what_is_kept() -> None:
    """With copies in no time the bound is that of all memory."""
    placement, m = looped(4), 8
    limit = (1.0,) * 4
    free = lower_bound(placement, m, costs_of(4, 0.0).for_placement(placement), limit)
    slow = lower_bound(placement, m, costs_of(4, 8.0).for_placement(placement), limit)
    kept = with_all_kept(costs_of(4)).for_placement(placement)
    assert free <= slow <= lower_bound(placement, m, kept, limit)
    assert free < lower_bound(placement, m, kept, limit)
