"""Gradient buckets are reduced as soon as their last gradient is there, and not before."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import drawn_sizes
import pytest
import torch
from gpt_cases import (
    GPTCase,
    _zero_gradients,
    built,
    differences,
    forward_backward,
    microbatches,
)
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from ranks import RankPools

from megatron_zb import schedules
from megatron_zb.megatron_core.data_parallel import (
    BucketReductions,
    DataParallelSync,
    ReductionOrder,
)
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.request import LimitTooSmall
from megatron_zb.schedules.schedule import Schedule

# One bucket for every few weights; Megatron makes several only on the first pipeline rank.
CASE = GPTCase(data_parallel=2, overlap_grad_reduce=True, bucket_size=5000, layers=8)
MICROBATCHES = 4  # of which v-half finishes later chunks first, so that no reduction waits for one


def events_of_a_step(case: GPTCase, schedule: str, steps: int) -> list[tuple[str, int, int]]:
    """What the last step does on this rank, in order.

    ("gradient", chunk, bucket group) for each that W or BW brings, and ("reduce", chunk, group).
    """
    events: list[tuple[str, int, int]] = []
    with built(case, schedule, MICROBATCHES) as (adapter, chunks):
        assert adapter is not None
        place = {
            id(weight): (c, g)
            for c, chunk in enumerate(chunks)
            for g, group in enumerate(chunk.bucket_groups)
            for weight in group.params
        }
        came = BucketReductions.gradient_came

        def record(self: BucketReductions, weight: torch.Tensor) -> None:
            events.append(("gradient", *place[id(weight)]))
            came(self, weight)

        for c, chunk in enumerate(chunks):
            for g, group in enumerate(chunk.bucket_groups):
                group.start_grad_sync = _recording(group, events, (c, g))
        with mock.patch.object(BucketReductions, "gradient_came", record):
            for _ in range(steps):
                _zero_gradients(chunks)
                events.clear()
                data = [microbatches(case, MICROBATCHES) for _ in chunks]
                forward_backward(adapter.forward_backward_func, chunks, data, MICROBATCHES)
    if parallel_state.get_pipeline_model_parallel_rank() == 0:
        assert max(g for _, _, g in events) > 2, "there are several buckets"
    return events


def _recording(group: Any, events: list[tuple[str, int, int]], place: tuple[int, int]) -> Any:
    """Megatron asks for every reduction again at the end, which does nothing once it runs."""
    original = group.start_grad_sync

    def start(*args: Any, **keywords: Any) -> None:
        if group.grad_reduce_handle is None:
            events.append(("reduce", *place))
        original(*args, **keywords)

    return start


def check_order(events: list[tuple[str, int, int]]) -> None:
    """Every bucket once, later chunks first, in order in its chunk, after its last gradient."""
    starts = [c for kind, c, _ in events if kind == "reduce"]
    assert starts == sorted(starts, reverse=True)
    for chunk in {c for _, c, _ in events}:
        reduced = [g for kind, c, g in events if kind == "reduce" and c == chunk]
        assert reduced == sorted(set(reduced))
        for group in reduced:
            last = max(
                (i for i, e in enumerate(events) if e == ("gradient", chunk, group)), default=-1
            )
            assert events.index(("reduce", chunk, group)) > last


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v-half", "zb-h1", "1f1b", "interleaved"])
def test_reductions_start_before_the_last_weight_gradient(ranks: RankPools, name: str) -> None:
    """In a BW, they do from the second step on: the first one shows what a backward brings."""
    ranks_events = ranks(4).run(events_of_a_step, case=CASE, schedule=name, steps=2)
    for events in ranks_events:
        check_order(events)
    kinds = [kind for kind, _, _ in ranks_events[0]]
    gradients_after = kinds[kinds.index("reduce") :].count("gradient")
    assert gradients_after >= 8


@pytest.mark.long
@pytest.mark.parametrize("name", ["v-half", "zb-h1", "zb-2p", "1f1b"])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"dtype": "bfloat16"}], ids=str)
def test_gradients_in_small_buckets_equal_megatrons(
    ranks: RankPools, name: str, options: dict[str, Any]
) -> None:
    case = replace(CASE, **options)
    found = ranks(4).run(
        differences, case=case, schedule=name, num_microbatches=[MICROBATCHES], iterations=3
    )
    assert found == [[]] * 4


# --- data-parallel ranks whose schedules finish a rank's chunks in other orders


def finishing(schedule: Schedule, last: int) -> Schedule:
    """The schedule with whole passes cut in two, and each rank's W of chunk ``last`` at its end."""
    ranks = []
    for held, passes in zip(schedule.placement.stages_of, schedule.ranks, strict=True):
        cut = [q for p in passes for q in _in_two(p)]
        late = [q for q in cut if q.kind is PassKind.W and q.stage == held[last]]
        ranks.append(tuple([q for q in cut if q not in late] + late))
    return replace(schedule, name=f"finishes-{last}", ranks=tuple(ranks)).validate()


def _in_two(whole: Pass) -> list[Pass]:
    if whole.kind is not PassKind.BW:
        return [whole]
    return [whole._replace(kind=PassKind.B), whole._replace(kind=PassKind.W)]


def differences_of_replicas(case: GPTCase, tables: list[Schedule]) -> list[str]:
    """The differences from Megatron's where each data-parallel rank has a table to itself."""
    table = tables[torch.distributed.get_rank() % len(tables)]
    return differences(case, table, [table.num_microbatches], iterations=3)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_replicas_may_finish_their_chunks_in_other_orders(ranks: RankPools, overlap: bool) -> None:
    built_once = schedules.build("v-half", pipeline_size=2, num_microbatches=4)
    tables = [finishing(built_once, last) for last in (0, 1)]
    case = replace(CASE, overlap_grad_reduce=overlap)
    assert ranks(4).run(differences_of_replicas, case=case, tables=tables) == [[]] * 4


@pytest.mark.slow
@settings(max_examples=200 if drawn_sizes.IS_FULL else 50)
@given(data=st.data())
def test_any_lengths_start_the_reductions_in_one_order(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["v-half", "v-zb", "1f1b-v", "zb-h1", "interleaved"]))
    p = data.draw(st.integers(2, 4))
    m = p * data.draw(st.integers(1, 2))
    lengths = data.draw(st.lists(st.floats(1, 8), min_size=m, max_size=m))
    equal = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=1.0, p2p=0.1)
    costs = equal.of_lengths(lengths)
    try:
        schedule = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs)
    except LimitTooSmall:  # the longest microbatch is above the family's share of memory
        reject()
    own = data.draw(st.booleans(), label="grad_sync_func of the user's")
    for held, passes in zip(schedule.placement.stages_of, schedule.ranks, strict=True):
        of_chunks = [held.index(q.stage) for q in passes if q.kind in (PassKind.W, PassKind.BW)]
        later_first = list(reversed(range(len(held))))
        dense = [f"{chunk}{part}" for chunk in later_first for part in ("ab", "cd")]
        experts = [f"{chunk}e" for chunk in later_first]
        started = starts_of_a_step(of_chunks, own)
        if own:
            assert started == later_first
        else:
            assert [s for s in started if s in dense] == dense
            assert [s for s in started if s in experts] == experts


def starts_of_a_step(of_chunks: list[int], own: bool) -> list[Any]:
    """What starts as the weight gradients of a rank's chunks come in an order."""
    started: list[Any] = []
    chunks = [Chunk(str(number), started) for number in range(max(of_chunks) + 1)]
    functions = [lambda _, number=number: started.append(number) for number in range(len(chunks))]
    sync = DataParallelSync(
        SimpleNamespace(param_sync_func=None, grad_sync_func=functions if own else None),
        chunks,
        order=[],
        passes=[of_chunks.count(number) for number in range(len(chunks))],
        buckets=[BucketReductions(chunk) for chunk in chunks],
    )
    for number in of_chunks:
        chunk = chunks[number]
        sync.before_weight_gradients(number, partial(brought, chunk, 0, 1, 2, 3, 4))
        if (listener := sync.listener(number)) is not None:
            for weight in chunk.weights:
                listener(weight)
        sync.after_weight_gradients(number)
    return started


# --- what cannot be provoked with a whole model


class Group:
    """A bucket group that says when it is reduced."""

    def __init__(self, name: str, weights: list[torch.Tensor], said: list[str]) -> None:
        self.params = set(weights)
        self.name, self.said = name, said

    def start_grad_sync(self, force_all_reduce: bool) -> None:
        self.said.append(f"{self.name}{'!' if force_all_reduce else ''}")


class Chunk:
    """Two buckets of two weights, and one of an expert."""

    def __init__(self, name: str = "", said: list[str] | None = None) -> None:
        self.said: list[str] = [] if said is None else said
        self.weights = [torch.zeros(i + 1) for i in range(5)]
        self.force_all_reduce = False
        self.bucket_groups = [
            Group(f"{name}ab", self.weights[0:2], self.said),
            Group(f"{name}cd", self.weights[2:4], self.said),
        ]
        self.expert_parallel_bucket_groups = [Group(f"{name}e", self.weights[4:], self.said)]

    def parameters(self) -> list[torch.Tensor]:
        return self.weights

    def start_grad_sync(self) -> None:
        raise AssertionError("which would start all buckets")


def lined_up(chunk: Chunk) -> BucketReductions:
    """The reductions of a rank's only chunk, in the order of a step."""
    reductions = BucketReductions(chunk)
    reductions.line_up(ReductionOrder(), ReductionOrder())
    return reductions


def brought(chunk: Chunk, *weights: int) -> dict[int, int]:
    return {id(chunk.weights[w]): weights.count(w) for w in weights}


def test_a_bucket_that_gets_nothing_in_the_last_w_starts_at_once_but_in_order() -> None:
    chunk = Chunk()
    reductions = lined_up(chunk)
    reductions.before_pass(brought(chunk, 0, 0), final=True)
    assert chunk.said == ["e"]  # the dense ones wait for the first of them
    reductions.gradient_came(chunk.weights[0])
    assert chunk.said == ["e"]
    reductions.gradient_came(chunk.weights[0])
    assert chunk.said == ["e", "ab", "cd"]
    reductions.after_pass(final=True)
    assert chunk.said == ["e", "ab", "cd"]


def test_a_w_that_is_not_the_last_starts_nothing() -> None:
    chunk = Chunk()
    reductions = lined_up(chunk)
    reductions.before_pass(brought(chunk, 0), final=False)
    reductions.gradient_came(chunk.weights[0])
    reductions.after_pass(final=False)
    assert chunk.said == []


def backward(chunk: Chunk, reductions: BucketReductions, weights: list[int], final: bool) -> None:
    reductions.line_up(ReductionOrder(), ReductionOrder())
    reductions.before_pass(None, final)
    for w in weights:
        chunk.bucket_groups[0].register_grad_ready(chunk.weights[w])  # type: ignore[attr-defined]
        chunk.said.append("abcde"[w])
    reductions.after_pass(final)


def test_a_bw_brings_what_the_last_one_brought() -> None:
    chunk = Chunk()
    reductions = lined_up(chunk)
    with reductions.listening():
        backward(chunk, reductions, [0, 1, 2, 3, 4], final=True)  # nothing known yet
        assert chunk.said == ["a", "b", "c", "d", "e", "ab", "cd", "e"]
        chunk.said.clear()
        backward(chunk, reductions, [4, 2, 3, 1, 0], final=True)
        assert chunk.said == ["e", "e", "c", "d", "b", "ab", "cd", "a"]
        chunk.said.clear()
        chunk.force_all_reduce = True
        backward(chunk, reductions, [0, 1, 3], final=True)  # c and e get nothing
        assert chunk.said == ["a", "ab!", "b", "d", "cd!", "e!"]
    assert not hasattr(chunk.bucket_groups[0], "register_grad_ready")


def test_hooks_of_a_b_count_for_nothing() -> None:
    chunk = Chunk()
    reductions = lined_up(chunk)
    with reductions.listening():
        chunk.bucket_groups[0].register_grad_ready(chunk.weights[0])  # type: ignore[attr-defined]
        reductions.before_pass(brought(chunk, 0), final=True)
    assert chunk.said == ["e"]


def test_a_gradient_after_its_reduction_is_no_silence() -> None:
    chunk = Chunk()
    reductions = lined_up(chunk)
    reductions.before_pass(brought(chunk, 0), final=True)
    with pytest.raises(RuntimeError, match="came after the last one that was expected"):
        reductions.gradient_came(chunk.weights[2])
