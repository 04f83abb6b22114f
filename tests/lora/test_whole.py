"""Copies of all weights in one pipeline: each trains as in a separate run of Megatron."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_optimizers import adam_over, new_optimizer
from brief_searches import briefly
from gpt_cases import GPTCase, built, forward_backward, microbatches
from megatron.core.utils import get_model_config, unwrap_model
from ranks import RankPools

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.lora.layers import LoRALayers, LoRAShape
from megatron_zb.lora.training import AdapterOptimizers
from megatron_zb.lora.whole import CopyBytes, WholeModels, check_fits, free_bytes
from megatron_zb.megatron_core.random_streams import global_parameters
from megatron_zb.schedules.features.adapters import Adapter, Adapters

M, STEPS, CLIP = 2, 3, 0.5
WHOLE = ("a", "b")
LORA = {"c": LoRAShape(4, 8.0, ("linear_proj", "linear_fc1"), 1)}
BASE = GPTCase(wrapped=False, dropout=0.1)
TENSOR = replace(BASE, tensor_parallel=2, sequence_parallel=True)
NORMS_OF_HEADS = replace(BASE, tensor_parallel=2, options=(("qk_layernorm", True),))


def data_of(case: GPTCase, name: str) -> Any:
    return iter(microbatches(case, STEPS * M, ord(name)))


def stages(case: GPTCase) -> int:
    return torch.distributed.get_world_size() // (case.tensor_parallel * case.data_parallel)


def together(
    case: GPTCase, schedule: str, names: tuple[str, ...]
) -> dict[str, dict[str, torch.Tensor]]:
    """Train all names for three steps; return the weights of each."""
    adapters = Adapters(tuple(Adapter(name, M) for name in names))
    with briefly():
        order = schedules.build(schedule, pipeline_size=stages(case), adapters=adapters)
    with built(case, order, adapters.num_units, lambda: 0) as (pipeline, chunks):
        assert pipeline is not None
        before = base_of(chunks)
        whole = WholeModels(chunks, [name for name in names if name in WHOLE])
        layers = LoRALayers(chunks, {name: LORA[name] for name in names if name in LORA})
        each = {
            name: new_optimizer(whole if name in WHOLE else layers, name, CLIP) for name in names
        }
        optimizers = AdapterOptimizers((layers, whole), each, get_model_config(chunks[0]))
        part = pipeline.train_adapters(optimizers)
        data = [part.merged({name: data_of(case, name) for name in names}) for _ in chunks]
        for _ in range(STEPS):
            for own in each.values():
                own.clear()
            forward_backward(pipeline.forward_backward_func, chunks, data, adapters.num_units)
            for name in each:
                optimizers.end_step(name)
                assert all(it.is_done for it in optimizers.stepped(name))
        for chunk in range(len(chunks)):
            whole.select(chunk, None)
        after = base_of(chunks)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        return {
            name: {key: weight.detach().clone() for key, weight in own.named_weights().items()}
            for name, own in each.items()
        }


def base_of(chunks: list[Any]) -> dict[str, torch.Tensor]:
    plain = map(unwrap_model, chunks)
    return {n: w.detach().clone() for chunk in plain for n, w in global_parameters(chunk).items()}


def in_a_separate_run(case: GPTCase, schedule: str, name: str) -> dict[str, torch.Tensor]:
    """Train the model as Megatron does, without any adapter."""
    done = 0
    with briefly():
        order = schedules.build(schedule, pipeline_size=stages(case), num_microbatches=M)
    with built(replace(case, wrapped=True), order, M, lambda: done) as (pipeline, chunks):
        assert pipeline is not None
        adam = adam_over(chunks, CLIP)
        data = [data_of(case, name) for _ in chunks]
        for _ in range(STEPS):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            adam.zero_grad()
            forward_backward(pipeline.forward_backward_func, chunks, data, M)
            adam.step()
            done += 1
        return base_of(chunks)


def check_same(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert torch.equal(one[name], value), name


@pytest.mark.parametrize("schedule", ["1f1b", "v-half", "zb-h1"])
def test_each_trains_as_in_a_separate_run(ranks: RankPools, schedule: str) -> None:
    names = (*WHOLE, *LORA)
    train = partial(ranks(2).run, case=BASE, schedule=schedule)
    ours = train(together, names=names)
    for name in WHOLE:
        check_same([of[name] for of in ours], train(in_a_separate_run, name=name))
    alone = train(together, names=("c",))
    check_same([of["c"] for of in ours], [of["c"] for of in alone])
    assert not torch.equal(ours[0]["a"][key := min(ours[0]["a"])], ours[0]["b"][key])


@pytest.mark.long
@pytest.mark.parametrize("case", [TENSOR, NORMS_OF_HEADS], ids=["sequence", "norms of heads"])
def test_with_tensor_parallelism(ranks: RankPools, case: GPTCase) -> None:
    train = partial(ranks(4).run, case=case, schedule="v-zb")
    ours = train(together, names=WHOLE)
    for name in WHOLE:
        check_same([of[name] for of in ours], train(in_a_separate_run, name=name))


@pytest.mark.parametrize(
    ("size", "more", "expected"),
    [
        (4, {}, (4, 4, 8)),
        (2, {}, (2, 2, 12)),
        (2, {"accumulate_allreduce_grads_in_fp32": True}, (2, 4, 12)),
        (2, {"use_distributed_optimizer": True}, (2, 2, 3)),
        (4, {"optimizer": "sgd"}, (4, 4, 4)),
    ],
    ids=["fp32", "bf16", "sums in fp32", "sharded", "sgd"],
)
def test_bytes_of_a_copy_are_those_of_a_training(
    size: int, more: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    """Of each weight: itself, its gradient, and Adam's two moments with a copy in float32."""
    weights = torch.nn.Linear(31, 10).to({2: torch.bfloat16, 4: torch.float32}[size])
    usual = {
        "accumulate_allreduce_grads_in_fp32": False,
        "use_distributed_optimizer": False,
        "optimizer": "adam",
    }
    found = CopyBytes.of([weights], SimpleNamespace(**usual | more), replicas=4)
    assert (found.weights, found.gradients, found.states) == tuple(320 * n for n in expected)
    assert free_bytes(weights) > 0


def refused(fits: int) -> str:
    """What the first rank says when the last one has room for so many copies."""
    rank, last = torch.distributed.get_rank(), torch.distributed.get_world_size() - 1
    each = CopyBytes(weights=2**20, gradients=2**21, states=2**22)
    free = (fits if rank == last else 9) * each.total + 5
    try:
        check_fits(["a", "b", "c"], each, free)
    except UsageError as error:
        return str(error)
    return ""


def test_more_copies_than_have_room_are_refused_with_the_number_that_fits(
    ranks: RankPools,
) -> None:
    assert set(ranks(2).run(refused, fits=3)) == {""}
    (said,) = set(ranks(2).run(refused, fits=1))
    assert "all take 21 MiB on rank 1, where 7 MiB are free: 1 of them fit: leave out b, c" in said
    (said,) = set(ranks(2).run(refused, fits=0))
    assert "none fits" in said
