"""Attention of a model's layers: all that the planner counts of it, and its arguments.

Each kind of attention is a function; ``ModelConfig.attention`` chooses that of a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zb.measured.config import Section, optional_size, size


@dataclass(frozen=True)
class Mixer:
    """What mixes the tokens in one layer; sizes in elements, those of activations for one token.

    Attributes:
        name: name in messages.
        weights: weights of one layer.
        projected: elements out of the first projections: queries, keys and values, with what they
            are projected from if it is narrow.
        attended: input of the output projection.
        divided: numbers that tensor-parallel ranks divide among one another.
        flags: words of Megatron-LM's command line for it.
        kept: keys and values, as the products with the scores read them.
        score_width: sizes of a head in both products with the scores: a query, and a value.
        rotary_flags: words for rotary positions that are not stretched by YaRN.
        scan_flops: FLOPs of Mamba-2's scan in F; 0 for attention.
        scan_bytes: bytes that its convolution, scan and gated norm read and write in F.
    """

    name: str
    weights: int
    projected: int
    attended: int
    divided: tuple[int, ...]
    flags: tuple[str, ...] = ()
    kept: int = 0
    score_width: int = 0
    rotary_flags: tuple[str, ...] = ()
    scan_flops: float = 0.0
    scan_bytes: float = 0.0


GROUPED = "grouped attention"


def grouped_attention(hidden: int, heads: int, groups: int, head: int) -> Mixer:
    """Return attention whose heads share keys and values in groups; in as many as heads, none."""
    words = ("--group-query-attention", "--num-query-groups", str(groups))
    return Mixer(
        name=GROUPED,
        weights=2 * hidden * (heads + groups) * head,
        kept=2 * groups * head,
        projected=(heads + 2 * groups) * head,
        attended=heads * head,
        score_width=2 * head,
        divided=(heads, groups),
        flags=() if groups == heads else words,
    )


# --- multi-latent attention (DeepSeek-V2, arXiv 2405.04434) ---------------------------------------


class LatentAttention(Section):
    """Multi-latent attention: queries, keys and values through a narrow projection."""

    query_rank: int | None = optional_size("width of the compressed queries, if they are", 1536)
    kv_rank: int = size("width of the compressed keys and values", 512)
    nope_head_dim: int = size("part of a head without position", 128)
    rope_head_dim: int = size("part of a head with position", 64)
    value_head_dim: int = size("values of a head", 128)


def latent_attention(hidden: int, heads: int, sizes: LatentAttention) -> Mixer:
    """Return multi-latent attention, whose keys have the same part with position in all heads."""
    query, rank = sizes.nope_head_dim + sizes.rope_head_dim, sizes.query_rank
    attended, narrow = heads * sizes.value_head_dim, sizes.kv_rank + sizes.rope_head_dim
    queries = hidden * heads * query if rank is None else rank * (hidden + heads * query)
    up = sizes.kv_rank * heads * (sizes.nope_head_dim + sizes.value_head_dim)
    return Mixer(
        name="latent attention",
        weights=queries + hidden * narrow + up + attended * hidden,
        kept=heads * query + attended,
        projected=2 * heads * query + attended + narrow + (rank or 0),
        attended=attended,
        score_width=query + sizes.value_head_dim,
        divided=(heads,),
        flags=(
            "--multi-latent-attention",
            *("--kv-lora-rank", str(sizes.kv_rank)),
            *("--qk-head-dim", str(sizes.nope_head_dim)),
            *("--qk-pos-emb-head-dim", str(sizes.rope_head_dim)),
            *("--v-head-dim", str(sizes.value_head_dim)),
            *(() if rank is None else ("--q-lora-rank", str(rank))),
        ),
        rotary_flags=("--rope-type", "rope", "--no-rope-fusion"),  # the fused kernel is for YaRN
    )
