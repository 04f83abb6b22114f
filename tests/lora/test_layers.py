"""LoRA on Megatron's linear layers: the same gradients however the base model is divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gpt_cases
import pytest
import torch
from adapter_optimizers import new_optimizer
from brief_searches import briefly
from gpt_cases import GPTCase, built, forward_backward, microbatches
from megatron.core import parallel_state
from megatron.core.utils import get_model_config, unwrap_model
from ranks import RankPool, RankPools
from te_models import layers_of_te

from megatron_zb import schedules
from megatron_zb.lora.layers import LoRALayers, LoRAShape
from megatron_zb.lora.streamed import StreamedOptimizers
from megatron_zb.lora.training import AdapterOptimizers
from megatron_zb.schedules.features.adapters import Adapter, Adapters

M, STEPS = 2, 2
SHAPES = {
    "a": LoRAShape(4, 8.0, ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), 1),
    "b": LoRAShape(2, 16.0, ("linear_proj",), 2),
}
BASE = GPTCase(wrapped=False)


def stream(case: GPTCase, schedule: str, clip: float) -> dict[str, torch.Tensor]:
    """Train both adapters for two steps in one call; return weights and norms, whole, by name."""
    p = torch.distributed.get_world_size() // (case.tensor_parallel * case.data_parallel)
    adapters = Adapters(tuple(Adapter(name, M, STEPS) for name in SHAPES))
    with briefly():
        order = schedules.build(schedule, pipeline_size=p, adapters=adapters)
    found: dict[str, torch.Tensor] = {}
    with built(case, order, adapters.num_units, lambda: 0) as (pipeline, chunks):
        assert pipeline is not None
        layers = LoRALayers(chunks, SHAPES)
        each = {name: new_optimizer(layers, name, clip) for name in SHAPES}
        optimizers = StreamedOptimizers([layers], each, get_model_config(chunks[0]), len(chunks))
        part = pipeline.train_adapters(optimizers)
        data = [part.merged(_data(case)) for _ in chunks]
        for own in each.values():
            own.clear()
        forward_backward(pipeline.forward_backward_func, chunks, data, adapters.num_units)
        for name, own in each.items():
            optimizers.end_step(name)
            assert optimizers.is_finite(name)
            stepped = optimizers.stepped(name)
            assert [it.is_done for it in stepped] == [True] * STEPS
            found[f"{name} norm"] = torch.tensor(stepped[-1].norm)
            for key, weight in own.named_weights().items():
                found[f"{name} {key}"] = _whole(weight, weight.detach())
    return found


def _data(case: GPTCase) -> dict[str, Any]:
    return {name: iter(microbatches(case, STEPS * M, ord(name))) for name in SHAPES}


def train(
    case: GPTCase,
    schedule: str,
    *,
    clip: float = 0.0,
    shapes: dict[str, LoRAShape] = SHAPES,
) -> dict[str, torch.Tensor]:
    """Train both adapters for two steps; return gradients, weights and norms, whole, by name."""
    p = torch.distributed.get_world_size() // (case.tensor_parallel * case.data_parallel)
    adapters = Adapters(tuple(Adapter(name, M) for name in SHAPES))
    with briefly():
        order = schedules.build(schedule, pipeline_size=p, adapters=adapters)
    found: dict[str, torch.Tensor] = {}
    with built(case, order, adapters.num_units, lambda: 0) as (pipeline, chunks):
        assert pipeline is not None
        layers = LoRALayers(chunks, shapes)
        each = {name: new_optimizer(layers, name, clip) for name in SHAPES}
        part = pipeline.train_adapters(
            AdapterOptimizers([layers], each, get_model_config(chunks[0]))
        )
        data = [part.merged(_data(case)) for _ in chunks]
        for _ in range(STEPS):
            for own in each.values():
                own.clear()
            forward_backward(pipeline.forward_backward_func, chunks, data, adapters.num_units)
            for name, own in each.items():
                own.reduce()
                assert own.has_finite_gradients()
                for key, weight in own.named_weights().items():
                    found[f"{name} {key} gradient"] = _whole(weight, weight.main_grad)
                stepped = own.step()
                assert stepped.is_done
                found[f"{name} norm"] = torch.tensor(stepped.norm or 0.0)
        for name, own in each.items():
            for key, weight in own.named_weights().items():
                found[f"{name} {key}"] = _whole(weight, weight.detach())
        base = [w for chunk in chunks for w in unwrap_model(chunk).parameters()]
        assert base and not any(w.requires_grad for w in base)
    return found


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


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("world", "schedule", "case"),
    [
        (2, "v-zb", BASE),
        pytest.param(2, "1f1b", BASE, marks=pytest.mark.slow),
        pytest.param(4, "v-half", replace(BASE, layers=8), marks=pytest.mark.slow),
        pytest.param(4, "zb-h1", replace(BASE, data_parallel=2), marks=pytest.mark.slow),
        pytest.param(4, "1f1b", replace(BASE, tensor_parallel=2), marks=pytest.mark.slow),
    ],
)
def test_steps_without_a_flush_are_those_with_one(
    ranks: RankPools, world: int, schedule: str, case: GPTCase
) -> None:
    pool = ranks(world)
    apart = of_all(pool.run(train, case=case, schedule=schedule, clip=0.01))
    ours = of_all(pool.run(stream, case=case, schedule=schedule, clip=0.01))
    assert ours.keys() == {name for name in apart if "gradient" not in name}
    for name, value in ours.items():
        torch.testing.assert_close(value, apart[name], rtol=1e-5, atol=1e-6, msg=name)


DROPPED = {name: replace(shape, dropout=0.25) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("schedule", ["v-zb", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_dropout_follows_the_layer_and_the_microbatch(ranks: RankPools, schedule: str) -> None:
    """The same numbers are dropped wherever a layer is, though the base draws none."""
    plain = of_all(ranks(2).run(train, case=BASE, schedule="1f1b", shapes=DROPPED))
    check_close(of_all(ranks(2).run(train, case=BASE, schedule=schedule, shapes=DROPPED)), plain)
    whole = of_all(ranks(2).run(train, case=BASE, schedule="1f1b"))
    assert not any(torch.equal(plain[name], whole[name]) for name in plain if "gradient" in name)


def dropped(case: GPTCase) -> dict[str, torch.Tensor]:
    """What is left of the numbers of each layer in the first F of a rank."""
    found: dict[str, torch.Tensor] = {}

    def note(module: Any, arguments: tuple[torch.Tensor], output: torch.Tensor) -> None:
        found.setdefault(names[module], output != 0)

    adapters = Adapters((Adapter("a", M),))
    order = schedules.build("1f1b", pipeline_size=2, adapters=adapters)
    with built(case, order, M, lambda: 0) as (pipeline, chunks):
        assert pipeline is not None
        layers = LoRALayers(chunks, {"a": DROPPED["a"]})
        names = {m: n for n, m in chunks[0].named_modules() if "lora_dropout." in n}
        for module in names:
            module.register_forward_hook(note)
        own = {"a": new_optimizer(layers, "a", 0.0)}
        part = pipeline.train_adapters(
            AdapterOptimizers([layers], own, get_model_config(chunks[0]))
        )
        data = [part.merged({"a": iter(microbatches(case, M, 1))})]
        forward_backward(pipeline.forward_backward_func, chunks, data, M)
    return found


@pytest.mark.long
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_drop_the_same_of_what_both_have(
    ranks: RankPools, sequence_parallel: bool
) -> None:
    case = replace(BASE, tensor_parallel=2, sequence_parallel=sequence_parallel)
    first, second, *_ = ranks(4).run(dropped, case=case)
    assert first.keys() == second.keys()
    assert len(first) == 4 * case.layers / 2
    for name, mask in first.items():
        have_same = not sequence_parallel and ("qkv" in name or "fc1" in name)
        assert torch.equal(mask, second[name]) == have_same, name
        assert 0.6 < mask.float().mean() < 0.9


def train_te(case: GPTCase, schedule: str) -> dict[str, torch.Tensor]:
    """Train on Transformer-Engine's modules, of which fused ones keep the normed input.

    Clipping takes kernels, and the optimizer is torch's.
    """
    from megatron.core import optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    gpt_cases._specification = layers_of_te
    return train(case, schedule)


@pytest.mark.long
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_layers_of_transformer_engine_get_the_same_adapters(
    ranks: RankPools, te_pool: RankPool, norm: str
) -> None:
    case = replace(BASE, options=(("normalization", norm),))
    plain = of_all(ranks(2).run(train, case=case, schedule="v-half"))
    check_close(of_all(te_pool.run(train_te, case=case, schedule="v-half")), plain)
