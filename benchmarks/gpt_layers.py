"""Real layers of a GPT on one device, for the benchmarks. Import it after ``one_device.start``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from layer_sizes import LOCAL_FLASH, TRANSFORMER_ENGINE, LayerSizes
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from one_device import Meter
from torch.nn import functional

from megatron_zb.megatron_core.split_backward import SplitBackward, split_linear_layers
from megatron_zb.megatron_core.transformer_engine import split_transformer_engine
from megatron_zb.runtime.autograd_stage import AutogradStage, WeightGradQueue


class FlashAttention(MegatronModule):
    """Causal attention by torch's fused kernel, in the place of Megatron's local one.

    Megatron's keeps a matrix of sequence length squared for every head, which no training at a
    realistic length would; its fused one needs Transformer-Engine.
    """

    def __init__(self, config: TransformerConfig, **_options: Any) -> None:
        super().__init__(config=config)
        self._width = config.kv_channels * config.num_attention_heads

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **_options: Any,
    ) -> torch.Tensor:
        """From [sequence, batch, heads, width] each to [sequence, batch, all heads' width]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), self._width)


def configuration(
    sizes: LayerSizes,
    layers: int,
    dtype: torch.dtype,
    device: torch.device,
    implementation: str,
    **more: Any,
) -> TransformerConfig:
    """A gated MLP, rotary positions, no biases and no dropout, nothing fused by a compiler.

    ``more`` goes to Megatron's config as it is, such as the pipeline's sizes.
    """
    more = {"hidden_dropout": 0.0, **more}
    return TransformerConfig(
        num_layers=layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        ffn_hidden_size=sizes.ffn_hidden,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        transformer_impl=(
            TRANSFORMER_ENGINE.replace("-", "_")
            if implementation == TRANSFORMER_ENGINE
            else "local"
        ),
        use_cpu_initialization=device.type == "cpu",
        gradient_accumulation_fusion=_is_fused(implementation, sizes, device),
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **more,
    )


def _is_fused(implementation: str, sizes: LayerSizes, device: torch.device) -> bool:
    """Whether weight gradients are added to main_grad by the kernel that computes them.

    Megatron's local layers need apex for it, and so does the output layer, which is always local.
    """
    if implementation == TRANSFORMER_ENGINE and not sizes.vocabulary:
        return True
    return device.type == "cuda" and find_spec("fused_weight_gradient_mlp_cuda") is not None


def of_experts(implementation: str, experts: int, ffn_hidden: int) -> dict[str, Any]:
    """Settings of Megatron's config for layers with experts, two of which compute each token.

    Where two terms are added in any order, the sum is the same: kernels with atomic additions give
    equal bits in every run.
    """
    return {
        "num_moe_experts": experts,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_ffn_hidden_size": ffn_hidden,
        "moe_grouped_gemm": implementation == TRANSFORMER_ENGINE,
    }


def _specification(implementation: str, config: TransformerConfig) -> Any:
    experts = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
    }
    if implementation == TRANSFORMER_ENGINE:
        return get_gpt_layer_with_transformer_engine_spec(**experts)
    layer = get_gpt_layer_local_spec(**experts)
    if implementation == LOCAL_FLASH:
        layer.submodules.self_attention.submodules.core_attention = FlashAttention
    return layer


def build(
    config: TransformerConfig,
    sizes: LayerSizes,
    implementation: str,
    device: torch.device,
    *,
    ends: tuple[bool, bool] = (False, False),
    vp_stage: int | None = None,
) -> GPTModel:
    """One model chunk as ``prepare_model`` takes it; `ends`: embedding, output layer."""
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=_specification(implementation, config),
        vocab_size=max(sizes.vocabulary, 1),
        max_sequence_length=sizes.seq_length,
        pre_process=ends[0],
        post_process=ends[1],
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    return chunk.to(device=device, dtype=config.params_dtype)


def with_main_grads(chunk: GPTModel) -> DistributedDataParallel:
    """Wrapped as for training: gradients are summed in fp32.

    On a side stream, as Megatron-LM does it: autograd accumulates a gradient on the stream on which
    its hook was created, and CUDA captures no graph if that is the default stream.
    """
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    if next(chunk.parameters()).device.type == "cpu":
        return DistributedDataParallel(chunk.config, settings, chunk)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        wrapped = DistributedDataParallel(chunk.config, settings, chunk)
    torch.cuda.current_stream().wait_stream(stream)
    return wrapped


def message(sizes: LayerSizes, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What travels between two stages."""
    shape = (sizes.seq_length, sizes.micro_batch_size, sizes.hidden)
    return torch.randn(shape, device=device).to(dtype)


class Layers:
    """Layers without embedding and output layer, whose passes can be run one by one."""

    def __init__(
        self,
        config: TransformerConfig,
        sizes: LayerSizes,
        implementation: str,
        device: torch.device,
    ) -> None:
        chunk = build(config, sizes, implementation, device)
        self._queue = WeightGradQueue()
        split = SplitBackward(self._queue)
        split_linear_layers(chunk, split)
        split_transformer_engine(chunk, split, "split_backward")
        self.model = with_main_grads(chunk)
        self._stage = AutogradStage(self._compute, self._queue, is_last=False)
        self._activation = message(sizes, config.params_dtype, device)
        self._gradient = message(sizes, config.params_dtype, device)

    def _compute(self, _microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        self.model.module.set_input_tensor([activation])
        output: torch.Tensor = self.model(None, None, None)
        self.model.module.set_input_tensor([None])
        return output

    def run(self, name: str) -> None:
        """F, B, W or BW of one microbatch."""
        if name == "F":
            self._stage.forward(0, self._activation.detach())
        elif name == "B":
            self._stage.backward_input(0, self._gradient)
        elif name == "W":
            self._stage.backward_weight(0)
        else:
            self._stage.backward(0, self._gradient)

    def held_after(self, meter: Meter) -> dict[str, int]:
        """The bytes held after F, after B and after W of one microbatch."""
        self._stage.activation_memory = meter.activation_memory
        self._queue.activation_memory = meter.activation_memory
        held = {}
        with meter.watching():
            for name in ("F", "B", "W"):
                self.run(name)
                held[name] = meter.held_bytes
        return held
