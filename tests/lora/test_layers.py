"""LoRA on Megatron's linear layers: the same gradients however the base model is divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from brief_searches import briefly
from gpt_cases import GPTCase, built, forward_backward, microbatches
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import get_model_config, unwrap_model
from ranks import RankPools

from megatron_zb import schedules
from megatron_zb.lora.layers import LoRALayers, LoRAShape
from megatron_zb.lora.training import AdapterOptimizer, AdapterOptimizers, wrapped
from megatron_zb.schedules.features.adapters import Adapter, Adapters

M = 2
SHAPES = {
    "a": LoRAShape(4, 8.0, ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), 1),
    "b": LoRAShape(2, 16.0, ("linear_proj",), 2),
}
BASE = GPTCase(wrapped=False)


class _NoSchedule:
    """The schedule of a learning rate that stays as it is."""

    def step(self, increment: int) -> None:
        del increment


def train(case: GPTCase, schedule: str, *, clip: float = 0.0) -> dict[str, torch.Tensor]:
    """Train both adapters for two steps; return gradients, weights and norms, whole, by name."""
    p = torch.distributed.get_world_size() // (case.tensor_parallel * case.data_parallel)
    adapters = Adapters(tuple(Adapter(name, M) for name in SHAPES))
    with briefly():
        order = schedules.build(schedule, pipeline_size=p, adapters=adapters)
    found: dict[str, torch.Tensor] = {}
    with built(case, order, adapters.num_units, lambda: 0) as (pipeline, chunks):
        assert pipeline is not None
        layers = LoRALayers(chunks, SHAPES)
        each = {name: new_optimizer(layers, name, case, clip) for name in SHAPES}
        part = pipeline.train_adapters(AdapterOptimizers(layers, each, get_model_config(chunks[0])))
        of_adapters = [
            {name: iter(microbatches(case, 2 * M, ord(name))) for name in SHAPES} for _ in chunks
        ]
        data = [part.merged(it) for it in of_adapters]
        for _ in range(2):
            for own in each.values():
                own.clear()
            forward_backward(pipeline.forward_backward_func, chunks, data, adapters.num_units)
            for name, own in each.items():
                own.reduce()
                assert own.has_finite_gradients()
                for key, weight in own.named_weights().items():
                    found[f"{name} {key} gradient"] = _whole(weight, weight.main_grad)
                stepped = own.step(M)
                assert stepped.is_done
                found[f"{name} norm"] = torch.tensor(stepped.norm or 0.0)
        for name, own in each.items():
            for key, weight in own.named_weights().items():
                found[f"{name} {key}"] = _whole(weight, weight.detach())
        base = [w for chunk in chunks for w in unwrap_model(chunk).parameters()]
        assert base and not any(w.requires_grad for w in base)
    return found


def new_optimizer(layers: LoRALayers, name: str, case: GPTCase, clip: float) -> AdapterOptimizer:
    chunks = wrapped(layers.weights[name], DistributedDataParallelConfig(), name)
    config = OptimizerConfig(lr=0.01, adam_eps=1e-4, params_dtype=case.torch_dtype, clip_grad=clip)
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    return AdapterOptimizer(chunks, optimizer, _NoSchedule())


def _whole(weight: Any, value: torch.Tensor) -> torch.Tensor:
    """Gather what tensor parallelism shards."""
    if not getattr(weight, "tensor_model_parallel", False):
        return value.clone()
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(value) for _ in range(group.size())]
    torch.distributed.all_gather(parts, value.contiguous(), group=group)
    return torch.cat(parts, dim=weight.partition_dim)


def of_all(found: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: value for of_rank in found for name, value in of_rank.items()}


def check_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert sum("gradient" in name for name in ours) == 2 * 4 * (4 + 1)  # pairs on 4 layers
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=2e-4, atol=2e-6, msg=name)
    assert all(value.abs().max() > 0 for name, value in ours.items() if "gradient" in name)


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (4, replace(BASE, tensor_parallel=2)),
        (4, replace(BASE, tensor_parallel=2, sequence_parallel=True)),
    ],
    ids=["tensor", "sequence"],
)
def test_gradients_and_norms_are_those_without_tensor_parallelism(
    ranks: RankPools, world: int, case: GPTCase
) -> None:
    plain = of_all(ranks(2).run(train, case=BASE, schedule="1f1b", clip=0.01))
    assert plain["a norm"] > 0.01  # it is clipped
    ours = of_all(ranks(world).run(train, case=case, schedule="1f1b", clip=0.01))
    check_close(ours, plain)


def test_a_v_clips_by_the_norm_of_all_ranks(ranks: RankPools) -> None:
    plain = of_all(ranks(2).run(train, case=BASE, schedule="1f1b", clip=0.01))
    ours = of_all(ranks(2).run(train, case=BASE, schedule="v-zb", clip=0.01))
    check_close(ours, plain)
