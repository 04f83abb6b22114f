"""Selective recomputation in plans: what Megatron's modules discard, and what R takes."""

from __future__ import annotations

import pytest
from small_models import load, small

from megatron_zb.cli import main
from megatron_zb.errors import UsageError
from megatron_zb.plan import byte_counts, operators
from megatron_zb.plan.mixers import LatentAttention
from megatron_zb.plan.model import Experts, ModelConfig

TOKENS, HIDDEN, HEADS = 1024, 1024, 16
TOP_K, INNER, SHARED = 2, 512, 256


def with_experts(**changes: object) -> ModelConfig:
    """A small model with experts in all layers but the first, and latent attention."""
    sizes = {"experts": 8, "top_k": TOP_K, "ffn_hidden_size": INNER, "dense_layers": 1}
    experts = Experts.model_validate({**sizes, "shared_ffn_hidden_size": SHARED})
    latent = LatentAttention(
        query_rank=96, kv_rank=32, nope_head_dim=48, rope_head_dim=16, value_head_dim=64
    )
    return small(experts=experts, latent_attention=latent, gated_mlp=True, **changes)


# Bytes that one token keeps in a layer with experts unless they are recomputed.
BY_HAND = {
    "mla_up_proj": 2 * HEADS * (2 * (48 + 16) + 64),
    "layernorm": 2 * 2 * HIDDEN,
    "moe_act": 2 * TOP_K * INNER,
    "shared_experts": 2 * 3 * SHARED,
    "moe": 2 * (3 * TOP_K * INNER + 2 * TOP_K * HIDDEN) + 2 * 3 * SHARED,
    "mlp": 0,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_module_drops_what_a_count_by_hand_says(name: str) -> None:
    held, less = (
        byte_counts.layer_held(load(with_experts(), recompute=how), 1) for how in ("none", name)
    )
    assert held.activation - less.activation == BY_HAND[name] * TOKENS
    assert less.in_backward - held.in_backward == BY_HAND[name] * TOKENS
    assert less.for_weight == held.for_weight


def test_a_dense_layer_drops_its_own_mlp() -> None:
    held, less = (
        byte_counts.layer_held(load(with_experts(), recompute=how), 0)
        for how in ("none", "mlp+moe_act")
    )
    assert held.activation - less.activation == 2 * 3 * with_experts().ffn * TOKENS


def test_a_module_within_another_is_dropped_once() -> None:
    """The activation function and the shared experts are part of what moe recomputes."""
    model = with_experts()
    alone, named = (
        load(model, recompute=how) for how in ("moe", "layernorm+moe+moe_act+shared_experts")
    )
    norms = BY_HAND["layernorm"] * TOKENS
    held = [byte_counts.layer_held(of, 1) for of in (alone, named)]
    assert held[0].activation - held[1].activation == norms
    assert held[1].activation >= 0


def test_modules_add_up_and_cost_time_in_b_alone() -> None:
    model = with_experts()
    none, one, other, both = (
        load(model, recompute=how).layer(1)
        for how in ("none", "moe_act", "mla_up_proj", "moe_act+mla_up_proj")
    )
    assert none.backward < one.backward < other.backward
    added = one.backward + other.backward - none.backward
    assert both.backward == pytest.approx(added)
    assert none.forward == both.forward
    assert none.weight == both.weight


def test_all_experts_again_take_their_forward_and_exchange() -> None:
    model = with_experts()
    none, whole = (load(model, expert=8, recompute=how).layer(1) for how in ("none", "moe"))
    assert whole.backward - none.backward > load(model, expert=8).all_to_all(1)
    assert whole.backward < none.backward + none.forward


def test_scores_alone_are_what_selective_is() -> None:
    model = small(flash_attention=False, dropout=True)
    short, long = (load(model, recompute=how) for how in ("selective", "core_attn"))
    assert byte_counts.layer_held(short, 0) == byte_counts.layer_held(long, 0)
    assert short.layer(0) == long.layer(0)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("mlp+some", "--recompute 'some' is unknown: give one or more of none,selective,full, or"),
        ("moe_act+moe_act", "names a module twice"),
        ("mla_up_proj", "--recompute mla_up_proj: "),
        ("moe", "has no such modules: leave it out, or give none"),
    ],
)
def test_wrong_modules_are_refused(asked: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("+", r"\+")):
        operators.check_recomputation(small(), asked)


def test_a_plan_has_the_modules_among_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        "plan --config gpt_1_5b --gpus 4 --device h100_sxm --pipeline 4 --tensor 1 "
        "--global-batch-size 8 --micro-batch-size 1 --schedules zb-h1 --vocabulary off --tries 1 "
        "--recompute"
    ).split()
    assert main.main([*asked, "mlp+layernorm"]) == 0
    printed = capsys.readouterr().out
    assert "--recompute-granularity selective" in printed
    assert "--recompute-modules mlp layernorm" in printed
