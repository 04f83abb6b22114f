"""What benchmarks/vocabulary_training.py tells of a cut output layer, in a short training."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import vocabulary_training
from brief_searches import briefly
from layer_sizes import LayerSizes
from rank_process import Kind
from ranks import RankPools
from vocabulary_training import Contender, Job

SIZES = LayerSizes(
    hidden=32, heads=2, ffn_hidden=85, seq_length=32, micro_batch_size=1, vocabulary=2048
)
JOB = Job(SIZES, ranks=4, layers=8, microbatches=8, steps=30)
EMBEDDING = 4 * 4 * SIZES.hidden * SIZES.vocabulary
"""Bytes of its weights, their gradients and two moments."""


def trained(job: Job, contenders: list[Contender]) -> list[dict[str, Any]]:
    with briefly():
        return [asdict(vocabulary_training.trained(job, one)) for one in contenders]


def test_it_learns_as_megatrons_and_shares_out_memory(ranks: RankPools) -> None:
    contenders = [Contender(None), Contender("v-half"), Contender("v-half", cut=True)]
    results = ranks(JOB.ranks).run(trained, job=JOB, contenders=contenders, timeout=300.0)
    stock, whole, cut = ([rank[number] for rank in results] for number in range(len(contenders)))
    found = vocabulary_training.compared(stock, cut)
    losses = vocabulary_training._losses(stock)
    assert len(losses) == JOB.steps and losses[-1] < losses[0] - 0.4
    assert found["losses"] < 1e-6
    assert found["last_loss"] == pytest.approx(losses[-1], rel=1e-6)

    of_ranks = [rank["state_bytes"] for rank in cut]
    assert max(of_ranks) - min(of_ranks) < 1.01 * EMBEDDING
    of_whole = [rank["state_bytes"] for rank in whole]
    assert max(of_whole) - min(of_whole) > 1.99 * EMBEDDING

    logits = 4 * SIZES.seq_length * SIZES.vocabulary
    assert max(rank["logits_bytes"] for rank in stock) == logits
    assert 0 < found["logits"] <= 3  # shards of up to three microbatches


def test_it_shares_out_the_work(ranks: RankPools) -> None:
    """Of an output layer that takes longer than all layers; in processor seconds."""
    sizes = replace(SIZES, hidden=64, ffn_hidden=170, seq_length=128, vocabulary=8192)
    job = replace(JOB, sizes=sizes, steps=4)
    assert job.output_layers > job.layers
    contenders = [Contender("v-half"), Contender("v-half", cut=True)]
    results = ranks(job.ranks, Kind.PLAIN).run(
        trained, job=job, contenders=contenders, timeout=300.0
    )
    whole, cut = ([rank[number] for rank in results] for number in range(len(contenders)))
    figures = [vocabulary_training.compared(whole, ranks)["passes"] for ranks in (whole, cut)]
    assert figures[1] < 0.85 * figures[0]
