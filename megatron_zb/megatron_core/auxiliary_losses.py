"""Scales of auxiliary losses, which Megatron keeps for all microbatches at once.

Losses of routers, of multi-token prediction and of sparse attention start their backward in the
middle of the model. Megatron sets how much they count after every F, for all B that follow. That is
right while all microbatches count equally. Of two adapters with other numbers of microbatches or
loss scales, a B would take the scale of the last F, whosever it was.
"""

from __future__ import annotations

import torch

from megatron_zb.megatron_core import versions


class AuxiliaryScales:
    """The scales that F of each adapter has set, for its B."""

    def __init__(self) -> None:
        self._scalers = versions.auxiliary_scalers()
        self._known: dict[str, list[torch.Tensor | None]] = {}

    def keep(self, adapter: str) -> None:
        """Take note of the scales behind an F of an adapter."""
        found = (scaler.main_loss_backward_scale for scaler in self._scalers)
        self._known[adapter] = [None if scale is None else scale.clone() for scale in found]

    def put_back(self, adapter: str) -> None:
        """Let a B of an adapter count its auxiliary losses as its F have set it."""
        for scaler, scale in zip(self._scalers, self._known.get(adapter, ()), strict=False):
            if scale is not None:
                scaler.set_loss_scale(scale)
