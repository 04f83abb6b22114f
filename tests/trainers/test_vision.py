"""Megatron-Bridge's vision-language models, under schedules and under Megatron's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from installed_trainers import missing_trainers
from rank_process import Kind
from ranks import RankFailure, RankPools

from megatron_zb.bridge import Settings, install

MISSING = missing_trainers()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

NAMES = ("v-half", "v-zb", "zb-h1", "interleaved")
Steps = list[tuple[dict[str, float], float]]


def trained(family: str, name: str | None, encoder: float | None = None, **provided: Any) -> Steps:
    """Three steps; microbatches have one image, two or none."""
    from vision_trainer import new_job, new_provider

    provider = new_provider(family, dist.get_world_size(), **provided)
    if name is None:
        job = new_job(family, provider)
        return [job.train_one_step() for _ in range(3)]
    settings = Settings(pipeline_schedule=name, num_microbatches=4, pipeline_encoder=encoder)
    with install(settings, provider) as pipeline:
        pipeline.prepare_provider(provider)
        job = new_job(family, provider)
        return [job.train_one_step() for _ in range(3)]


@pytest.mark.parametrize(
    "family", ["qwen3_vl", "qwen25_vl", "glm_45v", "exaone45_vl", "gemma3_vl", "kimi_k25_vl"]
)
def test_images_train_with_megatrons_losses(ranks: RankPools, family: str) -> None:
    assert_alike(ranks, 2, NAMES, family=family)


@pytest.mark.parametrize(
    ("ranks_of_job", "family", "frozen"),
    [
        (2, "qwen3_vl", "vision_model"),
        (2, "qwen3_vl", "language_model"),
        (2, "glm_45v", "vision_model"),
        (4, "qwen25_vl", "vision_model"),
        (4, "gemma3_vl", "vision_projection"),
    ],
)
def test_a_part_may_be_frozen(
    ranks: RankPools, ranks_of_job: int, family: str, frozen: str
) -> None:
    names = ("v-half", "zb-h1") if ranks_of_job == 4 else NAMES
    assert_alike(ranks, ranks_of_job, names, family=family, **{f"freeze_{frozen}": True})


def test_layers_that_change_the_config_of_all_run_one_chunk_per_rank(ranks: RankPools) -> None:
    """Step-3.7's layers write limits into it, which earlier chunks would then compute with."""
    limits = [0] * 6 + [0.001] * 2
    assert_alike(ranks, 2, ["zb-h1"], family="step37", swiglu_limits=limits)
    with pytest.raises(RankFailure, match=r"cannot run a Step37Model whose chunks share .* zb-h1"):
        ranks(2, Kind.TRAINERS).run(trained, family="step37", name="v-half", swiglu_limits=limits)


def assert_alike(ranks: RankPools, size: int, names: Any, **of_all: Any) -> None:
    """Compare losses to the last bit; norms but for the order of sums."""
    pool = ranks(size, Kind.TRAINERS)
    expected = pool.run(trained, name=None, **of_all)
    losses = losses_of(expected)
    assert all(each["lm loss"] > 0 for each in losses)
    assert len({each["lm loss"] for each in losses}) == 3
    for name in names:
        found = pool.run(trained, name=name, **of_all)
        assert losses_of(found) == losses, name
        norms = [norm for _, norm in found[0]]
        assert norms == pytest.approx([norm for _, norm in expected[0]], rel=1e-6), name


def losses_of(ranks_of_job: list[Steps]) -> list[dict[str, float]]:
    """The losses of each step, of the one rank that has the output layer."""
    by_step = zip(*([losses for losses, _ in steps] for steps in ranks_of_job), strict=True)
    found = [[losses for losses in of_ranks if losses] for of_ranks in by_step]
    assert all(len(of_one) == 1 for of_one in found)
    return [of_one[0] for of_one in found]


FROZEN = {
    "trained": {},
    "frozen": {"freeze_vision_model": True},
    "all frozen": {"freeze_vision_model": True, "freeze_vision_projection": True},
}


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize(
    ("family", "size"),
    [("qwen25_vl", 2), ("qwen25_vl", 4), ("qwen3_vl", 2), ("qwen3_vl", 4), ("glm_45v", 2)],
)
def test_an_encoder_runs_on_every_rank(
    ranks: RankPools, family: str, size: int, frozen: dict[str, bool]
) -> None:
    """Losses of the first step are equal; then weights differ by the order of sums."""
    pool = ranks(size, Kind.TRAINERS)
    expected = pool.run(trained, family=family, name=None, **frozen)
    names = NAMES if size == 2 else ("v-half", "zb-h1")
    for name in names:
        found = pool.run(trained, family=family, name=name, encoder=0.2, **frozen)
        ours, theirs = losses_of(found), losses_of(expected)
        assert ours[0] == theirs[0], name
        for one, other in zip(ours, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-5), name
        norms = [norm for _, norm in found[0]]
        assert norms == pytest.approx([norm for _, norm in expected[0]], rel=1e-4), name
