"""Arguments of Megatron-LM that describe a model of ``configs/models``."""

from __future__ import annotations

from megatron_zb.planner.attention import Mixer
from megatron_zb.planner.hybrid_layers import MAMBA
from megatron_zb.planner.model import Experts, ModelConfig, Rotary, Router


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
    return [*words, *(model.mamba_mixer.flags if MAMBA in model.kinds else ())]


def _of_vocabulary(model: ModelConfig) -> list[str]:
    return ["--padded-vocab-size", str(model.vocabulary)]


def _of_rotary(rotary: Rotary, attention: Mixer) -> list[str]:
    words = ["--position-embedding-type", "rope", "--rotary-base", str(rotary.base)]
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
