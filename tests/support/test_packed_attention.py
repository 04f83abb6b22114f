"""Packed attention is that of each sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from packed_attention import PackedAttention

LENGTHS = [5, 9, 2]


@pytest.mark.parametrize("padded", [False, True])
def test_packed_sequences_attend_to_themselves(padded: bool) -> None:
    """With two heads that share their keys; padding counts to the sequence before it."""
    tokens = sum(LENGTHS)
    query, key, value = (torch.randn(tokens, heads, 8) for heads in (4, 2, 2))
    ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0)
    packed = SimpleNamespace(
        cu_seqlens_q=ends - 1 if padded else ends, cu_seqlens_q_padded=ends if padded else None
    )
    attention = PackedAttention()
    found = attention(query, key, value, packed_seq_params=packed)
    assert found.shape == (tokens, 32)
    parts = zip(*(each.split(LENGTHS) for each in (query, key, value)), strict=True)
    expected = [attention(*(part[:, None] for part in parts_of_one)) for parts_of_one in parts]
    torch.testing.assert_close(found, torch.cat(expected)[:, 0])
