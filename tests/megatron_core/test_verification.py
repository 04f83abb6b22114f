"""The comparison of a first step with one in which nothing is split finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gpt_cases import GPTCase, built, forward_backward, gradients, microbatches
from joined_pairs import joined
from model_options import EXPERTS as PAIRED
from ranks import RankPools
from recompute_offload import with_recompute_offload

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import data_parallel, split_backward
from megatron_zb.runtime.autograd_stage import WeightGradQueue
from megatron_zb.schedules import Schedule

LAYER = "decoder.layers.3.mlp.linear_fc1"


def steps(case: GPTCase, schedule: str | Schedule, count: int, *, verifies: bool) -> list[Any]:
    """The losses and gradients of so many steps, and what is said of the first."""
    with redirect_stdout(StringIO()) as said, built(case, schedule, 4) as (adapter, chunks):
        assert adapter is not None
        if verifies:
            adapter.verify()
        data = [microbatches(case, 4 * count) for _ in chunks]
        found: list[Any] = []
        for _ in range(count):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            records = forward_backward(adapter.forward_backward_func, chunks, data, 4)
            found.append(([float(r["lm loss"]) for r in records], dict(gradients(chunks))))
    lines = [line for line in said.getvalue().splitlines() if "--pipeline-verify" in line]
    return [lines, found]


def compare_steps(case: GPTCase, schedule: str | Schedule) -> list[str]:
    """What is said, and whether the steps are those of a run that compares nothing."""
    lines, found = steps(case, schedule, 2, verifies=True)
    _, usual = steps(case, schedule, 2, verifies=False)
    for (losses, ours), (expected, theirs) in zip(found, usual, strict=True):
        assert losses == expected
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return lines


EXPERTS = (
    ("num_moe_experts", 2),
    ("moe_router_topk", 2),
    ("moe_router_load_balancing_type", "aux_loss"),
    ("moe_aux_loss_coeff", 0.01),
    ("add_bias_linear", False),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "schedule", "split"),
    [
        (GPTCase(tied=True), "v-half", 17),
        (GPTCase(dropout=0.1, overlap_grad_reduce=True), "zb-h1", 17),
        (GPTCase(options=EXPERTS), "v-zb", 25),
        (GPTCase(changes=("hook", "weight norm")), "v-zb", 13),
        (GPTCase(changes=("new average", "counter", "history")), "v-half", 17),
        (GPTCase(dtype="bfloat16", vocabulary=True), "v-half", 16),
        (GPTCase(data_parallel=2, overlap_grad_reduce=True, bucket_size=1000), "v-half", 34),
    ],
    ids=["tied", "dropout", "experts", "changed", "stateful", "vocabulary", "data-parallel"],
)
def test_a_right_step_is_said_once(
    ranks: RankPools, case: GPTCase, schedule: str, split: int
) -> None:
    """And leaves no trace: losses, draws and gradients of both steps are as without it."""
    said = ranks(2 * case.data_parallel).run(compare_steps, case=case, schedule=schedule)
    assert said[1:] == [[]] * (len(said) - 1)
    assert len(said[0]) == 1
    assert f", {split} of split layers, are those of an unsplit backward" in said[0][0]


@pytest.mark.parametrize("recompute", [0.4, 0.0])
def test_a_step_that_recomputes_and_offloads_is_verified(
    ranks: RankPools, recompute: float
) -> None:
    kept = schedules.build("v-half", pipeline_size=2, num_microbatches=4)
    order = with_recompute_offload(kept, seed=1, recompute=recompute, offload=0.4)
    case = GPTCase(dropout=0.1)
    said = ranks(2).run(compare_steps, case=case, schedule=order)
    assert ", 17 of split layers, are those of an unsplit backward" in said[0][0]


@pytest.mark.slow
def test_a_step_in_overlapped_pairs_is_verified(ranks: RankPools) -> None:
    case = GPTCase(
        dtype="bfloat16",
        data_parallel=2,
        expert_parallel=2,
        layers=8,
        all_to_all_overlaps=True,
        options=tuple(PAIRED.items()),
    )
    order = joined(schedules.build("v-half", pipeline_size=2, num_microbatches=4))
    assert order.pairs
    said = ranks(4).run(compare_steps, case=case, schedule=order)
    assert " of split layers, are those of an unsplit backward" in said[0][0]
    assert " 0 of split layers" not in said[0][0]


Fault = Callable[[], Any]


def weight_unread() -> Any:
    usual = WeightGradQueue.defer

    def defer(self: Any, *arguments: Any, layer: str = "", **more: Any) -> None:
        if layer != LAYER:
            usual(self, *arguments, layer=layer, **more)

    return patch.object(WeightGradQueue, "defer", defer)


def doubled() -> Any:
    usual = WeightGradQueue.defer

    def defer(self: Any, compute: Any, *operands: Any, layer: str = "", **more: Any) -> None:
        def twice(*given: Any) -> None:
            for _ in range(2):
                call, weight, *kept = compute.args
                call.uses.left = 1
                compute.func(call, weight, *kept, *given)

        usual(self, twice if layer == LAYER else compute, *operands, layer=layer, **more)

    return patch.object(WeightGradQueue, "defer", defer)


def run_twice() -> Any:
    """In one microbatch."""
    usual = WeightGradQueue.run
    done: list[str] = []

    def run(self: Any, microbatch: int) -> None:
        for task in self._microbatches[0][1]:
            if task.layer == LAYER and not done:
                done.append(task.layer)
                call, weight, *kept = task.compute.args
                again = call._replace(uses=split_backward._Uses(left=1))
                with torch.no_grad():
                    task.compute.func(again, weight, *kept)
        usual(self, microbatch)

    return patch.object(WeightGradQueue, "run", run)


def stale_operand() -> Any:
    usual = split_backward._operands
    last: dict[str, torch.Tensor] = {}

    def operands(ctx: Any, input_: torch.Tensor, grad_output: torch.Tensor) -> Any:
        before = last.get(ctx.layer.name, input_)
        last[ctx.layer.name] = input_
        return usual(ctx, before if ctx.layer.name == LAYER else input_, grad_output)

    return patch.object(split_backward, "_operands", operands)


def reduced_too_early() -> Any:
    usual = data_parallel.Reduction.expect

    def expect(self: Any, brings: Any, unknown: bool = False) -> None:
        usual(self, {})

    def came(self: Any, weight: Any) -> None:
        pass

    return patch.multiple(data_parallel.Reduction, expect=expect, gradient_came=came)


def not_summed() -> Any:
    """Over tensor-parallel ranks, of the gradient of a column-parallel layer's input."""
    usual = split_backward._input_gradient

    def input_gradient(ctx: Any, grad_output: torch.Tensor, input_: torch.Tensor) -> torch.Tensor:
        if ctx.layer.name == LAYER:
            return grad_output.matmul(ctx.parameter)
        return usual(ctx, grad_output, input_)

    return patch.object(split_backward, "_input_gradient", input_gradient)


def found(case: GPTCase, fault: Fault) -> str:
    with fault():
        try:
            steps(case, "zb-h1", 1, verifies=True)
        except UsageError as error:
            return str(error)
    return "nothing"


PARALLEL = GPTCase(data_parallel=2, overlap_grad_reduce=True, bucket_size=1000)


@pytest.mark.parametrize(
    ("fault", "case", "said"),
    [
        (
            weight_unread,
            GPTCase(),
            f"the gradient of {LAYER}.weight on rank 1 is missing, where an",
        ),
        (doubled, GPTCase(), f"the gradient of {LAYER}.weight on rank 1 has a norm of"),
        (run_twice, GPTCase(), f"the gradient of {LAYER}.weight on rank 1 has a norm of"),
        (stale_operand, GPTCase(), f"the gradient of {LAYER}.weight on rank 1 has a norm of"),
        (reduced_too_early, PARALLEL, "is off by"),
        (
            not_summed,
            GPTCase(tensor_parallel=2),
            "the gradient of decoder.layers.3.pre_mlp_layernorm.bias on rank",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_is_found(ranks: RankPools, fault: Fault, case: GPTCase, said: str) -> None:
    """On all ranks, and its layer named: that nearest to the loss, as input gradients spread."""
    world = 2 * case.data_parallel * case.tensor_parallel
    told = ranks(world).run(found, case=case, fault=fault)
    assert len(set(told)) == 1
    assert told[0].startswith("--pipeline-verify: with --pipeline-schedule zb-h1, the gradient of ")
    assert said in told[0]
