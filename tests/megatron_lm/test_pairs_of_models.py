"""Models whose overlapped passes would compute something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_zb.errors import UsageError
from megatron_zb.megatron_lm.models import check_pairs_of_model


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Linear(2, 2)


class Layer(torch.nn.Module):
    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp


class GPTModel(torch.nn.Module):
    """The parts of Megatron's model that the check reads: layers of a chunk, and the final norm."""

    def __init__(self, last: torch.nn.Module | None, norm: bool) -> None:
        super().__init__()
        decoder: Any = torch.nn.Module()
        self.decoder = decoder
        layers = [] if last is None else [Layer(torch.nn.Linear(2, 2)), Layer(last)]
        decoder.layers = torch.nn.ModuleList(layers)
        decoder.final_layernorm = torch.nn.LayerNorm(2) if norm else None


class Other(torch.nn.Module):
    pass


@pytest.mark.parametrize(
    "chunk",
    [
        GPTModel(Experts(), norm=True),
        GPTModel(torch.nn.Linear(2, 2), norm=False),
        GPTModel(None, norm=True),
    ],
)
def test_chunks_that_can_run_overlapped_passes(chunk: GPTModel) -> None:
    check_pairs_of_model(chunk)


def frozen() -> GPTModel:
    chunk = GPTModel(Experts(), norm=True)
    decoder: Any = chunk.decoder
    decoder.layers[0].mlp.weight.requires_grad_(False)
    return chunk


@pytest.mark.parametrize(
    ("chunk", "why"),
    [
        (GPTModel(torch.nn.Linear(2, 2), norm=True), "would leave the final norm out"),
        (frozen(), "frozen weights, such as decoder.layers.0.mlp.weight"),
        (Other(), "cannot run a Other: only GPTModel is supported"),
    ],
)
def test_chunks_that_cannot(chunk: torch.nn.Module, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_pairs_of_model(chunk)
