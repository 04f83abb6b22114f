"""Operators of a model's layers: one list, from which FLOPs, seconds and bytes are derived.

Biases, norms and Mamba-2's convolution have too few weights to count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_zb.planner.model import ModelConfig


@dataclass(frozen=True)
class Operator:
    """Products with weights and what runs between them: attention, Mamba-2, an MLP or experts.

    Sizes are those of one token, before ranks divide them. The hidden state that enters and leaves
    belongs to the part of the layer.

    Attributes:
        weights: weights that every token visits.
        outputs: elements out of the first products.
        inputs: elements into the last product.
        forward, backward: bytes that kernels between the products read and write in F and in B.
        kept: bytes that F keeps and W does not need.
        visited: weights of the experts that a token visits, ``routed`` those of all experts.
        sent: elements sent to experts, and as many back.
        kernels: kernels of routing, in F and as many in B.
    """

    weights: int
    outputs: int
    inputs: int
    forward: int = 0
    backward: int = 0
    kept: int = 0
    visited: int = 0
    routed: int = 0
    sent: int = 0
    kernels: int = 0

    @property
    def needed(self) -> int:
        """Bytes that W needs: inputs of products and gradients of their outputs."""
        return 2 * (self.outputs + self.inputs + 2 * self.sent)


def operators_of(model: ModelConfig, index: int) -> list[Operator]:
    """Return the operators of a layer."""
    found = [_mixer(model, index), mlp_operator(model, index), experts_operator(model, index)]
    return [operator for operator in found if operator is not None]


def _mixer(model: ModelConfig, index: int) -> Operator | None:
    mixer = model.mixer_in(index)
    if mixer is None:
        return None
    sizes = mixer.weights, mixer.projected, mixer.attended
    if mixer.scan_flops:  # what the scan gave, before it is gated and normed
        return Operator(*sizes, kept=2 * mixer.attended)
    moved = 4 * mixer.projected  # layout of heads
    statistics = 4 * model.attention_heads if model.flash_attention else 0
    return Operator(*sizes, moved, moved, statistics)


def mlp_operator(model: ModelConfig, index: int) -> Operator | None:
    """Return a dense MLP, or the shared experts."""
    inner, gates = model.dense_inner(index), model.gates
    if not inner:
        return None
    weights = (gates + 1) * model.hidden_size * inner
    return Operator(weights, gates * inner, inner, *_activation(gates, inner))


def _activation(gates: int, inner: int) -> tuple[int, int]:
    """Count the bytes of an MLP's activation function in F and in B."""
    return 2 * (gates + 1) * inner, 2 * (2 * gates + 1) * inner


def experts_operator(model: ModelConfig, index: int) -> Operator | None:
    """Return the routed experts with their router."""
    experts = model.experts_in(index)
    if experts is None:
        return None
    inner, gates, hidden = model.routed_inner(index), model.gates, model.hidden_size
    sent, each = experts.top_k * hidden, (gates + 1) * hidden * experts.ffn_hidden_size
    forward, backward = _activation(gates, inner)
    return Operator(
        weights=hidden * experts.experts,  # the router's
        outputs=gates * inner,
        inputs=inner,
        forward=forward + 8 * sent,
        backward=backward + 8 * sent,
        visited=experts.top_k * each,
        routed=experts.experts * each,
        sent=sent,
        kernels=6,
    )


def weights_of(model: ModelConfig, layers: Sequence[int]) -> tuple[int, int]:
    """Count the weights of layers: those that every token visits, and those of all experts."""
    dense = routed = 0
    for index, count in model.alike(layers).items():
        for operator in operators_of(model, index):
            dense += count * operator.weights
            routed += count * operator.routed
    return dense, routed


def all_weights(model: ModelConfig) -> int:
    """Count the weights of the whole model."""
    layers = [*range(model.layers), *predicted_layers(model)]
    ends = model.hidden_size * model.vocabulary * (1 if model.tied_embeddings else 2)
    return sum(weights_of(model, layers)) + joining_weights(model) + ends


def predicted_layers(model: ModelConfig) -> list[int]:
    """Return the layers of multi-token prediction, each as the index of a layer like it.

    Those of a hybrid model have indices of their own, several for each depth.
    """
    if model.kinds:
        return list(range(model.layers, len(model.kinds)))
    return [model.layers - 1] * model.prediction_layers


def joining_weights(model: ModelConfig) -> int:
    """Count the weights that join a token's state and the next token for multi-token prediction."""
    return model.prediction_layers * 2 * model.hidden_size**2


# --- FLOPs that training needs --------------------------------------------------------------------


def attention_flops(model: ModelConfig, tokens: int, sequence: int) -> float:
    """Count the FLOPs of the products with all scores of a layer in F, masked ones included."""
    return 2.0 * tokens * sequence * model.attention_heads * model.attention.score_width


def model_flops(
    model: ModelConfig, tokens: int, sequence: int, *, all_scores: bool = False
) -> float:
    """Count the FLOPs that training on so many tokens needs: three times F.

    Masked scores are not counted unless ``all_scores`` asks for them, as Megatron-LM and many
    papers count.
    """
    per_token, layers = 0.0, [*range(model.layers), *predicted_layers(model)]
    for index, count in model.alike(layers).items():
        visited = sum(one.weights + one.visited for one in operators_of(model, index))
        mixer = model.mixer_in(index)
        scan = mixer.scan_flops if mixer else 0.0
        per_token += count * (2 * visited + scan)
    per_token += 2 * joining_weights(model)
    per_token += 2 * model.hidden_size * model.vocabulary * (1 + model.prediction_layers)
    scores = sum(map(model.attends, layers)) * attention_flops(model, tokens, sequence)
    return 3 * (per_token * tokens + (scores if all_scores else scores / 2))
