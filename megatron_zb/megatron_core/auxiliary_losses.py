"""Scales of auxiliary losses, which Megatron keeps for all microbatches at once.

Losses of routers, of multi-token prediction and of sparse attention start their backward in the
middle of the model. Megatron sets how much they count after every F, for all B that follow. That is
right while all microbatches count equally. Of two owners with other numbers of microbatches or loss
scales, such as two adapters, a B would take the scale of the last F, whosever it was.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from megatron_zb.megatron_core import versions


class AuxiliaryScales:
    """The scales that F of each owner has set, for its B."""

    def __init__(self) -> None:
        self._scalers = versions.auxiliary_scalers()
        self._known: dict[Hashable, list[torch.Tensor | None]] = {}

    def keep(self, owner: Hashable) -> None:
        """Take note of the scales behind an F of an owner."""
        found = (scaler.main_loss_backward_scale for scaler in self._scalers)
        self._known[owner] = [None if scale is None else scale.clone() for scale in found]

    def put_back(self, owner: Hashable) -> None:
        """Let a B of an owner count its auxiliary losses as its F have set it."""
        for scaler, scale in zip(self._scalers, self._known.get(owner, ()), strict=False):
            if scale is not None:
                scaler.set_loss_scale(scale)
