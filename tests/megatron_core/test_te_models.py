"""Models of Transformer-Engine's layers under schedules, compared with Megatron's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpt_cases
import pytest
import torch
from gpt_cases import GPTCase
from rank_process import Kind
from ranks import RankPool, RankPools
from sizes import every_value
from te_cases import OPTIONS_OF_LATENT, layers_of_te


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


LATENT = GPTCase(rotary=True, options=OPTIONS_OF_LATENT)


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


REFERENCES = "transformer_engine.pytorch.custom_recipes."
CURRENT = f"{REFERENCES}reference_current_scaling.current_scaling_ref_factory"
NVFP4 = f"{REFERENCES}reference_nvfp4.nvfp4_ref_rht_2d_factory"


FUSED = GPTCase(fused_accumulation=True)


def quantized(kind: str, recipe: str, case: GPTCase = FUSED, **more: Any) -> GPTCase:
    """A model in fp8 or fp4, whose recipe is one of Megatron's or the path of TE's in Python.

    Steps of an optimizer show whether each uses weights that were quantised after the last one, and
    the maxima of earlier steps.
    """
    settings = {kind: "hybrid" if kind == "fp8" else "e2m1"}
    if "." in recipe:  # such a weight cannot be kept for the next microbatch
        settings |= {f"{kind}_recipe": "custom", f"{kind}_quantizer_factory": recipe}
        more["disable_parameter_transpose_cache"] = True
    else:
        settings |= {f"{kind}_recipe": recipe}
    options = (*case.options, *settings.items(), *more.items())
    return replace(case, dtype="bfloat16", optimizer_steps=3, options=options)


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
}


def quantized_differences(case: GPTCase, schedule: str) -> list[str]:
    """With torch's Adam, as those of TE and apex are kernels."""
    from megatron.core import optimizer
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    return differences(case, schedule, [5])


@pytest.mark.parametrize(
    ("name", "schedule"),
    every_value([*QUANTIZED], ["v-half", "zb-h1", "v-zb", "interleaved"]),
)
def test_quantized_models_equal_megatrons(te_pool: RankPool, name: str, schedule: str) -> None:
    found = te_pool.run(quantized_differences, case=QUANTIZED[name], schedule=schedule)
    assert found == [[], []]


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
