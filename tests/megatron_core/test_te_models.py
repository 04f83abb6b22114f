"""Models of Transformer-Engine's layers under schedules, compared with Megatron's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn_sizes import every_value
from gpt_cases import GPTCase, as_hybrid, skip_without_hybrids
from rank_process import Kind
from ranks import RankPool, RankPools
from te_models import (
    CURRENT,
    EXPERTS,
    FUSED,
    NVFP4,
    OPTIONS_OF_LATENT,
    differences,
    quantized,
    quantized_differences,
)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["v-half", pytest.param("zb-h1", marks=pytest.mark.full)])
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
        as_hybrid(replace(EXPERTS, fused_accumulation=True, overlap_grad_reduce=True)),
    ],
    ids=[
        "plain",
        "bf16-fused-tied",
        "no-ddp",
        "overlap",
        "overlap-fused",
        "experts",
        "experts-overlap-fused",
        "hybrid-experts-overlap-fused",
    ],
)
def test_models_equal_megatrons(te_pool: RankPool, case: GPTCase, schedule: str) -> None:
    skip_without_hybrids(case)
    found = te_pool.run(differences, case=case, schedule=schedule, microbatches=[5])
    assert found == [[], []]


LATENT = GPTCase(rotary=True, options=OPTIONS_OF_LATENT)


ON_FOUR = {
    "latent-attention": replace(LATENT, fused_accumulation=True),
    "experts": replace(EXPERTS, overlap_grad_reduce=True),
    "small-buckets": GPTCase(data_parallel=2, overlap_grad_reduce=True, bucket_size=5000),
    "tp2": GPTCase(tensor_parallel=2, fused_accumulation=True),
    "sequence-parallel": GPTCase(tensor_parallel=2, sequence_parallel=True),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "schedule"), every_value([*ON_FOUR], ["v-half", "zb-h1"], most=1))
def test_models_on_four_ranks_equal_megatrons(
    ranks: RankPools, te_pool: RankPool, name: str, schedule: str
) -> None:
    four, case = ranks(4, Kind.TRANSFORMER_ENGINE), ON_FOUR[name]
    assert four.run(differences, case=case, schedule=schedule, microbatches=[5]) == [[]] * 4


QUANTIZED = {
    "current-reference": quantized("fp8", CURRENT),
    "nvfp4-reference": quantized("fp4", NVFP4),
    "current": quantized("fp8", "tensorwise"),
    "delayed": quantized("fp8", "delayed"),
    "delayed-history": quantized(
        "fp8", "delayed", fp8_amax_history_len=1024, fp8_amax_compute_algo="max"
    ),
    "mxfp8": quantized("fp8", "mxfp8"),
    "blockwise": quantized("fp8", "blockwise"),
    "experts-current-reference": quantized("fp8", CURRENT, EXPERTS),
    "experts-delayed": quantized("fp8", "delayed", EXPERTS),
    "experts-mxfp8-fused": quantized("fp8", "mxfp8", replace(EXPERTS, fused_accumulation=True)),
    "hybrid-current-reference": quantized("fp8", CURRENT, as_hybrid(FUSED)),
    "hybrid-nvfp4-reference": quantized("fp4", NVFP4, as_hybrid(FUSED)),
    "hybrid-experts-delayed": quantized("fp8", "delayed", as_hybrid(EXPERTS)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    every_value([*QUANTIZED], ["v-half", "zb-h1", "v-zb", "interleaved"], most=4),
)
def test_quantized_models_equal_megatrons(te_pool: RankPool, name: str, schedule: str) -> None:
    skip_without_hybrids(QUANTIZED[name])
    found = te_pool.run(quantized_differences, case=QUANTIZED[name], schedule=schedule)
    assert found == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "schedules"),
    [
        (quantized("fp8", CURRENT), ("v-half", "interleaved")),
        pytest.param(quantized("fp4", NVFP4), ("zb-h1", "v-zb"), marks=pytest.mark.full),
        pytest.param(
            quantized(
                "fp8", "delayed", replace(EXPERTS, data_parallel=2, overlap_grad_reduce=True)
            ),
            ("v-half", "zb-h1"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            quantized("fp8", "delayed", GPTCase(tensor_parallel=2, sequence_parallel=True)),
            ("v-zb", "interleaved"),
            marks=pytest.mark.full,
        ),
    ],
    ids=["current-reference", "nvfp4-reference", "experts-delayed-dp2", "delayed-sp"],
)
def test_quantized_models_on_four_ranks_equal_megatrons(
    ranks: RankPools, te_pool: RankPool, case: GPTCase, schedules: tuple[str, ...]
) -> None:
    four = ranks(4, Kind.TRANSFORMER_ENGINE)
    for schedule in schedules:
        assert four.run(quantized_differences, case=case, schedule=schedule) == [[]] * 4
