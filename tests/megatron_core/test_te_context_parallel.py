"""Context parallelism of Transformer-Engine's attention, compared with Megatron's own schedule.

By all-gathers and by all-to-alls; the ring is left to a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpt_cases
import pytest
import torch
from drawn_sizes import every_value, first
from gpt_cases import GPTCase, as_hybrid, skip_without_hybrids
from rank_process import Kind
from ranks import RankPool, RankPools
from small_models import load, small
from te_attention import install, layers_with_attention
from te_cases import unlike
from te_models import EXPERTS, hybrid_of_te, layers_of_te

from megatron_zb.plan.byte_counts import layer_held
from megatron_zb.runtime.activation_memory import ActivationMemory

PLAIN = GPTCase()


def shared(how: str, case: GPTCase = PLAIN, **more: Any) -> GPTCase:
    """A case of two ranks that share every sequence; TE's fused attention is for two bytes."""
    options = (*case.options, ("cp_comm_type", how))
    case = replace(case, **more)
    return replace(case, context_parallel=2, dtype="bfloat16", options=options)


CASES = {
    "all-gather": shared("all_gather", rotary=True, per_token_loss=True),
    "all-to-all": shared("a2a", fused_accumulation=True, overlap_grad_reduce=True, tied=True),
    "experts": shared("a2a", EXPERTS, expert_parallel=2),
    "hybrid": shared("all_gather", as_hybrid(PLAIN), rotary=True),
}


def differences(case: GPTCase, schedule: str) -> list[str]:
    gpt_cases._specification = layers_with_attention
    if case.hybrid is not None:
        install()
        gpt_cases._hybrid_model = hybrid_of_te
    return gpt_cases.differences(case, schedule, [3], iterations=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"), every_value([*CASES], ["v-half", "zb-h1", "v-zb", "interleaved"])
)
def test_context_parallel_models_equal_megatrons(
    ranks: RankPools, te_pool: RankPool, name: str, schedule: str
) -> None:
    skip_without_hybrids(CASES[name])
    four = ranks(4, Kind.TRANSFORMER_ENGINE)
    assert four.run(differences, case=CASES[name], schedule=schedule) == [[]] * 4


def gradients(case: GPTCase) -> dict[str, torch.Tensor]:
    gpt_cases._specification = layers_with_attention
    return gpt_cases.run(case, "v-half", [3])[3].gradients


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "slices"), [("all_gather", "4"), *first(0, [("all_gather", None), ("a2a", None)])]
)
def test_two_ranks_of_a_sequence_compute_what_one_does(
    ranks: RankPools, te_pool: RankPool, how: str, slices: str | None
) -> None:
    """But for the order of sums: what stands in for the kernels is attention."""
    whole = GPTCase(dtype="bfloat16", per_token_loss=True)
    expected: dict[str, torch.Tensor] = {}
    for found in te_pool.run(gradients, case=whole):
        expected |= found
    case = shared(how, whole, slices=slices)
    for found in ranks(4, Kind.TRANSFORMER_ENGINE).run(gradients, case=case):
        assert unlike(found, {name: expected[name] for name in found}, tolerance=0.03) == []


def sliced_gradients(case: GPTCase, schedule: str) -> dict[str, torch.Tensor]:
    gpt_cases._specification = layers_with_attention
    case = replace(case, dtype="bfloat16", fused_accumulation=True, slices="4")
    return gpt_cases.run(case, schedule, [3])[3].gradients


@pytest.mark.parametrize(
    ("case", "schedule"), [(PLAIN, "1f1b"), (PLAIN, "interleaved"), (EXPERTS, "1f1b")]
)
def test_whole_backwards_of_slices_are_added_up(
    te_pool: RankPool, case: GPTCase, schedule: str
) -> None:
    """The last slice's backward comes first; TE overwrites by that of the first forward."""
    split: dict[str, torch.Tensor] = {}
    for found in te_pool.run(sliced_gradients, case=case, schedule="v-half"):
        split |= found
    for found in te_pool.run(sliced_gradients, case=case, schedule=schedule):
        assert unlike(found, {name: split[name] for name in found}, tolerance=0.0) == []


def with_attention_of_te(config: Any, vp_stage: int | None) -> Any:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    layer = layers_of_te(config, vp_stage)
    install()
    layer.submodules.self_attention.submodules.core_attention = TEDotProductAttention
    return layer


def most_held(case: GPTCase) -> int:
    gpt_cases._specification = with_attention_of_te
    with gpt_cases.built(case, "1f1b", 1) as (adapter, chunks):
        assert adapter is not None
        memory = ActivationMemory(p for chunk in chunks for p in chunk.parameters())
        adapter.track(memory)
        with memory.watching():
            data = [gpt_cases.microbatches(case, 1)]
            gpt_cases.forward_backward(adapter.forward_backward_func, chunks, data, 1)
    return memory.peak_bytes


@pytest.mark.full
def test_ranks_of_a_slice_hold_what_the_planner_counts_more(
    ranks: RankPools, te_pool: RankPool
) -> None:
    """What a layer holds of four slices, on two ranks and on one: the norms differ from counts."""
    planned, measured = [], []
    model = small(
        hidden_size=32, attention_heads=4, sequence_length=gpt_cases.SEQUENCE, flash_attention=True
    )
    for size in (1, 2):
        workload = load(model, slices=4, microbatch=2, context=size)
        planned.append(layer_held(workload, 0).activation)
        case = shared("all_gather", replace(PLAIN, slices="4", rotary=True))
        cases = [replace(case, layers=layers, context_parallel=size) for layers in (4, 6)]
        four = ranks(2 * size, Kind.TRANSFORMER_ENGINE)
        few, more = (four.run(most_held, case=each)[0] for each in cases)
        measured.append(more - few)
    calls = 16 * (8 - 4 / 2)  # state of a random generator for each call of attention
    assert measured[1] - measured[0] / 2 - calls == planned[1] - planned[0] / 2 > 0
