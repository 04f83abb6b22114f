"""Streams of layers: with them, weights and dropout masks are the same under every schedule."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import gpt_cases
import pytest
import torch
from gpt_cases import GPTCase, built, forward_backward, microbatches
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from ranks import RankPools

from megatron_zb.megatron.initialisation import global_parameters
from megatron_zb.megatron.placement import Layers, is_stock, segments_from_layout, spread
from megatron_zb.megatron.random_streams import LayerStreams, RandomState
from megatron_zb.run_flags import asks_for_layer_streams
from megatron_zb.schedules import build

DROPOUT = GPTCase(layers=8, dropout=0.1, drawn=True)
EXPERTS = replace(
    DROPOUT,
    data_parallel=2,
    expert_parallel=2,
    options=(
        ("num_moe_experts", 4),
        ("moe_router_topk", 2),
        ("moe_token_dispatcher_type", "alltoall"),
        ("add_bias_linear", False),
    ),
)
RECOMPUTED = (
    ("recompute_granularity", "full"),
    ("recompute_method", "uniform"),
    ("recompute_num_layers", 2),
)


@dataclass
class Run:
    """What the ranks of a job have drawn and computed, gathered; weights by global name."""

    losses: list[list[float]] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)

    def add(self, other: Run) -> None:
        self.losses = max(self.losses, other.losses)
        for mine, theirs in ((self.weights, other.weights), (self.gradients, other.gradients)):
            for name in mine.keys() & theirs.keys():  # a tied weight, or a replica's
                assert mine[name] == theirs[name], name
            mine.update(theirs)


def train(
    case: GPTCase,
    schedule: str | None,
    steps: tuple[int, ...] = (0, 1),
    count: int = 4,
    by_layer: bool = True,
    evaluates: bool = False,
) -> Run:
    """Steps without an optimizer: losses follow from weights, data and masks."""
    now = 0
    steps_done = (lambda: now) if by_layer else None
    with built(case, schedule, count, steps_done) as (adapter, chunks):
        function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        found = Run(weights=_digests(chunks, lambda weight: weight))
        for now in steps:
            gpt_cases._zero_gradients(chunks)
            if evaluates:
                _step(function, case, chunks, count, forward_only=True)
            records = _step(function, case, chunks, count)
            found.losses.append([float(record["lm loss"]) for record in records])
        found.gradients = _digests(chunks, lambda weight: weight.main_grad)
    return found


def _step(function: Any, case: GPTCase, chunks: list[Any], count: int, **more: Any) -> list[Any]:
    data = [microbatches(case, count) for _ in chunks]
    return forward_backward(function, chunks, data, count, **more)


def _digests(chunks: list[Any], value: Any) -> dict[str, str]:
    """By global name, and by tensor-parallel and expert-parallel rank where those differ."""
    found = {}
    for chunk in chunks:
        for name, weight in global_parameters(chunk).items():
            key = f"{name.replace('module.', '')} of {_shard(name, weight)}"
            bits = value(weight).detach().float().contiguous().numpy().tobytes()
            found[key] = hashlib.sha256(bits).hexdigest()
    return found


def _shard(name: str, weight: Any) -> str:
    if "experts" in name:
        return f"EP {parallel_state.get_expert_model_parallel_rank()}"
    tensor = parallel_state.get_tensor_model_parallel_rank()
    return f"TP {tensor}" if getattr(weight, "tensor_model_parallel", False) else "all"


def gathered(ranks: RankPools, size: int, case: GPTCase, schedule: str | None, **more: Any) -> Run:
    whole = Run()
    more_ranks = case.tensor_parallel * case.data_parallel
    for found in ranks(size * more_ranks).run(train, case=case, schedule=schedule, **more):
        whole.add(found)
    assert whole.losses and whole.weights and whole.gradients
    return whole


def check_equal(ours: Run, reference: Run) -> None:
    assert ours.losses == reference.losses
    assert ours.gradients.keys() >= reference.gradients.keys()
    for name in reference.weights:
        assert ours.weights[name] == reference.weights[name], name
        assert ours.gradients[name] == reference.gradients[name], name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_all_schedules_and_sizes_draw_the_same(ranks: RankPools, tied: bool) -> None:
    case = replace(DROPOUT, tied=tied)
    reference = gathered(ranks, 2, case, "1f1b")
    first, second = reference.losses
    assert first != second, "every step draws masks of its own"
    for size, name in [(2, "v-half"), (2, "zb-h1"), (4, "1f1b"), (4, "v-half"), (4, "v-zb")]:
        check_equal(gathered(ranks, size, case, name), reference)
