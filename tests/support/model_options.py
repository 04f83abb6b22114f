"""Options of Megatron's config for the small GPTs of tests, as ``GPTCase`` takes them."""

from __future__ import annotations

from typing import Any, TypeAlias

Options: TypeAlias = tuple[tuple[str, Any], ...]


def options(**settings: Any) -> Options:
    """Return settings in a form that can be hashed."""
    return tuple(settings.items())


ROUTED: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.02,
    "moe_ffn_hidden_size": 32,
    "add_bias_linear": False,
}
"""Experts, with Megatron's default dispatcher."""
EXPERTS: dict[str, Any] = {**ROUTED, "moe_token_dispatcher_type": "alltoall"}
LATENT = options(
    multi_latent_attention=True,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
    kv_channels=16,
    rope_type="rope",
    qk_layernorm=True,
    add_bias_linear=False,
)
MAMBA = options(mamba_state_dim=8, mamba_head_dim=8, mamba_num_groups=2)
GATED_DELTA = options(
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    deterministic_mode=True,
)
SELECTIVE = options(recompute_granularity="selective", recompute_modules=("core_attn",))
RECOMPUTED = options(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)


# --- options of a GPTCase

LAYERS_OF_EXPERTS = (
    ("num_moe_experts", 4),
    ("moe_router_topk", 2),
    ("moe_ffn_hidden_size", 32),
    ("moe_aux_loss_coeff", 0.5),
    ("add_bias_linear", False),
)
WHOLE_LAYERS = (
    ("recompute_granularity", "full"),
    ("recompute_method", "uniform"),
    ("recompute_num_layers", 1),
)
"""Recomputation by Megatron, of every layer."""
