"""Experts on token slices: routers have the losses of whole microbatches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpt_cases
import pytest
import torch
import torch.distributed as dist
from brief_searches import briefly
from drawn_sizes import every_value
from gpt_cases import GPTCase
from megatron.core.parallel_state import (
    get_pipeline_model_parallel_group,
    get_tensor_model_parallel_group,
)
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter
from ranks import RankPools

from megatron_zb.megatron_core import versions

M = 3


def case(more: dict[str, Any] | None = None, **fields: Any) -> GPTCase:
    options = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.5,
        "moe_ffn_hidden_size": 32,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
    }
    options |= more or {}
    return GPTCase(layers=4, exact=True, options=tuple(options.items()), **fields)


RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
PARALLEL = {"data_parallel": 2, "expert_parallel": 2}
CASES = {
    "balanced by microbatch": case(),
    "all-gather of experts": case(
        {"moe_token_dispatcher_type": "allgather", "moe_z_loss_coeff": 0.5}, **PARALLEL
    ),
    "balanced by sequence, shared experts": case(
        {
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_shared_expert_intermediate_size": 32,
        },
        **PARALLEL,
    ),
    "two losses": case(
        {
            "moe_router_load_balancing_type": ["global_aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [0.5, 0.25],
        },
        data_parallel=2,
    ),
    "a bias, z-loss, per-token loss": case(
        {
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_z_loss_coeff": 0.5,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
        per_token_loss=True,
    ),
    "a bias without losses": case(
        {
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
    ),
    "padding": case({"moe_z_loss_coeff": 0.5}, padded=True, per_token_loss=True),
    "recomputed layers": case(RECOMPUTED | {"moe_z_loss_coeff": 0.5}),
    "recomputed experts, per-token loss": case(
        {
            "recompute_granularity": "selective",
            "recompute_modules": ("moe",),
        },
        per_token_loss=True,
        grad_scale=64.0,
    ),
    "sequence parallelism": case(tensor_parallel=2, sequence_parallel=True),
}
SCHEDULES = ("v-half", "v-zb", "zb-h1", "1f1b", "interleaved")


def outcome(case: GPTCase, name: str | None) -> dict[str, torch.Tensor]:
    """Losses, gradients, and what routers have counted and logged, of all ranks in two steps."""
    with (
        versions.losses_logged_apart(),
        briefly(),
        gpt_cases.built(case, name, M) as (
            adapter,
            chunks,
        ),
    ):
        function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        for step in range(2):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            data = [gpt_cases.microbatches(case, M, step) for _ in chunks]
            records = gpt_cases.forward_backward(function, chunks, data, M)
        found = dict(gpt_cases.gradients(chunks))
        found |= {f"loss {i}": torch.as_tensor(r["lm loss"]) for i, r in enumerate(records)}
        for router in (m for c in chunks for m in c.modules() if isinstance(m, TopKRouter)):
            counted = router.named_buffers(prefix=f"router {router.layer_number}")
            found |= {name: buffer.clone() for name, buffer in counted}
        logged = {name: entry["values"] for name, entry in versions.expert_metrics().items()}
    for values in logged.values():  # of the tokens of a rank
        dist.all_reduce(values, group=get_tensor_model_parallel_group())
    everyone: list[Any] = [None] * (group := get_pipeline_model_parallel_group()).size()
    dist.all_gather_object(everyone, (found, logged), group=group)
    for of_rank, of_routers in everyone:
        found |= of_rank
        for name, values in of_routers.items():
            found[name] = found.get(name, 0) + values
    return found


def distances(case: GPTCase, name: str, slices: str) -> dict[str, float]:
    """How far a sliced step is from Megatron's own, in units of the largest number of a tensor."""
    expected = outcome(case, None)
    found = outcome(replace(case, slices=slices), name)
    assert found.keys() == expected.keys()
    return {
        key: float((found[key] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        for key, value in expected.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("what", "name"), every_value([*CASES], SCHEDULES))
def test_experts_are_as_in_whole_microbatches(ranks: RankPools, what: str, name: str) -> None:
    size = 2 * CASES[what].tensor_parallel * CASES[what].data_parallel
    for found in ranks(size).run(distances, case=CASES[what], name=name, slices="4"):
        assert {key: off for key, off in found.items() if not off < 1e-12} == {}
