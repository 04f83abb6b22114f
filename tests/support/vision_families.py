"""Sizes and layers of Megatron-Bridge's vision-language models on CPU ranks.

The providers, models and encoders are real, but for Kimi K2.5's encoder (``kimi_encoder.py``).
Layers, norms and projections that they take from Transformer-Engine by name are Megatron's own
here, with attention from ``packed_attention.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import kimi_encoder
import torch
from megatron.bridge.models.exaone.exaone45.exaone45_provider import Exaone45ModelProvider
from megatron.bridge.models.exaone.exaone45.modelling_exaone45 import model as exaone_model
from megatron.bridge.models.gemma import gemma3_provider
from megatron.bridge.models.gemma_vl import modeling_gemma3_vl
from megatron.bridge.models.gemma_vl.gemma3_vl_provider import Gemma3VLModelProvider
from megatron.bridge.models.glm_vl.glm_45v_provider import GLM45VModelProvider
from megatron.bridge.models.hf_pretrained import safe_config_loader
from megatron.bridge.models.kimi_vl import modeling_kimi_k25_vl
from megatron.bridge.models.kimi_vl.kimi_k25_vl_provider import KimiK25VLModelProvider
from megatron.bridge.models.qwen_vl import qwen3_vl_provider
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import model as qwen3_model
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider
from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider
from megatron.bridge.models.stepfun.configuration_step37 import Step37VisionConfig
from megatron.bridge.models.stepfun.step35_provider import Step35DecoderLayer
from megatron.bridge.models.stepfun.step37_provider import Step37ModelProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from packed_attention import PackedAttention
from transformers.models.exaone4.configuration_exaone4 import Exaone4Config
from transformers.models.exaone4_5.configuration_exaone4_5 import Exaone4_5_VisionConfig
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig

LENGTH, VOCABULARY = 32, 64
IMAGE, VIDEO, BEGIN, END = 60, 61, 62, 63
PATCH, MERGED = 4, 2
SIDE = 4 * PATCH  # of an image, in pixels
PIXELS = 3 * 2 * PATCH * PATCH  # of a patch: colours, frames, rows and columns

Images = dict[str, torch.Tensor]
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
_EXPERTS = {
    "num_moe_experts": 4,
    "moe_layer_freq": [0] + [1] * 7,
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 2,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
}
_ENCODER = {"hidden_size": 32, "intermediate_size": 64, "patch_size": PATCH}
_decoder = partial(get_gpt_decoder_block_spec, use_transformer_engine=False)


@dataclass(frozen=True)
class Family:
    """A class of Bridge's: its provider, and how a batch of it has images."""

    provider: Callable[..., Any]
    settings: Callable[[], dict[str, Any]]
    images: Callable[[int, torch.Generator], Images]
    use_megatrons_layers: Callable[[], None] = lambda: None


# --- images


def _patches(number: int, draw: torch.Generator) -> Images:
    return {
        "pixel_values": torch.randn(16 * number, PIXELS, generator=draw),
        "image_grid_thw": torch.tensor([(1, 4, 4)] * number),
    }


def _squares(number: int, draw: torch.Generator) -> Images:
    return {"pixel_values": torch.randn(number, 3, SIDE, SIDE, generator=draw)}


# --- layers


class NormedRow(RowParallelLinear):
    """A row-parallel layer with a norm behind it, as Bridge's TERowParallelLinearLayerNorm."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **more: Any) -> None:
        super().__init__(input_size, output_size, config=config, **more)
        self.post_layernorm = WrappedTorchNorm(config, output_size)

    def forward(self, inputs: torch.Tensor) -> Any:
        output, bias = super().forward(inputs)
        return self.post_layernorm(output), bias


def _layer(**options: Any) -> Any:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", **options)
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return layer


def _language_layer(config: Any = None, **options: Any) -> Any:
    return _layer()


def _layer_with_norms(config: Any = None, **options: Any) -> Any:
    return _layer(qk_layernorm=True)


def _vision_layer() -> Any:
    layer = _layer()
    layer.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    return layer


def _norms_behind(layer: Any) -> Any:
    parts = layer.submodules
    parts.self_attention.submodules.linear_proj = NormedRow
    parts.mlp.keywords["submodules"].linear_fc2 = NormedRow
    return layer


def _use_megatrons(module: Any) -> None:
    module.get_vit_layer_with_transformer_engine_spec = _vision_layer
    module.TENorm = WrappedTorchNorm
    module.TEColumnParallelLinear = ColumnParallelLinear
    module.TERowParallelLinear = RowParallelLinear


# --- families


def _qwen3() -> dict[str, Any]:
    vision = Qwen3VLVisionConfig(
        depth=3,
        num_heads=4,
        out_hidden_size=32,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
        **_ENCODER,
    )
    return _TOKENS | {
        "language_max_sequence_length": LENGTH,
        "mrope_section": [2, 1, 1],
        "vision_config": vision,
        "patch_size": PATCH,
    }


def _qwen3_names() -> None:
    _use_megatrons(qwen3_model)
    qwen3_vl_provider.get_gpt_layer_with_transformer_engine_spec = _layer_with_norms


def _qwen25() -> dict[str, Any]:
    vision = Qwen2_5_VLVisionConfig(
        depth=2,
        num_heads=4,
        window_size=2 * PATCH * MERGED,
        out_hidden_size=32,
        fullatt_block_indexes=[1],
        **_ENCODER,
    )
    return _TOKENS | {
        "transformer_layer_spec": _language_layer,
        "mrope_section": [2, 1, 1],
        "vision_config": vision,
    }


def _glm() -> dict[str, Any]:
    vision = Glm4vVisionConfig(
        depth=2, num_heads=4, image_size=SIDE, out_hidden_size=32, **_ENCODER
    )
    return {
        **_TOKENS,
        **_EXPERTS,
        "transformer_layer_spec": _decoder,
        "moe_shared_expert_intermediate_size": 32,
        "moe_shared_expert_overlap": False,
        "mtp_num_layers": None,  # as Bridge's importer of these models
        "mrope_section": [1, 1, 0],
        "vision_config": vision,
    }


def _exaone_layer(config: Any, **options: Any) -> Any:
    layer = _norms_behind(_layer(qk_layernorm=True))
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
    return layer


def _exaone() -> dict[str, Any]:
    vision = Exaone4_5_VisionConfig(
        depth=2,
        num_heads=4,
        num_key_value_heads=2,
        out_hidden_size=32,
        fullatt_block_indexes=[1],
        **_ENCODER,
    )
    return _TOKENS | {
        "transformer_layer_spec": _exaone_layer,
        "vision_config": vision,
        "hf_text_config": Exaone4Config(max_position_embeddings=LENGTH),
    }


def _gemma_layer(config: Any, **options: Any) -> Any:
    layer = _norms_behind(_layer(qk_layernorm=True))
    layer.submodules.self_attention.module = gemma3_provider.Gemma3SelfAttention
    return layer


def _gemma() -> dict[str, Any]:
    vision = SiglipVisionConfig(
        num_hidden_layers=2, num_attention_heads=4, image_size=SIDE, **_ENCODER
    )
    projector = modeling_gemma3_vl.Gemma3VLMultimodalProjectorConfig(
        input_size=32,
        hidden_size=32,
        image_size=SIDE,
        patch_dim=PATCH,
        tokens_per_image=4,
        layernorm_zero_centered_gamma=False,
        use_cpu_initialization=True,
    )
    return _TOKENS | {
        "transformer_layer_spec": _gemma_layer,
        "share_embeddings_and_output_weights": True,
        "layernorm_zero_centered_gamma": False,
        "window_size": 8,
        "interleaved_attn_pattern": (2, 1),
        "softmax_scale": None,
        "attention_backend": AttnBackend.auto,  # no fused one is on a CPU
        "vision_config": vision,
        "vision_projector_config": projector,
    }


def _gemma_names() -> None:
    modeling_gemma3_vl.TENorm = WrappedTorchNorm


def _kimi() -> dict[str, Any]:
    return {
        **_EXPERTS,
        "transformer_layer_spec": _decoder,
        "position_embedding_type": "rope",
        "num_query_groups": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "rope_type": "rope",
        "qk_layernorm": True,
        "moe_shared_expert_intermediate_size": 32,
        "hf_model_path": "kimi_encoder",
        "trust_remote_code": True,
        "media_placeholder_token_id": IMAGE,
        "pad_token_id": END,
    }


def _kimi_names() -> None:
    """Find the encoder here, and not in the folder of the weights."""
    config = SimpleNamespace(
        vision_config=SimpleNamespace(hidden_size=32, text_hidden_size=32, pixels=PIXELS)
    )
    modeling_kimi_k25_vl.get_class_from_dynamic_module = lambda name, path, **options: getattr(
        kimi_encoder, name.partition(".")[2]
    )
    safe_config_loader.safe_load_config_with_retry = lambda path, **options: config


def _step_layers(config: Any, vp_stage: int | None = None) -> Any:
    block = _decoder(config, normalization="RMSNorm", vp_stage=vp_stage)
    for layer in block.layer_specs:
        layer.module = Step35DecoderLayer
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return block


def _step() -> dict[str, Any]:
    vision = Step37VisionConfig(
        width=32, layers=2, heads=4, image_size=2 * SIDE, patch_size=PATCH, mlp_ratio=2
    )
    return {
        **_EXPERTS,
        "transformer_layer_spec": _step_layers,
        "layer_types": ["full_attention", "sliding_attention"] * 4,
        "sliding_attention_setting": {
            "window_size": (7, 0),
            "num_attention_heads": 8,
            "num_query_groups": 2,
            "kv_channels": 8,
        },
        "rotary_percents": [0.5, 1.0] * 4,
        "vision_config": vision,
        "image_token_id": IMAGE,
        "language_max_sequence_length": LENGTH,
    }


FAMILIES = {
    "qwen3_vl": Family(Qwen3VLModelProvider, _qwen3, _patches, _qwen3_names),
    "qwen25_vl": Family(Qwen25VLModelProvider, _qwen25, _patches),
    "glm_45v": Family(GLM45VModelProvider, _glm, _patches),
    "exaone45_vl": Family(
        Exaone45ModelProvider, _exaone, _patches, partial(_use_megatrons, exaone_model)
    ),
    "gemma3_vl": Family(Gemma3VLModelProvider, _gemma, _squares, _gemma_names),
    "kimi_k25_vl": Family(KimiK25VLModelProvider, _kimi, _patches, _kimi_names),
    "step37": Family(Step37ModelProvider, _step, _squares),
}
