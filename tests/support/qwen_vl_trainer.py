"""Megatron-Bridge's Qwen3-VL on CPU ranks: its provider and model, small, with images.

The provider and the model take layers, norms and projections of Transformer-Engine by name. Here
they get Megatron's own, and attention over packed sequences from ``packed_attention.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.bridge.models.qwen_vl import qwen3_vl_provider
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import model as qwen_model
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron_bridge_trainer import BridgeJob
from packed_attention import PackedAttention
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

LENGTH, VOCABULARY = 24, 64
IMAGE, VIDEO, BEGIN, END = 60, 61, 62, 63
PATCH, MERGED = 4, 2
PIXELS = 3 * 2 * PATCH * PATCH  # of a patch: colours, frames, rows and columns


def new_provider(pipeline_size: int, frozen: str | None = None) -> Qwen3VLModelProvider:
    """Bridge's provider of a language model of eight layers behind an encoder of three.

    Args:
        pipeline_size: ranks of the pipeline.
        frozen: ``vision_model`` or ``language_model``, to train the rest alone.
    """
    _use_megatrons_layers()
    vision = Qwen3VLVisionConfig(
        depth=3,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        patch_size=PATCH,
        spatial_merge_size=MERGED,
        temporal_patch_size=2,
        out_hidden_size=32,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    )
    return Qwen3VLModelProvider(
        num_layers=8,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        ffn_hidden_size=64,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        vocab_size=VOCABULARY,
        should_pad_vocab=False,
        share_embeddings_and_output_weights=False,
        seq_length=LENGTH,
        language_max_sequence_length=LENGTH,
        mrope_section=[2, 1, 1],
        vision_config=vision,
        patch_size=PATCH,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        freeze_vision_model=frozen == "vision_model",
        freeze_language_model=frozen == "language_model",
        pipeline_model_parallel_size=pipeline_size,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        persist_layer_norm=False,
    )


def new_job(provider: Qwen3VLModelProvider) -> BridgeJob:
    return BridgeJob(provider, forward_step=forward_step, batches=batches)


def _use_megatrons_layers() -> None:
    qwen3_vl_provider.get_gpt_layer_with_transformer_engine_spec = _language_layer
    qwen_model.get_vit_layer_with_transformer_engine_spec = _vision_layer
    qwen_model.TENorm = WrappedTorchNorm
    qwen_model.TEColumnParallelLinear = ColumnParallelLinear
    qwen_model.TERowParallelLinear = RowParallelLinear


def _language_layer(**options: Any) -> Any:
    return _attending(get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"))


def _vision_layer() -> Any:
    layer = _attending(get_gpt_layer_local_spec())
    layer.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    return layer


def _attending(layer: Any) -> Any:
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return layer


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Text with one image of 4 x 4 patches, or two, or one of 4 x 8; no two batches alike."""
    draw = torch.Generator().manual_seed(3)
    grids = [[(4, 4)], [(4, 4), (4, 4)], [(4, 8)]]
    number = 0
    while True:
        images = grids[number % len(grids)]
        number += 1
        tokens = torch.randint(50, (1, LENGTH), generator=draw)
        place = 1
        for rows, columns in images:
            count = rows * columns // MERGED**2
            tokens[0, place] = BEGIN
            tokens[0, place + 1 : place + 1 + count] = IMAGE
            tokens[0, place + 1 + count] = END
            place += count + 3
        patches = sum(rows * columns for rows, columns in images)
        yield {
            "input_ids": tokens,
            "labels": tokens.roll(-1, 1),
            "loss_mask": torch.ones(1, LENGTH),
            "pixel_values": torch.randn(patches, PIXELS, generator=draw),
            "image_grid_thw": torch.tensor([(1, *grid) for grid in images]),
        }


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any, *rest: Any) -> Any:
    """Run one chunk; as Bridge's own step for these models, every stage reads the batch."""
    output = model(**next(data), position_ids=None, attention_mask=None)

    def loss(losses: torch.Tensor) -> Any:
        total = losses.sum()
        count = torch.tensor(losses.numel(), dtype=torch.int)
        return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}

    return output, loss
