"""The teacher: the model of a torch_dist checkpoint, described by its stored arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from megatron_zb.distill import bridge_teacher
from megatron_zb.distill.student import TeacherShape
from megatron_zb.errors import UsageError
from megatron_zb.train.checkpoint import read
from megatron_zb.train.checkpoint_contents import check_contents
from megatron_zb.train.checkpoint_directory import latest_checkpoint

FLAG = "--teacher-load"

# As the arguments of megatron_zb.train and of Megatron-LM call them.
_NEEDED = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "padded_vocab_size",
    "max_position_embeddings",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "untie_embeddings_and_output_weights",
)
_OPTIONAL = {"norm_epsilon": 1e-5, "init_method_std": 0.02, "seq_length": None}
# What Megatron's grouped attention has, by what it is if nothing says so.
_ATTENTION = {
    "kv_channels": None,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
}

# What a model has besides, with latent attention and with experts.
LATENT = (
    "qk_layernorm",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_base",
    "rotary_percent",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
EXPERTS = (
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
    "moe_router_dtype",
    "moe_shared_expert_intermediate_size",
    "moe_apply_probs_on_input",
)

# What is not built here, and what it is in a model that has none of it.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "mtp_num_layers": (None, 0),
    "qk_l2_norm": (None, False),
    "squared_relu": (None, False),
    "openai_gelu": (None, False),
    "apply_layernorm_1p": (None, False),
    "fp32_residual_connection": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "heterogeneous_layers_config_path": (None, ""),
    "heterogeneous_layers_config_encoded_json": (None, ""),
    "rotary_interleaved": (None, False),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "window_size": (None,),
    "softmax_type": (None, "vanilla"),
    "linear_attention_freq": (None,),
    "experimental_attention_variant": (None,),
    "attention_output_gate": (None, False),
    "no_rope_freq": (None,),
    "hybrid_override_pattern": (None,),
}
_PLAIN_EXPERTS: dict[str, tuple[Any, ...]] = {
    "moe_expert_capacity_factor": (None,),
    "moe_input_jitter_eps": (None, 0.0),
    "moe_shared_expert_gate": (None, False),
    "moe_use_legacy_grouped_gemm": (None, False),
    "moe_latent_size": (None,),
    "moe_router_load_balancing_type": (
        *(None, "none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
        *(["none"], ["aux_loss"], ["seq_aux_loss"], ["global_aux_loss"]),
    ),
}
_POSITIONS = ("learned_absolute", "rope", "none")


@dataclass(frozen=True)
class Teacher:
    """The checkpoint of a teacher, and the arguments of its model."""

    path: Path
    """Directory of the checkpoint's files, such as DIR/iter_0000010."""
    arguments: dict[str, Any]
    """The model's arguments by the names of megatron_zb.train."""

    @property
    def shape(self) -> TeacherShape:
        names = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
        sizes = {name: self.arguments[name] for name in names}
        groups = self.arguments["num_query_groups"] or sizes["num_attention_heads"]
        return TeacherShape(
            **sizes,
            num_query_groups=groups,
            head_size=self.arguments["kv_channels"],
            has_latent_attention=self.arguments["multi_latent_attention"],
            expert_blocks=expert_blocks(self.arguments),
            expert_ffn_hidden_size=self.arguments.get("moe_ffn_hidden_size", 0),
            num_experts=self.arguments["num_experts"] or 0,
        )


def read_teacher(directory: Path) -> Teacher:
    """Read the teacher from the latest checkpoint of a directory; needs no process group.

    Raises:
        UsageError: there is none, it is damaged, or it is of a model that is not built here.
    """
    try:
        _, path = latest_checkpoint(directory)
    except UsageError as error:
        raise UsageError(str(error).replace("--load", FLAG)) from error
    check_contents(path, FLAG)
    if bridge_teacher.is_of_bridge(path):
        saved: Any = bridge_teacher.read_arguments(path, FLAG)
    else:
        common = read(path, lambda: dist_checkpointing.load_common_state_dict(str(path)), FLAG)
        saved = common.get("args")
    if isinstance(saved, argparse.Namespace):  # Megatron-LM's
        saved = vars(saved)
    if not isinstance(saved, dict):
        raise UsageError(
            f"{FLAG}: {path} does not say what model it holds: give a checkpoint that "
            "megatron_zb.train, Megatron-LM's pretrain_gpt.py or Megatron-Bridge has written"
        )
    return Teacher(path, _model_arguments(saved, path))


def expert_blocks(arguments: Mapping[str, Any]) -> frozenset[int]:
    """Return the blocks of a model, from 0, whose MLP is one of experts."""
    if not arguments.get("num_experts"):
        return frozenset()
    every: int | list[int] = arguments.get("moe_layer_freq") or 1
    blocks = range(arguments["num_layers"])
    return frozenset(b for b in blocks if (b % every == 0 if isinstance(every, int) else every[b]))


def _model_arguments(saved: dict[str, Any], path: Path) -> dict[str, Any]:
    missing = [name for name in _NEEDED if saved.get(name) is None]
    if missing:
        raise UsageError(
            f"{FLAG}: {path} does not say its {missing[0]}: give a checkpoint that "
            "megatron_zb.train or Megatron-LM's pretrain_gpt.py has written"
        )
    _check_plain(saved, path)
    arguments = {name: saved[name] for name in _NEEDED}
    arguments |= {name: saved.get(name) or value for name, value in _OPTIONAL.items()}
    grouped = saved.get("group_query_attention", False)
    arguments["group_query_attention"] = bool(grouped)
    arguments["num_query_groups"] = saved.get("num_query_groups") if grouped else None
    bias = not saved["disable_bias_linear"] if "disable_bias_linear" in saved else None
    arguments["disable_bias_linear"] = not (
        saved.get("add_bias_linear", True) if bias is None else bias
    )
    arguments |= {name: saved.get(name) or value for name, value in _ATTENTION.items()}
    if not arguments["kv_channels"]:
        arguments["kv_channels"] = arguments["hidden_size"] // arguments["num_attention_heads"]
    return arguments | _unlike_gpt(saved)


def _unlike_gpt(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of latent attention and of experts."""
    latent, experts = bool(saved.get("multi_latent_attention")), saved.get("num_experts")
    names = (LATENT if latent else ()) + (("moe_layer_freq", *EXPERTS) if experts else ())
    more = {name: saved[name] for name in names if saved.get(name) is not None}
    if experts:
        more.setdefault("moe_ffn_hidden_size", saved["ffn_hidden_size"])
    more.setdefault("moe_layer_freq", None)
    return more | {"multi_latent_attention": latent, "num_experts": experts or None}


def _check_plain(saved: dict[str, Any], path: Path) -> None:
    required = dict(_PLAIN)
    if saved.get("multi_latent_attention"):
        required["use_rope_scaling"] = (None, False)
    if saved.get("num_experts"):
        required |= _PLAIN_EXPERTS
    for name, plain in required.items():
        if saved.get(name) not in plain:
            raise UsageError(
                f"{FLAG}: {path} is of a model with {name} {saved[name]}, which blockwise "
                "distillation does not know: give a plain GPT"
            )
    if saved["position_embedding_type"] not in _POSITIONS:
        raise UsageError(
            f"{FLAG}: {path} has position_embedding_type {saved['position_embedding_type']}: "
            f"known are {', '.join(_POSITIONS)}"
        )
