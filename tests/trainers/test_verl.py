"""verl's Megatron engine over packed sequences, with schedules and with Megatron's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from installed_trainers import missing_trainers
from rank_process import Kind
from ranks import RankPools

from megatron_zb.bridge import Settings, install

if TYPE_CHECKING:
    from verl_trainer import VerlJob

MISSING = missing_trainers()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

STEPS = 3


Steps = list[tuple[list[float], list[float], float]]
"""Of each step: log-probabilities before it, losses of its microbatches, and its norm.

Ranks without the output layer have empty lists.
"""


def trained(name: str | None) -> Steps:
    from verl_trainer import VerlJob, new_config

    config = new_config(dist.get_world_size())
    if name is None:
        return steps_of(VerlJob(config))
    with install(Settings(pipeline_schedule=name, num_microbatches=4), config) as pipeline:
        found = steps_of(VerlJob(config, pipeline.builder))
        assert pipeline.steps_done == STEPS
    return found


def steps_of(job: VerlJob) -> Steps:
    return [(job.log_probs(step), *job.train_one_step(step)) for step in range(STEPS)]


def test_steps_have_megatrons_losses_and_log_probabilities(ranks: RankPools) -> None:
    """To the last bit, and with Megatron's number of microbatches.

    verl would round that up to a multiple of the pipeline's ranks where these have two chunks.
    """
    job = ranks(2, Kind.TRAINERS)
    expected = job.run(trained, name=None)
    assert all(not log_probs and not losses for log_probs, losses, _ in expected[0])
    assert {len(losses) for _, losses, _ in expected[1]} == {3, 4}
    assert all(len(set(log_probs)) > 50 for log_probs, *_ in expected[1])
    for name in ("v-half", "zb-h1"):
        for found, megatrons in zip(job.run(trained, name=name), expected, strict=True):
            assert [each[:2] for each in found] == [each[:2] for each in megatrons], name
            norms = [norm for *_, norm in megatrons]
            assert [norm for *_, norm in found] == pytest.approx(norms, rel=1e-6)
