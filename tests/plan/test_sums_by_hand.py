"""Sums of the planner beside the same sums by hand, with sizes in which all terms differ."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from counted_sizes import arguments
from measured_runs import P, profile
from small_models import WHOLE, a100, load, small

from megatron_zb.measured.balance import of_arguments
from megatron_zb.measured.counted_layers import attention_of
from megatron_zb.measured.fit import Fit, Variant
from megatron_zb.measured.profile import Profile
from megatron_zb.plan import from_profile, model_flags
from megatron_zb.plan.byte_counts import StateBytes, layer_held
from megatron_zb.plan.features.vocabulary import PlanVocabulary
from megatron_zb.plan.from_profile import ProfileRequest
from megatron_zb.plan.mixers import LatentAttention, latent_attention
from megatron_zb.plan.step import Travel, by_formula, seconds_apart
from megatron_zb.plan.strategy import candidates_of
from megatron_zb.plan.work import PassSeconds
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import looped
from megatron_zb.schedules.step_plan import NO_ATTENTION, AttentionWork


@pytest.mark.parametrize(
    ("query_rank", "weights", "projected"),
    [
        # queries 5 * (7 + 3 * 15), down 7 * (11 + 2), up 11 * 3 * (13 + 17), output 3 * 17 * 7
        (5, 260 + 91 + 990 + 357, 3 * (15 + 15 + 17) + 5 + 11 + 2),
        (None, 315 + 91 + 990 + 357, 3 * (15 + 15 + 17) + 11 + 2),
    ],
)
def test_latent_attention(query_rank: int | None, weights: int, projected: int) -> None:
    sizes = LatentAttention.model_construct(
        query_rank=query_rank, kv_rank=11, nope_head_dim=13, rope_head_dim=2, value_head_dim=17
    )
    found = latent_attention(hidden=7, heads=3, sizes=sizes)
    assert found.weights == weights
    assert found.projected == projected
    assert found.attended == 3 * 17
    assert found.score_width == 13 + 2 + 17
    assert found.kept == 3 * (13 + 2 + 17)
    assert found.divided == (3,)


def test_latent_attention_moves_its_latents_and_all_heads_of_keys() -> None:
    """Every element out of a projection, narrow or wide, is read and written once more."""
    latent = {"query_rank": 384, "kv_rank": 128, "nope_head_dim": 48, "rope_head_dim": 24}
    model = small(latent_attention={**latent, "value_head_dim": 40})
    workload = load(model)
    rates, tokens = workload.device, 1024
    projected = 16 * (2 * (48 + 24) + 40) + 384 + 128 + 24
    weights = model.attention.weights + 2 * 4 * 1024**2
    scores = 2 * tokens * 1024 * 16 * (48 + 24 + 40) / 2
    traffic = (2 * 10 * 1024 + 4 * 4 * 1024 + 4 * projected) * tokens
    seconds = 2 * tokens * weights / rates.matrix_products.reached
    seconds += scores / rates.attention.reached + traffic / rates.memory_bandwidth.reached
    kernels = 2 * 4 + 2 * 2 + 1
    assert workload.layer(0).forward == pytest.approx(seconds + kernels * rates.kernels.seconds)


def test_residual_streams_travel_and_are_kept() -> None:
    """Hyper-connections read and write 9 * 4 - 1 elements more around each part of a layer."""
    plain, wide = load(small()), load(small(residual_streams=4))
    tokens, hidden, rates = 1024, 1024, a100()
    assert wide.message() == 4 * plain.message() == 4 * 2 * tokens * hidden
    assert wide.latency(True) - plain.latency(True) == pytest.approx(
        3 * plain.message() / rates.messages.in_node.bandwidth
    )
    mixed = 2 * 2 * (9 * 4 - 1) * hidden * tokens / rates.memory_bandwidth.reached
    launched = 2 * 7 * rates.kernels.seconds
    one, other = wide.layer(0), plain.layer(0)
    assert one.forward - other.forward == pytest.approx(mixed + launched)
    assert one.backward - other.backward == pytest.approx(2 * (mixed + launched))
    assert one.weight == other.weight
    held = [layer_held(of, 0).activation for of in (wide, plain)]
    assert held[0] - held[1] == 2 * 2 * 4 * hidden * tokens
    words = model_flags.model_flags(wide.model)
    assert words[-3:] == ["--enable-mhc-connections", "--mhc-num-residual-streams", "4"]
    given = Namespace(enable_mhc_connections=True, mhc_num_residual_streams=4)
    assert [model_flags._streams(args) for args in (given, Namespace())] == [4, 1]
    again = [load(small(residual_streams=n), recompute="full") for n in (4, 1)]
    kept = [layer_held(of, 0).activation for of in again]
    assert kept[0] == 4 * kept[1] == 4 * 2 * hidden * tokens


STATES = StateBytes(2e9, 4e9, 3e9, 1e9, 0.0)


def test_the_seconds_of_a_step() -> None:
    """For 12 bytes of optimizer state, 4 + 2 + 12 + 12 are read or written."""
    device = a100()
    alone = 30 / 12 * 3e9 / device.memory_bandwidth.reached
    latency = device.messages.between_nodes.latency
    assert seconds_apart(load(small()), STATES, post_validation=True) == pytest.approx(alone)
    for pipeline in (2, 8):
        found = seconds_apart(load(small(), pipeline=pipeline), STATES, post_validation=False)
        assert found == pytest.approx(alone + 4 * pipeline * latency)
    one = seconds_apart(load(small(), pipeline=1), STATES, post_validation=False)
    assert one == pytest.approx(alone)


def test_the_seconds_of_gradients_and_weights_between_nodes() -> None:
    """16 replicas on 2 nodes: 4 and 2 bytes a weight, 15 of 16 parts of them, over 8 links."""
    workload, links = load(small(), pipeline=1, data=16), a100().collectives
    speed = min(links.in_node.bandwidth, 8 * links.between_nodes.bandwidth)
    travel = Travel.of(workload, STATES)
    latency = links.between_nodes.latency
    assert travel.reduction == pytest.approx(latency + 4e9 * 15 / 16 / speed)
    assert travel.gathering == pytest.approx(latency + 2e9 * 15 / 16 / speed)
    assert travel.total == travel.reduction + travel.gathering


def test_the_seconds_between_two_iterations_without_a_timeline() -> None:
    """8 layers: the reduction of the first begins last, the gathering of the last ends first."""
    travel = Travel(reduction=16.0, gathering=8.0)
    assert travel.exposed(forward=4.0, backward=8.0, layers=8) == pytest.approx(
        max(2.0, 16.0 - 8.0 * 7 / 8) + max(1.0, 8.0 - 4.0 * 7 / 8)
    )
    assert travel.exposed(forward=400.0, backward=800.0, layers=8) == pytest.approx(2.0 + 1.0)
    assert travel.exposed(forward=1.0, backward=1.0, layers=1) == pytest.approx(16.0 + 8.0)
    workload = load(small(), pipeline=1, data=16)
    found = Travel.of(workload, STATES)
    apart = seconds_apart(workload, STATES, post_validation=False)
    rank = PassSeconds(0.001, 0.002, 0.003)
    hidden = apart + found.exposed(0.001, 0.005, 8)
    by_hand = {True: hidden, False: apart + found.total}
    for overlap, expected in by_hand.items():
        chosen = load(small(), pipeline=1, data=16, overlap=overlap)
        assert by_formula(chosen, STATES, rank) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "layer"),
    [
        ({"kv_channels": 32}, 2 + 8),
        ({"kv_channels": 32, "group_query_attention": True, "num_query_groups": 8}, 1.5 + 8),
        ({"ffn_hidden_size": 3072}, 4 + 6),
        ({"ffn_hidden_size": 3072, "swiglu": True}, 4 + 9),
        ({"num_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 512}, 4 + 3),
        (
            {
                "num_experts": 8,
                "moe_router_topk": 3,
                "moe_ffn_hidden_size": 512,
                "moe_shared_expert_intermediate_size": 256,
            },
            4 + 3.5,
        ),
        ({"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": None}, 4 + 16),
    ],
    ids=str,
)
def test_a_layer_in_squares_of_the_hidden_size(changes: dict[str, Any], layer: float) -> None:
    """The output layer has 32 of them, so it counts for 32 over those of a layer."""
    assert of_arguments("auto", arguments(**changes)).output == pytest.approx(32 / layer, rel=1e-3)


def with_links(there: float, back: float) -> Profile:
    """A profile whose messages to the next rank and to the one before take other times."""
    values = profile().model_dump()
    for link in values["links"]:
        link["seconds"] = there if link["target"] > link["source"] else back
    return Profile.model_validate(values)


def test_a_pass_that_waits_for_its_message_takes_the_link_in_its_direction() -> None:
    """Four stages of four layers; the output layer counts for three, with all else in them."""
    fit = Fit.of(with_links(0.25, 0.75))
    found = fit.costs(looped(P), (4, 4, 4, 4), Variant(blocking=True))
    free = fit.costs(looped(P), (4, 4, 4, 4))
    forward = [
        b - a for a, b in zip(free.seconds[PassKind.F], found.seconds[PassKind.F], strict=True)
    ]
    backward = [
        b - a for a, b in zip(free.seconds[PassKind.B], found.seconds[PassKind.B], strict=True)
    ]
    assert forward == pytest.approx([0.25, 0.25, 0.25, 0.0])
    assert backward == pytest.approx([0.0, 0.75, 0.75, 0.75])
    assert found.seconds[PassKind.W] == free.seconds[PassKind.W]
    assert {t for row in found.p2p for t in row} == {0.0}
    assert (free.p2p[0][1], free.p2p[1][0]) == (0.25, 0.75)
    assert free.seconds[PassKind.F] == pytest.approx((4.0, 4.0, 4.0, 7.0))
    assert free.seconds[PassKind.B] == pytest.approx((4.8, 4.8, 4.8, 8.4))
    assert free.seconds[PassKind.W] == pytest.approx((3.2, 3.2, 3.2, 5.6))


@pytest.mark.parametrize(
    ("rows", "tensor", "why"),
    [
        (4096, 1, None),
        (4098, 1, "its 4098 rows cannot be sharded evenly for 4 ranks"),
        (4100, 2, "its 4100 rows cannot be sharded evenly for 8 ranks"),
        (4104, 2, None),
        (None, 1, "the profile lacks its number of rows: profile again"),
    ],
)
def test_a_vocabulary_is_sharded_if_its_rows_can_be_divided(
    rows: int | None, tensor: int, why: str | None
) -> None:
    values = profile().model_dump()
    values["model"] |= {"vocabulary": rows, "tensor": tensor}
    asked = ProfileRequest(Profile.model_validate(values), 8, None, False)
    assert PlanVocabulary().why_not(asked) == why


def test_the_table_of_a_profile_is_in_milliseconds_and_gib() -> None:
    asked = ProfileRequest(profile(), 8, None, False, WHOLE)
    found, _ = from_profile.rows(asked, candidates_of(["1f1b"]))
    row = found[0]
    table = from_profile._table([row])
    cells = {str(column.header): next(iter(column.cells)) for column in table.columns}
    assert cells["ms"] == f"{1000 * row.timeline.makespan + 1000 * asked.profile.outside:.4g}"
    assert cells["activations GiB"] == f"{row.activation_bytes / 2**30:.3g}"


@pytest.mark.parametrize("rank", [1536, None])
def test_latent_attention_is_counted_as_the_planner_counts_it(rank: int | None) -> None:
    hidden, heads = 7168, 128
    sizes = LatentAttention.model_construct(
        query_rank=rank, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128
    )
    mixer = latent_attention(hidden, heads, sizes)
    widths = {"kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    args = SimpleNamespace(
        multi_latent_attention=True,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=hidden,
        q_lora_rank=rank,
        **widths,
    )
    linear = mixer.weights + 2 * hidden * hidden
    assert attention_of(args) == AttentionWork.counted(heads * mixer.score_width // 2, linear)
    every = "*+-EMG"  # each kind that can be counted
    assert attention_of(hybrid_arguments(), every) != NO_ATTENTION
    assert attention_of(hybrid_arguments(), every + "D") == NO_ATTENTION
    del args.kv_lora_rank
    assert attention_of(args) == NO_ATTENTION


def hybrid_arguments() -> SimpleNamespace:
    """Sizes of every kind of layer."""
    return SimpleNamespace(
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        num_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=8,
        mamba_state_dim=8,
        mamba_head_dim=8,
        mamba_num_groups=2,
        linear_key_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_value_head_dim=8,
    )
