"""Optimizers of LoRA adapters on small models, as a training of Megatron has them."""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_zb.lora.layers import LoRALayers
from megatron_zb.lora.training import AdapterOptimizer, wrapped


class ConstantRate:
    """The schedule of a learning rate that is always the same."""

    def step(self, increment: int) -> None:
        del increment


def new_optimizer(layers: LoRALayers, name: str, clip: float) -> AdapterOptimizer:
    """Adam over the weights of an adapter, whose steps are of two samples."""
    chunks = wrapped(layers.weights[name], DistributedDataParallelConfig(), name)
    config = OptimizerConfig(lr=0.01, adam_eps=1e-4, clip_grad=clip)
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    return AdapterOptimizer(chunks, optimizer, ConstantRate(), 2)
