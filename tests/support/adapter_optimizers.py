"""Optimizers of adapters of small models, as a training of Megatron has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_zb.lora.layers import LoRALayers
from megatron_zb.lora.training import AdapterOptimizer, wrapped
from megatron_zb.lora.whole import WholeModels


class ConstantRate:
    """The schedule of a learning rate that is always the same."""

    def step(self, increment: int) -> None:
        del increment


def new_optimizer(weights: LoRALayers | WholeModels, name: str, clip: float) -> AdapterOptimizer:
    """Adam over the weights of an adapter, whose steps are of two samples."""
    chunks = wrapped(weights.weights[name], DistributedDataParallelConfig(), name)
    return AdapterOptimizer(chunks, adam_over(chunks, clip), ConstantRate(), 2)


def adam_over(chunks: Sequence[Any], clip: float) -> Any:
    """Megatron's Adam over the weights of chunks that are wrapped for data parallelism."""
    config = OptimizerConfig(lr=0.01, adam_eps=1e-4, clip_grad=clip)
    return get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
