"""Attention of a model's layers: all that the planner counts of it, and its arguments.

Each kind of attention is a class; ``ModelConfig.attention`` chooses that of a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from megatron_zb.measured.config import Section, optional_size, size


class LayerAttention(ABC):
    """Attention of one layer; sizes in elements, those of activations for one token."""

    name: ClassVar[str]
    """Its name in messages."""

    @property
    @abstractmethod
    def weights(self) -> int:
        """Weights of one layer."""

    @property
    @abstractmethod
    def kept(self) -> int:
        """Keys and values, as the products with the scores read them."""

    @property
    @abstractmethod
    def projected(self) -> int:
        """Queries, keys and values, with what they are projected from if it is narrow."""

    @property
    @abstractmethod
    def attended(self) -> int:
        """Input of the output projection."""

    @property
    @abstractmethod
    def score_width(self) -> int:
        """Sizes of a head in both products with the scores: a query, and a value."""

    @property
    @abstractmethod
    def divided(self) -> tuple[int, ...]:
        """Numbers that tensor-parallel ranks divide among one another."""

    @abstractmethod
    def flags(self) -> list[str]:
        """Return the words of Megatron-LM's command line for it."""

    def rotary_flags(self) -> list[str]:
        """Return the words for rotary positions that are not stretched by YaRN."""
        return []


@dataclass(frozen=True)
class GroupedAttention(LayerAttention):
    """Attention whose heads share keys and values in groups; as many groups as heads share none."""

    name = "grouped attention"

    hidden: int
    heads: int
    groups: int
    head: int

    @property
    def weights(self) -> int:
        queries_and_out = 2 * self.hidden * self.heads * self.head
        return queries_and_out + 2 * self.hidden * self.groups * self.head

    @property
    def kept(self) -> int:
        return 2 * self.groups * self.head

    @property
    def projected(self) -> int:
        return (self.heads + 2 * self.groups) * self.head

    @property
    def attended(self) -> int:
        return self.heads * self.head

    @property
    def score_width(self) -> int:
        return 2 * self.head

    @property
    def divided(self) -> tuple[int, ...]:
        return (self.heads, self.groups)

    def flags(self) -> list[str]:
        if self.groups == self.heads:
            return []
        return ["--group-query-attention", "--num-query-groups", str(self.groups)]


# --- multi-latent attention (DeepSeek-V2, arXiv 2405.04434) ---------------------------------------


class LatentAttention(Section):
    """Multi-latent attention: queries, keys and values through a narrow projection."""

    query_rank: int | None = optional_size("width of the compressed queries, if they are", 1536)
    kv_rank: int = size("width of the compressed keys and values", 512)
    nope_head_dim: int = size("part of a head without position", 128)
    rope_head_dim: int = size("part of a head with position", 64)
    value_head_dim: int = size("values of a head", 128)


@dataclass(frozen=True)
class LatentHeads(LayerAttention):
    """What the planner counts of multi-latent attention."""

    name = "latent attention"

    hidden: int
    heads: int
    sizes: LatentAttention

    @property
    def weights(self) -> int:
        sizes, hidden = self.sizes, self.hidden
        wide, rank = self.heads * self._query, sizes.query_rank
        queries = hidden * wide if rank is None else rank * (hidden + wide)
        down = hidden * (sizes.kv_rank + sizes.rope_head_dim)
        up = sizes.kv_rank * self.heads * (sizes.nope_head_dim + sizes.value_head_dim)
        return queries + down + up + self.attended * hidden

    @property
    def kept(self) -> int:
        return self.heads * self.score_width

    @property
    def projected(self) -> int:
        sizes = self.sizes
        heads = self.heads * (2 * self._query + sizes.value_head_dim)
        return heads + (sizes.query_rank or 0) + sizes.kv_rank + sizes.rope_head_dim

    @property
    def attended(self) -> int:
        return self.heads * self.sizes.value_head_dim

    @property
    def score_width(self) -> int:
        return self._query + self.sizes.value_head_dim

    @property
    def divided(self) -> tuple[int, ...]:
        return (self.heads,)

    @property
    def _query(self) -> int:
        return self.sizes.nope_head_dim + self.sizes.rope_head_dim

    def flags(self) -> list[str]:
        sizes = self.sizes
        words = [
            "--multi-latent-attention",
            *("--kv-lora-rank", str(sizes.kv_rank)),
            *("--qk-head-dim", str(sizes.nope_head_dim)),
            *("--qk-pos-emb-head-dim", str(sizes.rope_head_dim)),
            *("--v-head-dim", str(sizes.value_head_dim)),
        ]
        if sizes.query_rank is not None:
            words += ["--q-lora-rank", str(sizes.query_rank)]
        return words

    def rotary_flags(self) -> list[str]:
        return ["--rope-type", "rope", "--no-rope-fusion"]  # the fused kernel is only for YaRN
