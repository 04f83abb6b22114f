"""Images in samples, and Megatron's model that reads them."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

# An image takes the place of one token by 5 embeddings: 4 patches and a class token.
ENCODER_LAYERS, PIXELS, LENGTH_WITH_IMAGES, IMAGE_TOKEN = 3, 8, 24, -200


def multimodal_model(
    config: TransformerConfig,
    layer: Any,
    vocabulary: int,
    positions: str,
    pattern: str | None = None,
    encodes: bool | None = None,
    **ends: Any,
) -> Any:
    """Megatron's LLaVAModel: an encoder of images and a projection before a GPT, or a pattern.

    ``encodes`` says whether a chunk has the encoder; by default the first stage has.

    An internvit, since Megatron's norm of a CLIP cannot be built without Transformer-Engine.
    """
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec

    encoder: Any = copy(config)
    encoder.num_layers, encoder.vision_model_type = ENCODER_LAYERS, "internvit"
    encoder.pipeline_model_parallel_size, encoder.pipeline_model_parallel_layout = 1, None
    hybrid = {}
    if pattern is not None:
        config.language_model_type = "nemotron5-hybrid"
        hybrid["hybrid_layer_pattern"] = pattern
    model = LLaVAModel(
        language_transformer_config=config,
        language_transformer_layer_spec=layer,
        language_vocab_size=vocabulary,
        language_max_sequence_length=LENGTH_WITH_IMAGES,
        vision_transformer_config=encoder,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=False,
        vision_projection_config=encoder,
        vision_projection_layer_spec=MLPSubmodules(
            linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
        ),
        language_position_embedding_type=positions,
        add_encoder=ends["pre_process"] if encodes is None else encodes,
        img_h=PIXELS,
        img_w=PIXELS,
        patch_dim=PIXELS // 2,
        **hybrid,
        **ends,
    )
    model.model_type = ModelType.encoder_or_decoder  # as Megatron-LM's get_model does
    return model


def with_images(
    batch: dict[str, torch.Tensor], counts: list[int], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """A batch whose samples have so many images, at every third token."""
    for sample, count in zip(batch["tokens"], counts, strict=True):
        sample[1 : 1 + 3 * count : 3] = IMAGE_TOKEN
    images = torch.randn(sum(counts), 3, PIXELS, PIXELS, generator=generator)
    return {**batch, "images": images}
