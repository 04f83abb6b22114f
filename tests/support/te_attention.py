"""Transformer-Engine's attention on the CPU, over stand-ins for its fused kernels.

Its context parallelism is its own, in Python: which part of the keys and values travels when, by
all-gathers and all-to-alls, and how partial results are joined. What stands in is the attention of
a part, in plain torch: whole sequences of the layout sbhd, without dropout, bias or windows. Where
token slices have switched its context parallelism off, it is the attention of a rank's chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from te_models import layers_of_te
from te_stand_in import as_if_on_a_gpu


def layers_with_attention(config: Any, vp_stage: int | None) -> Any:
    """Megatron's layer of TE modules; of ranks that share sequences, its attention, too."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    layer = layers_of_te(config, vp_stage)
    if config.context_parallel_size == 1:
        return layer
    install()
    layer.submodules.self_attention.submodules.core_attention = TEDotProductAttention
    return layer


def install() -> None:
    """Let TE choose fused attention, whose kernels are those below."""
    from transformer_engine.pytorch import DotProductAttention
    from transformer_engine.pytorch.attention.dot_product_attention import (
        backends,
        context_parallel,
        utils,
    )
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

    fused = FusedAttnBackend["F16_arbitrary_seqlen"]
    chosen = (False, None, True, fused, False, [False, True, False])
    utils.get_attention_backend = lambda parameters: chosen
    for module in (backends, context_parallel, utils):
        module.get_device_compute_capability = lambda: (9, 0)
        module.get_cudnn_version = lambda: (9, 20, 0)
    if not hasattr(DotProductAttention, "runs_on_a_cpu"):
        DotProductAttention.runs_on_a_cpu = True
        DotProductAttention.forward = as_if_on_a_gpu(DotProductAttention.forward)
    for name, stand_in, first in (
        ("fused_attn_fwd", fused_attn_fwd, 8),
        ("fused_attn_bwd", fused_attn_bwd, 11),
    ):
        setattr(context_parallel, name, torch.no_grad()(stand_in))
        kernel = getattr(backends, name)
        if kernel.__module__ != __name__:
            setattr(backends, name, torch.no_grad()(_by_name(kernel, stand_in, first)))


def _by_name(kernel: Any, stand_in: Any, first: int) -> Callable[..., Any]:
    """Return a function that passes all but the first arguments by their names in a kernel."""

    def run(*args: Any, **options: Any) -> Any:
        given = signature(kernel).bind(*args, **options).arguments
        return stand_in(*args[:first], **dict([*given.items()][first:]))

    return run


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, mask: str) -> torch.Tensor:
    """The scores of queries (s b h d) and keys (t b h d), as b h s t; -inf where masked."""
    found = torch.einsum("sbhd,tbhd->bhst", q.float(), k.float()) * scale
    if "causal" not in mask:
        return found
    s, t = found.shape[-2:]
    after = t - s + 1 if "bottom_right" in mask else 1
    masked = torch.ones(s, t, dtype=torch.bool).triu(after)
    return found.masked_fill(masked, float("-inf"))


def fused_attn_fwd(
    _is_training: bool,
    _most_q: int,
    _most_kv: int,
    _cu_seqlens_q: Any,
    _cu_seqlens_kv: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *_types: Any,
    attn_scale: float,
    qkv_layout: str,
    attn_mask_type: str,
    **_options: Any,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output, and the logarithms of the sums over keys (b h s 1)."""
    assert qkv_layout == "sbhd_sbhd_sbhd", qkv_layout
    scores = _scores(q, k, attn_scale, attn_mask_type)
    sums = scores.logsumexp(-1, keepdim=True)
    out = torch.einsum("bhst,tbhd->sbhd", (scores - sums).exp(), v.float())
    return out.to(q.dtype).contiguous(), [sums, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(
    _most_q: int,
    _most_kv: int,
    _cu_seqlens_q: Any,
    _cu_seqlens_kv: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    d_out: torch.Tensor,
    _type: Any,
    kept: list[torch.Tensor],
    *_backend: Any,
    attn_scale: float,
    attn_mask_type: str,
    **_options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
    """The gradients of queries, keys and values, given the output over all keys and its sums."""
    scores = _scores(q, k, attn_scale, attn_mask_type)
    weights = (scores - kept[0].reshape(*scores.shape[:-1], 1)).exp()
    d_out = d_out.float()
    d_weights = torch.einsum("sbhd,tbhd->bhst", d_out, v.float())
    of_rows = torch.einsum("sbhd,sbhd->bhs", d_out, out.float())
    d_scores = weights * (d_weights - of_rows[..., None]) * attn_scale
    d_q = torch.einsum("bhst,tbhd->sbhd", d_scores, k.float()).to(q.dtype)
    d_k = torch.einsum("bhst,sbhd->tbhd", d_scores, q.float()).to(k.dtype)
    d_v = torch.einsum("bhst,sbhd->tbhd", weights, d_out).to(v.dtype)
    return d_q.contiguous(), d_k.contiguous(), d_v.contiguous(), None
