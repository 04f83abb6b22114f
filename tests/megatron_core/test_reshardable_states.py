"""Places of weights in joined buckets, and checkpoints whose states are not of their weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import checkpoints

WEIGHT = "decoder.layers.mlp.router.weight"


class Shifting(SimpleNamespace):
    """An optimizer whose Megatron takes weights from their places in the padded buffer."""

    def sharded_param_state_fully_reshardable(self) -> Any:
        return [each.param_index_map for each in self.buffers]


class Correcting(SimpleNamespace):
    """An optimizer whose Megatron subtracts the padding of the buckets before a weight."""

    def sharded_param_state_fully_reshardable(self) -> Any:
        found = []
        for each in self.buffers:
            found.append(sum(bucket.numel_unpadded for bucket in each.buckets))
        return found


def buffer(places: dict[str, tuple[int, int, int]], *buckets: tuple[int, int]) -> Any:
    """A buffer with weights at places, and with buckets of sizes with and without padding."""
    return SimpleNamespace(
        param_index_map=places,
        buckets=[
            SimpleNamespace(grad_data=torch.empty(padded), numel_unpadded=own)
            for padded, own in buckets
        ],
    )


def test_weights_are_found_where_the_buckets_are_joined() -> None:
    places = {"a": (0, 200, 0), "b": (256, 300, 1), "c": (320, 420, 1), "d": (512, 520, 2)}
    one = buffer(places, (256, 200), (256, 164), (128, 8))
    other = buffer({"e": (0, 8, 0)}, (128, 8))
    own = {"f": (0, 8, 0), "g": (16, 24, 1)}
    corrected = buffer(own, (16, 8), (16, 8))
    optimizers = [
        Shifting(buffers=[one]),
        SimpleNamespace(),
        Shifting(buffers=[other]),
        Correcting(buffers=[corrected]),
    ]
    with pytest.raises(KeyError), checkpoints.without_padding(optimizers):
        assert one.param_index_map == {
            "a": (0, 200, 0),
            "b": (200, 244, 1),
            "c": (264, 364, 1),
            "d": (364, 372, 2),
        }
        assert other.param_index_map == {"e": (0, 8, 0)}
        assert corrected.param_index_map is own
        raise KeyError
    assert one.param_index_map is places


def saved(folder: Path, weight: torch.Tensor, state: torch.Tensor, prefix: str = "") -> Path:
    tensors = {
        WEIGHT: weight,
        f"{prefix}optimizer.state.param.{WEIGHT}": state,
        f"{prefix}optimizer.state.exp_avg.{WEIGHT}": torch.zeros_like(state),
        "optimizer.state.param.of_no_weight": state,
    }
    checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)
    return folder


def weights() -> torch.Tensor:
    return torch.randn(4, 96, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_state_that_is_the_weight_before_rounding_is_loaded(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    checkpoints.check(saved(tmp_path, weights().to(dtype), weights()))


@pytest.mark.parametrize("prefix", ["", "chained_1."])
def test_a_shifted_state_is_refused_by_the_name_of_its_weight(tmp_path: Path, prefix: str) -> None:
    shifted = weights().flatten().roll(-64).reshape(4, 96)
    folder = saved(tmp_path, weights().bfloat16(), shifted, prefix)
    with pytest.raises(UsageError) as refusal:
        checkpoints.check(folder)
    said = str(refusal.value)
    assert f"{tmp_path} is not that of its weights (see {WEIGHT})" in said
    assert "--no-load-optim" in said
