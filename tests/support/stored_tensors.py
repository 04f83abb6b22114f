"""The tensors of a checkpoint in torch's distributed format, read without any process group."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint's files."""
    files = FileSystemReader(path)
    found = {
        name: torch.empty(of.size, dtype=of.properties.dtype)
        for name, of in files.read_metadata().state_dict_metadata.items()
        if isinstance(of, TensorStorageMetadata)
    }
    load(found, storage_reader=files, no_dist=True)
    return found
