"""Layers balanced for what the ends of a model count for."""

from __future__ import annotations

from pathlib import Path

import pytest
from counted_sizes import arguments
from measured_runs import HEAVY, HYBRID, LAYERS, P, hybrid_profile, profile

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.measured.balance import (
    Ends,
    balanced,
    costs_of,
    counted,
    ends_of,
    measured,
    of_arguments,
)
from megatron_zb.measured.counted_layers import attention_of, flops_of_kind
from megatron_zb.measured.profile import write_profile
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.step_plan import NO_ATTENTION

SIZES = {"layers": LAYERS, "hidden_size": 64, "sequence_length": 32, "tensor": 1}


def v_half() -> schedules.Schedule:
    return schedules.build("v-half", pipeline_size=P, num_microbatches=16)


def test_layers_take_a_stages_time_together_and_the_ends_lengthen_the_outer_ones() -> None:
    costs = costs_of(4, 2, Ends(embedding=0.25, output=1.0, known="given"))
    assert (
        costs.seconds[PassKind.F]
        == costs.seconds[PassKind.B]
        == costs.seconds[PassKind.W]
        == (0.625, 0.5, 0.5, 1.0)
    )


def test_a_vocabulary_of_32_hidden_sizes_counts_for_eight_thirds_of_a_layer() -> None:
    """A layer has 12 h squared weights, and attention to a single token adds next to nothing."""
    ends = of_arguments("auto", arguments())
    assert ends.output == pytest.approx(32 / 12, rel=1e-3)
    assert ends.embedding == 0
    small = of_arguments("auto", arguments(group_query_attention=True, num_query_groups=4))
    assert small.output == pytest.approx(32 / 10.5, rel=1e-3)
    gated = of_arguments("auto", arguments(swiglu=True))
    assert gated.output == pytest.approx(32 / 16, rel=1e-3)
    long = of_arguments("auto", arguments(seq_length=6 * 1024))
    assert long.output == pytest.approx(32 / 18, rel=1e-3)
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 512}
    routed = of_arguments("auto", arguments(**experts))
    assert routed.output == pytest.approx(32 / 6, rel=1e-3)


def test_latent_attention_counts_by_its_widths() -> None:
    """Sizes by hand, of 2 heads: queries, keys and values, the projection, and an MLP."""
    widths = {"kv_lora_rank": 4, "qk_head_dim": 3, "qk_pos_emb_head_dim": 1, "v_head_dim": 5}
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 16, **widths}
    args = arguments(multi_latent_attention=True, **sizes)
    keys_and_values = 8 * (4 + 1) + 4 * 2 * (3 + 5)
    linear = 8 * 2 * 4 + keys_and_values + 2 * 5 * 8 + 2 * 8 * 16
    assert attention_of(args).forward == pytest.approx(2 * (4 + 5) // 2 / linear)
    args.q_lora_rank = 6
    linear += 6 * (8 + 2 * 4) - 8 * 2 * 4
    assert attention_of(args).forward == pytest.approx(2 * (4 + 5) // 2 / linear)
    args.v_head_dim = None
    assert attention_of(args) == NO_ATTENTION


def test_letters_of_a_pattern_count_by_their_sizes() -> None:
    """Of h squared: attention 4, an MLP 8, two of eight experts 2, the vocabulary 32."""
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 512, "seq_length": 1}
    args = arguments(mtp_num_layers=1, **experts)
    ends = of_arguments("auto", args, "*-|*E/*-")
    mean = (4 + 8 + 4 + 2) / 4
    assert ends.work == pytest.approx([4 / mean, 8 / mean, 4 / mean, 2 / mean], rel=1e-3)
    assert ends.of_stages((1, 3)) == pytest.approx([4 / mean, 14 / mean], rel=1e-3)
    assert ends.kept == pytest.approx(12 / mean, rel=1e-3)
    assert ends.output == pytest.approx((2 * 32 + 12) / mean, rel=1e-3)
    assert ends_of(args, "*-D-") is None
    h, heads = args.hidden_size, 2 * args.hidden_size // 64
    products = h * (6 * h + 2 * 8 * 128 + heads) + 128 * (2 * h + 8 * 128) + 4 * h * 128
    assert flops_of_kind(args, "M") == pytest.approx(2 * products)
    delta = h * (2 * 2048 + 3 * 4096 + 2 * 32) + 4 * (2 * 2048 + 4096) + 4 * 32 * 128**2
    assert flops_of_kind(args, "G") == pytest.approx(2 * delta)
    for length in (1, 4096):  # half of the products of scores and of values, h for each token
        args.seq_length = length
        assert flops_of_kind(args, "*") == pytest.approx(2 * (4 * h * h + length * h))
        assert flops_of_kind(args, "-") == pytest.approx(2 * 8 * h * h)


def test_a_multi_token_prediction_is_a_layer_and_an_output_layer() -> None:
    assert counted(10.0, 20.0).output == 2
    assert counted(10.0, 20.0, multi_token=2).output == 2 + 2 * 3


@pytest.mark.parametrize("output", [0.0, 0.4, 1.0, 2.7, 6.0])
def test_balance_is_never_slower_than_even(output: float) -> None:
    found = balanced(LAYERS, v_half(), Ends(0.0, output, "for a test"))
    assert sum(found.layers) == LAYERS
    assert 0 <= found.gain < 1
    if output >= 2:  # the ranks in the middle of the V have more
        assert found.gain > 0.1
        ends = found.layers[0] + found.layers[-1]
        assert ends < LAYERS / P - 1


def test_a_profile_says_what_the_ends_cost_and_what_is_gained(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    write_profile(profile(), path)
    ends = measured(path, SIZES)
    assert ends.output == pytest.approx(HEAVY)
    found = balanced(LAYERS, v_half(), ends)
    assert 0.05 < found.gain < 0.5
    assert f"counts for 3.00 (measured, {path}): " in str(found)
    slow = tmp_path / "slow.yaml"
    write_profile(profile(slow={2: 3.0}), slow)
    held_up = balanced(LAYERS, v_half(), measured(slow, SIZES))
    assert held_up.gain != found.gain  # its ranks are not equally fast


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("layers", "of a run with --num-layers 16, this one has --num-layers 17"),
        ("hidden_size", "--hidden-size 64, this one has --hidden-size 65"),
        ("sequence_length", "--seq-length 32"),
        ("tensor", "--tensor-model-parallel-size 1"),
    ],
)
def test_a_profile_of_another_model_is_refused(tmp_path: Path, field: str, words: str) -> None:
    path = tmp_path / "run.yaml"
    write_profile(profile(), path)
    with pytest.raises(UsageError, match=words):
        measured(path, {**SIZES, field: SIZES[field] + 1})


def test_the_letters_of_a_profile_balance_a_hybrid_model(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    write_profile(hybrid_profile(output=2.0), path)
    ends = measured(path, SIZES, HYBRID)
    mean = (4 * 4 + 12) / 16
    assert ends.work == pytest.approx([4 / mean] * 4 + [1 / mean] * 12)
    assert ends.output == pytest.approx(2.0 / mean)
    found = balanced(LAYERS, v_half(), ends)
    assert found.gain > 0.2
    of_other_size = schedules.build("zb-h1", pipeline_size=2, num_microbatches=8)
    halves = balanced(LAYERS, of_other_size, ends).layers
    assert halves[0] in (3, 4), "an even share is 15 of 30 MLPs, the output layer's 2 included"


@pytest.mark.parametrize(
    ("pattern", "letters", "words"),
    [
        ("", True, r"a run with --hybrid-layer-pattern \*.*, this one is no hybrid model"),
        ("*-" * 8, True, r"this one has \*-.*: profile this model"),
        (HYBRID + "/*-", True, r"this one has .*/\*-: profile this model"),
        (HYBRID, False, "cannot tell the layers of a hybrid model apart: profile this model again"),
    ],
)
def test_a_profile_of_another_pattern_is_refused(
    tmp_path: Path, pattern: str, letters: bool, words: str
) -> None:
    path = tmp_path / "run.yaml"
    write_profile(hybrid_profile() if letters else profile(), path)
    with pytest.raises(UsageError, match=words):
        measured(path, SIZES, pattern)
    segmented = HYBRID.replace("-", "-|", 3)
    assert letters is False or measured(path, SIZES, segmented).work


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="5 layers cannot be balanced over 8 stages"):
        balanced(5, v_half(), Ends(0.0, 1.0, "for a test"))
