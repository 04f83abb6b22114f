"""Routers on token slices, with losses of whole microbatches.

Which experts a token goes to depends on no other token. The losses of a router do: balancing is a
product of the mean of probabilities and the shares of experts, over all tokens of a microbatch. Its
gradient for a slice also needs the shares in the slices behind it. As B of a slice follows F of the
last one, they are there in time: the last slice computes the losses from the logits of all slices,
as Megatron does from those of the whole microbatch, and leaves the other slices their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_zb.megatron_core.sliced_documents import Cut


def has_losses(router: Any) -> bool:
    """Return whether one of Megatron's routers adds losses of its tokens to the gradient."""
    return router.is_aux_loss_enabled() or router.config.moe_z_loss_coeff is not None


@dataclass
class _Logits:
    """Logits and masks of a microbatch by slice, and the gradients that the last slice left."""

    rows: list[torch.Tensor] = field(default_factory=list)
    masks: list[torch.Tensor] = field(default_factory=list)
    left: list[torch.Tensor] = field(default_factory=list)


class WholeRouting:
    """The routing of a router; its ``routing`` is replaced on the instance."""

    def __init__(self, cut: Cut, router: Any) -> None:
        self._cut, self._router, self._usual = cut, router, router.routing
        self.kept: dict[int, _Logits] = {}
        router.routing = self.routing

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """Return probabilities and experts of the tokens of a slice.

        Args:
            logits: of shape [tokens of the slice, batch, experts].
            padding_mask: of shape [tokens of the slice, batch].
        """
        cut = self._cut
        if cut.forward_only or not self._router.training:
            return self._usual(logits, padding_mask)
        kept = self.kept.setdefault(cut.microbatch, _Logits())
        if cut.slice < cut.slices - 1:
            if cut.slice == len(kept.rows):
                kept.rows.append(logits.detach())
                kept.masks += [] if padding_mask is None else [padding_mask]
            with self._no_losses():
                logits = _WithGradient.apply(logits, self.kept, cut.microbatch, cut.slice)
                return self._usual(logits, padding_mask)
        own = logits.shape[0] * logits.shape[1]
        whole = _AllSlices.apply(logits, kept)
        mask = None if padding_mask is None else torch.cat([*kept.masks, padding_mask])
        probabilities, experts = self._usual(whole, mask)
        return probabilities[-own:], experts[-own:]

    @contextmanager
    def _no_losses(self) -> Iterator[None]:
        """Leave losses, and the counts for a bias of experts, to the last slice."""
        router = self._router
        counts = router.enable_expert_bias
        router.training = router.enable_expert_bias = False
        try:
            yield
        finally:
            router.training, router.enable_expert_bias = True, counts


class _AllSlices(torch.autograd.Function):
    """Puts the logits of the last slice behind those of the others, and leaves these gradients."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, kept: _Logits) -> torch.Tensor:
        ctx.kept = kept
        return torch.cat([*kept.rows, logits])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        lengths = [len(rows) for rows in ctx.kept.rows]
        *ctx.kept.left, own = gradients[0].split([*lengths, len(gradients[0]) - sum(lengths)])
        return own, None


class _WithGradient(torch.autograd.Function):
    """Adds to the gradient of a slice's logits what the last slice left."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, all_kept: dict[int, _Logits], microbatch: int, place: int
    ) -> torch.Tensor:
        ctx.all_kept, ctx.microbatch, ctx.place = all_kept, microbatch, place
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        left = ctx.all_kept[ctx.microbatch].left
        gradient = gradients[0] + left[ctx.place] if left else gradients[0]
        if ctx.place == 0:
            del ctx.all_kept[ctx.microbatch]
        return gradient, None, None, None
