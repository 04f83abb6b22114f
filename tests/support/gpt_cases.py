"""A small GPT on every rank, run under Megatron's own schedule and under ours."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import rank_process
import torch
from adapters import scheduled
from images import LENGTH_WITH_IMAGES, multimodal_model, with_images
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from megatron.core.utils import unwrap_model
from user_changes import change

from megatron_zb import schedules
from megatron_zb.cpu_ranks import redirect_experts, redirect_predictions
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_core.random_streams import global_parameters, initialise_by_global_name
from megatron_zb.megatron_core.slices import SlicesPart
from megatron_zb.megatron_lm.models import naming_chunk
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.features.second_model import SecondModel
from megatron_zb.schedules.features.slices import Slicing
from megatron_zb.schedules.layout import Layers

SEQUENCE, VOCABULARY = 16, 64
FIRST_WITH_HYBRIDS = (0, 19)


@dataclass(frozen=True)
class GPTCase:
    """What distinguishes one small GPT from another; hashable, so that references are kept.

    ``options`` go to Megatron's config. ``layout`` is for our schedule alone, as stages differ.
    ``lengths`` are the sequence lengths of the microbatches, in turns. With ``optimizer_steps``
    the parameters after so many steps are compared, not gradients: the distributed optimizer
    leaves every rank with a part of them. ``frozen`` is a part of the names of frozen weights.
    With ``drawn``, Megatron's builders draw the weights, as on a GPU. With ``gather_in_optimizer``,
    our chunks do as ``--overlap-param-gather-with-optimizer-step`` tells, which upstream with one
    chunk per rank refuses. ``hybrid`` is the pattern of a HybridModel of so many ``layers``.
    ``images`` are the numbers of images of the samples, in turns, which the encoder of Megatron's
    LLaVAModel reads on its first stage; its language model is the GPT. A schedule runs a
    ``second_model`` beside the trained one. With an ``update_delay``, our updates come late.
    With ``vocabulary``, our output layer is vocabulary parallel over all pipeline ranks.
    With ``slices``, our microbatches are cut along the sequence, as ``--pipeline-slices`` has it.
    With ``documents``, attention keeps to those of a sample. Upstream has a mask; with ``slices``,
    ours finds them in a "mask" or in "ends" of packed sequences, whose positions start at 0.
    With ``padded``, routers get masks of padding at the ends of samples.
    With ``exact``, upstream has the weights that the type gives, and computes in 64 bits with them.
    With ``all_to_all_overlaps``, ours may run a forward and a backward in one pass.
    ``changes`` are those of a user to the model that is built, ``late_changes`` those to the model
    that data parallelism has wrapped, see ``user_changes``.
    """

    tied: bool = False
    dtype: str = "float32"
    tensor_parallel: int = 1
    data_parallel: int = 1
    context_parallel: int = 1
    fused_accumulation: bool = False
    sequence_parallel: bool = False
    per_token_loss: bool = False
    overlap_grad_reduce: bool = False
    bucket_size: int | None = None
    distributed_optimizer: bool = False
    wrapped: bool = True
    layers: int = 4
    options: tuple[tuple[str, Any], ...] = ()
    expert_parallel: int = 1
    multi_token: int = 0
    rotary: bool = False
    layout: str | None = None
    lengths: tuple[int, ...] = ()
    optimizer_steps: int = 0
    optimizer: str = "adam"  # or muon, layer-wise muon
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    gather_in_optimizer: bool = False
    grad_scale: float | None = None
    frozen: str | None = None
    dropout: float = 0.0
    drawn: bool = False
    hybrid: str | None = None
    images: tuple[int, ...] = ()
    second_model: SecondModel | None = None
    update_delay: int = 0
    vocabulary: bool = False
    slices: str | None = None
    documents: str = ""
    padded: bool = False
    exact: bool = False
    all_to_all_overlaps: bool = False
    changes: tuple[str, ...] = ()
    late_changes: tuple[str, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.exact else getattr(torch, self.dtype)


def as_hybrid(case: GPTCase) -> GPTCase:
    """The same layers as a HybridModel: each is one of attention, and one of an MLP or experts."""
    options = dict(case.options)
    attention = "+" if options.get("multi_latent_attention") else "*"
    routed = options.get("moe_layer_freq") or [1] * case.layers
    has_experts = options.get("num_moe_experts") is not None
    layers = [attention + ("E" if has_experts and of else "-") for of in routed]
    layout = None
    if case.layout is not None:
        one = iter(layers)
        layout = re.sub("t", lambda _: next(one), re.sub("[EL]", "", case.layout))
    left = {name: value for name, value in options.items() if name != "moe_layer_freq"}
    pattern = "".join(layers)
    return replace(
        case, hybrid=pattern, layers=len(pattern), layout=layout, options=tuple(left.items())
    )


def skip_without_hybrids(case: GPTCase) -> None:
    """Skip a test of a hybrid model where Megatron's has another name or no chunks."""
    if case.hybrid is not None and versions.core_series() < FIRST_WITH_HYBRIDS:
        pytest.skip("this megatron-core has no HybridModel")


@dataclass(frozen=True)
class Outcome:
    """Losses and gradients of one iteration on one rank, gradients by global parameter name.

    Where an optimizer has stepped, ``gradients`` are the parameters.
    """

    losses: list[float]
    gradients: dict[str, torch.Tensor]


def run(
    case: GPTCase,
    schedule: str | Schedule | None,
    num_microbatches: list[int],
    forward_only: bool = False,
    iterations: int = 1,
) -> dict[int, Outcome]:
    """The outcome for each number of microbatches; ``schedule=None`` is Megatron's own 1F1B.

    With several iterations each, gradients are zeroed between them and the last one's are returned.
    """
    with built(case, schedule, num_microbatches[0]) as (adapter, chunks):
        function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        adam = optimizer(case, chunks) if case.optimizer_steps else None
        outcomes = {}
        for m in num_microbatches:
            for _ in range(case.optimizer_steps or iterations):
                _zero_gradients(chunks)
                data = [microbatches(case, m) for _ in chunks]
                records = forward_backward(function, chunks, data, m, forward_only=forward_only)
                if adam is not None:
                    adam.step()
            losses = [float(record["lm loss"]) for record in records]
            outcomes[m] = Outcome(losses, dict(parameters(case, chunks) or gradients(chunks)))
    return outcomes


@contextmanager
def built(
    case: GPTCase,
    schedule: str | Schedule | None,
    num_microbatches: int,
    steps_done: Callable[[], int] | None = None,
) -> Iterator[tuple[PipelineAdapter | None, list[Any]]]:
    """The adapter, or None for Megatron's own 1F1B, and the model chunks of this rank.

    With ``steps_done``, the layers of a schedule draw from random streams of their own.
    """
    _forget_expert_metrics()
    MTPLossLoggingHelper.tracker.clear()  # a loss for each layer, of an earlier case maybe fewer
    p = _pipeline_size(case)
    adapter = None
    if schedule is not None:
        adapter = scheduled(
            schedule,
            pipeline_size=p,
            num_microbatches=num_microbatches,
            layers=Layers(case.layers, multi_token=case.multi_token, kinds=case.hybrid or ""),
            layer_layout=case.layout,
            pipeline_vocabulary="on" if case.vocabulary else "off",
            pipeline_slices=Slicing.parse(case.slices) if case.slices else None,
            overlaps_all_to_all=_asks_for_pairs(case, schedule),
            second_model=case.second_model,
            pipeline_update_delay=case.update_delay,
        )
        if steps_done is not None:
            adapter.draw_by_layer(1, steps_done)
        if case.slices:
            adapter.part(SlicesPart).documents = case.documents
    _enter_parallel_groups(case, adapter, p)
    yield adapter, _build_chunks(case, adapter, p)
    if adapter is not None:
        adapter.forward_backward_func.close()


def _forget_expert_metrics() -> None:
    """Empty Megatron's losses of experts: a row for each layer, of an earlier case maybe fewer."""
    try:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    except ModuleNotFoundError:  # of an older version
        from megatron.core.transformer.moe import moe_utils

        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        destroy_moe_metrics_tracker()


def _asks_for_pairs(case: GPTCase, schedule: str | Schedule) -> bool:
    """A table has its own."""
    return case.all_to_all_overlaps and isinstance(schedule, str)


def optimizer(case: GPTCase, chunks: list[Any]) -> Any:
    """Megatron's, without gradient clipping: a norm is summed in another order in a V."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    kind = "muon" if "muon" in case.optimizer else case.optimizer
    config = OptimizerConfig(
        optimizer=kind,
        lr=0.01,
        bf16=case.dtype == "bfloat16",
        fp16=case.dtype == "float16",
        initial_loss_scale=2.0**18,  # with which gradients are infinite
        loss_scale_window=2,
        hysteresis=1,
        params_dtype=case.torch_dtype,
        use_distributed_optimizer=case.distributed_optimizer,
        overlap_param_gather=case.overlap_param_gather,
        overlap_param_gather_with_optimizer_step=case.gather_in_optimizer,
        clip_grad=0.0,
    )
    if kind == "muon":
        from muon_stand_in import muon

        return muon(chunks, config, layer_wise=case.optimizer == "layer-wise muon")
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def parameters(case: GPTCase, chunks: list[Any]) -> dict[str, torch.Tensor]:
    """The parameters after the optimizer's steps, gathered if they are gathered lazily."""
    found: dict[str, torch.Tensor] = {}
    for chunk in chunks if case.optimizer_steps else []:
        if case.overlap_param_gather:
            chunk.disable_forward_pre_hook(param_sync=True)
        for name, parameter in global_parameters(chunk).items():
            found[name.replace("module.", "")] = parameter.detach().clone()
    return found


def _pipeline_size(case: GPTCase) -> int:
    others = case.tensor_parallel * case.context_parallel * case.data_parallel
    return torch.distributed.get_world_size() // others


def _zero_gradients(chunks: list[Any]) -> None:
    for chunk in chunks:
        if hasattr(chunk, "zero_grad_buffer"):
            chunk.zero_grad_buffer()
        chunk.zero_grad(set_to_none=True)


_MOST_STATES = 4
_PARALLEL_STATES: dict[tuple[Any, ...], tuple[dict[str, Any], set[Any]]] = {}
"""Megatron's parallel state and its process groups, the latest last."""


def _enter_parallel_groups(case: GPTCase, adapter: PipelineAdapter | None, p: int) -> None:
    """Make Megatron's parallel groups, or return to those of an earlier case.

    Every case would make twenty, in half a second.
    """
    key = (
        case.tensor_parallel,
        case.data_parallel,
        case.context_parallel,
        case.expert_parallel,
        p,
        adapter and adapter.chunks,
        adapter and adapter.physical.mirrored,
    )
    if key not in _PARALLEL_STATES:
        _PARALLEL_STATES[key] = _new_parallel_groups(case, adapter, p)
    _PARALLEL_STATES[key] = _PARALLEL_STATES.pop(key)
    while len(_PARALLEL_STATES) > _MOST_STATES:
        del _PARALLEL_STATES[next(iter(_PARALLEL_STATES))]
    rank_process.KEPT_GROUPS.clear()
    rank_process.KEPT_GROUPS.update(*(groups for _, groups in _PARALLEL_STATES.values()))
    vars(parallel_state).update(_PARALLEL_STATES[key][0])


def _new_parallel_groups(
    case: GPTCase, adapter: PipelineAdapter | None, p: int
) -> tuple[dict[str, Any], set[Any]]:
    before = rank_process.groups()
    parallel_state.destroy_model_parallel()
    more = {}
    if adapter is not None and adapter.embedding_ranks is not None:
        choose = adapter.embedding_ranks
        more["get_embedding_ranks"] = lambda ranks, _=None: choose(ranks)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tensor_parallel,
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=adapter.virtual_pipeline_size if adapter else None,
        context_parallel_size=case.context_parallel,
        expert_model_parallel_size=case.expert_parallel,
        create_gloo_process_groups=False,
        **more,
    )
    state = {k: v for k, v in vars(parallel_state).items() if _is_state(k, v)}
    return state, rank_process.groups() - before


def _is_state(name: str, value: Any) -> bool:
    return name.startswith("_") and name.isupper()


def _build_chunks(case: GPTCase, adapter: PipelineAdapter | None, p: int) -> list[Any]:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    # as Megatron-LM does: another stream on every pipeline rank
    model_parallel_cuda_manual_seed(1 + 100 * parallel_state.get_pipeline_model_parallel_rank())
    redirect_experts()
    redirect_predictions()
    if case.fused_accumulation:
        install_stand_in_for_fused_accumulation()
    low_precision = case.torch_dtype in (torch.bfloat16, torch.float16)
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in case.options}
    if varies := bool(case.lengths) or _images_vary_lengths(case):
        options.setdefault("moe_token_dispatcher_type", "alltoall")  # as Megatron demands
    overlaps = case.all_to_all_overlaps and adapter is not None
    if not overlaps:
        options.pop("ep_overlap_early_attn_memory_release", None)
    mla = options.get("multi_latent_attention", False)
    config = (MLATransformerConfig if mla else TransformerConfig)(
        num_layers=case.layers,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=case.tensor_parallel,
        sequence_parallel=case.sequence_parallel,
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=adapter.virtual_pipeline_size if adapter else None,
        pipeline_model_parallel_layout=_layout(case, adapter, p),
        pipeline_dtype=case.torch_dtype,
        params_dtype=case.torch_dtype,
        bf16=case.torch_dtype is torch.bfloat16,
        fp16=case.torch_dtype is torch.float16,
        context_parallel_size=case.context_parallel,
        expert_model_parallel_size=case.expert_parallel,
        mtp_num_layers=case.multi_token or None,
        variable_seq_lengths=varies,
        use_cpu_initialization=not case.drawn,
        attention_dropout=case.dropout,
        hidden_dropout=case.dropout,
        gradient_accumulation_fusion=case.fused_accumulation,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=True,
        calculate_per_token_loss=case.per_token_loss,
        is_hybrid_model=case.hybrid is not None,
        overlap_moe_expert_parallel_comm=overlaps and case.expert_parallel > 1,
        **options,
    )
    config.overlap_moe_expert_parallel_comm = overlaps  # for experts of one rank, too
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks: list[Any] = []
    count = adapter.chunks if adapter else 1
    for vp_stage in range(count):
        with adapter.drawing_weights() if adapter and case.drawn else nullcontext():
            ends: dict[str, Any] = {
                "pre_process": adapter.pre_process(rank, vp_stage) if adapter else rank == 0,
                "post_process": adapter.post_process(rank, vp_stage) if adapter else rank == p - 1,
                "share_embeddings_and_output_weights": case.tied,
                "vp_stage": vp_stage if count > 1 else None,
            }
            positions = "rope" if case.rotary else "learned_absolute"
            if case.images:
                chunk = _multimodal_model(adapter, case, config, positions, **ends)
            else:
                chunk = (_gpt_model if case.hybrid is None else _hybrid_model)(
                    adapter,
                    case,
                    config=config,
                    vocab_size=VOCABULARY,
                    max_sequence_length=SEQUENCE,
                    position_embedding_type=positions,
                    **ends,
                )
        chunks.append(chunk)
    if not case.drawn:
        _initialise(case, chunks, config)
    _freeze(case, chunks)
    if case.exact:
        _compute_exactly(chunks, getattr(torch, case.dtype))
    models = list(chunks)
    change(models, case.changes)
    if adapter is not None:
        adapter.prepare_model(chunks)
    if low_precision:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    if case.wrapped:
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=not case.exact,
            overlap_grad_reduce=case.overlap_grad_reduce,
            bucket_size=case.bucket_size,
            use_distributed_optimizer=case.distributed_optimizer,
            overlap_param_gather=case.overlap_param_gather,
            align_param_gather=case.align_param_gather,
        )
        whole = case.gather_in_optimizer  # one bucket for each chunk, as Megatron-LM does
        chunks = [DDP(config, ddp, chunk, disable_bucketing=whole) for chunk in chunks]
        config.finalize_model_grads_func = (
            adapter.finalize_model_grads if adapter else finalize_model_grads
        )
        if case.overlap_grad_reduce:
            functions = [chunk.no_sync for chunk in chunks]
            config.no_sync_func = functions if len(functions) > 1 else functions[0]
        if case.align_param_gather:
            gathers = [chunk.start_param_sync for chunk in chunks]
            config.param_sync_func = gathers if len(gathers) > 1 else gathers[0]
    change(models, case.late_changes)
    if case.grad_scale is not None:
        scale = case.grad_scale
        config.grad_scale_func = lambda loss: loss * scale
    return chunks


def _images_vary_lengths(case: GPTCase) -> bool:
    """Whether microbatches without images are shorter, which LLaVAModel pads up to 0.19 alone."""
    return bool(case.images) and versions.core_series() > (0, 19)


def _multimodal_model(
    adapter: PipelineAdapter | None, case: GPTCase, config: Any, positions: str, **ends: Any
) -> Any:
    more: dict[str, Any] = {"vocabulary": VOCABULARY, "positions": positions, **ends}
    if adapter is not None:
        rank = parallel_state.get_pipeline_model_parallel_rank()
        more["encodes"] = adapter.holds_encoder(rank, ends["vp_stage"])
    if case.hybrid is None:
        return multimodal_model(config, _specification(config, ends["vp_stage"]), **more)
    from hybrid_layers import STACK, cut_for

    with cut_for(adapter and adapter.layer_layout), naming_chunk(ends["vp_stage"]):
        return multimodal_model(config, STACK, pattern=case.hybrid, **more)


def _gpt_model(
    adapter: PipelineAdapter | None,
    case: GPTCase,
    config: Any,
    vp_stage: int | None,
    **more: Any,
) -> Any:
    layer = _specification(config, vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        mtp_block_spec=_multi_token(case, layer, config, vp_stage),
        vp_stage=vp_stage,
        **more,
    )


def _hybrid_model(
    adapter: PipelineAdapter | None, case: GPTCase, of_te: bool = False, **more: Any
) -> Any:
    from hybrid_layers import STACK, hybrid_model, stack_of_te  # changes Megatron's modules

    assert case.hybrid is not None
    attention = "+" if "+" in case.hybrid else "*"
    pattern = f"{case.hybrid}{f'/{attention}-' * case.multi_token}"
    stack = stack_of_te(case) if of_te else STACK
    return hybrid_model(pattern, adapter and adapter.layer_layout, stack, **more)


def _layout(case: GPTCase, adapter: PipelineAdapter | None, p: int) -> Any:
    """Megatron's own schedule wants to be told the stages where layers do not divide."""
    if case.hybrid is not None:
        return None
    if adapter is not None:
        return adapter.layer_layout
    if case.layers % p == 0:
        return None
    counts = [case.layers // p + (stage < case.layers % p) for stage in range(p)]
    return "E" + "|".join("t" * count for count in counts) + "L"


def _multi_token(case: GPTCase, layer: Any, config: Any, vp_stage: int | None) -> Any:
    if not case.multi_token:
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    spec = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=vp_stage)
    for depth in spec.layer_specs if spec is not None and config.sequence_parallel else []:
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(depth.submodules, name, SequenceParallelNorm)
    return spec


def _initialise(case: GPTCase, chunks: list[Any], config: TransformerConfig) -> None:
    """The same weights for every pipeline, other experts on every expert-parallel rank."""
    one = copy(config)
    one.expert_model_parallel_size = 1  # experts are named by their place on a rank
    initialise_by_global_name(chunks, one, seed=7)
    if case.images:  # the names of tied weights are those of the language model
        initialise_by_global_name([chunk.language_model for chunk in chunks], one, seed=7)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if "local_experts" in name:
                parameter.data.mul_(1 + parallel_state.get_expert_model_parallel_rank())


def _freeze(case: GPTCase, chunks: list[Any]) -> None:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if case.frozen is not None and case.frozen in name:
                parameter.requires_grad = False


def _compute_exactly(chunks: list[Any], dtype: torch.dtype) -> None:
    """Round weights of 64 bits to a type, and put a loss of 64 bits in the place of Megatron's."""

    def losses(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        whole = gather_from_tensor_model_parallel_region(logits)
        of_tokens = torch.nn.functional.cross_entropy(
            whole.flatten(0, 1), labels.t().flatten(), reduction="none"
        )
        return of_tokens.view(whole.shape[:2]).t()

    for chunk in chunks:
        chunk.compute_language_model_loss = losses
        chunk.to(dtype).double()


def install_stand_in_for_fused_accumulation() -> None:
    """In place of apex's CUDA kernels, which no CPU can run: the same sums in plain torch."""
    from megatron.core.tensor_parallel import layers

    def accumulate(
        inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        main_grad.add_(grad_output.t().matmul(inputs))

    stand_in: Any = ModuleType("fused_weight_gradient_mlp_cuda")
    stand_in.wgrad_gemm_accum_fp32 = stand_in.wgrad_gemm_accum_fp16 = accumulate
    sys.modules[stand_in.__name__] = stand_in
    layers.fused_weight_gradient_mlp_cuda = stand_in
    layers._grad_accum_fusion_available = True


class SequenceParallelNorm(torch.nn.LayerNorm):
    """A norm for sequence parallelism; Megatron's own ones for that need apex or a GPU."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


class SharedAttention(DotProductAttention):
    """Megatron's own attention where ranks share sequences, which it refuses without slices."""

    def __init__(self, config: TransformerConfig, *args: Any, **keywords: Any) -> None:
        one = copy(config)
        one.context_parallel_size = 1
        super().__init__(one, *args, **keywords)


class LatentAttention(SharedAttention):
    """Megatron's own attention, told the head sizes in the way of multi-latent attention.

    Its local specification cannot be built otherwise; keys and values must have the same size.
    """

    def __init__(
        self,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*args, **keywords)
        assert {k_channels, v_channels} <= {None, self.config.kv_channels}


def _specification(config: TransformerConfig, vp_stage: int | None) -> Any:
    if isinstance(config.moe_layer_freq, list):
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    if config.multi_latent_attention:
        multi_latent_attention.HAVE_TE = False  # 0.16 says that there is, everywhere
        layer.submodules.self_attention.submodules.core_attention = LatentAttention
    elif config.context_parallel_size > 1:
        layer.submodules.self_attention.submodules.core_attention = SharedAttention
    if not config.sequence_parallel:
        return layer
    layer.submodules.input_layernorm = SequenceParallelNorm
    layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
    layers = [layer] * get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=SequenceParallelNorm)


def forward_backward(
    function: Any,
    chunks: list[Any],
    data: list[Any],
    num_microbatches: int,
    step: Any = None,
    **more: Any,
) -> list[Any]:
    """Call a function in the way of Megatron; ``data`` has an iterator for each chunk."""
    has_images = hasattr(unwrap_model(chunks[0]), "language_model")
    records: list[Any] = function(
        forward_step_func=step or _forward_step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=num_microbatches,
        seq_length=LENGTH_WITH_IMAGES if has_images else SEQUENCE,
        micro_batch_size=2,
        **more,
    )
    return records


def microbatches(case: GPTCase, count: int, first: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Tokens that depend on the microbatch and the data-parallel rank; some are masked out."""
    for microbatch in range(first, first + count):
        seed = 1000 * parallel_state.get_data_parallel_rank() + microbatch
        generator = torch.Generator().manual_seed(seed)
        yield _batch(case, microbatch, generator)  # which nothing here holds on to


def _batch(case: GPTCase, microbatch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    length = case.lengths[microbatch % len(case.lengths)] if case.lengths else SEQUENCE
    tokens = torch.randint(VOCABULARY, (2, length + 1), generator=generator)
    mask = torch.rand(2, length, generator=generator) > 0.2
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": mask.float(),
        "positions": torch.arange(length).expand(2, -1),
    }
    if case.images:
        counts = [case.images[(2 * microbatch + i) % len(case.images)] for i in range(2)]
        return with_images(batch, counts, generator)
    if case.padded:
        batch["padding"] = torch.arange(length) >= length - torch.tensor([[5], [2]])
    if case.documents:
        _add_documents(case, batch, torch.rand(2, length, generator=generator) < 0.2)
    return batch


def _add_documents(case: GPTCase, batch: dict[str, torch.Tensor], first: torch.Tensor) -> None:
    """Put what a data set has of documents to a batch, which start at some tokens and at 0."""
    first[:, 0] = True
    length = first.size(1)
    places, number = torch.arange(length), first.cumsum(1)
    if case.documents == "ends":
        batch["positions"] = places - (places * first).cummax(1).values
    if case.documents == "ends" and case.slices:
        ends = torch.where(first, places, length).sort(1).values
        batch["cu_seqlens"] = torch.nn.functional.pad(ends, (0, 1), value=length).int()
        batch["max_seqlen"] = torch.full((2,), length)
    else:
        later = places[:, None] < places
        batch["attention_mask"] = ((number[:, :, None] != number[:, None]) | later)[:, None]


def _of_context_rank(sequences: torch.Tensor) -> torch.Tensor:
    """Two chunks of every sequence, one from either end, so that causal masks cost alike."""
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    if size == 1:
        return sequences
    chunks = sequences.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim=1)


def _forward_step(
    iterator: Iterator[dict[str, torch.Tensor]], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    batch = {name: _of_context_rank(part) for name, part in next(iterator).items()}
    length = batch["tokens"].size(1)
    if "images" in batch:
        text = (batch["tokens"], batch["positions"], None, batch["labels"], batch["loss_mask"])
        output, mask = model(batch["images"], *text)
        contiguous: Any = None if mask is None else mask.contiguous()  # as pretrain_vlm.py does
        return _with_loss(output, contiguous)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    mask = batch.get("attention_mask", causal)
    compute = model.build_schedule_plan if return_schedule_plan else model
    more = {"padding_mask": batch["padding"]} if "padding" in batch else {}
    output = compute(batch["tokens"], batch["positions"], mask, labels=batch["labels"], **more)
    return _with_loss(output, batch["loss_mask"])


def _with_loss(output: torch.Tensor, mask: torch.Tensor) -> tuple[Any, Any]:
    return output, partial(_loss, mask)


def _loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[Any, ...]:
    """Sum the losses as pretrain_gpt.py does, which views the mask as one row.

    It reports their mean over the tokens of all ranks that share sequences.
    """
    row = losses.reshape(-1)
    total = (row.to(torch.promote_types(row.dtype, torch.float32)) * mask.view(-1)).sum()
    tokens = mask.sum().to(torch.int)
    whole = torch.stack([total.detach().clone(), tokens])
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:
        torch.distributed.all_reduce(whole, group=group)
    return total, tokens, {"lm loss": whole[0] / whole[1]}


def gradients(chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in chunks:
        for name, parameter in global_parameters(chunk).items():
            gradient = getattr(parameter, "main_grad", parameter.grad)
            if gradient is not None:
                yield name.replace("module.", ""), gradient.clone()


_REFERENCES: dict[tuple[GPTCase, int, bool], Outcome] = {}


def _references(case: GPTCase, num_microbatches: list[int], forward_only: bool) -> list[Outcome]:
    """Megatron's own 1F1B, gathered from all ranks; kept for the other schedules."""
    missing = [m for m in num_microbatches if (case, m, forward_only) not in _REFERENCES]
    for m, outcome in (run(case, None, missing, forward_only) if missing else {}).items():
        group = parallel_state.get_pipeline_model_parallel_group()
        gathered = [outcome] * group.size()
        torch.distributed.all_gather_object(gathered, outcome, group=group)
        gradients = {name: g for o in gathered for name, g in o.gradients.items()}
        _REFERENCES[case, m, forward_only] = Outcome(gathered[-1].losses, gradients)
    return [_REFERENCES[case, m, forward_only] for m in num_microbatches]


def differences(
    case: GPTCase,
    schedule: str | Schedule,
    num_microbatches: list[int],
    forward_only: bool = False,
    iterations: int = 1,
) -> list[str]:
    """Where a schedule's losses and gradients are not Megatron's to the last bit: [] is parity."""
    if case.layout is None and case.hybrid is None:
        placed = schedule
        if isinstance(placed, str):
            p = _pipeline_size(case)
            placed = schedules.build(placed, pipeline_size=p, num_microbatches=1)
        case = replace(case, layers=max(case.layers, placed.placement.num_stages))
    upstream = replace(case, layout=None, gather_in_optimizer=False)
    references = _references(upstream, num_microbatches, forward_only)
    ours = run(case, schedule, num_microbatches, forward_only, iterations)
    found = []
    for (m, outcome), expected in zip(ours.items(), references, strict=True):
        found += [f"m={m}: {text}" for text in _compare(outcome, expected)]
        found += [f"m={m}: no gradient of {name}" for name in _missing(outcome, expected)]
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True) != bool(outcome.losses):
            found.append(f"m={m}: losses are not on the last rank")
        if not forward_only and not expected.gradients:
            found.append(f"m={m}: no gradients")
    return found


def _missing(ours: Outcome, expected: Outcome) -> list[str]:
    """Name the parameters that no rank of this pipeline has a gradient of, and Megatron has."""
    group = parallel_state.get_pipeline_model_parallel_group()
    gathered: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(gathered, list(ours.gradients), group=group)
    return sorted(set(expected.gradients).difference(*gathered))


def _compare(ours: Outcome, expected: Outcome) -> list[str]:
    found = []
    if ours.losses and ours.losses != expected.losses:
        found.append(f"losses {ours.losses} are not {expected.losses}")
    for name, gradient in ours.gradients.items():
        if not torch.equal(gradient, expected.gradients[name]):
            worst = (gradient - expected.gradients[name]).abs().max().item()
            found.append(f"gradient of {name} is off by {worst}")
    return found
