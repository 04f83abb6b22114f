"""Seconds and bytes of a strategy, and of the layers that a rank has."""

from __future__ import annotations

from typing import Any

import pytest
from small_models import a100, load, small

from megatron_zb import schedules
from megatron_zb.plan import byte_counts
from megatron_zb.plan.device import DeviceConfig, Link, Places
from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.operators import all_weights, attention_flops, mlp_operator, model_flops
from megatron_zb.plan.prediction import IterationSettings, peak_of, predict, worst_rank
from megatron_zb.plan.stages import cut_into_stages
from megatron_zb.plan.step import seconds_apart
from megatron_zb.plan.strategy import candidates_of
from megatron_zb.plan.work import PassSeconds
from megatron_zb.schedules import layout
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.placement import looped, v_shape


def gapless() -> DeviceConfig:
    """An A100 that loses nothing between kernels."""
    device = a100()
    kernels = device.kernels.model_copy(update={"seconds": 0.0})
    return device.model_copy(update={"kernels": kernels})


def test_products_with_weights_take_as_long_in_f_b_and_w() -> None:
    """Beside the scores and the traffic, which have no W."""
    work = load(small(), gapless()).layer(0)
    weights = 12 * 1024**2
    assert work.weight == pytest.approx(2 * 1024 * weights / a100().matrix_products.reached)
    assert work.forward > work.weight
    assert work.backward > work.forward


@pytest.mark.parametrize(("gated", "forward", "backward"), [(False, 2, 3), (True, 3, 5)])
def test_an_activation_function_reads_and_writes_16_bits(
    gated: bool, forward: int, backward: int
) -> None:
    """F reads g gates and writes one value; B reads these g + 1 and writes g."""
    mlp = mlp_operator(small(gated_mlp=gated), 0)
    assert mlp is not None
    assert mlp.forward == 2 * forward * mlp.inputs
    assert mlp.backward == 2 * backward * mlp.inputs


def test_a_small_microbatch_is_less_efficient() -> None:
    one, two = (load(small(), microbatch=b).layer(0) for b in (1, 2))
    assert two.forward < 2 * one.forward
    assert two.backward < 2 * one.backward
    assert two.weight < 2 * one.weight


def test_recomputation_adds_f_to_b_and_nothing_to_w() -> None:
    model = small(flash_attention=False, dropout=True)
    none, some, everything = (
        load(model, recompute=how).layer(0) for how in ("none", "selective", "full")
    )
    assert everything.backward == pytest.approx(none.backward + none.forward)
    assert none.backward < some.backward < everything.backward
    assert none.forward == some.forward == everything.forward
    assert none.weight == some.weight == everything.weight


def test_scores_that_are_stored_are_computed_and_moved_again() -> None:
    """By selective recomputation: 16 heads, 8 bytes of each score."""
    model = small(flash_attention=False)
    none, some = (load(model, gapless(), recompute=how) for how in ("none", "selective"))
    products = attention_flops(model, 1024, 1024) / a100().attention.reached
    again = some.layer(0).backward - none.layer(0).backward
    assert again == pytest.approx(products + some.moved(8 * 16 * 1024**2))


def test_activations_are_those_of_the_papers() -> None:
    """34 s b h + 5 a s s b, of which W needs 32 s b h."""
    model = small(flash_attention=False, dropout=True)
    s, h, a = 1024, 1024, 16
    held = byte_counts.layer_held(load(model), 0)
    assert held.activation == 34 * s * h + 5 * a * s * s
    assert held.for_weight == 32 * s * h
    split = byte_counts.layer_held(load(model, tensor=4), 0)
    assert split.activation == held.activation / 4


def test_states_are_18_bytes_of_a_weight_and_fewer_with_data_parallelism() -> None:
    alone = byte_counts.rank_states(load(small()), [0, 1], False, False)
    assert alone.parameters == 2 * 12 * 1024**2
    assert alone.total == 18 * alone.parameters
    shared = byte_counts.rank_states(load(small(), data=4), [0, 1], False, False)
    assert shared.total == (6 + 12 / 4) * alone.parameters


def test_what_w_needs_of_tensor_parallel_ranks_is_counted_as_shards() -> None:
    held = [byte_counts.layer_held(load(small(), tensor=t), 0).for_weight for t in (1, 2, 8)]
    assert held == [32 * 1024 * 1024 / t for t in (1, 2, 8)]


@pytest.mark.parametrize("tensor", [1, 4])
def test_w_of_the_output_layer_holds_its_input_and_the_gradient_of_the_logits(tensor: int) -> None:
    model = small(vocabulary=50_000)
    held = byte_counts.output_held(load(model, tensor=tensor, microbatch=2))
    tokens = 2 * 1024
    assert held.activation == (2 + 2) * tokens * 1024 / tensor
    assert held.for_weight == 2 * tokens * (1024 + 50_000) / tensor
    assert held.in_backward == 0


@pytest.mark.parametrize("tensor", [1, 4])
def test_logits_take_ten_bytes_each_while_their_microbatch_runs(tensor: int) -> None:
    """In 16 bits, their softmax and its gradient in 32; on the rank of the output layer alone."""
    model = small(vocabulary=50_000)
    expected = 10 * 1024 * 50_000 / tensor
    assert byte_counts.logits(load(model, tensor=tensor)) == expected
    staged = cut_into_stages(load(model, tensor=tensor), candidates_of(["zb-h1"])[-1], None)
    assert staged is not None
    assert [staged.logits(rank) for rank in range(4)] == [0, 0, 0, expected]


@pytest.mark.parametrize("snapshot", [False, True])
def test_the_memory_of_the_fullest_rank_has_all_its_parts(snapshot: bool) -> None:
    """With a large vocabulary, that is the last one of a pipeline that is no V."""
    model = small(vocabulary=200_000)
    staged = cut_into_stages(load(model), candidates_of(["zb-h1"])[-1], None)
    assert staged is not None
    schedule = schedules.build("zb-h1", pipeline_size=4, num_microbatches=8)
    memory = worst_rank(staged, schedule, snapshot=snapshot)
    states, device = staged.states[3], staged.load.device
    assert memory.rank == 3
    assert (memory.weights, memory.gradients) == (states.weights, states.gradients)
    assert memory.optimizer == states.optimizer > 0
    assert memory.snapshot == (states.optimizer if snapshot else 0)
    assert memory.logits == 10 * 1024 * 200_000
    assert memory.messages == 4 * 2 * 1024 * 1024  # two of each direction
    assert memory.reserved + memory.fragmentation == device.reserved_bytes
    assert (memory.activations, memory.weight_queue) == peak_of(schedule.ranks[3], staged.held)
    assert memory.total == sum(memory.parts().values())
    assert len(memory.parts()) == 10


def test_the_fullest_rank_of_a_v_has_megatrons_number() -> None:
    """Logical rank 0 has both ends of a V; it is Megatron's last pipeline rank."""
    staged = cut_into_stages(load(small(vocabulary=200_000)), candidates_of(["v-half"])[-1], None)
    assert staged is not None
    assert staged.logits(0) > 0
    schedule = schedules.build("v-half", pipeline_size=4, num_microbatches=8)
    assert worst_rank(staged, schedule, snapshot=False).rank == 3


@pytest.mark.parametrize(("tied", "copies"), [(True, 1), (False, 2)])
def test_a_tied_embedding_is_kept_once_where_both_ends_are_on_one_rank(
    tied: bool, copies: int
) -> None:
    model = small(tied_embeddings=tied, vocabulary=50_000)
    none, both = (byte_counts.rank_states(load(model), [0], ends, ends) for ends in (False, True))
    assert both.parameters - none.parameters == copies * 1024 * 50_000
    first = byte_counts.rank_states(load(model), [0], True, False)
    assert first.parameters - none.parameters == 1024 * 50_000


def test_the_shards_of_experts_lie_on_different_ranks() -> None:
    experts = {"experts": 8, "top_k": 2, "ffn_hidden_size": 512}
    model = small(gated_mlp=True, experts=experts)
    whole = byte_counts.rank_states(load(model), [1], False, False)
    split = byte_counts.rank_states(
        load(model, data=8, expert=2, expert_tensor=4), [1], False, False
    )
    assert whole.routed == 8 * 3 * 512 * 1024
    assert split.routed == whole.routed / 8


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_message_in_and_one_out_are_held_in_both_directions_for_each_chunk(chunks: int) -> None:
    assert byte_counts.message_buffers(load(small()), chunks) == 4 * chunks * 2 * 1024 * 1024
    assert byte_counts.message_buffers(load(small(), pipeline=1), chunks) == 0


def test_two_small_reductions_over_the_pipeline_come_before_a_step() -> None:
    states = byte_counts.rank_states(load(small()), [0, 1], False, False)
    together, apart = (
        seconds_apart(load(small()), states, post_validation=flag) for flag in (True, False)
    )
    assert apart - together == pytest.approx(4 * 4 * a100().messages.between_nodes.latency)
    assert together == pytest.approx(
        (4 + 2 * 12 + 2) * states.parameters / a100().memory_bandwidth.reached
    )


def test_experts_are_counted_where_tokens_visit_them() -> None:
    dense = small(gated_mlp=True, ffn_hidden_size=1024)
    sparse = small(
        gated_mlp=True,
        ffn_hidden_size=1024,
        experts={"experts": 8, "top_k": 2, "ffn_hidden_size": 512, "dense_layers": 1},
    )
    assert load(sparse).layer(0) == load(dense).layer(0)
    router = 1024 * 8
    assert load(sparse, gapless()).layer(1).weight == pytest.approx(
        load(dense, gapless()).layer(1).weight * (1 + router / (4 * 1024**2 + 3 * 1024**2))
    )
    assert all_weights(sparse) > all_weights(dense)


def test_training_takes_six_flops_for_each_weight_and_token() -> None:
    model = small(sequence_length=1, vocabulary=1)
    weights = 8 * 12 * 1024**2
    assert model_flops(model, 1000, 1) == pytest.approx(6 * 1000 * weights, rel=0.001)


def test_tensor_parallelism_costs_messages_and_saves_the_rest() -> None:
    model = small(hidden_size=4096)
    one, eight = (load(model, gapless(), tensor=t).layer(0) for t in (1, 8))
    assert one.total / 8 < eight.total < one.total
    assert eight.weight == pytest.approx(one.weight / 8)


def communication(model: ModelConfig, index: int, **strategy: int) -> PassSeconds:
    """Seconds of a layer's collectives: what it takes beyond one with links that take no time."""
    free = Link.model_construct(bandwidth=float("inf"), latency=0.0)
    device = a100().model_copy(update={"collectives": Places(in_node=free, between_nodes=free)})
    with_links, without = (load(model, on, **strategy).layer(index) for on in (a100(), device))
    return with_links + without * -1


def test_tensor_parallel_ranks_gather_and_scatter_around_attention_and_mlp() -> None:
    link = a100().collectives.in_node
    each = link.seconds(2 * 1024 * 1024 * 3 / 4)
    found = communication(small(), 0, tensor=4)
    assert (found.forward, found.backward, found.weight) == pytest.approx((4 * each, 4 * each, 0))


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_tokens_travel_to_their_experts_and_back(ranks: int) -> None:
    """Within a node of 8 GPUs, or as long as the slower of both kinds of links takes."""
    experts = {"experts": 16, "top_k": 2, "ffn_hidden_size": 512}
    links = a100().collectives
    sent = 2 * 1024 * 2 * 1024
    near = min(ranks, 8)
    inside = links.in_node.seconds(sent * (near - 1) / ranks)
    outside = links.between_nodes.seconds(sent * (ranks - near) / ranks)
    slower = max(inside, outside) if ranks > near else inside
    found = communication(small(experts=experts), 1, expert=ranks, data=ranks)
    assert (found.forward, found.backward) == pytest.approx((2 * slower, 2 * slower))


def test_shards_of_an_expert_gather_and_scatter_its_tokens() -> None:
    experts = {"experts": 4, "top_k": 2, "ffn_hidden_size": 512}
    sent = 2 * 1024 * 2 * 1024
    found = communication(small(experts=experts), 1, expert_tensor=4, data=4)
    both_ways = 2 * a100().collectives.in_node.seconds(3 * sent)
    assert (found.forward, found.backward) == pytest.approx((both_ways, both_ways))


def test_a_message_takes_the_link_between_its_ranks() -> None:
    near, far = (Link(bandwidth=b, latency=1e-5, source="test") for b in (2e11, 2e10))
    links = Places(in_node=near, between_nodes=far)
    workload = load(small(), a100().model_copy(update={"messages": links}))
    for in_node, link in ((True, near), (False, far)):
        assert workload.latency(in_node) == link.seconds(2 * 1024 * 1024)
        assert workload.latency(in_node, together=2) == link.seconds(4 * 1024 * 1024) / 2


@pytest.mark.parametrize("placement", [looped(4), looped(4, 2), v_shape(4)])
@pytest.mark.parametrize("layers", [6, 8, 13, 32])
def test_a_layout_has_every_layer_once(layers: int, placement: Any) -> None:
    found = layout.choices(layers, placement, 0.1, 3.0)
    assert len(found) == (1 if layers < placement.num_stages else 2)
    for counts in found:
        assert sum(counts) == layers
        assert len(counts) == placement.num_stages
        assert layout.text(layout.lettered(counts)).count("t") == layers


def test_a_heavy_output_layer_takes_layers_from_its_rank() -> None:
    heavy, light = Layers(16, output=2.0), Layers(6, output=1.0)
    assert layout.balanced(heavy, looped(4)) == (4, 5, 5, 2)
    assert layout.balanced(light, looped(4, 2)) == (0, 1, 1, 1, 1, 1, 1, 0)
    assert layout.text(layout.lettered((0, 1, 1, 0))) == "E|t|t|L"


def test_the_peak_counts_what_waits_for_w() -> None:
    held = [byte_counts.ActivationBytes(10.0, 6.0, 3.0)]
    passes = [schedules.Pass(schedules.PassKind(kind), 0, i) for kind, i in [("F", 0), ("F", 1)]]
    assert peak_of(passes, held) == (20.0, 0.0)
    passes += [schedules.Pass(schedules.PassKind(kind), 0, 0) for kind in ("B", "W")]
    assert peak_of(passes, held) == (23.0, 0.0)
    passes.insert(3, schedules.Pass(schedules.PassKind.F, 0, 2))
    assert peak_of(passes, held) == (20.0, 6.0)
    passes += [schedules.Pass(schedules.PassKind.F, 0, i) for i in (3, 4)]
    assert peak_of(passes, held) == (40.0, 0.0)  # W has run


def test_many_microbatches_are_continued_from_the_steady_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small()
    for candidate in candidates_of(["zb-h1"]):
        chunks = 2 if candidate.takes_chunks else None
        staged = cut_into_stages(load(model), candidate, chunks)
        assert staged is not None
        monkeypatch.setattr("megatron_zb.plan.prediction._MOST_PASSES", 10**9)
        whole = predict(staged, candidate, IterationSettings(64), chunks)
        monkeypatch.setattr("megatron_zb.plan.prediction._MOST_PASSES", 1)
        continued = predict(staged, candidate, IterationSettings(64), chunks)
        assert continued.pipeline_seconds == pytest.approx(whole.pipeline_seconds, rel=0.01)


def test_with_post_validation_an_iteration_does_not_wait_for_the_last_rank() -> None:
    (candidate,) = candidates_of(["zb-2p"])[2:]
    staged = cut_into_stages(load(small(layers=16)), candidate, None)
    assert staged is not None
    alone, back_to_back = (
        predict(staged, candidate, IterationSettings(24, post_validation=flag), None)
        for flag in (False, True)
    )
    assert back_to_back.pipeline_seconds < alone.pipeline_seconds
    assert back_to_back.timeline is not None
    assert back_to_back.pipeline_seconds == back_to_back.timeline.period


def test_dropout_of_the_embedding_draws_a_random_number_for_each_of_its_values() -> None:
    """A random number counts as 6 values of 2 bytes, that is 12 bytes of traffic."""
    with_it, without = (load(small(dropout=d), gapless()) for d in (True, False))
    drawn = with_it.embedding().forward - without.embedding().forward
    elements = with_it.tokens * with_it.model.hidden_size
    assert drawn == pytest.approx(12 * elements / with_it.device.memory_bandwidth.reached)
