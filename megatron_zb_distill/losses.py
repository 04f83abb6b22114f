"""Losses between the output of a student block and that of its teacher block."""

from __future__ import annotations

from collections.abc import Callable

import torch

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def mse(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the mean squared difference of two tensors of one shape; a scalar in float32."""
    return (student.float() - teacher.float()).square().mean()


def normalised_mse(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the mean squared difference over the teacher's mean square; 1 for an output of zeros.

    Puzzle, arXiv 2411.19146, section 3.
    """
    return mse(student, teacher) / teacher.float().square().mean()


def cosine(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return one minus the cosine of each token's two vectors, averaged over (sequence, batch)."""
    similar = torch.nn.functional.cosine_similarity(student.float(), teacher.float(), dim=-1)
    return 1 - similar.mean()


LOSSES: dict[str, Loss] = {"mse": mse, "normalised-mse": normalised_mse, "cosine": cosine}
