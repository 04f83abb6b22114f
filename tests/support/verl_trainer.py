"""verl's Megatron engine on CPU ranks: its forward and backward over packed sequences.

The engine's own construction is left out: it imports a model in Hugging Face's format onto a GPU.
Its steps, its division into microbatches and its loss are verl's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from packed_attention import PackedAttention
from verl.utils import tensordict_utils
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
from verl.workers.utils.losses import sft_loss

from megatron_zb.megatron_core.random_streams import initialise_by_global_name

VOCABULARY, SEQUENCES, TOKENS = 64, 8, 24
"""Sequences of a step, and the most tokens of a microbatch."""


def new_config(pipeline_size: int) -> TransformerConfig:
    """Eight layers with grouped keys, for sequences of any length."""
    return TransformerConfig(
        num_layers=8,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        pipeline_model_parallel_size=pipeline_size,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
    )


class _Engine(MegatronEngineWithLMHead):
    """verl's engine with a model that has been built."""

    def __init__(self, config: Any, chunks: list[Any]) -> None:
        self.module = chunks
        self.tf_config = config
        self.enable_routing_replay = False
        self.engine_config = SimpleNamespace(
            context_parallel_size=1,
            dynamic_context_parallel=False,
            pad_bshd_to_minibatch_max=False,
            use_remove_padding=True,
            use_fused_kernels=False,
            pad_to_length=False,
            pad_to_length_bucket=512,
            router_replay=SimpleNamespace(mode="disabled"),
            entropy_from_logits_with_chunking=False,
        )
        self.model_config = SimpleNamespace(
            mtp=SimpleNamespace(enable=False, enable_train=False),
            hf_config=SimpleNamespace(architectures=["Qwen3ForCausalLM"]),
            tokenizer=SimpleNamespace(pad_token_id=0),
        )


class VerlJob:
    """A process of verl with its engine; ``wrap`` is given what builds a chunk."""

    def __init__(self, config: Any, wrap: Callable[[Any], Any] | None = None) -> None:
        size = config.virtual_pipeline_model_parallel_size
        mpu.initialize_model_parallel(1, config.pipeline_model_parallel_size, size)
        model_parallel_cuda_manual_seed(1)
        build: Callable[..., Any] = partial(_build_chunk, config)
        build = wrap(build) if wrap else build
        models = [build(vp_stage=stage) for stage in (range(size) if size else [None])]
        initialise_by_global_name(models, config, seed=1)
        ddp = DistributedDataParallelConfig()
        self._chunks = [DistributedDataParallel(config, ddp, model) for model in models]
        if config.finalize_model_grads_func is None:  # the schedule has set its own
            config.finalize_model_grads_func = finalize_model_grads
        optimizer = OptimizerConfig(lr=1e-2, clip_grad=1.0)
        self._optimizer = get_megatron_optimizer(optimizer, self._chunks)
        self._engine = _Engine(config, self._chunks)

    def train_one_step(self, step: int) -> tuple[list[float], float]:
        """The losses of the microbatches, on the rank with the output layer, and the norm."""
        self._optimizer.zero_grad()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        found = self._engine.forward_backward_batch(_batch(step), partial(sft_loss, None))
        _, norm, _ = self._optimizer.step()
        return [float(loss) for loss in (found or {}).get("loss") or []], float(norm)

    def log_probs(self, step: int) -> list[float]:
        """The log-probabilities of a step's tokens, sequence by sequence, likewise."""
        found = self._engine.infer_batch(_batch(step))
        output = (found or {}).get("model_output") or {}
        return output["log_probs"].values().tolist() if output else []


def _build_chunk(
    config: Any,
    vp_stage: int | None = None,
    pre_process: bool | None = None,
    post_process: bool | None = None,
) -> GPTModel:
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    return GPTModel(
        config,
        spec,
        VOCABULARY,
        64,
        pre_process=first if pre_process is None else pre_process,
        post_process=last if post_process is None else post_process,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )


def _batch(step: int) -> Any:
    """Sequences of rising tokens, in verl's format.

    The first token of each is a prompt: its label would depend on what it is packed behind.
    """
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(4, 14, (SEQUENCES,), generator=draw).tolist()
    firsts = torch.randint(VOCABULARY, (SEQUENCES,), generator=draw)
    positions = [torch.arange(length) for length in lengths]
    tokens = [(first + where) % VOCABULARY for first, where in zip(firsts, positions, strict=True)]
    masks = [(where > 0).float() for where in positions]
    tensors = {"input_ids": tokens, "position_ids": positions, "loss_mask": masks}
    nested = {
        name: torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        for name, rows in tensors.items()
    }
    options = {
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": TOKENS,
        "calculate_entropy": True,
    }
    temperature = {"temperature": torch.ones(SEQUENCES)}
    return tensordict_utils.get_tensordict({**nested, **temperature}, options)
