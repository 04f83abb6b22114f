"""A stage that sleeps for its costs: the runtime without a model."""

from __future__ import annotations

import time

import torch

from megatron_zb.schedules.costs import StageCosts
from megatron_zb.schedules.passes import Pass, PassKind


class SyntheticStage:
    """A stage that sleeps for the seconds of F, B, W and BW and sends messages without content."""

    def __init__(self, stage: int, costs: StageCosts) -> None:
        self._stage, self._costs = stage, costs
        self._is_last = stage == len(costs.forward) - 1
        self._is_first = stage == 0
        self._payload = torch.zeros(64)

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        self._sleep(PassKind.F, microbatch)
        return None if self._is_last else self._payload

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self._sleep(PassKind.B, microbatch)
        return None if self._is_first else self._payload

    def backward_weight(self, microbatch: int) -> None:
        self._sleep(PassKind.W, microbatch)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self._sleep(PassKind.BW, microbatch)
        return None if self._is_first else self._payload

    def _sleep(self, kind: PassKind, microbatch: int) -> None:
        time.sleep(self._costs.duration(Pass(kind, self._stage, microbatch)))

    def reset(self) -> None:
        """Do nothing: there is nothing to forget."""
