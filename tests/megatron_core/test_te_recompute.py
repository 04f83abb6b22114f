"""Selective recomputation of Transformer-Engine's layers, compared with Megatron's own schedule.

An operand of W may be what Megatron discards after F and computes again in B: it must hold those
values when W runs, however many microbatches have passed since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from drawn_sizes import every_value
from gpt_cases import GPTCase, as_hybrid, skip_without_hybrids
from rank_process import Kind
from ranks import RankPool, RankPools
from recompute_offload import with_recompute_offload
from te_models import OPTIONS_OF_LATENT, differences, quantized, quantized_differences

from megatron_zb import schedules
from megatron_zb.megatron_core.versions import core_series
from megatron_zb.schedules import Schedule

_WHOLE = (
    "TransformerBlock._checkpointed_forward.<locals>.custom.<locals>.custom_forward",
    "checkpointed_forward.<locals>.custom.<locals>.custom_forward",  # from 0.19 on
)
# What Megatron computes again for each name of --recompute-modules.
FUNCTIONS = {
    "core_attn": "Attention._checkpointed_attention_forward.<locals>.custom_forward",
    "mlp": "MLP",
    "moe": "MoELayer.forward.<locals>.custom_forward",
    "moe_act": "TEGroupedMLP.forward.<locals>.bias_act_func",
    "layernorm": "RMSNorm",
    "mla_up_proj": "MLASelfAttention.get_query_key_value_tensors.<locals>"
    ".qkv_up_proj_and_rope_apply",
    "shared_experts": "SharedExpertMLP",
    "whole layers": _WHOLE[core_series() >= (0, 19)],
}


def recomputing(modules: str, case: GPTCase, **more: Any) -> GPTCase:
    options = {"recompute_granularity": "selective", "recompute_modules": tuple(modules.split())}
    return replace(case, options=(*case.options, *options.items()), **more)


DENSE = GPTCase(options=(("add_bias_linear", False),))  # with one, upstream recurses without an end
SPARSE = GPTCase(
    rotary=True,
    options=(
        *OPTIONS_OF_LATENT,
        ("num_moe_experts", 2),
        ("moe_grouped_gemm", True),
        ("moe_ffn_hidden_size", 32),
        ("moe_shared_expert_intermediate_size", 32),
    ),
)
PARTS = "core_attn layernorm mla_up_proj moe_act shared_experts"
WHOLE = {"granularity": "full", "method": "uniform", "num_layers": 1}
OVERLAPPED = {"fused_accumulation": True, "overlap_grad_reduce": True}
CASES = {
    "dense": recomputing("core_attn mlp", DENSE),
    "parts": recomputing(PARTS, SPARSE),
    "moe": recomputing("moe mla_up_proj", SPARSE, **OVERLAPPED),
    "dense-delayed": quantized("fp8", "delayed", recomputing("core_attn mlp", DENSE)),
    "whole-delayed": quantized(
        "fp8", "delayed", DENSE, **{f"recompute_{name}": value for name, value in WHOLE.items()}
    ),
    "parts-current": quantized("fp8", "tensorwise", recomputing(PARTS, SPARSE)),
    "parts-mxfp8": quantized("fp8", "mxfp8", recomputing(PARTS, SPARSE, **OVERLAPPED)),
    "moe-delayed": quantized("fp8", "delayed", recomputing("moe mla_up_proj", SPARSE)),
    "hybrid-dense": recomputing("core_attn mlp", as_hybrid(DENSE)),
    "hybrid-parts": recomputing(PARTS, as_hybrid(SPARSE)),
    "hybrid-whole-delayed": quantized(
        "fp8",
        "delayed",
        as_hybrid(DENSE),
        **{f"recompute_{name}": value for name, value in WHOLE.items()},
    ),
}


def compare(case: GPTCase, schedule: str | Schedule) -> tuple[list[str], set[str]]:
    """What differs, and which functions have been recomputed, by either schedule."""
    with recording() as recomputed:
        if case.optimizer_steps:
            return quantized_differences(case, schedule), recomputed
        return differences(case, schedule, [5]), recomputed


@contextmanager
def recording() -> Iterator[set[str]]:
    """Note the names of what is recomputed, by any of the three ways that there are."""
    from megatron.core.tensor_parallel import random
    from transformer_engine.pytorch import distributed

    names = set[str]()

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(context: Any, *gradients: Any) -> Any:
            if context.run_function is not None:
                function = getattr(context.run_function, "func", context.run_function)
                names.add(getattr(function, "__qualname__", type(function).__name__))
                names.discard("IdentityOp")  # in place of the MLP of a pattern's attention
            return method(context, *gradients)

        return noted

    kinds: list[Any] = [random.CheckpointFunction, distributed._CheckpointFunction]
    methods = [kind.backward for kind in kinds]
    without_output = random.CheckpointWithoutOutput._recompute
    for kind, method in zip(kinds, methods, strict=True):
        kind.backward = staticmethod(noting(method))
    random.CheckpointWithoutOutput._recompute = noting(without_output)
    yield names
    for kind, method in zip(kinds, methods, strict=True):
        kind.backward = staticmethod(method)
    random.CheckpointWithoutOutput._recompute = without_output


def expected(case: GPTCase, ranks: int) -> list[tuple[list[str], set[str]]]:
    modules = dict(case.options).get("recompute_modules", ["whole layers"])
    return [([], {FUNCTIONS[name] for name in modules})] * ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"), every_value([*CASES], ["v-half", "zb-h1", "v-zb", "interleaved"], most=4)
)
def test_recomputed_models_equal_megatrons(te_pool: RankPool, name: str, schedule: str) -> None:
    case = CASES[name]
    skip_without_hybrids(case)
    assert te_pool.run(compare, case=case, schedule=schedule) == expected(case, 2)


@pytest.mark.long
@pytest.mark.parametrize("state", ["recomputed", "offloaded"])
@pytest.mark.parametrize("name", ["dense", "parts", "moe"])
def test_units_that_are_recomputed_or_offloaded_equal_megatrons(
    te_pool: RankPool, name: str, state: str
) -> None:
    """What Megatron has emptied is not copied, and what it refills is what a backward reads."""
    kept = schedules.build("v-half", pipeline_size=2, num_microbatches=5)
    shares = {"recompute": 0.6} if state == "recomputed" else {"offload": 0.6}
    order = with_recompute_offload(kept, seed=len(name), **shares)
    assert order.recomputed if state == "recomputed" else order.offloaded
    case = CASES[name]
    assert te_pool.run(compare, case=case, schedule=order) == expected(case, 2)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["recomputed", pytest.param("offloaded", marks=pytest.mark.full)])
def test_an_older_transformer_engine_equals_megatrons(older_te_pool: RankPool, state: str) -> None:
    """In saved-tensor hooks its modules see no parameter, and so say nothing of ``main_grad``."""
    shares = {"recompute": 0.6} if state == "recomputed" else {"offload": 0.6}
    kept = schedules.build("v-half", pipeline_size=2, num_microbatches=5)
    order = with_recompute_offload(kept, seed=3, **shares)
    found = older_te_pool.run(compare, case=CASES["moe"], schedule=order)
    assert found == expected(CASES["moe"], 2)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
@pytest.mark.parametrize("name", ["parts", "parts-current"])
def test_recomputed_sequence_parallel_models_equal_megatrons(
    ranks: RankPools, te_pool: RankPool, name: str, schedule: str
) -> None:
    case = replace(CASES[name], tensor_parallel=2, sequence_parallel=True)
    found = ranks(4, Kind.TRANSFORMER_ENGINE).run(compare, case=case, schedule=schedule)
    assert found == expected(case, 4)
