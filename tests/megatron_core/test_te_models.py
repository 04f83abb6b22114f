"""Models of Transformer-Engine's layers under schedules, compared with Megatron's own."""

from __future__ import annotations

from dataclasses import replace

import gpt_cases
import pytest
from gpt_cases import GPTCase
from rank_process import Kind
from ranks import RankPool, RankPools
from te_cases import layers_of_te


def differences(case: GPTCase, schedule: str, microbatches: list[int]) -> list[str]:
    """From Megatron's own schedule over the same modules, which then know nothing of a split."""
    gpt_cases._specification = layers_of_te
    return gpt_cases.differences(case, schedule, microbatches, iterations=2)


EXPERTS = GPTCase(
    options=(("num_moe_experts", 2), ("moe_grouped_gemm", True), ("add_bias_linear", False))
)


@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
@pytest.mark.parametrize(
    "case",
    [
        GPTCase(),
        GPTCase(dtype="bfloat16", fused_accumulation=True, tied=True),
        GPTCase(wrapped=False),
        GPTCase(overlap_grad_reduce=True),
        GPTCase(overlap_grad_reduce=True, fused_accumulation=True),
        EXPERTS,
        replace(EXPERTS, fused_accumulation=True, overlap_grad_reduce=True),
    ],
    ids=[
        "plain",
        "bf16-fused-tied",
        "no-ddp",
        "overlap",
        "overlap-fused",
        "experts",
        "experts-overlap-fused",
    ],
)
def test_models_equal_megatrons(te_pool: RankPool, case: GPTCase, schedule: str) -> None:
    found = te_pool.run(differences, case=case, schedule=schedule, microbatches=[5])
    assert found == [[], []]


LATENT = GPTCase(
    rotary=True,
    options=(
        ("multi_latent_attention", True),
        ("q_lora_rank", 16),
        ("kv_lora_rank", 16),
        ("qk_head_dim", 8),
        ("qk_pos_emb_head_dim", 8),
        ("v_head_dim", 16),
        ("kv_channels", 16),
        ("rope_type", "rope"),
        ("add_bias_linear", False),
    ),
)


@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
@pytest.mark.parametrize(
    "case",
    [
        replace(LATENT, fused_accumulation=True),
        replace(EXPERTS, overlap_grad_reduce=True),
        GPTCase(data_parallel=2, overlap_grad_reduce=True, bucket_size=5000),
        GPTCase(tensor_parallel=2, fused_accumulation=True),
        GPTCase(tensor_parallel=2, sequence_parallel=True),
    ],
    ids=["latent-attention", "experts", "small-buckets", "tp2", "sequence-parallel"],
)
def test_models_on_four_ranks_equal_megatrons(
    ranks: RankPools, te_pool: RankPool, case: GPTCase, schedule: str
) -> None:
    four = ranks(4, Kind.TRANSFORMER_ENGINE)
    assert four.run(differences, case=case, schedule=schedule, microbatches=[5]) == [[]] * 4
