"""What a finished student says of its layers: Megatron's configuration of heterogeneous layers."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from megatron_zb.distill.stitching import are_alike, described, is_uniform
from megatron_zb.distill.student import BlockShape

FULL = BlockShape("full", "attention", 4, "mlp", 256, None)
FEWER = BlockShape("fewer", "attention", 2, "mlp", 128, None)
LINEAR = BlockShape("linear", "linear", 4, "linear", 256, None)
NOTHING = BlockShape("nothing", "no_op", 4, "no_op", 256, None)
TEACHER = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "untie_embeddings_and_output_weights": True,
    "rotary_base": 500000,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
}


def of_attention(groups: int | None, heads: int | None, **kind: bool) -> dict[str, object]:
    kinds = {"no_op": False, "replace_with_linear": False}
    return {**kinds, **kind, "num_query_groups": groups, "n_heads_in_group": heads}


def of_mlp(width: int | None, **kind: bool) -> dict[str, object]:
    return {"no_op": False, "replace_with_linear": False, **kind, "ffn_hidden_size": width}


def test_every_layer_is_described() -> None:
    shapes = [FULL, FEWER, LINEAR, NOTHING]
    assert json.loads(described(argparse.Namespace(**TEACHER), shapes)) == {
        "hidden_act": "silu",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "tie_word_embeddings": False,
        "rope_theta": 500000,
        "rope_scaling": {"factor": 1.0},
        "block_configs": [
            {"attention": of_attention(4, 2), "mlp": of_mlp(256)},
            {"attention": of_attention(2, 4), "mlp": of_mlp(128)},
            {
                "attention": of_attention(None, None, replace_with_linear=True),
                "mlp": of_mlp(None, replace_with_linear=True),
            },
            {"attention": of_attention(None, None, no_op=True), "mlp": of_mlp(None, no_op=True)},
        ],
    }


def test_scaled_positions_stay_so() -> None:
    scaled = argparse.Namespace(**TEACHER | {"use_rope_scaling": True})
    assert json.loads(described(scaled, [FULL] * 4))["rope_scaling"] == {"factor": 8.0}


def test_layers_of_one_model_have_the_same_sizes() -> None:
    assert is_uniform([FULL, FULL])
    assert not is_uniform([FULL, FEWER])
    assert not is_uniform([LINEAR, LINEAR])
    assert not is_uniform([NOTHING])


def test_layers_of_which_some_have_experts_are_stored_one_by_one() -> None:
    """As Megatron stores them, also where all are as wide."""
    dense, experts = FULL, replace(FULL, num_experts=4)
    plain = argparse.Namespace(num_layers=2, num_experts=None, moe_layer_freq=None)
    assert are_alike(plain, [dense, dense])
    assert not are_alike(plain, [dense, FEWER])
    for frequency, shapes, alike in (
        (1, [experts, experts], True),
        ([0, 1], [dense, experts], False),
        ([1, 1], [experts, experts], False),
        (2, [experts, dense], False),
    ):
        args = argparse.Namespace(num_layers=2, num_experts=4, moe_layer_freq=frequency)
        assert are_alike(args, shapes) is alike
