"""Token mixers of a layer, such as attention or Mamba-2, with all that is counted of them.

Each kind of attention is a function; ``ModelConfig.attention`` chooses that of a model.

A layer of a hybrid model is one part, where a transformer's layer has attention and an MLP.

The kinds are Megatron-LM's letters: ``M`` Mamba-2, ``G`` gated delta, ``*`` attention, ``-`` dense
MLP, ``E`` experts. Of Mamba-2 (arXiv 2405.21060) are counted, as its published Triton kernels work:

- Two products with weights, which are all that is left to W; the gradients of convolution, decays
  and norm come with B.
- The scan over chunks (section 6): within a chunk, into its state and out of the one before it.
- F keeps what was projected and what the scan gave; B computes the rest of the scan again, for
  which it takes 2.5 times as long as F. That factor is FlashAttention-2's, an assumption here.

Gated delta (arXiv 2412.06464) is counted in the same way, as the kernels of flash-linear-attention
work: in chunks of 64 tokens, with a triangular inverse in each, for every head of the values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from pydantic import model_validator

from megatron_zb.measured.config import Section, optional_size, size
from megatron_zb.schedules import layout

# --- attention


@dataclass(frozen=True)
class Mixer:
    """Token mixer of one layer; sizes in elements, those of activations for one token.

    Attributes:
        name: name in messages.
        weights: weights of one layer.
        projected: elements out of the first projections: queries, keys and values, with what they
            are projected from if it is narrow.
        attended: input of the output projection.
        divided: numbers that tensor-parallel ranks divide among one another.
        shared: a number that they divide too, or where it is smaller, that divides theirs: then
            several of them have the same. Groups of keys and values; 0 for none.
        flags: words of Megatron-LM's command line for it.
        kept: keys and values, as the products with the scores read them.
        score_width: sizes of a head in both products with the scores: a query, and a value.
        rotary_flags: words for rotary positions that are not stretched by YaRN.
        scan_flops: FLOPs of the scan of Mamba-2 or gated delta in F; 0 for attention.
        scan_bytes: bytes that its convolution, scan and gated norm read and write in F.
        scan_kept: bytes between the projections that F keeps for the scan's B.
        scan_kernels: kernels between the projections, in F and in B.
    """

    name: str
    weights: int
    projected: int
    attended: int
    divided: tuple[int, ...]
    shared: int = 0
    flags: tuple[str, ...] = ()
    kept: int = 0
    score_width: int = 0
    rotary_flags: tuple[str, ...] = ()
    scan_flops: float = 0.0
    scan_bytes: float = 0.0
    scan_kept: int = 0
    scan_kernels: tuple[int, int] = (0, 0)

    def is_cut_by(self, tensor: int) -> bool:
        """Return whether Megatron can divide it by a number of tensor-parallel ranks."""
        shares = self.shared % tensor == 0 or tensor % self.shared == 0
        return shares and not any(size % tensor for size in self.divided)

    def kept_by_rank(self, tensor: int) -> float:
        """Return the keys and values that one of ``tensor`` ranks keeps, in elements."""
        return self.kept / (min(tensor, self.shared) if self.shared else tensor)


GROUPED = "grouped attention"


def grouped_attention(
    hidden: int, heads: int, groups: int, head: int, *, gated: bool = False
) -> Mixer:
    """Return attention whose heads share keys and values in groups; in as many as heads, none.

    A ``gated`` one multiplies its output by a sigmoid, projected beside the queries.
    """
    words = ("--group-query-attention", "--num-query-groups", str(groups))
    gates = heads * head if gated else 0
    return Mixer(
        name=GROUPED,
        weights=hidden * (2 * (heads + groups) * head + gates),
        kept=2 * groups * head,
        projected=(heads + 2 * groups) * head + gates,
        attended=heads * head,
        score_width=2 * head,
        divided=(heads,),
        shared=groups,
        flags=(*(() if groups == heads else words), *(("--attention-output-gate",) * gated)),
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


# --- hybrid layers


MAMBA, DELTA, ATTENTION, MLP, EXPERTS = "MG*-E"
RECURRENT = {MAMBA: "Mamba-2", DELTA: "gated delta"}
"""Kinds with a state that passes from one token of a sample to the next, by their names."""
_CHUNK = 128  # tokens, of Megatron's mixer


class Mamba(Section):
    """Mamba-2 with Megatron-LM's defaults."""

    heads: int | None = optional_size("heads; 2 hidden_size / head_dim if left out", 128)
    head_dim: int = size("size of a head", 64, 64)
    groups: int = size("groups of heads with the same B and C", 8, 8)
    state_dim: int = size("states of each element of a head", 128, 128)


def mamba_mixer(hidden: int, sizes: Mamba) -> Mixer:
    """Return Mamba-2 in one layer.

    States of a chunk are written, passed on and read, half of it in 32 bits; so are the products
    of B and C.

    Raises:
        ValueError: the heads do not go into the groups or the width.
    """
    if sizes.heads is None and 2 * hidden % sizes.head_dim:
        raise ValueError(
            f"twice the hidden_size {hidden} cannot be divided by mamba.head_dim "
            f"{sizes.head_dim}; give mamba.heads"
        )
    heads = sizes.heads or 2 * hidden // sizes.head_dim
    if heads % sizes.groups:
        raise ValueError(
            f"the {heads} heads of mamba cannot be divided by mamba.groups "
            f"{sizes.groups}; give, for example, groups: 1"
        )
    inner, shared = heads * sizes.head_dim, sizes.groups * sizes.state_dim
    projected = 2 * inner + 2 * shared + heads  # gates, inputs, B, C and time steps
    states = 12 * inner * sizes.state_dim / _CHUNK
    return Mixer(
        name="Mamba-2",
        weights=hidden * (projected + inner),
        projected=projected,
        attended=inner,
        divided=(heads, sizes.groups),
        flags=(
            *("--mamba-num-heads", str(heads)),
            *("--mamba-head-dim", str(sizes.head_dim)),
            *("--mamba-num-groups", str(sizes.groups)),
            *("--mamba-state-dim", str(sizes.state_dim)),
        ),
        scan_flops=2 * _CHUNK * (shared + inner) + 2 * 2 * inner * sizes.state_dim,
        scan_bytes=16 * (inner + shared) + states + 8 * _CHUNK * sizes.groups,
        scan_kept=2 * inner,  # what the scan gave, before it is gated and normed
        scan_kernels=(7, 16),
    )


_DELTA_CHUNK = 64  # tokens, of flash-linear-attention's kernels


class GatedDelta(Section):
    """Gated delta with Megatron-LM's defaults, which are those of Qwen3-Next."""

    key_heads: int = size("heads of queries and keys", 16, 16)
    value_heads: int = size("heads of values", 32, 32)
    key_head_dim: int = size("size of a head of queries and keys", 128, 128)
    value_head_dim: int = size("size of a head of values", 128, 128)

    @model_validator(mode="after")
    def _divisible(self) -> GatedDelta:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"gated_delta.value_heads {self.value_heads} cannot be divided by "
                f"gated_delta.key_heads {self.key_heads}; give, for example, key_heads: 1"
            )
        return self


def delta_mixer(hidden: int, sizes: GatedDelta) -> Mixer:
    """Return gated delta in one layer.

    Of every head of values: in a chunk, products of keys and of queries with keys, a triangular
    inverse and two products with it, one of scores with values; three with the state. Between the
    kernels, queries, keys and values are convolved, normed and repeated for the heads of values;
    keys and values that the inverse gave are written and read; so are states, half in 32 bits.
    """
    keys, values = sizes.key_heads * sizes.key_head_dim, sizes.value_heads * sizes.value_head_dim
    of_key, of_value, chunk = sizes.key_head_dim, sizes.value_head_dim, _DELTA_CHUNK
    repeated = 2 * sizes.value_heads * of_key  # queries and keys
    projected = 2 * keys + 2 * values + 2 * sizes.value_heads  # with gates, steps and decays
    within = 2 * chunk * (3 * of_key + 2 * of_value) + chunk**2
    states = 12 * values * of_key / chunk
    moved = 8 * (2 * keys + values) + 12 * repeated + 16 * values
    return Mixer(
        name="gated delta",
        weights=hidden * (projected + values),
        projected=projected,
        attended=values,
        divided=(sizes.key_heads, sizes.value_heads),
        flags=(
            *("--linear-num-key-heads", str(sizes.key_heads)),
            *("--linear-num-value-heads", str(sizes.value_heads)),
            *("--linear-key-head-dim", str(of_key)),
            *("--linear-value-head-dim", str(of_value)),
        ),
        scan_flops=sizes.value_heads * (within + 3 * 2 * of_key * of_value),
        scan_bytes=moved + states + 6 * chunk * sizes.value_heads,
        scan_kept=2 * (2 * keys + repeated + 2 * values) + 2 * chunk * sizes.value_heads,
        scan_kernels=(18, 28),
    )


@lru_cache
def all_kinds(pattern: str) -> str:
    """Return the kinds of all layers, with those of multi-token prediction behind the others."""
    return layout.pattern_kinds(pattern) + "".join(layout.predicting_parts(pattern))


def layers_of_two(pattern: str) -> tuple[int, int] | None:
    """Count the layers of a transformer that a pattern writes as two parts each: dense, and sparse.

    None if it writes other layers.
    """
    found = re.fullmatch(rf"((?:\*{MLP})*)((?:\*{EXPERTS})*)", layout.pattern_kinds(pattern))
    if found is None or not found[0]:
        return None
    if set(layout.predicting_parts(pattern)) - {found[0][-2:]}:
        return None
    return len(found[1]) // 2, len(found[2]) // 2


def check_hybrid(pattern: str, layers: int, prediction_layers: int) -> None:
    """Raise ValueError, with what to change, where a pattern is wrong or cannot be planned."""
    named = f"hybrid_layer_pattern '{pattern}'"
    if "|" in pattern:
        raise ValueError(
            f"{named} fixes the layers of each stage, which the plan is to find: leave out '|'"
        )
    kinds = all_kinds(pattern)
    if other := sorted(set(kinds) - {*RECURRENT, ATTENTION, MLP, EXPERTS}):
        raise ValueError(
            f"{named} has layers of the kind {other[0]}, whose costs the planner cannot count: "
            "give only M (Mamba-2), G (gated delta), * (attention), - (MLP) and E (experts)"
        )
    written, depths = len(layout.pattern_kinds(pattern)), layout.predicting_parts(pattern)
    if written != layers:
        raise ValueError(f"{named} has {written} layers, and layers is {layers}; give as many")
    if len(depths) != prediction_layers or len(set(depths)) > 1:
        raise ValueError(
            f"{named} must have the same layers after each '/', and prediction_layers is "
            f"{prediction_layers}; give, for example, prediction_layers: {len(depths)}"
        )
