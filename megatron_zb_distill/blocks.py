"""Transformer layers of teacher and student, built by megatron-core one by one.

A layer is built wherever its block runs: nothing here knows of pipeline ranks.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_zb_distill.student import BlockShape
from megatron_zb_train.model import transformer_config

_FIRST_NORM, _SECOND_NORM = "input_layernorm.", "pre_mlp_layernorm."


def teacher_layer(args: argparse.Namespace, block: int) -> TransformerLayer:
    """Build block `block` (from 0) of the teacher, frozen, with weights yet to be set."""
    config = transformer_config(args)
    spec = get_gpt_layer_local_spec(normalization=args.normalization)
    return _frozen(_build(config, spec.submodules, block))


def student_layer(args: argparse.Namespace, shape: BlockShape, block: int) -> TransformerLayer:
    """Build a candidate for block `block` (from 0), with weights yet to be set."""
    return _build(student_config(args, shape), _submodules(args, shape), block)


def student_config(args: argparse.Namespace, shape: BlockShape) -> TransformerConfig:
    """Return Megatron's configuration of a model with blocks of this shape."""
    values = vars(args) | {
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_query_groups": shape.num_query_groups,
    }
    return transformer_config(argparse.Namespace(**values))


def _build(config: TransformerConfig, submodules: Any, block: int) -> TransformerLayer:
    layer = TransformerLayer(config, submodules, layer_number=block + 1)
    return layer if config.use_cpu_initialization else layer.cuda()


def _frozen(module: Any) -> Any:
    module.requires_grad_(False)
    return module.eval()


def _submodules(args: argparse.Namespace, shape: BlockShape) -> Any:
    """Return the submodules of a layer; their names in a checkpoint are Megatron's own."""
    parts = get_gpt_layer_local_spec(normalization=args.normalization).submodules
    names = dict(parts.sharded_state_dict_keys_map)
    if shape.attention == "linear":
        parts.self_attention = _linear("linear_attn")
        names[_FIRST_NORM] = "self_attention.layer_norm_"
    elif shape.attention == "no_op":
        parts.input_layernorm, parts.self_attention = IdentityOp, IdentityOp
        parts.self_attn_bda = IdentityFuncOp
        del names[_FIRST_NORM]
    if shape.mlp == "linear":
        parts.mlp = _linear("linear_mlp")
        names[_SECOND_NORM] = "mlp.layer_norm_"
    elif shape.mlp == "no_op":
        parts.pre_mlp_layernorm, parts.mlp, parts.mlp_bda = IdentityOp, IdentityOp, IdentityFuncOp
        del names[_SECOND_NORM]
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
        norm = get_gpt_layer_local_spec(normalization=args.normalization).submodules.input_layernorm
        self.final_layernorm = build_module(
            norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )
        weight = torch.empty(args.padded_vocab_size, args.hidden_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        _frozen(self if args.cpu else self.cuda())

    def losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token, (batch, sequence), from (sequence, batch, hidden)."""
        logits = torch.nn.functional.linear(self.final_layernorm(hidden), self.weight)
        flat = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), labels.t().reshape(-1), reduction="none"
        )
        return flat.view(labels.shape[1], labels.shape[0]).t()


def rotary(args: argparse.Namespace) -> torch.Tensor | None:
    """Return the rotary embedding of a sequence for the attention layers; None without one."""
    if args.position_embedding_type != "rope":
        return None
    embedding = RotaryEmbedding(
        kv_channels=args.hidden_size // args.num_attention_heads,
        rotary_percent=1.0,
        use_cpu_initialization=args.cpu,
    )
    table: torch.Tensor = embedding(args.seq_length)
    return table
