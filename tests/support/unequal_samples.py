"""Hybrid layers, and samples of unequal lengths, for ``--spec unequal_samples STACK``."""

from __future__ import annotations

from typing import Any

from hybrid_layers import STACK
from megatron.core.datasets import gpt_dataset

__all__ = ["STACK"]

_WHOLE = gpt_dataset.MockGPTDataset.__getitem__


def _cut(dataset: Any, number: int | None) -> dict[str, Any]:
    """Cut a sample to three lengths in turns."""
    sample = _WHOLE(dataset, number)
    length = len(sample["tokens"]) - 6 * ((number or 0) % 3)
    return {name: part[..., :length] for name, part in sample.items()}


gpt_dataset.MockGPTDataset.__getitem__ = _cut
