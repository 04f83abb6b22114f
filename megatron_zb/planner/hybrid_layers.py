"""Layers of a hybrid model: one part each, where a transformer's layer has attention and an MLP.

The kinds are Megatron-LM's letters: ``M`` Mamba-2, ``*`` attention, ``-`` dense MLP, ``E`` experts.
Of Mamba-2 (arXiv 2405.21060) are counted, as its published Triton kernels work:

- Two products with weights, which are all that is left to W; the gradients of convolution, decays
  and norm come with B.
- The scan over chunks (section 6): within a chunk, into its state and out of the one before it.
- F keeps what was projected and what the scan gave; B computes the rest of the scan again, for
  which it takes 2.5 times as long as F. That factor is FlashAttention-2's, an assumption here.
"""

from __future__ import annotations

from functools import lru_cache

from megatron_zb.measured.config import Section, optional_size, size
from megatron_zb.planner.attention import Mixer
from megatron_zb.schedules import layout

MAMBA, ATTENTION, MLP, EXPERTS = "M*-E"
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
    )


@lru_cache
def all_kinds(pattern: str) -> str:
    """Return the kinds of all layers, with those of multi-token prediction behind the others."""
    return layout.pattern_kinds(pattern) + "".join(layout.predicting_parts(pattern))


def check(pattern: str, layers: int, prediction_layers: int) -> None:
    """Raise ValueError, with what to change, where a pattern is wrong or cannot be planned."""
    named = f"hybrid_layer_pattern '{pattern}'"
    if "|" in pattern:
        raise ValueError(
            f"{named} fixes the layers of each stage, which the plan is to find: leave out '|'"
        )
    kinds = all_kinds(pattern)
    if other := sorted(set(kinds) - {MAMBA, ATTENTION, MLP, EXPERTS}):
        raise ValueError(
            f"{named} has layers of the kind {other[0]}, whose costs the planner cannot count: "
            "give only M (Mamba-2), * (attention), - (MLP) and E (experts)"
        )
    written, depths = len(layout.pattern_kinds(pattern)), layout.predicting_parts(pattern)
    if written != layers:
        raise ValueError(f"{named} has {written} layers, and layers is {layers}; give as many")
    if len(depths) != prediction_layers or len(set(depths)) > 1:
        raise ValueError(
            f"{named} must have the same layers after each '/', and prediction_layers is "
            f"{prediction_layers}; give, for example, prediction_layers: {len(depths)}"
        )
