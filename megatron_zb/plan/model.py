"""Description of a model for the planner: ``configs/models/*.yaml``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, PrivateAttr, model_validator

from megatron_zb.measured import config
from megatron_zb.measured.config import LARGEST_SIZE, Section, optional_size, size
from megatron_zb.plan import mixers
from megatron_zb.plan.mixers import (
    GatedDelta,
    LatentAttention,
    Mamba,
    Mixer,
    delta_mixer,
    grouped_attention,
    latent_attention,
    mamba_mixer,
)
from megatron_zb.schedules import layout


class Recommended(Section):
    """Recommended schedule for a number of GPUs; ``none`` where none is worth a change."""

    schedule: str = Field(
        max_length=40, description="name of a schedule, or none", examples=["v-half"]
    )
    why: str = Field(max_length=300, description="one line", examples=["half the memory of 1F1B"])
    gpus: int | None = optional_size("GPUs that it is recommended for", 64)
    device: str | None = Field(
        None, max_length=80, description="of configs/devices", examples=["h100_sxm"]
    )
    vocabulary_parallel: bool = Field(
        False, description="whether with --pipeline-vocabulary on", examples=[True]
    )


class Published(Section):
    """The setup in which figures of this model were published."""

    gpus: int = size("GPUs", 32)
    sequence_length: int | None = optional_size("tokens of a sample, where it differs", 1024)


class RopeScaling(Section):
    """Rotary embeddings stretched to longer samples, as in Llama 3.1."""

    factor: float = Field(gt=0, lt=1e6, description="how far they are stretched", examples=[8.0])


class Yarn(Section):
    """YaRN (arXiv 2309.00071), as multi-latent attention uses it."""

    factor: float = Field(gt=0, lt=1e6, description="how far they are stretched", examples=[40.0])
    mscale: float = Field(1.0, ge=0, lt=1e6, description="scale of magnitudes", examples=[1.0])
    mscale_all_dim: float = Field(
        0.0, ge=0, lt=1e6, description="the same for all of a head", examples=[1.0]
    )


class Rotary(Section):
    """Rotary position embeddings; without this section, positions are learned."""

    base: int = size("base of the frequencies", 500000)
    fraction: float = Field(
        1.0, gt=0, le=1, description="part of a head that has positions", examples=[0.25]
    )
    scaling: RopeScaling | None = Field(None, description="stretched as in Llama 3.1")
    yarn: Yarn | None = Field(None, description="stretched by YaRN, with latent attention")

    @model_validator(mode="after")
    def _one_way(self) -> Rotary:
        if self.scaling is not None and self.yarn is not None:
            raise ValueError("scaling and yarn exclude each other; give one of them")
        return self


class Router(Section):
    """Choice of a token's experts, and balancing of their load."""

    score_function: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="from logits to scores", examples=["sigmoid"]
    )
    groups: int | None = optional_size("groups of experts, of which a token visits some", 8)
    top_k_groups: int | None = optional_size("groups that a token visits", 4)
    scaling_factor: float | None = Field(
        None, gt=0, lt=1e6, description="the experts' share is multiplied by it", examples=[2.5]
    )
    bias_update_rate: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="step of each expert's bias, if loads are evened by biases",
        examples=[0.001],
    )
    balancing: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"] = Field(
        "aux_loss", description="loss that evens the loads", examples=["seq_aux_loss"]
    )
    aux_loss_coefficient: float = Field(
        0.001, ge=0, lt=1e6, description="weight of that loss", examples=[0.001]
    )

    @model_validator(mode="after")
    def _grouped(self) -> Router:
        if (self.groups is None) != (self.top_k_groups is None):
            raise ValueError("groups and top_k_groups go together; give both or none")
        if (self.top_k_groups or 0) > (self.groups or 0):
            raise ValueError(
                f"top_k_groups is {self.top_k_groups}, more than the {self.groups} groups; "
                f"give, for example, top_k_groups: {self.groups}"
            )
        if self.bias_update_rate is not None and self.score_function != "sigmoid":
            raise ValueError("bias_update_rate needs score_function: sigmoid")
        return self


class Experts(Section):
    """Mixture of experts: ``top_k`` of them for each token, on top of a shared one."""

    experts: int = size("experts of a layer", 128)
    top_k: int = size("experts that a token visits", 8)
    ffn_hidden_size: int = size("inner size of one expert", 768)
    shared_ffn_hidden_size: int = Field(
        0,
        ge=0,
        le=LARGEST_SIZE,
        description="inner size of the shared experts together",
        examples=[2048],
    )
    shared_gate: bool = Field(
        False, description="shared experts are multiplied by a sigmoid", examples=[True]
    )
    latent_size: int | None = optional_size(
        "width of tokens in the routed experts, if they are projected to it", 1024
    )
    dense_layers: int = Field(
        0, ge=0, le=LARGEST_SIZE, description="first layers with a dense MLP", examples=[3]
    )
    router: Router = Field(
        Router.model_validate({}), description="how a token's experts are chosen"
    )

    @model_validator(mode="after")
    def _reachable(self) -> Experts:
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k is {self.top_k}, more than its {self.experts} experts; give, for example, "
                f"top_k: {min(8, self.experts)}"
            )
        if self.experts % (self.router.groups or 1):
            raise ValueError(
                f"experts {self.experts} cannot be divided by router.groups {self.router.groups}; "
                f"give, for example, groups: {_divisor(self.experts, self.router.groups or 1)}"
            )
        return self


class Encoder(Section):
    """A vision encoder on the first stage, whose attention sees all patches of an image."""

    layers: int = Field(gt=0, le=10_000, description="transformer layers", examples=[27])
    hidden_size: int = size("width", 1152)
    attention_heads: int = size("heads", 16)
    ffn_hidden_size: int = size("inner size of the MLP", 4304)
    gated_mlp: bool = Field(False, description="SwiGLU, as in Qwen2.5-VL", examples=[True])
    patches: int = size("patches of an image", 1024)
    images: int = Field(1, gt=0, le=LARGEST_SIZE, description="images of a sample", examples=[2])
    merged: int = Field(4, gt=0, le=1024, description="patches that become one token", examples=[4])
    mergers: int = Field(
        1, gt=0, le=64, description="MLPs that merge, one more per deepstack layer", examples=[4]
    )
    frozen: bool = Field(False, description="runs without a backward pass", examples=[True])

    @model_validator(mode="after")
    def _divisible(self) -> Encoder:
        for name, by in (("hidden_size", self.attention_heads), ("patches", self.merged)):
            if (whole := getattr(self, name)) % by:
                raise ValueError(f"{name} {whole} cannot be divided by {by}; give a multiple of it")
        return self


class ModelConfig(Section):
    """A decoder-only transformer or hybrid model; sizes in elements."""

    name: str = Field(min_length=1, max_length=80, description="as shown", examples=["GPT 28.3B"])
    source: str = Field(
        max_length=300, description="where the sizes come from", examples=["arXiv 2401.10241"]
    )
    recommended: Recommended | None = Field(None, description="what to start with")
    published: Published | None = Field(None, description="setup of published figures")
    layers: int = Field(gt=0, le=10_000, description="transformer layers", examples=[32])
    hidden_size: int = size("width", 4096)
    attention_heads: int = size("heads", 32)
    query_groups: int | None = optional_size("heads of keys and values; the heads if left out", 8)
    head_dim: int | None = optional_size("size of a head; hidden_size / heads if left out", 128)
    ffn_hidden_size: int | None = optional_size(
        "inner size of the MLP; 4 hidden if not given", 14336
    )
    qk_layernorm: bool = Field(False, description="normed queries and keys", examples=[True])
    attention_output_gate: bool = Field(
        False, description="attention's output is multiplied by a sigmoid", examples=[True]
    )
    gated_mlp: bool = Field(
        False, description="SwiGLU, with RMSNorm and without biases", examples=[True]
    )
    squared_relu: bool = Field(
        False, description="squared ReLU, with RMSNorm and without biases", examples=[True]
    )
    norm_epsilon: float = Field(
        1e-5, gt=0, lt=1, description="added to the variance in a norm", examples=["1.0e-06"]
    )
    rotary: Rotary | None = Field(None, description="rotary position embeddings")
    hybrid_layer_pattern: str | None = Field(
        None,
        min_length=1,
        max_length=20_000,
        description="kinds of a hybrid model's layers; without rotary, it has no positions",
        examples=["M-M*-"],
    )
    mamba: Mamba | None = Field(None, description="sizes of Mamba-2 layers, if not the defaults")
    gated_delta: GatedDelta | None = Field(
        None, description="sizes of gated delta layers, if not the defaults"
    )
    vocabulary: int = size("rows of the embedding, padded", 128256)
    tokenizer: str | None = Field(
        None,
        min_length=1,
        max_length=120,
        description="the tokenizer of that vocabulary, if it is published",
        examples=["meta-llama/Meta-Llama-3-8B"],
    )
    tied_embeddings: bool = Field(False, description="output layer is embedding", examples=[False])
    sequence_length: int = size("tokens of a sample", 8192)
    global_batch_size: int = size("samples of an iteration", 512)
    dropout: bool = Field(False, description="dropout is not 0", examples=[False])
    flash_attention: bool = Field(True, description="scores are not stored", examples=[True])
    experts: Experts | None = Field(None, description="mixture of experts")
    latent_attention: LatentAttention | None = Field(None, description="multi-latent attention")
    prediction_layers: int = Field(
        0, ge=0, le=16, description="layers of multi-token prediction", examples=[1]
    )
    prediction_loss_scale: float = Field(
        0.1, ge=0, lt=1e6, description="weight of their loss", examples=[0.3]
    )
    residual_streams: int = Field(
        1, ge=1, le=64, description="residual streams of hyper-connections", examples=[4]
    )
    encoder: Encoder | None = Field(None, description="vision encoder on the first stage")
    _pattern: str | None = PrivateAttr(None)

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
        if self.rotary and self.rotary.yarn and self.latent_attention is None:
            raise ValueError(
                "rotary.yarn needs latent_attention: leave it out, or give rotary.scaling"
            )
        if self.gated_mlp and self.squared_relu:
            raise ValueError("gated_mlp and squared_relu exclude each other; leave one of them out")
        if self.prediction_layers and self.rotary is None and not self.kinds:
            raise ValueError(
                "prediction_layers need rotary positions; give, for example, rotary: {base: 10000}"
            )
        if self.encoder is not None and self.image_tokens > self.sequence_length:
            raise ValueError(
                f"the images of encoder are {self.image_tokens} tokens, more than sequence_length "
                f"{self.sequence_length}; give fewer images or patches, or a longer sequence"
            )
        if self.experts is not None and self.experts.dense_layers > self.layers:
            raise ValueError(
                f"experts.dense_layers is {self.experts.dense_layers}, more than the "
                f"{self.layers} layers; give, for example, dense_layers: 1"
            )
        return self

    @model_validator(mode="after")
    def _hybrid(self) -> ModelConfig:
        pattern = self.hybrid_layer_pattern
        if pattern is not None:
            mixers.check_hybrid(pattern, self.layers, self.prediction_layers)
        if self.mamba is not None and mixers.MAMBA not in self.kinds:
            raise ValueError("mamba is for the layers M of a hybrid_layer_pattern: leave it out")
        if mixers.MAMBA in self.kinds:
            _ = self.mamba_mixer  # refuses wrong sizes
        if self.gated_delta is not None and mixers.DELTA not in self.kinds:
            raise ValueError(
                "gated_delta is for the layers G of a hybrid_layer_pattern: leave it out"
            )
        if self.attention_output_gate and self.latent_attention is not None:
            raise ValueError(
                "attention_output_gate does not go with latent_attention: leave one of them out"
            )
        if not self.kinds:
            return self
        if (mixers.EXPERTS in self.kinds) != (self.experts is not None):
            raise ValueError("experts and the layers E of hybrid_layer_pattern go together")
        if self.latent_attention is not None or (self.experts and self.experts.dense_layers):
            raise ValueError(
                "latent_attention and experts.dense_layers do not go with hybrid_layer_pattern: "
                "leave them out"
            )
        return self

    @property
    def image_tokens(self) -> int:
        """Tokens of a sample that come from the encoder."""
        encoder = self.encoder
        return 0 if encoder is None else encoder.images * encoder.patches // encoder.merged

    @property
    def depths(self) -> int:
        """The number of times that the output layer runs."""
        return 1 + self.prediction_layers

    @property
    def as_transformer(self) -> ModelConfig:
        """The transformer whose layers the pattern writes as two parts each; else the model itself.

        Each of its layers is attention and an MLP, or, behind those, attention and experts. One of
        prediction is like the last. A plan then cuts the pattern between such layers only.
        """
        pattern = self.hybrid_layer_pattern or ""
        counts = mixers.layers_of_two(pattern)
        if counts is None:
            return self
        dense, sparse = counts
        experts = self.experts and self.experts.model_copy(update={"dense_layers": dense})
        whole = self.model_copy(
            update={"layers": dense + sparse, "hybrid_layer_pattern": None, "experts": experts}
        )
        whole._pattern = pattern
        return whole

    @property
    def pattern(self) -> str | None:
        """The pattern of a HybridModel, also that of a transformer; None for a GPTModel."""
        return self.hybrid_layer_pattern or self._pattern

    def placed_pattern(self, counts: Sequence[int]) -> str:
        """Return the pattern with ``|`` between stages, from the plan's layers of each."""
        letters = 1 if self.kinds else 2
        return layout.placed_pattern(self.pattern or "", [letters * count for count in counts])

    @property
    def kinds(self) -> str:
        """A letter for each layer of a hybrid model, those of prediction included; else none."""
        pattern = self.hybrid_layer_pattern
        return "" if pattern is None else mixers.all_kinds(pattern)

    def kind(self, layer: int) -> str:
        """Return the kind of a layer: layers of one kind cost the same."""
        return self.kinds[layer] if self.kinds else str(self.experts_in(layer) is None)

    def alike(self, layers: Sequence[int]) -> dict[int, int]:
        """Return one layer of each kind, with how many of the layers are of it."""
        if not (self.kinds or self.experts) and layers:
            return {layers[0]: len(layers)}
        first: dict[str, int] = {}
        counts: dict[int, int] = {}
        for layer in layers:
            one = first.setdefault(self.kind(layer), layer)
            counts[one] = counts.get(one, 0) + 1
        return counts

    @property
    def parts(self) -> int:
        """Parts of a layer, each with a norm before it and a sum behind it."""
        return 1 if self.kinds else 2

    @property
    def message_width(self) -> int:
        """Elements of a token between two stages: all residual streams."""
        return self.residual_streams * self.hidden_size

    def mixer_in(self, layer: int) -> Mixer | None:
        """Return what mixes the tokens in a layer, None if nothing does."""
        kind = self.kinds[layer] if self.kinds else mixers.ATTENTION
        if kind == mixers.MAMBA:
            return self.mamba_mixer
        if kind == mixers.DELTA:
            return self.delta_mixer
        return self.attention if kind == mixers.ATTENTION else None

    def attends(self, layer: int) -> bool:
        """Return whether a layer has attention."""
        return not self.kinds or self.kinds[layer] == mixers.ATTENTION

    @property
    def attending(self) -> int:
        """The number of decoder layers that have attention."""
        return sum(map(self.attends, range(self.layers)))

    def experts_in(self, layer: int) -> Experts | None:
        """Return the experts of a layer, None if it has none."""
        if self.kinds:
            return self.experts if self.kinds[layer] == mixers.EXPERTS else None
        is_dense = self.experts is None or layer < self.experts.dense_layers
        return None if is_dense else self.experts

    def dense_inner(self, layer: int) -> int:
        """Count the inner elements of a token in a layer's dense MLP or shared experts."""
        if self.kinds and self.kinds[layer] not in (mixers.MLP, mixers.EXPERTS):
            return 0
        experts = self.experts_in(layer)
        return self.ffn if experts is None else experts.shared_ffn_hidden_size

    def routed_inner(self, layer: int) -> int:
        """Count the inner elements of a token in the experts that it visits in a layer."""
        experts = self.experts_in(layer)
        return 0 if experts is None else experts.top_k * experts.ffn_hidden_size

    @property
    def gates(self) -> int:
        """Products that lead into an MLP."""
        return 2 if self.gated_mlp else 1

    @property
    def attention(self) -> Mixer:
        """The attention of a layer."""
        if self.latent_attention is not None:
            return latent_attention(self.hidden_size, self.attention_heads, self.latent_attention)
        sizes = self.hidden_size, self.attention_heads, self.groups, self.head
        return grouped_attention(*sizes, gated=self.attention_output_gate)

    def is_cut_by(self, tensor: int) -> bool:
        """Return whether Megatron can divide layers and vocabulary by a number of ranks."""
        has_mlp = not self.kinds or mixers.MLP in self.kinds
        sizes = [self.vocabulary, *([self.ffn] if has_mlp else [])]
        found: list[Mixer] = []
        if not self.kinds or mixers.ATTENTION in self.kinds:
            found.append(self.attention)
        if mixers.MAMBA in self.kinds:
            found.append(self.mamba_mixer)
        if mixers.DELTA in self.kinds:
            found.append(self.delta_mixer)
        return not any(size % tensor for size in sizes) and all(m.is_cut_by(tensor) for m in found)

    @property
    def mamba_mixer(self) -> Mixer:
        """The Mamba-2 of a layer M."""
        return mamba_mixer(self.hidden_size, self.mamba or Mamba.model_validate({}))

    @property
    def delta_mixer(self) -> Mixer:
        """The gated delta of a layer G."""
        return delta_mixer(self.hidden_size, self.gated_delta or GatedDelta.model_validate({}))

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
    """Return the largest divisor of ``whole`` that is not above ``near``."""
    return next(d for d in range(min(near, whole), 0, -1) if whole % d == 0)


def read_model(path: Path) -> ModelConfig:
    """Read a file of ``configs/models``.

    Raises:
        UsageError: the file or a field of it is wrong.
    """
    return config.read(path, ModelConfig)
