"""What the planner must know about a model: ``configs/models/*.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from megatron_zb.planner import config
from megatron_zb.planner.config import Section

_MOST = 10_000_000


def _size(description: str, example: int) -> Any:
    """A required whole number of 1 or more."""
    return Field(gt=0, le=_MOST, description=description, examples=[example])


def _optional(description: str, example: int) -> Any:
    """The same where it may be left out."""
    return Field(None, gt=0, le=_MOST, description=description, examples=[example])


class Recommended(Section):
    """What ``plan`` says for so many of a device; ``none`` where no schedule is worth a change."""

    schedule: str = Field(
        max_length=40, description="name of a schedule, or none", examples=["v-half"]
    )
    why: str = Field(max_length=300, description="one line", examples=["half the memory of 1F1B"])
    gpus: int | None = _optional("GPUs that it is recommended for", 64)
    device: str | None = Field(
        None, max_length=80, description="of configs/devices", examples=["h100_sxm"]
    )


class Published(Section):
    """The setup in which figures of this model were published."""

    gpus: int = _size("GPUs", 32)
    sequence_length: int | None = _optional("tokens of a sample, where it differs", 1024)


class Experts(Section):
    """Mixture of experts: so many of them for each token, on top of a shared one."""

    experts: int = _size("experts of a layer", 128)
    top_k: int = _size("experts that a token visits", 8)
    ffn_hidden_size: int = _size("inner size of one expert", 768)
    shared_ffn_hidden_size: int = Field(
        0, ge=0, le=_MOST, description="inner size of the shared experts together", examples=[2048]
    )
    dense_layers: int = Field(
        0, ge=0, le=_MOST, description="first layers with a dense MLP", examples=[3]
    )

    @model_validator(mode="after")
    def _reachable(self) -> Experts:
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k is {self.top_k}, more than its {self.experts} experts; give, for example, "
                f"top_k: {min(8, self.experts)}"
            )
        return self


class LatentAttention(Section):
    """Multi-latent attention: queries, keys and values through a narrow projection."""

    query_rank: int | None = _optional("width of the compressed queries, if they are", 1536)
    kv_rank: int = _size("width of the compressed keys and values", 512)
    nope_head_dim: int = _size("part of a head without position", 128)
    rope_head_dim: int = _size("part of a head with position", 64)
    value_head_dim: int = _size("values of a head", 128)


class ModelConfig(Section):
    """A decoder-only transformer; sizes in elements."""

    name: str = Field(min_length=1, max_length=80, description="as shown", examples=["GPT 28.3B"])
    source: str = Field(
        max_length=300, description="where the sizes come from", examples=["arXiv 2401.10241"]
    )
    recommended: Recommended | None = Field(None, description="what to start with")
    published: Published | None = Field(None, description="setup of published figures")
    layers: int = Field(gt=0, le=10_000, description="transformer layers", examples=[32])
    hidden_size: int = _size("width", 4096)
    attention_heads: int = _size("heads", 32)
    query_groups: int | None = _optional("heads of keys and values; the heads if left out", 8)
    head_dim: int | None = _optional("size of a head; hidden_size / heads if left out", 128)
    ffn_hidden_size: int | None = _optional("inner size of the MLP; 4 hidden if left out", 14336)
    qk_layernorm: bool = Field(False, description="normed queries and keys", examples=[True])
    gated_mlp: bool = Field(False, description="SwiGLU and its kin", examples=[True])
    vocabulary: int = _size("rows of the embedding, padded", 128256)
    tied_embeddings: bool = Field(False, description="output layer is embedding", examples=[False])
    sequence_length: int = _size("tokens of a sample", 8192)
    global_batch_size: int = _size("samples of an iteration", 512)
    dropout: bool = Field(False, description="dropout is not 0", examples=[False])
    flash_attention: bool = Field(True, description="scores are not stored", examples=[True])
    experts: Experts | None = Field(None, description="mixture of experts")
    latent_attention: LatentAttention | None = Field(None, description="multi-latent attention")

    @model_validator(mode="after")
    def _divisible(self) -> ModelConfig:
        if self.head_dim is None and self.hidden_size % self.attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} cannot be divided by attention_heads "
                f"{self.attention_heads}; give, for example, attention_heads: "
                f"{_divisor(self.hidden_size, self.attention_heads)}, or head_dim: 128"
            )
        if self.attention_heads % self.groups:
            raise ValueError(
                f"attention_heads {self.attention_heads} cannot be divided by query_groups "
                f"{self.query_groups}; give, for example, query_groups: "
                f"{_divisor(self.attention_heads, self.groups)}"
            )
        if self.experts is not None and self.experts.dense_layers > self.layers:
            raise ValueError(
                f"experts.dense_layers is {self.experts.dense_layers}, more than the "
                f"{self.layers} layers; give, for example, dense_layers: 1"
            )
        return self

    @property
    def groups(self) -> int:
        return self.query_groups or self.attention_heads

    @property
    def head(self) -> int:
        return self.head_dim or self.hidden_size // self.attention_heads

    @property
    def ffn(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size


def _divisor(whole: int, near: int) -> int:
    """The largest divisor of a size that is not above another number."""
    return next(d for d in range(min(near, whole), 0, -1) if whole % d == 0)


def read_model(path: Path) -> ModelConfig:
    """Read a file of ``configs/models``.

    Raises:
        UsageError: the file or a field of it is wrong.
    """
    return config.read(path, ModelConfig)
