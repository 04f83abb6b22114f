"""What benchmarks/vocabulary_training.py tells of vocabulary parallelism, in a short training."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import vocabulary_training
from brief_searches import briefly
from layer_sizes import LayerSizes
from ranks import RankPools
from vocabulary_training import Contender, Job

SIZES = LayerSizes(
    hidden=32, heads=2, ffn_hidden=85, seq_length=32, micro_batch_size=1, vocabulary=2048
)
JOB = Job(SIZES, ranks=4, layers=8, microbatches=8, steps=12)


def trained(job: Job, contenders: list[Contender]) -> list[dict[str, Any]]:
    with briefly():
        return [asdict(vocabulary_training.trained(job, one)) for one in contenders]


@pytest.mark.full
def test_it_learns_as_megatrons_and_shares_out_memory(ranks: RankPools) -> None:
    contenders = [Contender(None), Contender("v-half"), Contender("v-half", sharded=True)]
    results = ranks(JOB.ranks).run(trained, job=JOB, contenders=contenders, timeout=300.0)
    upstream, whole, sharded = (
        [rank[number] for rank in results] for number in range(len(contenders))
    )
    found = vocabulary_training.compared(upstream, sharded)
    losses = vocabulary_training._losses(upstream)
    assert len(losses) == JOB.steps and losses[-1] < losses[0] - 0.1
    assert found["losses"] < 1e-6
    assert found["last_loss"] == pytest.approx(losses[-1], rel=1e-6)

    assert vocabulary_training.compared(upstream, whole)["states"] > 2
    assert found["states"] < 1.05

    logits = 4 * SIZES.seq_length * SIZES.vocabulary
    assert max(rank["logits_bytes"] for rank in upstream) == logits
    assert 0 < found["logits"] <= 3  # shards of up to three microbatches
