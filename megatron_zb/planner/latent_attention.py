"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zb.measured.config import Section, optional_size, size
from megatron_zb.planner.attention import Attention


class LatentAttention(Section):
    """Multi-latent attention: queries, keys and values through a narrow projection."""

    query_rank: int | None = optional_size("width of the compressed queries, if they are", 1536)
    kv_rank: int = size("width of the compressed keys and values", 512)
    nope_head_dim: int = size("part of a head without position", 128)
    rope_head_dim: int = size("part of a head with position", 64)
    value_head_dim: int = size("values of a head", 128)


@dataclass(frozen=True)
class LatentHeads(Attention):
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
