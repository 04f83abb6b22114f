"""The GPT model of this rank and its optimizer, built by megatron-core."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
    get_gpt_heterogeneous_layer_spec,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    HeterogeneousTransformerConfig,
)
from megatron.core.transformer.module import Float16Module

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.random_streams import initialise_by_global_name

if TYPE_CHECKING:
    from megatron_zb.megatron_core.adapter import PipelineAdapter


@dataclass(frozen=True)
class Trainee:
    """The model of this rank in training: `chunks` are wrapped in DistributedDataParallel."""

    config: TransformerConfig
    chunks: list[Any]
    optimizer: Any
    scheduler: OptimizerParamScheduler
    forward_backward: Callable[..., list[dict[str, torch.Tensor]]]


def build(
    args: argparse.Namespace,
    adapter: PipelineAdapter | None,
    agree: Callable[[UsageError | None], object],
) -> Trainee:
    """Build and initialise the model chunks, the optimizer and the scheduler of this rank.

    Args:
        adapter: the schedule's adapter, or None for Megatron's.
        agree: called with this rank's error, if any, when the chunks are built.
    """
    config = transformer_config(args, adapter)
    models = [_model(args, config, *place) for place in _places(adapter)]
    initialise_by_global_name(models, config, args.seed)
    agree(None if adapter is None else _prepared(adapter, models))
    chunks = _wrap(args, config, models)
    optimizer = _optimizer(args, chunks)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = (
        adapter.finalize_model_grads if adapter else finalize_model_grads
    )
    return Trainee(
        config=config,
        chunks=chunks,
        optimizer=optimizer,
        scheduler=scheduler(args, optimizer, args.lr),
        forward_backward=adapter.forward_backward_func if adapter else get_forward_backward_func(),
    )


def _prepared(adapter: PipelineAdapter, models: list[GPTModel]) -> UsageError | None:
    """Prepare the chunks for the schedule; return the reason if that is impossible."""
    try:
        adapter.prepare_model(models)
    except UsageError as error:
        return error
    return None


def parameter_dtype(args: argparse.Namespace) -> torch.dtype:
    """Return the type of weights and activations."""
    return torch.bfloat16 if args.bf16 else torch.float32


def transformer_config(
    args: argparse.Namespace,
    adapter: PipelineAdapter | None = None,
    kind: type[TransformerConfig] = TransformerConfig,
    fields: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Return Megatron's configuration of the model; attributes not named here keep its defaults.

    Args:
        args: the arguments. Those of a distillation may also have ``sequence_parallel`` and
            ``no_gradient_accumulation_fusion``.
        adapter: the schedule's adapter, or None for Megatron's.
        kind: the class of the configuration.
        fields: attributes of this class that the arguments do not give.
    """
    fused = not args.cpu
    more = {name: getattr(args, name) for name in _SAME_NAMES} | dict(fields or {})
    if args.heterogeneous_layers_config_path is not None:
        kind = HeterogeneousTransformerConfig
        more["heterogeneous_layers_config_path"] = args.heterogeneous_layers_config_path
    return kind(
        **more,
        layernorm_epsilon=args.norm_epsilon,
        add_bias_linear=not args.disable_bias_linear,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        transformer_impl="local",
        params_dtype=parameter_dtype(args),
        pipeline_dtype=parameter_dtype(args),
        use_cpu_initialization=args.cpu,
        sequence_parallel=getattr(args, "sequence_parallel", False),
        virtual_pipeline_model_parallel_size=adapter.virtual_pipeline_size if adapter else None,
        pipeline_model_parallel_layout=(
            adapter.layer_layout if adapter else args.pipeline_layer_layout
        ),
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=(
            fused
            and find_spec("fused_weight_gradient_mlp_cuda") is not None
            and not getattr(args, "no_gradient_accumulation_fusion", False)
        ),
        masked_softmax_fusion=(
            fused and find_spec("scaled_upper_triang_masked_softmax_cuda") is not None
        ),
        bias_dropout_fusion=fused,
        bias_activation_fusion=fused and (args.swiglu or not args.disable_bias_linear),
    )


# Arguments that the configuration calls by the same names.
_SAME_NAMES = """
num_layers hidden_size num_attention_heads num_query_groups kv_channels add_qkv_bias qk_layernorm
ffn_hidden_size hidden_dropout attention_dropout normalization init_method_std bf16
tensor_model_parallel_size pipeline_model_parallel_size
""".split()


def _places(adapter: PipelineAdapter | None) -> list[tuple[bool, bool, int | None]]:
    """Return (holds the embedding, holds the output layer, virtual stage) of each of its chunks."""
    if adapter is None:
        return [
            (
                parallel_state.is_pipeline_first_stage(),
                parallel_state.is_pipeline_last_stage(),
                None,
            )
        ]
    rank = parallel_state.get_pipeline_model_parallel_rank()
    return [
        (
            adapter.pre_process(rank, chunk),
            adapter.post_process(rank, chunk),
            None if adapter.virtual_pipeline_size is None else chunk,
        )
        for chunk in range(adapter.chunks)
    ]


def _model(
    args: argparse.Namespace,
    config: TransformerConfig,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> GPTModel:
    spec: Any
    if args.heterogeneous_layers_config_path is not None:
        spec = get_gpt_heterogeneous_layer_spec(config, use_te=False, vp_stage=vp_stage)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm, normalization=args.normalization
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        **rotary_arguments(args),
        vp_stage=vp_stage,
    )


def rotary_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of GPTModel and RotaryEmbedding for rotary positions."""
    return {
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "rope_scaling": args.use_rope_scaling,
        "rope_scaling_factor": args.rope_scaling_factor,
    }


def _wrap(
    args: argparse.Namespace, config: TransformerConfig, models: list[GPTModel]
) -> list[DistributedDataParallel]:
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad,
    )
    chunks = []
    for model in models:
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if not args.cpu:
            model.cuda(torch.cuda.current_device())
        module = Float16Module(config, model) if args.bf16 else model
        chunks.append(DistributedDataParallel(config, ddp_config, module))
    return chunks


def _optimizer(args: argparse.Namespace, chunks: list[DistributedDataParallel]) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        bf16=args.bf16,
        params_dtype=parameter_dtype(args),
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
    )
    return get_megatron_optimizer(
        config,
        chunks,
        config_overrides=get_standard_config_overrides(config),
        use_gloo_process_groups=not args.cpu,
    )


def scheduler(args: argparse.Namespace, optimizer: Any, peak: float) -> OptimizerParamScheduler:
    """Build the schedule of the learning rate by samples consumed, as in Megatron, `peak` at most.

    The command line has priority after a resume.
    """
    batch = args.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=peak,
        min_lr=min(args.min_lr, peak),
        lr_warmup_steps=args.lr_warmup_iters * batch,
        lr_decay_steps=args.lr_decay_iters * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
