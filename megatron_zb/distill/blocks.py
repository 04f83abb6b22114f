"""Transformer layers of teacher and student, built by megatron-core one by one.

A layer is built wherever its block runs: no code here depends on pipeline ranks.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_zb.distill import fp8_teacher
from megatron_zb.distill.student import BlockShape
from megatron_zb.distill.teacher import EXPERTS, LATENT, expert_blocks
from megatron_zb.train.model import rotary_arguments, transformer_config

_FIRST_NORM, _SECOND_NORM = "input_layernorm.", "pre_mlp_layernorm."


def teacher_layer(args: argparse.Namespace, block: int) -> TransformerLayer:
    """Build block `block` (from 0) of the teacher, frozen, with weights yet to be set."""
    config = layer_config(args, block, fp8_teacher.config_fields(args.teacher_fp8))
    parts = _parts(config)
    if args.teacher_fp8 is not None:
        parts = fp8_teacher.with_engine(parts)
    return _frozen(_build(config, parts, block))


@torch.no_grad()
def taught(layer: TransformerLayer, given: torch.Tensor, table: torch.Tensor | None) -> Any:
    """Run the forward of a layer of the teacher.

    Args:
        layer: from :func:`teacher_layer`.
        given: of shape (sequence, batch, hidden), as what is returned.
        table: from :func:`rotary`.
    """
    with fp8_teacher.running(layer):
        made, _ = layer(given, attention_mask=None, rotary_pos_emb=table)
    return made


def student_layer(args: argparse.Namespace, shape: BlockShape, block: int) -> TransformerLayer:
    """Build a candidate for block `block` (from 0), with weights yet to be set."""
    sizes = {"num_query_groups": shape.num_query_groups}
    if block in expert_blocks(vars(args)):
        sizes |= {"moe_ffn_hidden_size": shape.ffn_hidden_size, "num_experts": shape.num_experts}
    else:
        sizes["ffn_hidden_size"] = shape.ffn_hidden_size
    config = layer_config(argparse.Namespace(**(vars(args) | sizes)), block)
    return _build(config, _submodules(config, shape), block)


def layer_config(
    args: argparse.Namespace, block: int, more: Mapping[str, Any] | None = None
) -> TransformerConfig:
    """Return Megatron's configuration of a block of the teacher, or of one of other sizes.

    Routers have no load-balancing loss: a block learns only its teacher's output.
    """
    given, fields = vars(args), dict(more or {})
    latent = given.get("multi_latent_attention")
    if latent:
        fields |= {name: given[name] for name in LATENT if given.get(name) is not None}
    if block in expert_blocks(given):
        fields |= {name: given[name] for name in EXPERTS if given.get(name) is not None}
        uneven = args.cpu and args.tensor_model_parallel_size > 1  # which gloo does not gather
        fields |= {
            "num_moe_experts": args.num_experts,
            "expert_model_parallel_size": args.expert_model_parallel_size,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather" if uneven else "alltoall",
        }
    kind = MLATransformerConfig if latent else TransformerConfig
    return transformer_config(args, kind=kind, fields=fields)


def _build(config: TransformerConfig, submodules: Any, block: int) -> TransformerLayer:
    layer = TransformerLayer(config, submodules, layer_number=block + 1)
    return layer if config.use_cpu_initialization else layer.cuda()


def _frozen(module: Any) -> Any:
    module.requires_grad_(False)
    return module.eval()


class FusedAttention(DotProductAttention):
    """Causal attention by torch's fused kernels; Megatron's own keeps the scores of all tokens.

    In float32 on a GPU, it also keeps them: there, results are to be the same in every run.

    It takes the arguments with which Megatron builds latent attention, too: its own lacks them.
    """

    def __init__(
        self,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*args, **keywords)  # sizes of heads follow from what they are given

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **others: Any,
    ) -> torch.Tensor:
        """Return what tokens take from those before them, (sequence, batch, heads * head size).

        Args:
            query, key, value: of shape (sequence, batch, heads, head size); keys and values may
                have fewer heads, each for as many queries.
            attention_mask: not read.
            others: not read; there are neither packed sequences nor biases in a distillation.
        """
        shared = query.shape[2] // key.shape[2]
        if shared > 1:
            key, value = (t.repeat_interleave(shared, dim=2) for t in (key, value))
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        with _kernels(query):
            made: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.softmax_scale
            )
        return made.permute(2, 0, 1, 3).flatten(2)


def _kernels(query: torch.Tensor) -> AbstractContextManager[Any]:
    """Return the context that chooses kernels: in float32, those that give the same bits again.

    On a GPU, gradients of the fused ones are summed in an order that changes from run to run.
    """
    exact = query.is_cuda and query.dtype == torch.float32
    return sdpa_kernel(SDPBackend.MATH) if exact else nullcontext()


class ShardedNorm:
    """A norm of Megatron's for shards of a sequence, whose gradients are marked to be summed.

    Megatron marks those of Apex and Transformer-Engine only.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> Any:
        """Build the norm that the configuration requests."""
        return _norm(config, hidden_size, eps, summed=config.sequence_parallel)


class HeadNorm:
    """A norm of queries or keys, of whose heads every tensor-parallel rank has others."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> Any:
        """Build the norm, `hidden_size` is that of a head."""
        return _norm(config, hidden_size, eps, summed=config.tensor_model_parallel_size > 1)


def _norm(config: TransformerConfig, hidden_size: int, eps: float, *, summed: bool) -> Any:
    """Build a norm, whose gradients are marked to be summed over tensor-parallel ranks or not."""
    spec = get_gpt_layer_local_spec(normalization=config.normalization).submodules
    of_whole = copy.copy(config)
    of_whole.sequence_parallel = False
    norm = build_module(spec.input_layernorm, config=of_whole, hidden_size=hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = summed
    return norm


def _parts(config: TransformerConfig) -> Any:
    """Return the submodules of a layer."""
    parts = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    ).submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = ShardedNorm
    attention = parts.self_attention.submodules
    attention.core_attention = FusedAttention
    if config.qk_layernorm and config.multi_latent_attention:
        attention.q_layernorm = attention.kv_layernorm = ShardedNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = HeadNorm
    return parts


def _submodules(config: TransformerConfig, shape: BlockShape) -> Any:
    """Return the submodules of a layer; their names in a checkpoint are Megatron's own."""
    parts = _parts(config)
    names = dict(parts.sharded_state_dict_keys_map)
    if shape.attention == "linear":
        parts.self_attention = _linear("linear_attn")
        names[_FIRST_NORM] = "self_attention.layer_norm_"
    elif shape.attention == "no_op":
        parts.input_layernorm, parts.self_attention = IdentityOp, IdentityOp
        parts.self_attn_bda = IdentityFuncOp
        names.pop(_FIRST_NORM, None)
    if shape.mlp == "linear":
        parts.mlp = _linear("linear_mlp")
        names[_SECOND_NORM] = "mlp.layer_norm_"
    elif shape.mlp == "no_op":
        parts.pre_mlp_layernorm, parts.mlp, parts.mlp_bda = IdentityOp, IdentityOp, IdentityFuncOp
        names.pop(_SECOND_NORM, None)
    parts.sharded_state_dict_keys_map = names
    return parts


def _linear(name: str) -> ModuleSpec:
    return ModuleSpec(module=ColumnParallelLinearGathered, params={"tp_comm_buffer_name": name})


class Embedding(torch.nn.Module):
    """The teacher's embedding, frozen; named as in a GPTModel."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        config = transformer_config(args)
        self.embedding = LanguageModelEmbedding(
            config=config,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            position_embedding_type=args.position_embedding_type,
        ).to(config.params_dtype)
        _frozen(self if args.cpu else self.cuda())

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed tokens and positions of shape (batch, sequence) as (sequence, batch, hidden)."""
        embedded: torch.Tensor = self.embedding(tokens, positions)
        return embedded


class OutputHead(torch.nn.Module):
    """The teacher's last norm and output layer, frozen."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        config = transformer_config(args)
        self._sequence_parallel = config.sequence_parallel
        self.final_layernorm = build_module(
            ShardedNorm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )
        tokens = args.padded_vocab_size // args.tensor_model_parallel_size
        weight = torch.empty(tokens, args.hidden_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        _frozen(self if args.cpu else self.cuda())

    def losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token, (batch, sequence), from (sequence, batch, hidden)."""
        hidden = self.final_layernorm(hidden)
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        logits = torch.nn.functional.linear(hidden, self.weight)
        losses: torch.Tensor = vocab_parallel_cross_entropy(logits.float(), labels.t().contiguous())
        return losses.t()


def rotary(args: argparse.Namespace) -> torch.Tensor | None:
    """Return the rotary embedding of a sequence for the attention layers; None without one.

    Latent attention has its own.
    """
    if args.position_embedding_type != "rope" or args.multi_latent_attention:
        return None
    embedding = RotaryEmbedding(
        kv_channels=args.kv_channels,
        **rotary_arguments(args),
        use_cpu_initialization=args.cpu,
    )
    table: torch.Tensor = embedding(args.seq_length)
    return table
