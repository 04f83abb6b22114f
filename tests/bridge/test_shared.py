"""Errors of several trainings in one pipeline, raised before anything is built."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from megatron_zb.bridge.shared import SharedTraining, _check
from megatron_zb.errors import UsageError


def training(iterators: int) -> dict[str, SharedTraining]:
    return {"french": SharedTraining(4, lambda chunks: chunks, [iter(())] * iterators)}


def chunk(*, trained: bool = True, shared: bool = False) -> Any:
    layer: Any = torch.nn.Linear(2, 2).requires_grad_(trained)
    if shared:
        layer.weight.shared_embedding = True  # as Megatron marks it
    return layer


@pytest.mark.parametrize(
    ("chunks", "iterators", "said"),
    [
        ([chunk(), chunk()], 1, "training french has 1 iterators, and this rank 2 chunks: give it"),
        ([chunk(trained=False)], 1, "no weight of the model is trained: give one with adapters"),
        ([chunk(shared=True)], 1, "embedding and output layer share a weight that is trained"),
    ],
    ids=["data", "frozen", "tied"],
)
def test_a_mistake_is_refused_in_a_sentence(chunks: list[Any], iterators: int, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        _check(chunks, training(iterators))
    _check([chunk(), chunk(trained=False, shared=True)], training(2))
