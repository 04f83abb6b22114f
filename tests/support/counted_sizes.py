"""Megatron-LM's arguments for sizes whose layers are counted by hand."""

from __future__ import annotations

from argparse import Namespace
from typing import Any


def arguments(**changes: Any) -> Namespace:
    sizes = {
        "num_layers": 16,
        "hidden_size": 1024,
        "seq_length": 1,
        "num_attention_heads": 16,
        "group_query_attention": False,
        "num_query_groups": None,
        "ffn_hidden_size": None,
        "swiglu": False,
        "vocab_size": 32 * 1024,
        "tensor_model_parallel_size": 1,
    }
    return Namespace(**{**sizes, **changes})
