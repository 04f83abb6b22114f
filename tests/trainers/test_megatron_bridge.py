"""Megatron-Bridge's training step, import and export, with schedules and with Megatron's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from installed_trainers import missing_trainers
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
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


@contextmanager
def bridge_job(
    name: str | None, slices: int | None, provided: dict[str, Any], **options: Any
) -> Iterator[tuple[Any, Any]]:
    """A job of a model that Bridge's provider makes, and its schedule, None for Megatron's own.

    It does not clip, as norms differ in a bit.
    """
    from megatron_bridge_trainer import BridgeJob, new_hybrid_provider, new_provider

    new = new_hybrid_provider if "pattern" in provided else new_provider
    provider = new(**{"pipeline_size": dist.get_world_size()} | provided)
    with install(settings(name, slices), provider) if name else nullcontext() as pipeline:
        if pipeline is not None:
            pipeline.prepare_provider(provider)
        yield BridgeJob(provider, clip_grad=1e3, **options), pipeline


def trained(name: str | None, adapted: bool, slices: int | None = None) -> Steps:
    """Four steps."""
    with bridge_job(name, slices, {}, adapted=adapted) as (job, pipeline):
        found = [job.train_one_step() for _ in range(4)]
        assert pipeline is None or pipeline.steps_done == 4
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
        assert_close(two.run(trained, name=name, adapted=adapted, slices=4), expected)


EXPERTS: dict[str, Any] = {
    "add_bias_linear": False,  # Megatron's experts cannot add one on a CPU
    "moe_aux_loss_coeff": 0.05,
    "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "num_layers": 4,
    "num_moe_experts": 4,
}


def evaluated(name: str | None, slices: int | None = None) -> Steps:
    """Steps of a model with experts and other numbers of microbatches, each with an evaluation."""
    found: Steps = []
    with bridge_job(name, slices, EXPERTS) as (job, _):
        for number in (4, 3):
            job.set_microbatches(number)
            found += [job.train_one_step(), (job.evaluate(), 0.0)]
    return found


def test_experts_and_evaluations_on_token_slices_have_megatrons_losses(two: RankPool) -> None:
    """The losses that balance experts are of whole microbatches."""
    assert_close(
        two.run(evaluated, name="zb-h1", slices=4),
        two.run(evaluated, name=None),
    )


HYBRIDS: dict[str, dict[str, Any]] = {
    # a transformer written as a pattern
    "transformer": {"pattern": "*-*-*-*-"},
    # as in Nemotron-H and Nemotron 3 Nano: mostly Mamba, a few layers of attention, experts
    "nemotron": {
        "pattern": "ME*EMEM-",
        **{name: value for name, value in EXPERTS.items() if name != "num_layers"},
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": 32,
        "position_embedding_type": "none",
    },
    # as in Qwen3-Next: gated delta layers, every fourth layer attention, experts
    "gated delta": {
        "pattern": "GEGEGE*E",
        **{name: value for name, value in EXPERTS.items() if name != "num_layers"},
        "moe_router_load_balancing_type": "none",
        "linear_conv_kernel_dim": 2,
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
        "deterministic_mode": True,
    },
}


def trained_hybrid(name: str | None, model: str, slices: int | None = None, **more: Any) -> Steps:
    """Three steps; with a pipeline size, of replicas with a distributed optimizer."""
    distributed = {"use_distributed_optimizer": "pipeline_size" in more}
    with bridge_job(name, slices, HYBRIDS[model] | more, **distributed) as (job, _):
        return [job.train_one_step() for _ in range(3)]


@pytest.mark.parametrize("model", HYBRIDS)
def test_a_hybrid_model_of_bridges_provider_has_megatrons_losses(two: RankPool, model: str) -> None:
    """To the last bit; in a V also, though Bridge's provider knows no chunks."""
    expected = two.run(trained_hybrid, name=None, model=model)
    assert all(0 < each["lm loss"] < 6 for each in losses_of(expected[1]))
    for name in ("v-half", "v-zb", "zb-h1"):
        assert_alike(two.run(trained_hybrid, name=name, model=model), expected)


PREDICTION = {"mtp_hybrid_override_pattern": "*-", "mtp_num_layers": 1}


@pytest.mark.parametrize(
    ("count", "more"),
    [
        (2, {"share_embeddings_and_output_weights": True}),
        (2, PREDICTION),
        (4, {"pipeline_size": 2}),
    ],
    ids=["tied", "prediction", "replicas"],
)
def test_a_hybrid_model_with_another_feature_has_megatrons_losses(
    ranks: RankPools, count: int, more: dict[str, Any]
) -> None:
    pool = ranks(count, Kind.TRAINERS)
    expected = pool.run(trained_hybrid, name=None, model="transformer", **more)
    for name in NAMES:
        assert_alike(pool.run(trained_hybrid, name=name, model="transformer", **more), expected)


def test_a_hybrid_model_on_token_slices_has_megatrons_losses(two: RankPool) -> None:
    expected = two.run(trained_hybrid, name=None, model="transformer")
    for name in NAMES:
        assert_close(two.run(trained_hybrid, name=name, model="transformer", slices=4), expected)


def resumed(name: str | None, folder: str | None = None, slices: int | None = None) -> Steps:
    """Four steps of two replicas, behind the second of which the job is another one."""
    case = partial(
        bridge_job,
        name,
        slices,
        {"pipeline_size": 2},
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
    )
    with case() as (job, _):
        found = [job.train_one_step() for _ in range(2 if folder else 4)]
        if folder is None:
            return found
        job.save(folder)
    parallel_state.destroy_model_parallel()
    with case() as (job, _):
        job.load(folder, steps_done=2)
        return found + [job.train_one_step() for _ in range(2)]


def test_token_slices_resume_with_a_distributed_optimizer(ranks: RankPools, tmp_path: Path) -> None:
    four = ranks(4, Kind.TRAINERS)
    found = four.run(resumed, name="v-half", folder=str(tmp_path), slices=4)
    assert_close(found, four.run(resumed, name=None))


def packed(name: str | None, form: str, slices: int | None = None) -> Steps:
    """Four steps with samples of several documents, which Bridge's inner stages read, too."""
    from megatron_bridge_trainer import packed_batches

    with bridge_job(name, slices, {}, batches=partial(packed_batches, form)) as (job, _):
        data = job.state.cfg.dataset
        data.skip_getting_attention_mask_from_dataset = form != "mask"
        data.enable_offline_packing = form != "mask"
        return [job.train_one_step() for _ in range(4)]


@pytest.mark.parametrize("form", ["current", "before"])
def test_packed_documents_on_token_slices_have_the_losses_of_a_mask(
    two: RankPool, form: str
) -> None:
    """Megatron's own attention has no packed sequences on a CPU, but takes a mask of documents."""
    expected = two.run(packed, name=None, form="mask")
    for name in NAMES:
        assert_close(two.run(packed, name=name, form=form, slices=4), expected)


def rotated() -> tuple[bool, bool]:
    """Whether the rotary embeddings of a step are those of the data's positions, and of places."""
    from megatron_bridge_trainer import LENGTH, MICROBATCHES, packed_batches

    # a queue, as a run on slices refuses a list that forwards append to
    found: SimpleQueue[torch.Tensor] = SimpleQueue()
    batches = partial(packed_batches, "current")
    with bridge_job("zb-h1", 4, {}, batches=batches) as (job, _):
        rotary = get_attr_wrapped_model(job.model[0], "rotary_pos_emb")
        table, sliced = type(rotary).forward(rotary, LENGTH), rotary.forward

        def noted(*args: Any, **options: Any) -> Any:
            rows: torch.Tensor = sliced(*args, **options)
            found.put(rows)
            return rows

        rotary.forward = noted
        job.train_one_step()
    noted_rows = [found.get() for _ in range(found.qsize())]
    positions = [batch["position_ids"][0] for batch in islice(batches(), MICROBATCHES)]
    restarting, rows = table[torch.cat(positions)], torch.cat(noted_rows)
    return torch.equal(rows, restarting), torch.equal(rows, table.repeat(MICROBATCHES, 1, 1, 1))


def test_positions_of_packed_documents_restart_on_every_stage(two: RankPool) -> None:
    """Attention has the distance between tokens only, so that losses do not show it."""
    assert two.run(rotated) == [(True, False)] * 2


def counted(form: str) -> tuple[Any, Any]:
    """What Bridge counts of a step's tokens to tell its FLOP/s, and what whole samples have."""
    from megatron.bridge.training.utils.flop_utils import accumulate_flops_metadata
    from megatron_bridge_trainer import MICROBATCHES, packed_batches

    batches, whole = partial(packed_batches, form), SimpleNamespace()
    with bridge_job("v-half", 4, {}, batches=batches) as (job, _):
        job.state.cfg.dataset.enable_offline_packing = True  # all stages have tokens then
        job.train_one_step()
    for batch in islice(batches(), MICROBATCHES):
        ends = batch.get("cu_seqlens_q_padded")
        accumulate_flops_metadata(whole, batch["tokens"], cu_seqlens=ends)
    found = {name: value for name, value in vars(job.state).items() if "_flops_" in name}
    return found, vars(whole)


@pytest.mark.parametrize("form", ["current", "unpacked"])
def test_tokens_of_slices_are_counted_once(two: RankPool, form: str) -> None:
    for found, expected in two.run(counted, form=form):
        assert found == expected


def losses_of(steps: Steps) -> list[dict[str, float]]:
    return [losses for losses, _ in steps]


def assert_close(found: list[Steps], expected: list[Steps]) -> None:
    """Assert that losses and norms are equal but for the order of sums, which Adam makes larger."""
    for ours, megatrons in zip(found, expected, strict=True):
        for step, ((loss, norm), of) in enumerate(zip(ours, megatrons, strict=True)):
            assert loss == pytest.approx(of[0], rel=2e-6)
            assert norm == pytest.approx(of[1], rel=1e-4 if step else 2e-6)


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
