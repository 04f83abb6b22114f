"""Megatron-Bridge's training step, import and export, with schedules and with Megatron's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from installed_trainers import missing_trainers
from rank_process import Kind
from ranks import RankPool, RankPools

from megatron_zb.bridge import Settings, install

MISSING = missing_trainers()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

NAMES = ("v-half", "zb-h1")
Steps = list[tuple[dict[str, float], float]]
"""The losses and the norm of each step; ranks without the output layer have no losses."""


@pytest.fixture(scope="module")
def two(ranks: RankPools) -> RankPool:
    return ranks(2, Kind.TRAINERS)


def settings(name: str, slices: int | None = None) -> Settings:
    return Settings(pipeline_schedule=name, num_microbatches=4, pipeline_slices=slices)


def trained(name: str | None, adapted: bool, slices: int | None = None) -> Steps:
    """Four steps of a model that Bridge's provider makes; none clips, as norms differ in a bit."""
    from megatron_bridge_trainer import BridgeJob, new_provider

    provider = new_provider(dist.get_world_size())
    if name is None:
        job = BridgeJob(provider, adapted=adapted, clip_grad=1e3)
        return [job.train_one_step() for _ in range(4)]
    with install(settings(name, slices), provider) as pipeline:
        pipeline.prepare_provider(provider)
        job = BridgeJob(provider, adapted=adapted, clip_grad=1e3)
        found = [job.train_one_step() for _ in range(4)]
        assert pipeline.steps_done == 4
    return found


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_a_training_step_has_megatrons_losses(two: RankPool, adapted: bool) -> None:
    """To the last bit; norms but for the order of sums."""
    expected = two.run(trained, name=None, adapted=adapted)
    assert losses_of(expected[0]) == [{}] * 4
    assert all(0 < each["lm loss"] < 5 for each in losses_of(expected[1]))
    for name in NAMES:
        found = two.run(trained, name=name, adapted=adapted)
        assert_alike(found, expected)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_a_training_step_on_token_slices_has_megatrons_losses(two: RankPool, adapted: bool) -> None:
    """But for the order of sums, whose rounding Adam makes larger from its first step on."""
    expected = two.run(trained, name=None, adapted=adapted)
    for name in NAMES:
        found = two.run(trained, name=name, adapted=adapted, slices=4)
        for ours, megatrons in zip(found, expected, strict=True):
            for step, ((loss, norm), of) in enumerate(zip(ours, megatrons, strict=True)):
                assert loss == pytest.approx(of[0], rel=2e-6)
                assert norm == pytest.approx(of[1], rel=1e-4 if step else 2e-6)


def losses_of(steps: Steps) -> list[dict[str, float]]:
    return [losses for losses, _ in steps]


def assert_alike(found: list[Steps], expected: list[Steps]) -> None:
    """Assert that losses are equal on every rank, and norms but for the order of sums."""
    for ours, megatrons in zip(found, expected, strict=True):
        assert losses_of(ours) == losses_of(megatrons)
        assert [n for _, n in ours] == pytest.approx([n for _, n in megatrons], rel=1e-6)


# --- a model in Hugging Face's format


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output layer is its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    made = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(made)
    return made


Weights = dict[str, torch.Tensor]


def imported(name: str | None, folder: Path) -> tuple[Steps, Weights, Weights]:
    """Two steps of an imported model, and what is exported of it before them and after."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron_bridge_trainer import BridgeJob, imported_provider

    bridges_own = MegatronModelBridge._broadcast_shared_embeddings
    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = imported_provider(bridge, dist.get_world_size())
    pipeline = install(settings(name), provider) if name else None
    if pipeline:
        pipeline.prepare_provider(provider)
    job = BridgeJob(provider, draws=False)
    before = exported(bridge, job.model)
    steps = [job.train_one_step() for _ in range(2)]
    after = exported(bridge, job.model)
    if pipeline:
        pipeline.uninstall()
    assert MegatronModelBridge._broadcast_shared_embeddings is bridges_own
    return steps, before, after


def exported(bridge: Any, model: list[Any]) -> Weights:
    found = bridge.export_hf_weights(model, show_progress=False)
    return {name: weight.clone() for name, weight in found}


def test_tied_weights_are_imported_trained_and_exported_as_by_megatron(
    two: RankPool, folder: Path
) -> None:
    """The output layer has no weight in the file: Bridge takes the embedding's, also in a V."""
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in stored
    expected = two.run(imported, name=None, folder=folder)
    for name in NAMES:
        found = two.run(imported, name=name, folder=folder)
        assert_alike([each[0] for each in found], [each[0] for each in expected])
        for (_, before, after), (_, _, megatrons) in zip(found, expected, strict=True):
            assert before.keys() == stored.keys()
            assert all(torch.equal(before[key], stored[key]) for key in stored), name
            torch.testing.assert_close(after, megatrons)
            embedding = "model.embed_tokens.weight"
            assert not torch.equal(after[embedding], before[embedding])  # steps change it
