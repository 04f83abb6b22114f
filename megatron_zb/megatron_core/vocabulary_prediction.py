"""Multi-token prediction where the vocabulary is cut over all ranks.

The output layer runs once more for each depth, so that the last stage hands on the tokens of all
depths, the model's own first, and P gets the losses of all. Megatron's code between its prediction
layers and its loss runs in P, on these losses. It masks, scales and logs those of prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import roll_tensor

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.vocabulary_shard import VocabularyShard

_OF_LOSSES = ("labels", "loss_mask", "packed_seq_params")


def with_later(tokens: torch.Tensor, depths: int, group: Any, packed: Any) -> list[torch.Tensor]:
    """Return tokens (batch, sequence), and at each further depth those that follow them."""
    found = [tokens]
    for _ in range(depths - 1):
        rolled, _ = roll_tensor(found[-1], cp_group=group, packed_seq_params=packed)
        found.append(rolled)
    return found


class PredictedLosses:
    """The last stage's ``model`` with multi-token prediction: stops it before its losses."""

    def __init__(self, model: Any, shard: VocabularyShard) -> None:
        self._model, self._shard, self._whole = model, shard, model._postprocess
        self._call: dict[str, Any] = {}
        self._losses: list[torch.Tensor] = []
        model._postprocess = self._before_losses
        model.compute_language_model_loss = self._next_loss

    def _before_losses(self, **call: Any) -> torch.Tensor:
        """Return the output (depths x sequence, batch, width) of the layers of all depths."""
        if call.get("output_processor") is not None:
            raise UsageError(
                "the model was called with an output_processor, which would get a part of the "
                "logits: give --pipeline-vocabulary off"
            )
        model = self._model
        model.post_process = False
        try:
            hidden: torch.Tensor = self._whole(**{**call, "mtp_in_postprocess": True})
        finally:
            model.post_process = True
        self._call = dict.fromkeys(call) | {name: call.get(name) for name in _OF_LOSSES}
        return self._shard.loss(call["labels"], hidden)

    def call(self) -> dict[str, Any]:
        """Return what the losses of the forward that has just run depend on."""
        found, self._call = self._call, {}
        return found

    def main_loss(
        self, call: dict[str, Any], losses: Sequence[torch.Tensor], right: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the model's own losses (batch, sequence), whose backward starts all others.

        Args:
            call: that of the microbatch.
            losses: the losses of all depths, the model's own first.
            right: (batch, sequence) whether the label's logit is the largest, for each depth.
        """
        self._losses = [*losses[1:], losses[0]]
        # logits of two words, of which the first one is every label
        words = [torch.stack([of.t().float(), 0.5 * torch.ones_like(of.t())], 2) for of in right]
        given = call | {
            "hidden_states": torch.cat(words),
            "labels": torch.zeros_like(call["labels"]),
            "mtp_in_postprocess": False,
            "runtime_gather_output": True,
        }
        found: torch.Tensor = self._whole(**given)
        return found

    def _next_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Stand in for ``compute_language_model_loss``, which the model calls for its own last."""
        del labels
        loss = self._losses.pop(0)
        return loss if self._losses else loss + 0 * logits[..., 0].t()
