"""ms-swift's Megatron trainer on CPU ranks: its training step over padding-free sequences.

The trainer's own construction is left out: it wants a tokenizer, a command line and a GPU. Its
step, its batches for a stage, its loss and its aggregation are ms-swift's; the model, its
conversion from Hugging Face's format and its layers are mcore-bridge's. Attention over packed
sequences is a stand-in, and so are Transformer-Engine's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mcore_bridge import ModelConfig, hf_to_mcore_config
from mcore_bridge.model.register import ModelLoader, get_mcore_model
from megatron.core import optimizer as optimizers
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from packed_attention import PackedAttention
from swift.megatron.trainers.trainer import MegatronTrainer
from swift.megatron.utils import wrap_model
from transformers import AutoConfig

from megatron_zb.bridge.pipeline import Pipeline

LAYERS, VOCABULARY, MICROBATCHES = 8, 64, 4


def new_sizes(pipeline_size: int) -> TransformerConfig:
    """The sizes of the model, which a schedule has to know before its config can be made."""
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        pipeline_model_parallel_size=pipeline_size,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
    )


def _config_of(folder: Path) -> ModelConfig:
    """The config of the model in a folder, as mcore-bridge reads it."""
    return ModelConfig(
        **hf_to_mcore_config(AutoConfig.from_pretrained(folder)),
        pipeline_model_parallel_size=mpu.get_pipeline_model_parallel_world_size(),
        params_dtype=torch.float32,
        overlap_p2p_comm=False,  # for interleaved schedules alone
        use_cpu_initialization=True,
        apply_rope_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )


class _Trainer(MegatronTrainer):
    """ms-swift's trainer with a model that has been built."""

    def __init__(self, args: Any, config: Any, chunks: list[Any]) -> None:
        self.args = args
        self.config = config
        self.enable_routing_replay = False
        self.unwrapped_models = chunks
        self.wrapped_models = wrap_model(args, chunks)
        optimizers.USING_PYTORCH_OPTIMIZER = True  # Transformer-Engine's is one kernel
        optimizer = OptimizerConfig(lr=1e-2, clip_grad=1e3)  # never: norms differ in the last bit
        self.optimizer = get_megatron_optimizer(optimizer, self.wrapped_models)
        self.opt_param_scheduler = SimpleNamespace(step=lambda increment: None)


class SwiftJob:
    """A process of ms-swift with its trainer, which trains the model in a folder."""

    def __init__(self, folder: Path, pipeline_size: int, pipeline: Pipeline | None = None) -> None:
        size = pipeline.virtual_pipeline_size if pipeline else None
        mpu.initialize_model_parallel(1, pipeline_size, size)
        model_parallel_cuda_manual_seed(1)
        config = _config_of(folder)
        if pipeline:
            pipeline.prepare(config)
        config.model_meta.loader = partial(_new_loader, pipeline)
        chunks = get_mcore_model(config)
        config.bridge.load_weights(chunks, str(folder))
        if config.finalize_model_grads_func is None:  # the schedule has set its own
            config.finalize_model_grads_func = finalize_model_grads
        self._trainer = _Trainer(_arguments(config), config, chunks)
        config.grad_scale_func = self._trainer.optimizer.scale_loss
        self._several = size is not None

    def train_one_step(self, step: int) -> tuple[list[list[float]], list[float], float]:
        """The losses of the microbatches with their tokens, their sums, and the norm.

        Ranks without the output layer have no losses.
        """
        trainer = self._trainer
        data = [_batches(step) for _ in trainer.wrapped_models]
        metrics, norm, _ = trainer.train_step(data if self._several else data[0])
        sums: dict[str, Any] = {}
        trainer._aggregated_metrics(metrics, sums)
        total = sums["loss"].tolist() if "loss" in sums else []
        return [each["loss"].tolist() for each in metrics], total, float(norm)


def _new_loader(pipeline: Pipeline | None, config: ModelConfig) -> ModelLoader:
    loader = _Loader(config)
    if pipeline:
        loader.build_model = pipeline.builder(loader.build_model)
    return loader


class _Loader(ModelLoader):
    def get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        spec = super().get_transformer_layer_spec(vp_stage=vp_stage)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
        return spec


def _arguments(config: Any) -> SimpleNamespace:
    return SimpleNamespace(
        task_type="causal_lm",
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        context_parallel_size=1,
        cp_partition_mode="zigzag",
        padding_free=True,
        num_microbatches=MICROBATCHES,
        micro_batch_size=1,
        global_batch_size=MICROBATCHES,
        seq_length=1,
        enable_dft_loss=False,
        enable_channel_loss=False,
        fp16=False,
        bf16=False,
        overlap_param_gather_with_optimizer_step=False,
        data_parallel_random_init=False,
        router_replay_mode="disabled",
    )


def _batches(step: int) -> Iterator[dict[str, Any]]:
    """Padding-free batches of two or three sequences, whose first halves are prompts."""
    draw = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        count = int(torch.randint(2, 4, (1,), generator=draw))
        lengths = torch.randint(4, 10, (count,), generator=draw).tolist()
        firsts = torch.randint(VOCABULARY, (count,), generator=draw).tolist()
        positions = [torch.arange(length) for length in lengths]
        tokens = [
            (first + where) % VOCABULARY for first, where in zip(firsts, positions, strict=True)
        ]
        labels = [
            torch.where(where < len(where) // 2, -100, token)
            for where, token in zip(positions, tokens, strict=True)
        ]
        yield {
            "input_ids": torch.cat(tokens)[None],
            "position_ids": torch.cat(positions)[None],
            "labels": torch.cat(labels)[None],
        }
