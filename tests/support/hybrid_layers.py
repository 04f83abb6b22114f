"""The layers of Megatron's HybridModel on a CPU: its own modules over its own linear layers.

Megatron names Transformer-Engine's layers in its specification; here the same modules have those of
megatron-core and the norm of torch. Of the kernels that need a GPU, Mamba's scan and gated delta's
norm of keys are replaced by the same sums in torch; gated delta itself is Megatron's own in torch,
which it takes in its deterministic mode. A script takes this by ``--spec hybrid_layers STACK``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from gpt_cases import LatentAttention, SequenceParallelNorm, SharedAttention
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid import hybrid_layer_allocation as allocation
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch.nn import functional


class Norm:
    """Torch's norm, or one for sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
        kind: Any = SequenceParallelNorm if config.sequence_parallel else WrappedTorchNorm
        return kind(config=config, hidden_size=hidden_size, eps=eps)


def _copied(spec: Any) -> Any:
    """Copy a specification, with those in it; the modules that they name stay the same."""
    if isinstance(spec, list):
        return list(map(_copied, spec))
    if not is_dataclass(spec) or isinstance(spec, type):
        return spec
    found = copy(spec)
    vars(found).update({name: _copied(value) for name, value in vars(spec).items()})
    return found


def _stack() -> Any:
    stack = _copied(hybrid_stack_spec)
    layers = stack.submodules
    multi_latent_attention.HAVE_TE = False
    dense, routed = (get_gpt_layer_local_spec(n).submodules for n in (None, 2))
    latent = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True).submodules
    for layer, like, core in (
        (layers.attention_layer, dense, SharedAttention),
        (layers.mla_layer, latent, LatentAttention),
    ):
        like.self_attention.submodules.core_attention = core
        layer.submodules = TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=like.self_attention,
            self_attn_bda=like.self_attn_bda,
        )
    for layer, like in ((layers.mlp_layer, dense), (layers.moe_layer, routed)):
        layer.submodules = TransformerLayerSubmodules(
            pre_mlp_layernorm=Norm, mlp=like.mlp, mlp_bda=like.mlp_bda
        )
    layers.gdn_layer.submodules.input_layernorm = Norm
    delta = layers.gdn_layer.submodules.self_attention.submodules
    delta.in_proj, delta.out_proj = ColumnParallelLinear, RowParallelLinear
    delta.out_norm = Norm
    layers.mamba_layer.submodules.norm = Norm
    mixer = layers.mamba_layer.submodules.mixer
    mixer.params = {"rmsnorm": False}  # it is another kernel
    mixer.submodules.in_proj, mixer.submodules.out_proj = ColumnParallelLinear, RowParallelLinear
    (predicted,) = layers.mtp_block_spec.submodules.layer_specs
    predicted.submodules.enorm = predicted.submodules.hnorm = Norm
    predicted.submodules.eh_proj = ColumnParallelLinear
    predicted.submodules.layer_norm = Norm
    return stack


def stack_of_te(case: Any) -> Any:
    """Megatron's own layers; attention itself has no weights, and TE's needs a GPU.

    Where ranks share sequences, it is TE's over stand-ins.
    """
    stack = _copied(hybrid_stack_spec)
    if case.context_parallel > 1:
        return stack
    for layer, core in (
        (stack.submodules.attention_layer, SharedAttention),
        (stack.submodules.mla_layer, LatentAttention),
    ):
        layer.submodules.self_attention.submodules.core_attention = core
    return stack


def _scan(
    zxbcdt: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    *,
    D: torch.Tensor,
    headdim: int,
    ngroups: int,
    **_options: Any,
) -> torch.Tensor:
    """In place of mamba_ssm's fused kernel: Mamba-2's recurrence (arXiv 2405.21060), step by step.

    ``zxbcdt`` is (batch, length, width of gate, inputs, B, C and time steps).
    """
    heads = a.numel()
    inner, mixed = heads * headdim, conv_weight.size(0)
    state = (mixed - inner) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, mixed, heads], dim=-1)
    padded = functional.pad(xbc.transpose(1, 2), (conv_weight.size(1) - 1, 0))
    conv = functional.conv1d(padded, conv_weight.unsqueeze(1), conv_bias, groups=mixed)
    x, b, c = functional.silu(conv.transpose(1, 2)).split([inner, *[ngroups * state] * 2], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (
        t.unflatten(-1, (ngroups, state)).repeat_interleave(heads // ngroups, dim=2) for t in (b, c)
    )
    dt = functional.softplus(dt + dt_bias)
    kept = torch.zeros_like(x[:, 0].unsqueeze(-1) * b[:, 0].unsqueeze(-2))
    outputs = []
    for t in range(x.size(1)):
        entering = (dt[:, t, :, None] * x[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(-2)
        kept = kept * (dt[:, t] * a).exp()[..., None, None] + entering
        outputs.append((kept * c[:, t].unsqueeze(-2)).sum(-1) + D[:, None] * x[:, t])
    return (torch.stack(outputs, 1).flatten(-2) * functional.silu(z)).to(zxbcdt.dtype)


mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.mamba_split_conv1d_scan_combined = True, _scan
for module in (common, gdn):  # a release after 0.19 reads them in the second one
    for name, value in (("HAVE_FLA", True), ("l2norm", partial(functional.normalize, dim=-1))):
        if hasattr(module, name):
            setattr(module, name, value)
STACK = _stack()
_NORM_OF_TE = hybrid_block.TENorm
hybrid_block.TENorm = Norm


@contextmanager
def cut_for(layout: Any, stack: Any = STACK) -> Iterator[None]:
    """Let chunks be built as the hook in Megatron-LM does; upstream cuts the pattern itself.

    ``layout`` is that of a schedule, None for upstream's.
    """
    hybrid_block.TENorm = Norm if stack is STACK else _NORM_OF_TE
    cut = allocation.select_pipeline_segment
    if layout is not None:
        allocation.select_pipeline_segment = lambda pattern, _, vp_stage, **__: layout.segment(
            pattern, vp_stage
        )
    try:
        yield
    finally:
        allocation.select_pipeline_segment = cut


def hybrid_model(pattern: str, layout: Any, stack: Any = STACK, **more: Any) -> Any:
    """Build a chunk."""
    with cut_for(layout, stack):
        return HybridModel(hybrid_stack_spec=stack, hybrid_layer_pattern=pattern, **more)
