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

from dataclasses import dataclass
from functools import lru_cache

from pydantic import Field

from megatron_zb.measured.config import LARGEST_SIZE, Section, optional_size
from megatron_zb.planner.attention import LayerAttention
from megatron_zb.schedules import hybrid_pattern

MAMBA, ATTENTION, MLP, EXPERTS = "M*-E"
_CHUNK = 128  # tokens, of Megatron's mixer


class Mamba(Section):
    """Mamba-2 with Megatron-LM's defaults."""

    heads: int | None = optional_size("heads; 2 hidden_size / head_dim if left out", 128)
    head_dim: int = Field(64, gt=0, le=LARGEST_SIZE, description="size of a head", examples=[64])
    groups: int = Field(
        8, gt=0, le=LARGEST_SIZE, description="groups of heads with the same B and C", examples=[8]
    )
    state_dim: int = Field(
        128, gt=0, le=LARGEST_SIZE, description="states of each element of a head", examples=[128]
    )


@dataclass(frozen=True)
class MambaMixer:
    """What the planner counts of Mamba-2 in one layer; sizes in elements of one token."""

    hidden: int
    sizes: Mamba

    @property
    def heads(self) -> int:
        return self.sizes.heads or 2 * self.hidden // self.sizes.head_dim

    @property
    def attended(self) -> int:
        """Input of the output projection."""
        return self.heads * self.sizes.head_dim

    @property
    def projected(self) -> int:
        """Gates, inputs, B, C and time steps."""
        return 2 * self.attended + 2 * self._shared + self.heads

    @property
    def weights(self) -> int:
        return self.hidden * (self.projected + self.attended)

    @property
    def scan_flops(self) -> float:
        """FLOPs of the scan in F."""
        inner, states = self.attended, self.sizes.state_dim
        within = 2 * _CHUNK * (self._shared + inner)
        return within + 2 * 2 * inner * states

    @property
    def scan_bytes(self) -> float:
        """Bytes that convolution, scan and gated norm read and write in F.

        States of a chunk are written, passed on and read, half of it in 32 bits; so are the
        products of B and C.
        """
        states = 12 * self.attended * self.sizes.state_dim / _CHUNK
        return 16 * (self.attended + self._shared) + states + 8 * _CHUNK * self.sizes.groups

    @property
    def divided(self) -> tuple[int, ...]:
        """Numbers that tensor-parallel ranks divide among one another."""
        return (self.heads, self.sizes.groups)

    @property
    def _shared(self) -> int:
        return self.sizes.groups * self.sizes.state_dim

    def flags(self) -> list[str]:
        """Return the words of Megatron-LM's command line for it."""
        sizes = self.sizes
        return [
            *("--mamba-num-heads", str(self.heads)),
            *("--mamba-head-dim", str(sizes.head_dim)),
            *("--mamba-num-groups", str(sizes.groups)),
            *("--mamba-state-dim", str(sizes.state_dim)),
        ]

    def check(self) -> None:
        """Raise ValueError where the heads do not go into the groups or the width."""
        sizes = self.sizes
        if sizes.heads is None and 2 * self.hidden % sizes.head_dim:
            raise ValueError(
                f"twice the hidden_size {self.hidden} cannot be divided by mamba.head_dim "
                f"{sizes.head_dim}; give mamba.heads"
            )
        if self.heads % sizes.groups:
            raise ValueError(
                f"the {self.heads} heads of mamba cannot be divided by mamba.groups "
                f"{sizes.groups}; give, for example, groups: 1"
            )


Mixer = LayerAttention | MambaMixer


@lru_cache
def all_kinds(pattern: str) -> str:
    """Return the kinds of all layers, with those of multi-token prediction behind the others."""
    return hybrid_pattern.kinds(pattern) + "".join(hybrid_pattern.predicting_parts(pattern))


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
    written, depths = len(hybrid_pattern.kinds(pattern)), hybrid_pattern.predicting_parts(pattern)
    if written != layers:
        raise ValueError(f"{named} has {written} layers, and layers is {layers}; give as many")
    if len(depths) != prediction_layers or len(set(depths)) > 1:
        raise ValueError(
            f"{named} must have the same layers after each '/', and prediction_layers is "
            f"{prediction_layers}; give, for example, prediction_layers: {len(depths)}"
        )
