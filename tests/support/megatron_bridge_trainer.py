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
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.peft import utils as peft_utils
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training.eval import evaluate
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.train import train_step
from megatron.core import dist_checkpointing
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
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.utils import unwrap_model

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


def new_provider(pipeline_size: int, **options: Any) -> GPTModelProvider:
    """Bridge's provider of a GPT of eight layers."""
    usual: dict[str, Any] = {
        "num_layers": 8,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "transformer_layer_spec": _local_layers,
        "pipeline_model_parallel_size": pipeline_size,
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": "rope",
        **ON_A_CPU,
    }
    return GPTModelProvider(**usual | options)


def new_hybrid_provider(pipeline_size: int, pattern: str, **options: Any) -> HybridModelProvider:
    """Bridge's provider of a hybrid model, whose layers have stand-ins for kernels of a GPU."""

    def layers() -> Any:  # a function, as Bridge copies its providers, and not every layer can be
        from hybrid_layers import STACK

        return STACK

    usual: dict[str, Any] = {
        "hybrid_layer_pattern": pattern,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "hybrid_stack_spec": layers,
        "mamba_head_dim": 8,
        "mamba_num_groups": 2,
        "mamba_state_dim": 8,
        "position_embedding_type": "rope",
        "pipeline_model_parallel_size": pipeline_size,
        "attention_backend": AttnBackend.auto,
        "params_dtype": torch.float32,
        "bf16": False,
        **ON_A_CPU,
    }
    return HybridModelProvider(**usual | options)


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
        provider: GPTModelProvider | HybridModelProvider,
        *,
        adapted: bool = False,
        draws: bool = True,
        clip_grad: float = 1.0,
        forward_step: Callable[..., Any] = forward_step,
        batches: Callable[[], Iterator[Any]] | None = None,
        **data_parallel: Any,
    ) -> None:
        mpu.initialize_model_parallel(
            provider.tensor_model_parallel_size,
            provider.pipeline_model_parallel_size,
            provider.virtual_pipeline_model_parallel_size,
            context_parallel_size=provider.context_parallel_size,
            expert_model_parallel_size=provider.expert_model_parallel_size,
        )
        model_parallel_cuda_manual_seed(1)
        self.set_microbatches(MICROBATCHES)
        destroy_rerun_state_machine()
        destroy_moe_metrics_tracker()  # its entries have groups of an earlier case
        initialize_rerun_state_machine()
        provider.finalize()
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        ddp = DistributedDataParallelConfig(**data_parallel)
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
        self.optimizer_config = OptimizerConfig(
            lr=1e-2,
            clip_grad=clip_grad,
            weight_decay=0.0,
            use_distributed_optimizer=ddp.use_distributed_optimizer,
        )
        self._optimizer = get_megatron_optimizer(self.optimizer_config, self.model)
        self.state = _state(provider, ddp)
        if "state" in signature(forward_step).parameters:
            forward_step = partial(forward_step, self.state)
        self._messages = P2PCommunicator(pp_group=self._groups.pp, config=provider)
        self._data = RerunDataIterator((batches or rising_batches)())
        self.forward_step = forward_step

    @staticmethod
    def set_microbatches(number: int) -> None:
        """Set the number of microbatches of the following steps."""
        ranks = mpu.get_data_parallel_world_size()
        unset_num_microbatches_calculator()
        init_num_microbatches_calculator(0, None, number * ranks, 1, ranks)

    def train_one_step(self) -> tuple[dict[str, float], float]:
        """The losses of the step, on the rank that has the output layer, and the norm."""
        losses, _, _, _, _, norm, *_ = train_step(
            self.forward_step,
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

    def evaluate(self) -> dict[str, float]:
        """The losses of as many microbatches as a step has, on the rank that has them."""
        config, data = self.state.cfg, RerunDataIterator(rising_batches())
        losses, *_ = evaluate(
            self.state,
            self.forward_step,
            data,
            self.model,
            None,
            config,
            pg_collection=self._groups,
        )
        assert losses is not None, "there is no limit of time"
        return {name: float(loss) for name, loss in losses.items()}

    def save(self, folder: str) -> None:
        dist_checkpointing.save(self._sharded_state(is_loading=False), folder)

    def load(self, folder: str, steps_done: int) -> None:
        """Continue behind so many steps of a job that was saved."""
        state = dist_checkpointing.load(self._sharded_state(is_loading=True), folder)
        for number, chunk in enumerate(unwrap_model(self.model)):
            chunk.load_state_dict(state[f"model{number}"])
        self._optimizer.load_state_dict(state["optimizer"])
        for _ in range(steps_done * MICROBATCHES):
            next(self._data)

    def _sharded_state(self, is_loading: bool) -> dict[str, Any]:
        chunks = unwrap_model(self.model)
        state = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
        model = state if len(chunks) > 1 else state["model0"]
        kind = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
        optimizer = self._optimizer.sharded_state_dict(model, is_loading, metadata=kind)
        return state | {"optimizer": optimizer}


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

    def start(self, *args: Any, **keywords: Any) -> None:
        """Start nothing."""

    stop = log = start


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
            exit_duration_in_mins=None,
        ),
        validation=SimpleNamespace(
            eval_global_batch_size=MICROBATCHES, eval_micro_batch_size=1, eval_iters=1
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
    return SimpleNamespace(
        cfg=config,
        timers=_NoTimer(),
        straggler_timer=_NoTimer(),
        train_state=SimpleNamespace(consumed_valid_samples=0),
        rank_monitor_client=None,
        fault_tolerance_state=None,
    )


def rising_batches(seed: int = 3) -> Iterator[dict[str, Any]]:
    """Rising tokens from a drawn one."""
    draw = torch.Generator().manual_seed(seed + mpu.get_data_parallel_rank())
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


def packed_batches(form: str) -> Iterator[dict[str, Any]]:
    """Samples of several documents, whose ends have the names of Bridge's data of today or before.

    A document has up to one token of padding, and a sample ends with two. With the form "mask",
    attention keeps to documents by a mask; with "unpacked", to nothing.
    """
    draw = torch.Generator().manual_seed(3)
    places = torch.arange(LENGTH)
    while True:
        lengths = 2 * torch.randint(1, 4, (7,), generator=draw)
        ends = torch.tensor([0, *lengths.cumsum(0).clamp(max=LENGTH - 2), LENGTH])
        real = (ends.diff() - torch.randint(2, (8,), generator=draw)).clamp(min=0)
        real[-1] = 0
        number = torch.bucketize(places, ends, right=True) - 1
        positions = places - ends[number]
        tokens = torch.randint(VOCABULARY, (1, LENGTH), generator=draw)
        batch = {
            "tokens": tokens,
            "labels": (tokens + positions) % VOCABULARY,
            "loss_mask": (positions < real[number]).long()[None],
            "position_ids": positions[None],
            "attention_mask": None,
            "token_count": [LENGTH],
        }
        yield batch | _documents(form, ends.int(), torch.cat([ends[:1], real.cumsum(0)]).int())


def _documents(form: str, ends: torch.Tensor, real_ends: torch.Tensor) -> dict[str, Any]:
    """What a microbatch has of its documents, whose padding the real ends leave out."""
    longest = ends.diff().max()[None]
    if form == "unpacked":
        return {}
    if form == "mask":
        number = torch.bucketize(torch.arange(LENGTH), ends, right=True)
        later = torch.ones(LENGTH, LENGTH).triu(1).bool()
        return {"attention_mask": ((number[:, None] != number) | later)[None, None]}
    if form == "current":
        return {
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), real_ends[None]),
            **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), ends[None]),
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), longest),
        }
    count = torch.tensor([[len(ends)]])
    none = torch.full((3,), -1)
    return {
        "cu_seqlens": torch.cat([ends, none])[None],
        "cu_seqlens_unpadded": torch.cat([real_ends, none])[None],
        **dict.fromkeys(("cu_seqlens_argmin", "cu_seqlens_unpadded_argmin"), count),
        "max_seqlen": longest,
    }
