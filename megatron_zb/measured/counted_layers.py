"""Work of a model's layers, counted from Megatron's arguments.

A hybrid model's layers are kinds, by Megatron's letters: ``*`` attention, ``+`` multi-latent
attention, ``-`` MLP, ``E`` experts, ``M`` Mamba-2, ``G`` gated delta.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_zb.schedules import layout
from megatron_zb.schedules.step_plan import NO_ATTENTION, AttentionWork

LATENT_SIZES = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_CHUNK = 128  # tokens of Mamba-2's scan


def attention_of(args: Any, pattern: str = "") -> AttentionWork:
    """Count the work of attention beside linear layers; none where the sizes do not suffice.

    Args:
        pattern: that of a hybrid model, of whose layers this is the mean.
    """
    if not has_attention_sizes(args):
        return NO_ATTENTION
    if not all(getattr(args, name, None) for name in ("hidden_size", "num_attention_heads")):
        return NO_ATTENTION
    kinds = layout.pattern_kinds(pattern)
    if not set(kinds) <= set(_PRODUCTS):
        return NO_ATTENTION
    layers = [_PRODUCTS[kind](args) for kind in kinds] or [_layer_products(args)]
    linear, scores = map(sum, zip(*layers, strict=True))
    return AttentionWork.counted(scores, linear)


def layer_flops(args: Any) -> float:
    """Count a layer's FLOPs per token in F: products with weights, half of those with scores."""
    linear, scores = _layer_products(args)
    return 2.0 * (linear + args.seq_length * scores)


def flops_of_kind(args: Any, kind: str) -> float | None:
    """Count the FLOPs per token in F of a hybrid model's layer; None for other kinds."""
    if kind not in _PRODUCTS:
        return None
    linear, scores = _PRODUCTS[kind](args)
    return 2.0 * (linear + args.seq_length * scores)


def has_attention_sizes(args: Any) -> bool:
    """Return whether attention can be counted; where it is latent, its widths have to be given."""
    is_latent = getattr(args, "multi_latent_attention", False)
    return not is_latent or all(getattr(args, name, None) for name in LATENT_SIZES)


def _layer_products(args: Any) -> tuple[int, int]:
    """Count a layer's products per token in F with weights, and half of those with one score."""
    is_latent = getattr(args, "multi_latent_attention", False)
    attention, scores = (_latent_attention if is_latent else _attention)(args)
    has_experts = _given(args, "num_experts") or _given(args, "num_moe_experts")
    mlp, _ = (_experts if has_experts else _mlp)(args)
    return attention + mlp, scores


def _given(args: Any, name: str, usual: Any = None) -> Any:
    found = getattr(args, name, None)
    return usual if found is None else found


def _mlp(args: Any, width: int | None = None, times: int = 1, beside: int = 0) -> tuple[int, int]:
    """Count an MLP: several of a width, and one beside them."""
    matrices = 3 if _given(args, "swiglu") or _given(args, "gated_linear_unit") else 2
    inner = width or int(_given(args, "ffn_hidden_size") or 4 * args.hidden_size)
    return matrices * args.hidden_size * (inner * times + beside), 0


def _experts(args: Any) -> tuple[int, int]:
    width, chosen = _given(args, "moe_ffn_hidden_size"), _given(args, "moe_router_topk") or 2
    return _mlp(args, width, chosen, _given(args, "moe_shared_expert_intermediate_size") or 0)


def _attention(args: Any) -> tuple[int, int]:
    hidden, heads = args.hidden_size, args.num_attention_heads
    head = getattr(args, "kv_channels", None) or hidden // heads
    # a config has no flag for groups, arguments have a number without it
    given = getattr(args, "num_query_groups", None)
    groups = given if getattr(args, "group_query_attention", True) and given else heads
    return 2 * hidden * head * (heads + groups), heads * head


def _latent_attention(args: Any) -> tuple[int, int]:
    """Count multi-latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    narrow, plain, rotary, value = (getattr(args, name) for name in LATENT_SIZES)
    query, rank = plain + rotary, getattr(args, "q_lora_rank", None)
    queries = rank * (hidden + heads * query) if rank else hidden * heads * query
    keys_and_values = hidden * (narrow + rotary) + narrow * heads * (plain + value)
    scores = heads * (query + value) // 2
    return queries + keys_and_values + heads * value * hidden, scores


def _mamba(args: Any) -> tuple[int, int]:
    """Count Mamba-2 (arXiv 2405.21060)."""
    hidden, head = args.hidden_size, _given(args, "mamba_head_dim", 64)
    heads = _given(args, "mamba_num_heads") or 2 * hidden // head
    state, groups = _given(args, "mamba_state_dim", 128), _given(args, "mamba_num_groups", 8)
    inner, shared = heads * head, groups * state
    projections = hidden * (2 * inner + 2 * shared + heads + inner)
    return projections + _CHUNK * (shared + inner) + 2 * inner * state, 0


def _gated_delta(args: Any) -> tuple[int, int]:
    """Count a gated delta net (arXiv 2412.06464), with as many products as Megatron's own count."""
    hidden, value = args.hidden_size, _given(args, "linear_value_head_dim", 128)
    keys = _given(args, "linear_key_head_dim", 128) * _given(args, "linear_num_key_heads", 16)
    heads = _given(args, "linear_num_value_heads", 32)
    values = value * heads
    projections = hidden * (2 * keys + 2 * values + 2 * heads + values)
    conv = _given(args, "linear_conv_kernel_dim", 4) * (2 * keys + values)
    return projections + conv + 4 * heads * value**2, 0


_PRODUCTS: dict[str, Callable[[Any], tuple[int, int]]] = {
    "*": _attention,
    "+": _latent_attention,
    "-": _mlp,
    "E": _experts,
    "M": _mamba,
    "G": _gated_delta,
}
"""Products per token in F with weights or states, and half of those with one score, by kind."""
