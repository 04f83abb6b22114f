"""A small encoder under the names of Kimi K2.5's, which is published with its weights only.

Megatron-Bridge's ``KimiK25VLModel`` loads these classes by name from the folder of the weights.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

MERGED = 4  # patches of a token


class VisionTowerConfig(SimpleNamespace):
    """The sizes of the encoder."""

    def __init__(self, vision: Any) -> None:
        super().__init__(**vars(vision))


ProjectorConfig = VisionTowerConfig


class MoonViT3dEncoder(torch.nn.Module):
    """Attention within each image."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(
            config.hidden_size, 4, 2 * config.hidden_size, dropout=0.0, batch_first=True
        )

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(patches[None])[0]
        return found


class MoonViT3dPretrainedModel(torch.nn.Module):
    """Features of each image, of which every four patches make one token."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.patch_embed = torch.nn.Linear(config.pixels, config.hidden_size)
        self.encoder = MoonViT3dEncoder(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embed.weight.dtype

    def forward(self, pixels: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
        images = self.patch_embed(pixels).split(grids.prod(-1).tolist())
        return [self.encoder(image).unflatten(0, (-1, MERGED)) for image in images]


class PatchMergerMLP(torch.nn.Module):
    """The projection to the size of the language model."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(MERGED * config.hidden_size, config.text_hidden_size)

    def forward(self, images: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.proj(image.flatten(1)) for image in images]
