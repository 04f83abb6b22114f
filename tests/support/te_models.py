"""Small GPTs of Transformer-Engine's layers, and their differences from Megatron's own schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import gpt_cases
import torch
from gpt_cases import GPTCase

from megatron_zb.schedules import Schedule

# Of multi-latent attention, in sizes that have whole blocks of 32.
OPTIONS_OF_LATENT = (
    ("multi_latent_attention", True),
    ("q_lora_rank", 32),
    ("kv_lora_rank", 32),
    ("qk_head_dim", 32),
    ("qk_pos_emb_head_dim", 32),
    ("v_head_dim", 64),
    ("kv_channels", 64),
    ("rope_type", "rope"),
    ("add_bias_linear", False),
)
EXPERTS = GPTCase(
    options=(("num_moe_experts", 2), ("moe_grouped_gemm", True), ("add_bias_linear", False))
)
# Experts whose layers are operations that TE may fuse, with as many tokens for each as fit.
FUSED_EXPERTS = replace(
    EXPERTS,
    options=(
        *EXPERTS.options,
        ("use_transformer_engine_op_fuser", True),
        ("gated_linear_unit", True),
        ("activation_func", torch.nn.functional.silu),
        ("moe_token_dispatcher_type", "alltoall"),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_pad_expert_input_to_capacity", True),
    ),
)
REFERENCES = "transformer_engine.pytorch.custom_recipes."
CURRENT = f"{REFERENCES}reference_current_scaling.current_scaling_ref_factory"
NVFP4 = f"{REFERENCES}reference_nvfp4.nvfp4_ref_rht_2d_factory"
FUSED = GPTCase(fused_accumulation=True)
hybrid_of_te = partial(gpt_cases._hybrid_model, of_te=True)
"""Builds a chunk of a HybridModel of TE modules."""


def layers_of_te(config: Any, vp_stage: int | None) -> Any:
    """Megatron's layer of TE modules; attention itself has no weights, and TE's needs a GPU."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        multi_latent_attention=config.multi_latent_attention,
    )
    latent = config.multi_latent_attention
    core = gpt_cases.LatentAttention if latent else DotProductAttention
    layer.submodules.self_attention.submodules.core_attention = core
    return layer


def differences(case: GPTCase, schedule: str | Schedule, microbatches: list[int]) -> list[str]:
    """From Megatron's own schedule over the same modules, which then know nothing of a split."""
    gpt_cases._specification = layers_of_te
    gpt_cases._hybrid_model = hybrid_of_te
    return gpt_cases.differences(case, schedule, microbatches, iterations=2)


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


def quantized_differences(case: GPTCase, schedule: str | Schedule) -> list[str]:
    """With torch's Adam, as those of TE and apex are kernels."""
    from megatron.core import optimizer
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    return differences(case, schedule, [5])
