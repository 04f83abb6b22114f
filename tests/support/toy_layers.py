"""A toy model of linear layers, one for each stage."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from megatron_zb.runtime.autograd_stage import AutogradStage, WeightGradQueue
from megatron_zb.schedules.passes import Message
from megatron_zb.schedules.placement import Placement


class Layer:
    """y = tanh(x w) with its weight gradient left to the queue, in plain torch."""

    def __init__(self, seed: int, queue: WeightGradQueue) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(4, 4, generator=generator, dtype=torch.float64)
        self.gradient = torch.zeros_like(self.weight)
        self.queue = queue

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(_Product.apply(x, self))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return x @ layer.weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (x,), layer = ctx.saved_tensors, ctx.layer

        def accumulate(x: torch.Tensor, grad: torch.Tensor) -> None:
            layer.gradient += x.t() @ grad

        if layer.queue.deferring:
            layer.queue.defer(accumulate, x, grad)
        else:
            accumulate(x, grad)
        return grad @ layer.weight.t(), None


def toy_input(microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + microbatch)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def layers_of_a_rank(
    placement: Placement, ends: Collection[int] = ()
) -> tuple[dict[int, Layer], dict[int, AutogradStage]]:
    """One layer for every stage of this rank; those of ``ends``, or the last one, have a loss."""
    ends = ends or (placement.num_stages - 1,)
    layers: dict[int, Layer] = {}
    stages = {}
    for stage in placement.stages_of[torch.distributed.get_rank()]:
        queue = WeightGradQueue()
        layer = layers[stage] = Layer(stage, queue)
        is_last = stage in ends

        def compute(
            microbatch: int, x: torch.Tensor | None, layer: Layer = layer, last: bool = is_last
        ) -> torch.Tensor:
            y = layer(toy_input(microbatch).requires_grad_() if x is None else x)
            return y.square().sum() if last else y

        stages[stage] = AutogradStage(compute, queue, is_last=is_last)
    return layers, stages


def empty_message(message: Message) -> torch.Tensor:
    return torch.empty(3, 4, dtype=torch.float64)
