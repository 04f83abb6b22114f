"""Megatron-Bridge's Qwen3-VL with images, under schedules and under Megatron's own."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from installed_trainers import missing_trainers
from rank_process import Kind
from ranks import RankPools

from megatron_zb.bridge import Settings, install

MISSING = missing_trainers()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

Steps = list[tuple[dict[str, float], float]]


def trained(name: str | None, frozen: str | None) -> Steps:
    """Three steps; microbatches have one image or two."""
    from qwen_vl_trainer import new_job, new_provider

    provider = new_provider(dist.get_world_size(), frozen)
    if name is None:
        job = new_job(provider)
        return [job.train_one_step() for _ in range(3)]
    settings = Settings(pipeline_schedule=name, num_microbatches=4)
    with install(settings, provider) as pipeline:
        pipeline.prepare_provider(provider)
        job = new_job(provider)
        return [job.train_one_step() for _ in range(3)]


@pytest.mark.parametrize("frozen", [None, "vision_model", "language_model"])
def test_images_train_with_megatrons_losses(ranks: RankPools, frozen: str | None) -> None:
    """Losses to the last bit; norms but for the order of sums."""
    two = ranks(2, Kind.TRAINERS)
    expected = two.run(trained, name=None, frozen=frozen)
    assert all(losses["lm loss"] > 0 for losses in losses_of(expected))
    for name in ("v-half", "v-zb", "zb-h1", "interleaved"):
        found = two.run(trained, name=name, frozen=frozen)
        assert losses_of(found) == losses_of(expected), name
        norms = [norm for _, norm in found[0]]
        assert norms == pytest.approx([norm for _, norm in expected[0]], rel=1e-6)


def losses_of(ranks_of_job: list[Steps]) -> list[dict[str, float]]:
    """The losses of each step, of the one rank that has the output layer."""
    by_step = zip(*([losses for losses, _ in steps] for steps in ranks_of_job), strict=True)
    found = [[losses for losses in of_ranks if losses] for of_ranks in by_step]
    assert all(len(of_one) == 1 for of_one in found)
    return [of_one[0] for of_one in found]
