"""Arguments of Megatron-LM that describe a model of ``configs/models``, and the inverse."""

from __future__ import annotations

import argparse
import ast
import re
from typing import Any

from pydantic import ValidationError

from megatron_zb.errors import UsageError
from megatron_zb.parsing import flag_of
from megatron_zb.plan.mixers import DELTA, MAMBA, Mixer
from megatron_zb.plan.model import Experts, ModelConfig, Rotary, Router
from megatron_zb.schedules.layout import predicting_parts


def model_flags(model: ModelConfig) -> list[str]:
    """Return the words of the command line for the model, its sequence length and its batch.

    A vocabulary without a published tokenizer is left to the tokenizer, and parallel sizes to the
    job.
    """
    words = [
        *("--num-layers", str(model.layers)),
        *("--hidden-size", str(model.hidden_size)),
        *("--ffn-hidden-size", str(model.ffn)),
        *("--num-attention-heads", str(model.attention_heads)),
        *("--seq-length", str(model.sequence_length)),
        *("--max-position-embeddings", str(model.sequence_length)),
        *("--global-batch-size", str(model.global_batch_size)),
        *("--norm-epsilon", _number(model.norm_epsilon)),
    ]
    words += model.attention.flags
    if model.head_dim is not None:
        words += ["--kv-channels", str(model.head_dim)]
    if model.gated_mlp or model.squared_relu:
        words.append("--swiglu" if model.gated_mlp else "--squared-relu")
        words += ["--normalization", "RMSNorm", "--disable-bias-linear"]
    if model.rotary is not None:
        words += _of_rotary(model.rotary, model.attention)
    if model.hybrid_layer_pattern is not None:
        words += _of_hybrid(model)
    if model.qk_layernorm:
        words.append("--qk-layernorm")
    if not model.tied_embeddings:
        words.append("--untie-embeddings-and-output-weights")
    if not model.dropout:
        words += ["--attention-dropout", "0", "--hidden-dropout", "0"]
    if not model.flash_attention:
        words += ["--attention-backend", "unfused"]
    if model.tokenizer is not None:
        words += _of_vocabulary(model)
    if model.experts is not None:
        words += _of_experts(model.experts, model.layers)
    if model.prediction_layers:
        words += ["--mtp-num-layers", str(model.prediction_layers)]
        words += ["--mtp-loss-scaling-factor", _number(model.prediction_loss_scale)]
    if model.residual_streams > 1:
        words += ["--enable-mhc-connections"]
        words += ["--mhc-num-residual-streams", str(model.residual_streams)]
    return words


def mock_data_flags(model: ModelConfig) -> list[str]:
    """Return the words for mock data, with as large a vocabulary as the model has.

    Megatron-LM 0.16 counts the end of a document on top of ``--vocab-size``, 0.19 within it.
    """
    vocabulary = [] if model.tokenizer is not None else _of_vocabulary(model)
    tokens = ["--vocab-size", str(max(1, model.vocabulary - 1))]
    return ["--mock-data", "--tokenizer-type", "NullTokenizer", *tokens, *vocabulary]


def _number(value: float) -> str:
    return f"{value:g}"


def _of_hybrid(model: ModelConfig) -> list[str]:
    """Return the words for pretrain_hybrid.py, which needs the modules of each kind."""
    words = ["--hybrid-layer-pattern", model.hybrid_layer_pattern or ""]
    words += ["--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    if model.rotary is None:
        words += ["--position-embedding-type", "none"]
    words += model.mamba_mixer.flags if MAMBA in model.kinds else ()
    return [*words, *(model.delta_mixer.flags if DELTA in model.kinds else ())]


def _of_vocabulary(model: ModelConfig) -> list[str]:
    return ["--padded-vocab-size", str(model.vocabulary)]


def _of_rotary(rotary: Rotary, attention: Mixer) -> list[str]:
    words = ["--position-embedding-type", "rope", "--rotary-base", str(rotary.base)]
    words += [] if rotary.fraction == 1 else ["--rotary-percent", _number(rotary.fraction)]
    if rotary.scaling is not None:
        words += ["--use-rope-scaling", "--rope-scaling-factor", _number(rotary.scaling.factor)]
    if rotary.yarn is not None:
        words += ["--rope-type", "yarn"]
        words += ["--rotary-scaling-factor", _number(rotary.yarn.factor)]
        words += ["--mscale", _number(rotary.yarn.mscale)]
        words += ["--mscale-all-dim", _number(rotary.yarn.mscale_all_dim)]
    else:
        words += attention.rotary_flags
    return words


def _of_experts(experts: Experts, layers: int) -> list[str]:
    words = [
        *("--num-experts", str(experts.experts)),
        *("--moe-router-topk", str(experts.top_k)),
        *("--moe-ffn-hidden-size", str(experts.ffn_hidden_size)),
        *_of_router(experts.router),
        *("--moe-token-dispatcher-type", "alltoall"),
        "--moe-grouped-gemm",
    ]
    if experts.shared_ffn_hidden_size:
        words += ["--moe-shared-expert-intermediate-size", str(experts.shared_ffn_hidden_size)]
        words += ["--moe-shared-expert-gate"] if experts.shared_gate else []
    if experts.latent_size is not None:
        words += ["--moe-latent-size", str(experts.latent_size)]
    if experts.dense_layers:
        sparse = layers - experts.dense_layers
        words += ["--moe-layer-freq", f"([0]*{experts.dense_layers}+[1]*{sparse})"]
    return words


def _of_router(router: Router) -> list[str]:
    words = [
        *("--moe-router-score-function", router.score_function),
        *("--moe-router-load-balancing-type", router.balancing),
        *("--moe-aux-loss-coeff", _number(router.aux_loss_coefficient)),
        *("--moe-router-dtype", "fp32"),
    ]
    if router.groups is not None:
        words += ["--moe-router-num-groups", str(router.groups)]
        words += ["--moe-router-group-topk", str(router.top_k_groups)]
    if router.scaling_factor is not None:
        words += ["--moe-router-topk-scaling-factor", _number(router.scaling_factor)]
    if router.bias_update_rate is not None:
        words.append("--moe-router-enable-expert-bias")
        words += ["--moe-router-bias-update-rate", _number(router.bias_update_rate)]
    return words


# --- the model of the arguments of a training


NAME = "the model of the arguments"

# Arguments that change the operations of a layer in ways that the planner does not count.
_NOT_COUNTED = (
    "experimental_attention_variant",
    "heterogeneous_layers_config_encoded_json",
    "heterogeneous_layers_config_path",
    "hybrid_override_pattern",
    "linear_attention_freq",
    "window_size",
)
_NEEDED = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "seq_length": 4096,
    "global_batch_size": 512,
}
_LONGEST_LIST = 10_000


def model_of(args: argparse.Namespace) -> ModelConfig:
    """Return the description of a model from parsed arguments of Megatron-LM.

    Raises:
        UsageError: a size is missing, or the planner cannot count what an argument requests.
    """
    for name in _NOT_COUNTED:
        if getattr(args, name, None) is not None:
            raise UsageError(
                f"{flag_of(name)}: the planner does not count such layers: leave it out, or give "
                "--config with the nearest model"
            )
    for name, example in _NEEDED.items():
        if getattr(args, name) is None and not (name == "num_layers" and _pattern(args)):
            raise UsageError(
                f"{flag_of(name)} is missing among the arguments of the training: add, for "
                f"example, {flag_of(name)} {example}"
            )
    try:
        return ModelConfig.model_validate(_fields(args))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = str(first.get("ctx", {}).get("error", first["msg"]))
        path = ".".join(map(str, first["loc"]))
        where = f"{_flag(path) or path}: " if path else ""
        raise UsageError(f"{NAME} cannot be planned: {where}{_with_flags(reason)}") from error


# Megatron-LM's flags for fields of a model, by the last part of a field's path, or more of it.
_FLAGS = {
    "layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "attention_heads": "--num-attention-heads",
    "query_groups": "--num-query-groups",
    "head_dim": "--kv-channels",
    "norm_epsilon": "--norm-epsilon",
    "gated_mlp": "--swiglu",
    "squared_relu": "--squared-relu",
    "rotary": "--position-embedding-type rope",
    "rope": "--position-embedding-type rope",
    "base": "--rotary-base",
    "fraction": "--rotary-percent",
    "yarn": "--rope-type yarn",
    "factor": "--rotary-scaling-factor",
    "mscale": "--mscale",
    "mscale_all_dim": "--mscale-all-dim",
    "scaling": "--use-rope-scaling",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "mamba": "--mamba-num-heads",
    "heads": "--mamba-num-heads",
    "mamba.head_dim": "--mamba-head-dim",
    "mamba.groups": "--mamba-num-groups",
    "state_dim": "--mamba-state-dim",
    "gated_delta": "--linear-num-key-heads",
    "key_heads": "--linear-num-key-heads",
    "value_heads": "--linear-num-value-heads",
    "key_head_dim": "--linear-key-head-dim",
    "attention_output_gate": "--attention-output-gate",
    "vocabulary": "--padded-vocab-size",
    "sequence_length": "--seq-length",
    "global_batch_size": "--global-batch-size",
    "experts": "--num-experts",
    "top_k": "--moe-router-topk",
    "shared_ffn_hidden_size": "--moe-shared-expert-intermediate-size",
    "shared_gate": "--moe-shared-expert-gate",
    "latent_size": "--moe-latent-size",
    "dense_layers": "--moe-layer-freq",
    "score_function": "--moe-router-score-function",
    "groups": "--moe-router-num-groups",
    "top_k_groups": "--moe-router-group-topk",
    "scaling_factor": "--moe-router-topk-scaling-factor",
    "bias_update_rate": "--moe-router-bias-update-rate",
    "balancing": "--moe-router-load-balancing-type",
    "aux_loss_coefficient": "--moe-aux-loss-coeff",
    "latent_attention": "--multi-latent-attention",
    "query_rank": "--q-lora-rank",
    "kv_rank": "--kv-lora-rank",
    "nope_head_dim": "--qk-head-dim",
    "rope_head_dim": "--qk-pos-emb-head-dim",
    "value_head_dim": "--v-head-dim",
    "prediction_layers": "--mtp-num-layers",
    "prediction_loss_scale": "--mtp-loss-scaling-factor",
    "residual_streams": "--mhc-num-residual-streams",
}
# A field's name: with an underscore or a dot anywhere, else only where it stands as one.
_FIELD = re.compile(
    r"(?P<name>\b[a-z]+(?:[._][a-z]+)+|\b[a-z]+(?=:| \d| is )|^[a-z]+(?= and ))"
    r"(?P<colon>: (?=\d|sigmoid))?"
)


def _flag(path: str) -> str | None:
    """Return the flag for a field, None if there is none."""
    parts = path.split(".")
    return _FLAGS.get(".".join(parts[-2:])) or _FLAGS.get(parts[-1])


def _with_flags(reason: str) -> str:
    """Return what is wrong with a model's fields in the flags of Megatron-LM."""
    section = "mamba." if "mamba." in reason else ""

    def flag(found: re.Match[str]) -> str:
        given = _flag(section + found["name"])
        if given is None:
            return found[0]
        return f"{given} " if found["colon"] else given

    return _FIELD.sub(flag, reason.replace("rotary: {base: 10000}", "rotary.rope"))


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    ffn = args.ffn_hidden_size
    if ffn is None and args.swiglu:
        ffn = int(4 * args.hidden_size * 2 / 3) // 64 * 64  # as Megatron-LM chooses it
    pattern = _pattern(args)
    return {
        "name": NAME,
        "source": "the command line",
        "layers": args.num_layers if args.num_layers is not None else _letters(pattern or ""),
        "hidden_size": args.hidden_size,
        "ffn_hidden_size": ffn,
        "attention_heads": args.num_attention_heads,
        "query_groups": args.num_query_groups if args.group_query_attention else None,
        "head_dim": args.kv_channels,
        "qk_layernorm": args.qk_layernorm,
        "attention_output_gate": args.attention_output_gate,
        "gated_mlp": args.swiglu,
        "squared_relu": args.squared_relu,
        "norm_epsilon": _either(args, "norm_epsilon", "layernorm_epsilon"),
        "rotary": _rotary(args),
        "hybrid_layer_pattern": pattern,
        "mamba": _mamba(args) if pattern and MAMBA in pattern else None,
        "gated_delta": _delta(args) if pattern and DELTA in pattern else None,
        "vocabulary": _vocabulary(args),
        "tied_embeddings": not args.untie_embeddings_and_output_weights,
        "sequence_length": args.seq_length,
        "global_batch_size": args.global_batch_size,
        "dropout": bool(args.hidden_dropout or args.attention_dropout),
        "flash_attention": _is_fused(args),
        "experts": _experts(args) if args.num_experts else None,
        "latent_attention": _latent(args) if args.multi_latent_attention else None,
        "prediction_layers": _depths(args),
        "prediction_loss_scale": args.mtp_loss_scaling_factor,
        "residual_streams": _streams(args),
    }


def _streams(args: argparse.Namespace) -> int:
    has_several: bool = getattr(args, "enable_mhc_connections", False)  # newer than 0.19
    return int(args.mhc_num_residual_streams) if has_several else 1


def _either(args: argparse.Namespace, *names: str) -> Any:
    """Return the value of an argument that has one name or another, by version."""
    return next(getattr(args, name) for name in names if hasattr(args, name))


def written_pattern(args: argparse.Namespace) -> str | None:
    """Return the pattern of a hybrid model as the arguments write it."""
    pattern: str | None = getattr(args, "hybrid_layer_pattern", None)
    return pattern


def _pattern(args: argparse.Namespace) -> str | None:
    pattern = written_pattern(args)
    return None if pattern is None else pattern.replace("|", "")


def _depths(args: argparse.Namespace) -> int:
    """Return the number of multi-token prediction layers, from pattern or arguments."""
    return len(predicting_parts(_pattern(args) or "")) or args.mtp_num_layers or 0


def _letters(pattern: str) -> int:
    return len(pattern.partition("/")[0])


def _is_fused(args: argparse.Namespace) -> bool:
    """Return whether attention never stores its scores, as in FlashAttention."""
    if args.attention_backend is not None:
        return args.attention_backend not in ("unfused", "local")
    return args.transformer_impl != "local" or bool(args.use_flash_attn)


def _vocabulary(args: argparse.Namespace) -> int:
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    if args.vocab_size is None:
        raise UsageError(
            "the arguments name a tokenizer, whose vocabulary is read only as training starts: "
            "add --padded-vocab-size, such as --padded-vocab-size 128256"
        )
    unit = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(-(-args.vocab_size // unit) * unit)


def _rotary(args: argparse.Namespace) -> dict[str, Any] | None:
    kind = args.position_embedding_type
    if kind == "none" or (kind == "learned_absolute" and not args.use_rotary_position_embeddings):
        return None
    out: dict[str, Any] = {"base": args.rotary_base, "fraction": args.rotary_percent}
    if args.multi_latent_attention and args.rope_type in (None, "yarn"):
        out["yarn"] = {
            "factor": args.rotary_scaling_factor,
            "mscale": args.mscale,
            "mscale_all_dim": args.mscale_all_dim,
        }
    elif args.use_rope_scaling:
        out["scaling"] = {"factor": args.rope_scaling_factor}
    return out


def _mamba(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "heads": args.mamba_num_heads,
        "head_dim": args.mamba_head_dim,
        "groups": args.mamba_num_groups,
        "state_dim": args.mamba_state_dim,
    }


def _delta(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "key_heads": args.linear_num_key_heads,
        "value_heads": args.linear_num_value_heads,
        "key_head_dim": args.linear_key_head_dim,
        "value_head_dim": args.linear_value_head_dim,
    }


def _latent(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "query_rank": args.q_lora_rank,
        "kv_rank": args.kv_lora_rank,
        "nope_head_dim": args.qk_head_dim,
        "rope_head_dim": args.qk_pos_emb_head_dim,
        "value_head_dim": args.v_head_dim,
    }


def _experts(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "experts": args.num_experts,
        "top_k": args.moe_router_topk,
        "ffn_hidden_size": args.moe_ffn_hidden_size or args.ffn_hidden_size or 4 * args.hidden_size,
        "shared_ffn_hidden_size": args.moe_shared_expert_intermediate_size or 0,
        "shared_gate": args.moe_shared_expert_gate,
        "latent_size": args.moe_latent_size,
        "dense_layers": 0 if _pattern(args) else _dense_layers(args),
        "router": _router(args),
    }


def _router(args: argparse.Namespace) -> dict[str, Any]:
    balancing, loss = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    if isinstance(balancing, list):
        balancing = balancing[0]
    counted = ("aux_loss", "seq_aux_loss", "global_aux_loss")
    biased = args.moe_router_enable_expert_bias
    return {
        "score_function": args.moe_router_score_function,
        "groups": args.moe_router_num_groups,
        "top_k_groups": args.moe_router_group_topk,
        "scaling_factor": args.moe_router_topk_scaling_factor,
        "bias_update_rate": args.moe_router_bias_update_rate if biased else None,
        "balancing": balancing if balancing in counted else "none",
        "aux_loss_coefficient": loss[0] if isinstance(loss, list) else loss,
    }


def _dense_layers(args: argparse.Namespace) -> int:
    """Return how many layers before the first with experts are dense.

    Raises:
        UsageError: a dense layer follows one with experts.
    """
    text = str(args.moe_layer_freq)
    layers = [int(i % int(text) == 0) for i in range(args.num_layers)] if text.isdecimal() else None
    sparse = layers if layers is not None else _list_of(text)
    dense = sparse.index(1) if 1 in sparse else len(sparse)
    if 0 in sparse[dense:] or len(sparse) != args.num_layers:
        raise UsageError(
            f"--moe-layer-freq {text}: the planner counts models whose dense layers come before "
            f"all others: give, for example, --moe-layer-freq ([0]*1+[1]*{args.num_layers - 1})"
        )
    return dense


def _list_of(text: str) -> list[int]:
    """Read a list such as ``([0]*3+[1]*58)`` without running it; other text gives no element."""
    try:
        return _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _evaluated(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List):
        return [int(bool(ast.literal_eval(each))) for each in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_evaluated(node.left), *_evaluated(node.right)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        part, times = _evaluated(node.left), ast.literal_eval(node.right)
        if isinstance(times, int) and len(part) * times <= _LONGEST_LIST:
            return part * times
    raise ValueError("neither a list, a sum of lists nor a list times a number")
