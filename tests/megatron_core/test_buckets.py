"""Gradient buckets are reduced as soon as their last gradient is there, and not before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

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
from megatron.core import parallel_state
from ranks import RankPools

from megatron_zb.megatron_core.data_parallel import BucketReductions

# One bucket for every few weights; Megatron makes several only on the first pipeline rank.
CASE = GPTCase(data_parallel=2, overlap_grad_reduce=True, bucket_size=5000, layers=8)
MICROBATCHES = 5


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
    """Every bucket once, in order within its chunk, and after its own last gradient."""
    for chunk in {c for _, c, _ in events}:
        reduced = [g for kind, c, g in events if kind == "reduce" and c == chunk]
        assert reduced == sorted(set(reduced))
        for group in reduced:
            last = max(
                (i for i, e in enumerate(events) if e == ("gradient", chunk, group)), default=-1
            )
            assert events.index(("reduce", chunk, group)) > last


@pytest.mark.parametrize("name", ["v-half", "zb-h1", "1f1b", "interleaved"])
def test_reductions_start_before_the_last_weight_gradient(ranks: RankPools, name: str) -> None:
    """In a BW, they do from the second step on: the first one shows what a backward brings."""
    ranks_events = ranks(4).run(events_of_a_step, case=CASE, schedule=name, steps=2)
    for events in ranks_events:
        check_order(events)
    kinds = [kind for kind, _, _ in ranks_events[0]]
    gradients_after = kinds[kinds.index("reduce") :].count("gradient")
    assert gradients_after >= 8


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

    def __init__(self) -> None:
        self.said: list[str] = []
        self.weights = [torch.zeros(i + 1) for i in range(5)]
        self.force_all_reduce = False
        self.bucket_groups = [
            Group("ab", self.weights[0:2], self.said),
            Group("cd", self.weights[2:4], self.said),
        ]
        self.expert_parallel_bucket_groups = [Group("e", self.weights[4:], self.said)]


def brought(chunk: Chunk, *weights: int) -> dict[int, int]:
    return {id(chunk.weights[w]): weights.count(w) for w in weights}


def test_a_bucket_that_gets_nothing_in_the_last_w_starts_at_once_but_in_order() -> None:
    chunk = Chunk()
    reductions = BucketReductions(chunk)
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
    reductions = BucketReductions(chunk)
    reductions.before_pass(brought(chunk, 0), final=False)
    reductions.gradient_came(chunk.weights[0])
    reductions.after_pass(final=False)
    assert chunk.said == []


def backward(chunk: Chunk, reductions: BucketReductions, weights: list[int], final: bool) -> None:
    reductions.before_pass(None, final)
    for w in weights:
        chunk.bucket_groups[0].register_grad_ready(chunk.weights[w])  # type: ignore[attr-defined]
        chunk.said.append("abcde"[w])
    reductions.after_pass(final)


def test_a_bw_brings_what_the_last_one_brought() -> None:
    chunk = Chunk()
    reductions = BucketReductions(chunk)
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
    reductions = BucketReductions(chunk)
    with reductions.listening():
        chunk.bucket_groups[0].register_grad_ready(chunk.weights[0])  # type: ignore[attr-defined]
        reductions.before_pass(brought(chunk, 0), final=True)
    assert chunk.said == ["e"]


def test_a_gradient_after_its_reduction_is_no_silence() -> None:
    chunk = Chunk()
    reductions = BucketReductions(chunk)
    reductions.before_pass(brought(chunk, 0), final=True)
    with pytest.raises(RuntimeError, match="came after the last one that was expected"):
        reductions.gradient_came(chunk.weights[2])
