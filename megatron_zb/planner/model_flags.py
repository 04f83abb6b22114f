"""The arguments of Megatron-LM that describe a model of ``configs/models``."""

from __future__ import annotations

from megatron_zb.planner.model import Experts, LatentAttention, ModelConfig


def model_flags(model: ModelConfig) -> list[str]:
    """One word of the command line each: the model, its sequence length and its batch.

    The vocabulary is left to the tokenizer, and parallel sizes to the job.
    """
    words = [
        *("--num-layers", str(model.layers)),
        *("--hidden-size", str(model.hidden_size)),
        *("--ffn-hidden-size", str(model.ffn)),
        *("--num-attention-heads", str(model.attention_heads)),
        *("--seq-length", str(model.sequence_length)),
        *("--max-position-embeddings", str(model.sequence_length)),
        *("--global-batch-size", str(model.global_batch_size)),
    ]
    if model.groups != model.attention_heads:
        words += ["--group-query-attention", "--num-query-groups", str(model.groups)]
    if model.head_dim is not None:
        words += ["--kv-channels", str(model.head_dim)]
    if model.gated_mlp:
        words += ["--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"]
        words += ["--position-embedding-type", "rope"]
    if model.qk_layernorm:
        words.append("--qk-layernorm")
    if not model.tied_embeddings:
        words.append("--untie-embeddings-and-output-weights")
    if not model.dropout:
        words += ["--attention-dropout", "0", "--hidden-dropout", "0"]
    if model.experts is not None:
        words += _of_experts(model.experts, model.layers)
    if model.latent_attention is not None:
        words += _of_latent_attention(model.latent_attention)
    return words


def _of_experts(experts: Experts, layers: int) -> list[str]:
    words = [
        *("--num-experts", str(experts.experts)),
        *("--moe-router-topk", str(experts.top_k)),
        *("--moe-ffn-hidden-size", str(experts.ffn_hidden_size)),
        *("--moe-router-load-balancing-type", "aux_loss"),
        *("--moe-aux-loss-coeff", "0.001"),
        *("--moe-token-dispatcher-type", "alltoall"),
        "--moe-grouped-gemm",
    ]
    if experts.shared_ffn_hidden_size:
        words += ["--moe-shared-expert-intermediate-size", str(experts.shared_ffn_hidden_size)]
    if experts.dense_layers:
        sparse = layers - experts.dense_layers
        words += ["--moe-layer-freq", f"([0]*{experts.dense_layers}+[1]*{sparse})"]
    return words


def _of_latent_attention(attention: LatentAttention) -> list[str]:
    words = [
        "--multi-latent-attention",
        *("--kv-lora-rank", str(attention.kv_rank)),
        *("--qk-head-dim", str(attention.nope_head_dim)),
        *("--qk-pos-emb-head-dim", str(attention.rope_head_dim)),
        *("--v-head-dim", str(attention.value_head_dim)),
    ]
    if attention.query_rank is not None:
        words += ["--q-lora-rank", str(attention.query_rank)]
    return words
