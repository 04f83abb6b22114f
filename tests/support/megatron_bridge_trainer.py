"""Megatron-Bridge's own training step on CPU ranks: its providers, LoRA, forward step, importer.

Bridge's configuration of a job, its timers and its scheduler of learning rates are fakes with what
``train_step`` reads. Layers are Megatron's own, without Transformer-Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.peft import utils as peft_utils
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.train import train_step
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

from megatron_zb.megatron_core.random_streams import initialise_by_global_name

MICROBATCHES, LENGTH, VOCABULARY = 4, 16, 64
ADAPTED = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
# Bridge would ask whether a layer is of Transformer-Engine's classes, which are names only.
peft_utils.HAVE_TE = False

ON_A_CPU: dict[str, Any] = {
    "apply_rope_fusion": False,
    "attention_dropout": 0.0,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "gradient_accumulation_fusion": False,
    "hidden_dropout": 0.0,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "persist_layer_norm": False,
    "pipeline_dtype": torch.float32,
    "seq_length": LENGTH,
    "should_pad_vocab": False,
    "use_cpu_initialization": True,
    "vocab_size": VOCABULARY,
}


def new_provider(pipeline_size: int) -> GPTModelProvider:
    """Bridge's provider of a GPT of eight layers."""
    return GPTModelProvider(
        num_layers=8,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        transformer_layer_spec=_local_layers,
        pipeline_model_parallel_size=pipeline_size,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        **ON_A_CPU,
    )


def imported_provider(bridge: AutoBridge, pipeline_size: int) -> GPTModelProvider:
    """The provider for a model in Hugging Face's format, whose weights Bridge then imports."""
    provider = bridge.to_megatron_provider()
    for name, value in ON_A_CPU.items():
        setattr(provider, name, value)
    provider.transformer_layer_spec = partial(_local_layers, normalization="RMSNorm")
    provider.pipeline_model_parallel_size = pipeline_size
    provider.params_dtype = torch.float32
    provider.fp16 = provider.bf16 = False
    return provider


def _local_layers(config: Any, **options: Any) -> Any:
    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, **options
    )


class BridgeJob:
    """A job of Megatron-Bridge on this rank, with a provider that may have been prepared.

    With ``adapted``, LoRA's adapters are beside frozen layers. Weights are drawn, or imported.
    """

    def __init__(
        self,
        provider: GPTModelProvider,
        *,
        adapted: bool = False,
        draws: bool = True,
        clip_grad: float = 1.0,
        forward_step: Callable[..., Any] = forward_step,
        batches: Callable[[], Iterator[Any]] | None = None,
    ) -> None:
        mpu.initialize_model_parallel(
            1, provider.pipeline_model_parallel_size, provider.virtual_pipeline_model_parallel_size
        )
        model_parallel_cuda_manual_seed(1)
        unset_num_microbatches_calculator()
        init_num_microbatches_calculator(0, None, MICROBATCHES, 1, 1)
        destroy_rerun_state_machine()
        destroy_moe_metrics_tracker()  # its entries have groups of an earlier case
        initialize_rerun_state_machine()
        provider.finalize()
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        ddp = DistributedDataParallelConfig()
        hook = partial(_draw, provider, adapted)
        self.model = provider.provide_distributed_model(
            ddp_config=ddp,
            wrap_with_ddp=True,
            use_cpu_initialization=True,
            pg_collection=self._groups,
            bf16=False,
            fp16=False,
            **({"pre_wrap_hook": hook} if draws else {}),
        )
        if provider.finalize_model_grads_func is None:  # the schedule has set its own
            provider.finalize_model_grads_func = finalize_model_grads
        optimizer = OptimizerConfig(lr=1e-2, clip_grad=clip_grad, weight_decay=0.0)
        self._optimizer = get_megatron_optimizer(optimizer, self.model)
        self.state = _state(provider, ddp)
        if "state" in signature(forward_step).parameters:
            forward_step = partial(forward_step, self.state)
        self._messages = P2PCommunicator(pp_group=self._groups.pp, config=provider)
        self._data = RerunDataIterator((batches or _batches)())
        self._forward_step = forward_step

    def train_one_step(self) -> tuple[dict[str, float], float]:
        """The losses of the step, on the rank that has the output layer, and the norm."""
        losses, _, _, _, _, norm, *_ = train_step(
            self._forward_step,
            self._data,
            self.model,
            self._optimizer,
            SimpleNamespace(step=lambda increment: None),
            self.state,
            self._groups,
            get_forward_backward_func(),
            p2p_communicator=self._messages,
        )
        return {name: float(loss) for name, loss in losses.items()}, float(norm)


def _draw(provider: Any, adapted: bool, chunks: list[Any]) -> list[Any]:
    """Draw weights by their names in the whole model; adapters start with an effect."""
    initialise_by_global_name(chunks, provider, seed=1)
    if not adapted:
        return chunks
    adapters = LoRA(target_modules=ADAPTED, dim=4, alpha=8, dropout=0.0)
    chunks = adapters(chunks, training=True)
    for chunk in chunks:
        for name, weight in chunk.named_parameters():
            if "adapter" in name:
                draw = torch.Generator().manual_seed(7)
                weight.data.copy_(torch.randn(weight.shape, generator=draw) * 0.05)
    return chunks


class _NoTimer(nullcontext[None]):
    """A timer, and what hands out timers, that measure nothing."""

    def __call__(self, *args: Any, **keywords: Any) -> _NoTimer:
        return self

    def start(self, **keywords: Any) -> None:
        """Start nothing."""

    stop = start


def _state(provider: Any, ddp: Any) -> SimpleNamespace:
    """What ``train_step`` and ``forward_step`` read of Bridge's configuration and state."""
    config = SimpleNamespace(
        model=provider,
        ddp=ddp,
        data_parallel_size=1,
        train=SimpleNamespace(
            micro_batch_size=1,
            empty_unused_memory_level=0,
            check_optimizer_step_success=True,
            skip_sync_grad_norm_across_mp=False,
        ),
        optimizer=SimpleNamespace(
            reuse_grad_buf_for_mxfp8_param_ag=False,
            barrier_with_L1_time=False,
            log_num_zeros_in_grad=False,
        ),
        dataset=SimpleNamespace(
            dataloader_type="single", skip_getting_attention_mask_from_dataset=True
        ),
        dist=SimpleNamespace(use_decentralized_pg=False),
        rerun_state_machine=SimpleNamespace(
            check_for_nan_in_loss=False, check_for_spiky_loss=False
        ),
    )
    return SimpleNamespace(cfg=config, timers=_NoTimer(), straggler_timer=_NoTimer())


def _batches() -> Iterator[dict[str, Any]]:
    """Rising tokens from a drawn one."""
    draw = torch.Generator().manual_seed(3)
    while True:
        first = torch.randint(VOCABULARY, (1, 1), generator=draw)
        tokens = (first + torch.arange(LENGTH + 1)) % VOCABULARY
        yield {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": torch.ones(1, LENGTH),
            "position_ids": torch.arange(LENGTH)[None],
            "attention_mask": None,
        }
