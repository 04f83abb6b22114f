"""Values of each weight in the distributed optimizer's fully reshardable state.

Megatron joins the buckets of a buffer without the padding at their ends, and then takes each
weight's values from its place in the buffer with the padding. Behind a padded bucket they are
others': the checkpoint holds shifted weights and moments, in every version up to 0.19.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_zb.errors import UsageError

RESHARDABLE = "sharded_param_state_fully_reshardable"
"""The method of Megatron's distributed optimizer to run :func:`without_padding`."""
BOUND = "load_parameter_state_from_dp_reshardable"
"""The method that loads its default format, which is bound to the placement."""

_WEIGHT_OF_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?:fp32_)?param\.(.+)")
_LARGEST = 1 << 22  # elements of a weight that is read to compare; norms and biases have less


@contextmanager
def without_padding(optimizers: Sequence[Any]) -> Iterator[None]:
    """Index the weights of distributed optimizers by their places in the joined buckets."""
    buffers = [buffer for each in optimizers for buffer in getattr(each, "buffers", ())]
    own = [buffer.param_index_map for buffer in buffers]
    try:
        for buffer in buffers:
            buffer.param_index_map = _joined(buffer)
        yield
    finally:
        for buffer, places in zip(buffers, own, strict=True):
            buffer.param_index_map = places


def _joined(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Return each weight's start and end in the joined buckets, and its bucket."""
    padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
    before = list(accumulate(padding, initial=0))
    return {
        weight: (start - before[bucket], end - before[bucket], bucket)
        for weight, (start, end, bucket) in buffer.param_index_map.items()
    }


def check(path: Path) -> None:
    """Compare the small weights of a checkpoint with their copies in the optimizer's state.

    Raises:
        UsageError: they differ by more than the rounding to 16 bits.
    """
    reader = checkpoint.FileSystemReader(path)
    stored = {
        name: entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    found = ((name, _WEIGHT_OF_STATE.fullmatch(name)) for name in stored)
    weights = {name: match[1] for name, match in found if match and match[1] in stored}
    pairs = {n: w for n, w in weights.items() if stored[n].size.numel() <= _LARGEST}
    tensors = {
        name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype, device="cpu")
        for name in {*pairs, *pairs.values()}
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a single process on purpose
        checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    for name, weight in sorted(pairs.items()):
        one, two = tensors[name].float(), tensors[weight].float()
        if one.shape != two.shape or not torch.allclose(one, two, rtol=2**-7, atol=2**-20):
            raise UsageError(
                f"the optimizer's state in the checkpoint {path} is not that of its weights (see "
                f"{weight}): Megatron shifts what it writes with "
                "--dist-ckpt-optim-fully-reshardable where data parallelism pads a bucket, so load "
                "the weights alone with --no-load-optim and save with --pipeline-schedule"
            )
