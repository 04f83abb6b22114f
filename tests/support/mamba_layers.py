"""Layers of the MambaModel of Megatron-LM 0.16 on a CPU, for ``--spec mamba_layers STACK``.

Attention and MLP are Megatron's own, over its local linear layers; hybrid_layers.py has newer ones.
"""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.ssm import mamba_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

mamba_block.TENorm = WrappedTorchNorm
_local = get_gpt_layer_local_spec().submodules
STACK = mamba_stack_spec
STACK.submodules.attention_layer.submodules = TransformerLayerSubmodules(
    input_layernorm=_local.input_layernorm,
    self_attention=_local.self_attention,
    self_attn_bda=_local.self_attn_bda,
)
STACK.submodules.mlp_layer.submodules = TransformerLayerSubmodules(
    pre_mlp_layernorm=_local.pre_mlp_layernorm, mlp=_local.mlp, mlp_bda=_local.mlp_bda
)
