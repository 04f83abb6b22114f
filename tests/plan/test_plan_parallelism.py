"""What megatron-zb plan knows: context and expert parallelism, fp8, overlap, prediction layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_zb.cli import main as cli
from megatron_zb.plan import byte_counts
from megatron_zb.plan.device import DeviceConfig, read_device
from megatron_zb.plan.model import ModelConfig, read_model
from megatron_zb.plan.operators import all_weights, model_flops
from megatron_zb.plan.prediction import IterationSettings, predict
from megatron_zb.plan.search import search
from megatron_zb.plan.settings import CountedSettings, PlanJob
from megatron_zb.plan.stages import cut_into_stages
from megatron_zb.plan.step import Travel
from megatron_zb.plan.strategy import MEGATRON_1F1B, Choices, Strategy, candidates_of, strategies
from megatron_zb.plan.table import flags
from megatron_zb.plan.work import Workload

ROOT = Path(__file__).resolve().parents[2]


def device(name: str = "h100_sxm") -> DeviceConfig:
    return read_device(ROOT / "configs" / "devices" / f"{name}.yaml")


def gapless() -> DeviceConfig:
    found = device()
    kernels = found.kernels.model_copy(update={"seconds": 0.0})
    return found.model_copy(update={"kernels": kernels})


def dense(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "name": "dense",
        "source": "test",
        "layers": 16,
        "hidden_size": 4096,
        "attention_heads": 32,
        "query_groups": 8,
        "gated_mlp": True,
        "ffn_hidden_size": 14336,
        "vocabulary": 128000,
        "sequence_length": 32768,
        "global_batch_size": 64,
    }
    return ModelConfig(**{**sizes, **changes})


def sparse(**changes: Any) -> ModelConfig:
    experts = {"experts": 64, "top_k": 4, "ffn_hidden_size": 2048}
    return dense(experts=experts, sequence_length=4096, **changes)


def load(model: ModelConfig, on: DeviceConfig | None = None, **changes: Any) -> Workload:
    strategy = replace(Strategy(1, 4, 1, 1, 1, "none"), **changes)
    return Workload(model, on or gapless(), strategy, model.sequence_length)


# --- tensor parallelism --------------------------------------------------------------------------


def test_ranks_share_keys_and_values_where_there_are_fewer_groups_than_ranks() -> None:
    """Megatron asks for a multiple or a divisor of the ranks: each rank has a group at least."""
    model = dense(query_groups=2)
    choices = Choices(tensor=(1, 2, 4, 8), pipeline=(2,), context=(1,))
    assert {s.tensor for s in strategies(model, device(), 16, 64, choices)} == {1, 2, 4, 8}
    three = dense(query_groups=3, attention_heads=24, hidden_size=3072)
    assert {s.tensor for s in strategies(three, device(), 16, 64, choices)} == {1}
    whole, *shared = (byte_counts.keys_and_values(load(model, tensor=t)) for t in (1, 2, 4, 8))
    assert shared == [whole / 2] * 3


# --- context parallelism -------------------------------------------------------------------------


def test_context_parallel_ranks_share_tokens_scores_and_memory() -> None:
    model = dense()
    whole, quarter = load(model), load(model, context=4)
    assert quarter.tokens == whole.tokens / 4
    assert quarter.layer(0).weight == pytest.approx(whole.layer(0).weight / 4)
    assert quarter.layer(0).forward >= whole.layer(0).forward / 4
    held = [byte_counts.layer_held(of, 0).activation for of in (whole, quarter)]
    assert held[1] == held[0] / 4
    # The optimizer is distributed over them, weights and gradients are not.
    states = [byte_counts.rank_states(of, [0], False, False) for of in (whole, quarter)]
    assert states[1].weights == states[0].weights
    assert states[1].optimizer == states[0].optimizer / 4


def test_keys_and_values_travel_behind_the_scores_of_a_long_sample() -> None:
    long, short = (load(dense(sequence_length=s), context=8) for s in (131072, 1024))
    for of, hidden in ((long, True), (short, False)):
        alone = load(of.model, context=1)
        extra = of.layer(0).forward - alone.layer(0).forward / 8
        assert (extra < 0.01 * alone.layer(0).forward / 8) == hidden


def test_a_long_sample_is_cut_and_a_short_one_is_not_unless_asked() -> None:
    for sequence, expected in ((4096, {1}), (32768, {1, 2, 4})):
        model = dense(sequence_length=sequence)
        found = {s.context for s in strategies(model, device(), 32, 64, Choices())}
        assert found == expected
    asked = Choices(context=(2,), tensor=(2,), pipeline=(4,))
    found_strategies = list(strategies(dense(sequence_length=4096), device(), 32, 64, asked))
    assert {(s.context, s.data) for s in found_strategies} == {(2, 2)}


def test_rates_by_formula_count_the_tokens_of_all_ranks() -> None:
    choices = Choices(tensor=(1,), pipeline=(2,), context=(1, 4), recompute=("none",))
    model, on = dense(sequence_length=32768), device()
    job = PlanJob(model, on, 8, on.memory_bytes, 8, 32768, choices)
    (candidate,) = candidates_of(["v-half"])[2:]
    found = CountedSettings.of(job).ordered(candidate)
    assert {setting.load.strategy.context for setting in found} == {1, 4}
    for setting in found:
        assert setting.rate * setting.seconds == pytest.approx(8 * 32768)


# --- experts over all ranks of a pipeline rank ---------------------------------------------------


def test_experts_may_span_tensor_context_and_data_ranks() -> None:
    asked = Choices(tensor=(4,), context=(2,), pipeline=(2,), expert=(16,))
    (found, *_) = strategies(sparse(), device(), 32, 64, asked)
    assert (found.data, found.expert, found.expert_tensor) == (2, 16, 1)
    assert found.expert_replicas == 1
    for choices in (Choices(expert=(32,)), Choices(expert=(16,), expert_tensor=(2,))):
        narrow = replace(choices, tensor=(4,), context=(2,), pipeline=(2,))
        assert not list(strategies(sparse(), device(), 32, 64, narrow))


@pytest.mark.parametrize(("expert", "split"), [(1, 1), (4, 1), (16, 1), (2, 4), (1, 4)])
def test_a_rank_keeps_its_share_of_the_experts(expert: int, split: int) -> None:
    model = sparse()
    here = load(model, tensor=4, context=2, data=2, expert=expert, expert_tensor=split)
    states = byte_counts.rank_states(here, [0], False, False)
    routed = 64 * 3 * 4096 * 2048
    assert states.routed == routed / (expert * split)
    replicas = 16 / (expert * split)
    rest = (states.parameters - states.routed) / 4
    assert states.optimizer == pytest.approx(12 * (rest + states.routed / replicas))


def test_experts_in_another_node_and_shards_of_experts_cost_messages() -> None:
    model = sparse()
    seconds = [
        load(model, tensor=2, data=16, expert=e, expert_tensor=s).layer(0).forward
        for e, s in ((1, 1), (8, 1), (32, 1), (8, 2))
    ]
    assert seconds[0] < seconds[1] < seconds[2]
    assert seconds[1] < seconds[3]


def test_gradients_of_experts_travel_among_fewer_ranks() -> None:
    here = load(sparse(), tensor=1, data=8, expert=8)
    states = byte_counts.rank_states(here, [0], False, False)
    assert Travel.of(here, states).total == pytest.approx(
        Travel.of(
            here, replace(states, parameters=states.parameters - states.routed, routed=0.0)
        ).total
    )


# --- fp8 -----------------------------------------------------------------------------------------


def test_fp8_is_for_the_products_of_layers_alone() -> None:
    model = dense(sequence_length=4096)
    half, eighth = load(model), load(model, precision="fp8")
    rates = [device().matrix_products.reached, device().fp8_products.reached]  # type: ignore[union-attr]
    assert half.layer(0).weight / eighth.layer(0).weight == pytest.approx(rates[1] / rates[0])
    assert half.output() == eighth.output()
    assert half.embedding() == eighth.embedding()
    assert eighth.layer(0).forward > half.layer(0).forward * rates[0] / rates[1]


def test_fp8_keeps_inputs_in_8_bits_and_two_more_copies_of_a_weight() -> None:
    model = dense(sequence_length=4096)
    half, eighth = load(model), load(model, precision="fp8")
    weights = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    more = byte_counts.rank_states(eighth, [0], False, False).weights
    assert more == byte_counts.rank_states(half, [0], False, False).weights + 2 * weights
    inputs = 4096 * (4096 + 4096 + 4096 + 14336)
    saved = (
        byte_counts.layer_held(half, 0).activation - byte_counts.layer_held(eighth, 0).activation
    )
    assert saved == inputs


def test_a_device_without_fp8_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--config", "llama3_8b", "--gpus", "8", "--precision", "fp8"]
    assert cli.main([*asked, "--device", "a100_80gb_sxm"]) == 2
    assert "A100 80GB SXM has no fp8_products: give --precision bf16" in capsys.readouterr().err


def test_a_dense_model_has_no_experts_to_share_out(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--config", "llama3_8b", "--gpus", "8", "--expert", "8"]
    assert cli.main(asked) == 2
    assert "--expert is for a mixture of experts, and Llama 3 8B has no" in capsys.readouterr().err


# --- flags ---------------------------------------------------------------------------------------


def test_flags_tell_all_of_it() -> None:
    choices = Choices(
        tensor=(2,),
        context=(2,),
        pipeline=(2,),
        microbatch=(1,),
        recompute=("none",),
        expert=(8,),
        precision="fp8",
    )
    model = sparse(rotary={"base": 10000}, prediction_layers=1)
    job = PlanJob(model, device("b200_sxm"), 16, 1e12, 64, 4096, choices)
    plan = search(job, candidates_of(["zb-h1"]))
    for row in plan.ranked:
        words = flags(row, 64)
        assert {"--context-parallel-size 2", "--expert-model-parallel-size 8"} <= set(words)
        assert "--expert-tensor-parallel-size 1" in words
        assert {"--bf16", "--fp8-format hybrid"} <= set(words)
        assert {"--overlap-grad-reduce", "--overlap-param-gather"} <= set(words)
        layouts = [word for word in words if "--pipeline-model-parallel-layout" in word]
        assert all(word.endswith("mL'") for word in layouts)


# --- the step between iterations -----------------------------------------------------------------


def staged_seconds(overlap: bool, schedule: str = MEGATRON_1F1B, **changes: Any) -> float:
    model = dense(sequence_length=4096, hidden_size=8192, attention_heads=64)
    (found,) = (c for c in candidates_of(["v-zb"]) if c.name == schedule)
    staged = cut_into_stages(load(model, tensor=8, data=8, overlap=overlap), found, None)
    assert staged is not None
    return predict(staged, found, IterationSettings(8, **changes), None).step_seconds


def test_overlap_hides_some_of_what_travels_and_never_more() -> None:
    apart, beside = staged_seconds(False), staged_seconds(True)
    assert 0 < beside < apart


def test_with_post_validation_weights_are_gathered_after_the_step() -> None:
    beside = staged_seconds(True, "v-zb")
    assert staged_seconds(True, "v-zb", post_validation=True) > beside


def test_ranks_of_a_node_use_all_its_links_to_the_others() -> None:
    states = byte_counts.StateBytes(parameters=1e9)
    one = Travel.of(load(dense(), tensor=8, data=16), states)
    eight = Travel.of(load(dense(), tensor=1, data=16), states)
    links = device().collectives
    speed = min(links.in_node.bandwidth, 8 * links.between_nodes.bandwidth)
    ratio = speed / links.between_nodes.bandwidth
    assert one.reduction / eight.reduction == pytest.approx(ratio, rel=0.01)


# --- multi-token prediction ----------------------------------------------------------------------


def test_a_layer_of_prediction_is_counted_on_the_last_stage() -> None:
    plain = sparse(rotary={"base": 10000})
    more = sparse(rotary={"base": 10000}, prediction_layers=1)
    layer = all_weights(dense(layers=2)) - all_weights(dense(layers=1))
    routed = 64 * 3 * 4096 * 2048 + 4096 * 64 - 3 * 4096 * 14336
    assert all_weights(more) - all_weights(plain) == layer + routed + 2 * 4096**2
    output, longer = load(plain).output(), load(more).output()
    assert longer.weight > 2 * output.weight
    assert load(plain).layer(0) == load(more).layer(0)
    flops = [model_flops(m, 1000, 4096) for m in (plain, more)]
    assert flops[1] > flops[0] * 17 / 16
    held = [byte_counts.output_held(load(m)).activation for m in (plain, more)]
    assert held[1] > held[0] + byte_counts.layer_held(load(more), 15).activation


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("b200_sxm", marks=pytest.mark.full),
        pytest.param("gb200_nvl72", marks=pytest.mark.full),
        "gb300_nvl72",
        "mi300x",
    ],
)
def test_a_plan_on_every_new_device(name: str) -> None:
    model = read_model(ROOT / "configs" / "models" / "llama3_70b.yaml")
    found = device(name)
    assert found.fp8_products is not None
    assert found.fp8_products.peak == pytest.approx(2 * found.matrix_products.peak, rel=0.001)
    choices = Choices(tensor=(4,), pipeline=(4,), microbatch=(1,), precision="fp8")
    job = PlanJob(model, found, 64, found.memory_bytes, 128, 8192, choices)
    plan = search(job, candidates_of(["v-half"]), tries=1)
    assert {"v-half", MEGATRON_1F1B} <= {row.candidate for row in plan.ranked}
    assert all(0.05 < row.mfu < 0.6 for row in plan.ranked)
