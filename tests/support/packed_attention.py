"""Attention over packed sequences on the CPU, where Megatron's own refuses them.

It stands in for ``core_attention`` of a layer's specification. Its memory grows with the square of
all tokens of a batch. It has no dropout and no context parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class PackedAttention(torch.nn.Module):
    """Causal attention that looks at no other sequence, with grouped keys.

    Tensors are [tokens, heads, size] with ``packed_seq_params``, or else [length, batch, heads,
    size].
    """

    def __init__(self, softmax_scale: float | None = None, **others: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        if packed_seq_params is None:
            tensors = [each.permute(1, 2, 0, 3) for each in (query, key, value)]
            return self._attend(*tensors, mask=attention_bias).permute(2, 0, 1, 3).flatten(2)
        mask = _causal_within_sequences(packed_seq_params, query.size(0))
        tensors = [each.transpose(0, 1)[None] for each in (query, key, value)]
        return self._attend(*tensors, mask=mask)[0].transpose(0, 1).flatten(1)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=query.size(1) != key.size(1),
        )


def _causal_within_sequences(packed: Any, tokens: int) -> torch.Tensor:
    ends = packed.cu_seqlens_q_padded
    ends = (packed.cu_seqlens_q if ends is None else ends)[1:]
    places = torch.arange(tokens)
    sequence = torch.bucketize(places, ends.to(places.dtype), right=True)
    return (sequence[:, None] == sequence) & (places[:, None] >= places)
