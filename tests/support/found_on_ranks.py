"""What the ranks of a trainer have found, put together and compared to the last bit."""

from __future__ import annotations

from typing import Any

import torch


def whole(of_ranks: list[Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What the ranks with the output layer have found, and the weights of all ranks."""
    weights: dict[str, torch.Tensor] = {}
    for _, part in of_ranks:
        for name, weight in part.items():
            assert torch.equal(weights.setdefault(name, weight), weight), name
    return [found for found, _ in of_ranks if found and found[-1]], weights


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | dict):
        items = one.items() if isinstance(one, dict) else enumerate(one)
        return len(one) == len(other) and all(same(value, other[key]) for key, value in items)
    return bool(one == other)
