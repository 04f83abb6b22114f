"""ms-swift's training step over padding-free batches, with schedules and with Megatron's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from installed_trainers import missing_trainers
from rank_process import Kind
from ranks import RankPools

from megatron_zb.bridge import Settings, install

if TYPE_CHECKING:
    from swift_trainer import SwiftJob

MISSING = missing_trainers()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

STEPS = 3

Steps = list[tuple[list[list[float]], list[float], float]]
"""Of each step: losses and tokens of its microbatches, their sums, and its norm.

Ranks without the output layer have empty lists.
"""


def trained(name: str | None, folder: Path) -> Steps:
    from swift_trainer import SwiftJob, new_sizes

    size = dist.get_world_size()
    if name is None:
        return steps_of(SwiftJob(folder, size))
    settings = Settings(pipeline_schedule=name, num_microbatches=4)
    with install(settings, new_sizes(size)) as pipeline:
        found = steps_of(SwiftJob(folder, size, pipeline))
        assert pipeline.steps_done == STEPS
    return found


def steps_of(job: SwiftJob) -> Steps:
    return [job.train_one_step(step) for step in range(STEPS)]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in Hugging Face's format."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=request.param,
    )
    torch.manual_seed(1)
    made = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(made)
    return made


def test_steps_have_megatrons_losses(ranks: RankPools, folder: Path) -> None:
    """To the last bit; norms but for the order of sums."""
    job = ranks(2, Kind.MS_SWIFT)
    expected = job.run(trained, name=None, folder=folder)
    assert all(not losses for losses, *_ in expected[0])
    assert all(0 < sums[0] / sums[1] < 5 for _, sums, _ in expected[1])
    for name in ("v-half", "zb-h1"):
        for found, megatrons in zip(
            job.run(trained, name=name, folder=folder), expected, strict=True
        ):
            assert [each[:2] for each in found] == [each[:2] for each in megatrons], name
            norms = [norm for *_, norm in megatrons]
            assert [norm for *_, norm in found] == pytest.approx(norms, rel=1e-6)
