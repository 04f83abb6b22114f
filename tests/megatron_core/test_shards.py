"""What W needs of a sequence that sequence parallelism has gathered: a shard is held until then."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt_cases import GPTCase, _enter_parallel_groups, install_stand_in_for_fused_accumulation
from ranks import RankPools

from megatron_zb.megatron_core.split_backward import (
    SequenceShard,
    SplitBackward,
    split_linear_layers,
)
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.autograd_stage import WeightGradQueue

WIDTH, WIDER, TOKENS = 8, 12, 6  # tokens of one rank


class Run:
    """One of Megatron's layers with its queue, over two tensor-parallel ranks."""

    def __init__(self, kind: str, sequence_parallel: bool, fused: bool, expert: bool) -> None:
        from megatron.core import tensor_parallel
        from megatron.core.transformer import TransformerConfig

        _enter_parallel_groups(GPTCase(tensor_parallel=2), None, 1)
        if fused:
            install_stand_in_for_fused_accumulation()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        self.rank = torch.distributed.get_rank()
        self.kind, self.sequence_parallel, self.expert = kind, sequence_parallel, expert
        config = TransformerConfig(
            num_layers=1,
            hidden_size=WIDTH,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
            gradient_accumulation_fusion=fused,
            use_cpu_initialization=True,
        )
        column = kind == "column"
        layer: Any = (
            tensor_parallel.ColumnParallelLinear if column else tensor_parallel.RowParallelLinear
        )
        more = {"gather_output": False} if column else {"input_is_parallel": True}
        self.layer = layer(
            WIDTH,
            WIDER,
            config=config,
            init_method=torch.nn.init.normal_,
            bias=False,
            skip_bias_add=True,
            **more,
        )
        self.layer.weight.main_grad = torch.zeros_like(self.layer.weight)
        if expert:
            self.layer.explicit_expert_comm = True
        self.queue = WeightGradQueue()
        self.queue.activation_memory = self.memory = ActivationMemory()
        split_linear_layers(torch.nn.ModuleList([self.layer]), SplitBackward(self.queue))

    def input_(self, microbatch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * microbatch + self.rank)
        whole = self.kind == "row" or not self.sequence_parallel or self.expert
        width = WIDTH // 2 if self.kind == "row" else WIDTH
        shape = (2 * TOKENS if whole else TOKENS, 1, width)
        return torch.randn(shape, generator=generator).requires_grad_()

    def backward(self, microbatch: int) -> None:
        self.layer(self.input_(microbatch))[0].square().sum().backward()
        if self.layer.weight.grad is not None:
            if not self.layer.weight.grad_added_to_main_grad:
                self.layer.weight.main_grad += self.layer.weight.grad
            self.layer.weight.grad = None

    def deferred(self) -> int:
        """B and then W of three microbatches; the bytes that they hold between."""
        for microbatch in range(3):
            with self.queue.collecting(microbatch):
                self.backward(microbatch)
        held = self.memory.live_bytes
        for microbatch in range(3):
            self.queue.run(microbatch)
        return held

    def whole(self) -> None:
        for microbatch in range(3):
            self.backward(microbatch)


def deferred_and_whole(**options: Any) -> tuple[int, int, bool]:
    """Bytes held by three microbatches between B and W, and after W; whether gradients differ."""
    one, other = Run(**options), Run(**options)
    held = one.deferred()
    other.whole()
    gradient, expected = one.layer.weight.main_grad, other.layer.weight.main_grad
    assert expected.any()
    return held, one.memory.live_bytes, not torch.equal(gradient, expected)


COLUMN, ROW = (WIDTH, WIDER // 2), (WIDTH // 2, WIDER)  # of the input and of the output gradient


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize(
    ("kind", "sequence_parallel", "expert", "numbers"),
    [
        ("column", True, False, TOKENS * COLUMN[0] + 2 * TOKENS * COLUMN[1]),
        ("row", True, False, 2 * TOKENS * ROW[0] + TOKENS * ROW[1]),
        ("column", False, False, 2 * TOKENS * sum(COLUMN)),
        ("row", False, False, 2 * TOKENS * sum(ROW)),
        ("row", True, True, 2 * TOKENS * sum(ROW)),
    ],
    ids=["column", "row", "column-tensor-parallel", "row-tensor-parallel", "row-of-experts"],
)
def test_a_shard_is_held_of_what_is_gathered(
    ranks: RankPools, kind: str, sequence_parallel: bool, expert: bool, numbers: int, fused: bool
) -> None:
    """And of nothing else; experts that bring their tokens themselves have no shards."""
    found = ranks(2).run(
        deferred_and_whole,
        kind=kind,
        sequence_parallel=sequence_parallel,
        fused=fused,
        expert=expert,
    )
    assert found == [(3 * numbers * 4, 0, False)] * 2


def stage_input_is_gone_after_b(kind: str) -> bool:
    run = Run(kind, sequence_parallel=True, fused=False, expert=False)
    x = run.input_(0)
    y = run.layer(x * 2)[0].square().sum()
    with run.queue.collecting(0):
        y.backward()
    assert x.grad is not None
    seen = weakref.ref(x)
    del x, y
    assert len(run.queue) == 1
    # gloo's thread may hold the input of a collective for a moment after its end
    end = time.monotonic() + 10
    while seen() is not None and time.monotonic() < end:
        time.sleep(0.01)
    return seen() is None


@pytest.mark.parametrize("kind", ["column", "row"])
def test_what_waits_for_w_does_not_keep_the_input_of_the_stage(ranks: RankPools, kind: str) -> None:
    """Its graph leads there: one more message would be held for each W that is left."""
    assert ranks(2).run(stage_input_is_gone_after_b, kind=kind) == [True] * 2


def gathers_and_uses() -> list[str]:
    """What a W of two column-parallel layers does, in order."""
    run = Run("column", sequence_parallel=True, fused=False, expert=False)
    with run.queue.collecting(0):
        for microbatch in range(2):  # as two layers, in one B
            run.backward(microbatch)
    said: list[str] = []
    gather, whole = dist.all_gather_into_tensor, SequenceShard.whole

    def gathers(*args: Any, **more: Any) -> Any:
        said.append("gather")
        return gather(*args, **more)

    def uses(self: SequenceShard) -> torch.Tensor:
        said.append("use")
        return whole(self)

    change: Any = SequenceShard
    dist.all_gather_into_tensor, change.whole = gathers, uses
    try:
        run.queue.run(0)
    finally:
        dist.all_gather_into_tensor, change.whole = gather, whole
    return said


def test_shards_are_gathered_beside_the_weight_gradient_before(ranks: RankPools) -> None:
    assert ranks(2).run(gathers_and_uses) == [["gather", "gather", "use", "use"]] * 2
