"""Layers with attention over packed sequences on a CPU, for ``--spec packed_layers LAYERS``."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from packed_attention import PackedAttention

LAYERS = get_gpt_layer_local_spec()
LAYERS.submodules.self_attention.submodules.core_attention = PackedAttention
