"""Megatron-Bridge's vision-language models on CPU ranks: small, with images, by Bridge's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from megatron.bridge.models.qwen_vl import qwen3_vl_step
from megatron.bridge.models.stepfun import step37_flickr8k_step
from megatron.bridge.models.stepfun.data.flickr8k.multimodal_utils import IMAGE_ITEM_TYPE
from megatron.bridge.training import vlm_step
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from megatron_bridge_trainer import ON_A_CPU, BridgeJob
from PIL import Image
from vision_families import BEGIN, END, FAMILIES, IMAGE, LENGTH, MERGED, PATCH, SIDE

_SMALL: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 64,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "share_embeddings_and_output_weights": False,
    "seq_length": LENGTH,
    "bf16": False,
    "params_dtype": torch.float32,
    "autocast_dtype": torch.float32,
}


def new_provider(family: str, pipeline_size: int, **settings: Any) -> Any:
    """Bridge's provider of a language model of eight layers behind an encoder.

    Args:
        family: one of FAMILIES.
        pipeline_size: ranks of the pipeline.
        settings: of the provider, such as ``freeze_vision_model``.
    """
    found = FAMILIES[family]
    found.use_megatrons_layers()
    provider = found.provider()
    of_all = ON_A_CPU | _SMALL | found.settings() | settings
    for name, value in of_all.items():
        setattr(provider, name, value)
    provider.pipeline_model_parallel_size = pipeline_size
    return provider


def new_job(family: str, provider: Any) -> BridgeJob:
    """A job with Bridge's own forward step of these models.

    Gradients are not clipped: a norm in another order of sums would change the next loss.
    """
    steps: dict[str, Callable[..., Any]] = {
        "qwen3_vl": qwen3_vl_step.forward_step,
        "step37": step37_flickr8k_step.forward_step,
    }
    job = BridgeJob(
        provider,
        forward_step=steps.get(family, vlm_step.forward_step),
        batches=packs if family == "step37" else partial(batches, family),
        clip_grad=100.0,
    )
    vars(job.state.cfg.dataset).update(
        img_start_token_id=BEGIN,
        patch_start_token_id=-1,
        image_size=2 * SIDE,
        patch_image_size=2 * SIDE,
        encoder_patch_size=PATCH,
    )
    return job


def batches(family: str) -> Iterator[dict[str, Any]]:
    """Text with one image of 4 x 4 patches, or two, or none; no two batches alike."""
    draw = torch.Generator().manual_seed(3)
    number = 0
    while True:
        images = (1, 2, 0)[number % 3]
        number += 1
        tokens = torch.randint(1, 50, (1, LENGTH), generator=draw)
        count, place = (4 // MERGED) ** 2, 1
        for _ in range(images):
            tokens[0, place] = BEGIN
            tokens[0, place + 1 : place + 1 + count] = IMAGE
            tokens[0, place + 1 + count] = END
            place += count + 3
        seen = FAMILIES[family].images(images, draw) if images else {}
        if family == "glm_45v":
            seen["mm_token_type_ids"] = (tokens == IMAGE).int()
        yield {
            "input_ids": tokens,
            "labels": tokens.roll(-1, 1),
            "loss_mask": torch.ones(1, LENGTH),
            "position_ids": torch.arange(LENGTH)[None],
            "visual_inputs": GenericVisualInputs(**seen),
        }


def packs() -> Iterator[dict[str, Any]]:
    """The same text in packs of two sequences, whose images are files."""
    with TemporaryDirectory() as folder:
        for number, batch in enumerate(batches("step37")):
            pixels = batch["visual_inputs"].pixel_values
            paths: list[tuple[str, int]] = []
            for image in () if pixels is None else pixels:
                paths.append((f"{folder}/{number}-{len(paths)}.png", IMAGE_ITEM_TYPE))
                colours = (image.sigmoid() * 255).byte().permute(1, 2, 0).contiguous()
                Image.fromarray(colours.numpy()).save(paths[-1][0])
            yield {
                "tokens": batch["input_ids"][0],
                "labels": batch["labels"][0],
                "loss_masks": batch["loss_mask"][0],
                "cu_seqlens": torch.tensor([0, 20, LENGTH]),
                "position_id": torch.arange(LENGTH),
                "image_paths": paths,
            }
