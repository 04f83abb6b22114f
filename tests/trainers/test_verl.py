"""verl's Megatron engine over packed sequences, with schedules and with Megatron's own."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from installed_trainers import missing_trainers
from rank_process import Kind
from ranks import RankPools

from megatron_zb.bridge import Settings, install

MISSING = missing_trainers()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

STEPS = 3


def trained(name: str | None) -> list[tuple[list[float], float]]:
    """The losses of the microbatches of each step, in their order, and its norm."""
    from verl_trainer import VerlJob, new_config

    config = new_config(dist.get_world_size())
    if name is None:
        job = VerlJob(config)
        return [job.train_one_step(step) for step in range(STEPS)]
    with install(Settings(pipeline_schedule=name, num_microbatches=4), config) as pipeline:
        job = VerlJob(config, pipeline.builder)
        found = [job.train_one_step(step) for step in range(STEPS)]
        assert pipeline.steps_done == STEPS
    return found


def test_a_step_has_megatrons_losses(ranks: RankPools) -> None:
    """To the last bit, also where Megatron's two chunks would take another number of microbatches.

    That is a multiple of the pipeline's ranks.
    """
    job = ranks(2, Kind.TRAINERS)
    expected = job.run(trained, name=None)
    assert [len(losses) for losses, _ in expected[0]] == [0, 0, 0]
    assert {len(losses) for losses, _ in expected[1]} == {3, 4}
    for name in ("v-half", "zb-h1"):
        for found, megatrons in zip(job.run(trained, name=name), expected, strict=True):
            assert [losses for losses, _ in found] == [losses for losses, _ in megatrons], name
            norms = [norm for _, norm in megatrons]
            assert [norm for _, norm in found] == pytest.approx(norms, rel=1e-6)
