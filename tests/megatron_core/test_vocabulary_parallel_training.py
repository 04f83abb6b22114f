"""A short training with vocabulary parallelism: losses, and memory of the ranks, beside 1F1B's."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any
from unittest.mock import patch

import gpt_cases
import pytest
import torch
from brief_searches import briefly
from gpt_cases import GPTCase
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from ranks import RankPools

from megatron_zb.runtime.activation_memory import ActivationMemory

RANKS, MICROBATCHES, STEPS, WORDS = 4, 8, 12, 2048
SAMPLES = 2  # of a microbatch
LEARNING_RATE = 1e-3  # a larger one magnifies differences of rounding sooner


@dataclass(frozen=True)
class Trained:
    """What one rank has of a training; losses of each step, on the last rank."""

    losses: list[float]
    state_bytes: int
    logits_bytes: int


class LogitsMemory(ActivationMemory):
    """Counts logits, and what has their shape: that of all words, or of a rank's."""

    def hold(self, tensor: torch.Tensor) -> None:
        if tensor.dim() > 1 and tensor.size(-1) in (WORDS, WORDS // RANKS):
            super().hold(tensor)


def trained(schedule: str | None, sharded: bool = False) -> Trained:
    """Train on the same microbatches in each step; Megatron's own 1F1B without a schedule."""
    case = GPTCase(layers=8, vocabulary=sharded)
    words = patch.object(gpt_cases, "VOCABULARY", WORDS)
    with briefly(), words, gpt_cases.built(case, schedule, MICROBATCHES) as (adapter, chunks):
        optimizer = gpt_cases.optimizer(case, chunks)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        memory = LogitsMemory(p for chunk in chunks for p in chunk.parameters())
        if adapter is not None:
            adapter.track(memory)
        function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        losses = []
        with memory.watching():
            for _ in range(STEPS):
                for chunk in chunks:
                    chunk.zero_grad_buffer()
                optimizer.zero_grad()
                data = [gpt_cases.microbatches(case, MICROBATCHES) for _ in chunks]
                records = gpt_cases.forward_backward(
                    function, chunks, data, MICROBATCHES, forward_only=False
                )
                optimizer.step()
                losses += [mean(float(r["lm loss"]) for r in records)] if records else []
    return Trained(losses, state_bytes(chunks, optimizer), memory.peak_bytes)


def state_bytes(chunks: list[Any], optimizer: Any) -> int:
    """Return the bytes of weights, their gradients and the optimizer's states."""
    weights = [p for chunk in chunks for p in chunk.parameters()]
    states = [
        value
        for part in optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return sum(tensor.nbytes for tensor in (*weights, *(p.main_grad for p in weights), *states))


def most_over_mean(ranks: list[Trained]) -> float:
    states = [rank.state_bytes for rank in ranks]
    return max(states) / mean(states)


@pytest.mark.full
def test_it_learns_as_megatrons_and_shares_out_memory(ranks: RankPools) -> None:
    pool = ranks(RANKS)
    upstream = pool.run(trained, schedule=None, timeout=300.0)
    whole = pool.run(trained, schedule="v-half", timeout=300.0)
    sharded = pool.run(trained, schedule="v-half", sharded=True, timeout=300.0)
    expected = upstream[-1].losses
    (losses,) = (rank.losses for rank in sharded if rank.losses)
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.1
    assert losses == pytest.approx(expected, rel=1e-6)

    assert most_over_mean(whole) > 2
    assert most_over_mean(sharded) < 1.05

    logits = 4 * SAMPLES * gpt_cases.SEQUENCE * WORDS
    assert max(rank.logits_bytes for rank in upstream) == logits
    most = max(rank.logits_bytes for rank in sharded)
    assert 0 < most <= 3 * logits / RANKS  # shards of up to three microbatches
