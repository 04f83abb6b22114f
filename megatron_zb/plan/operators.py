"""Operators of a model's layers: one list, from which FLOPs, seconds and bytes are derived.

Biases, norms and convolutions have too few weights to count.

Selective recomputation saves what each of ``--recompute-modules`` does in Megatron's layers. A
module either discards its output, which its last kernel can recompute (``mla_up_proj``,
``moe_act``, ``layernorm``), or keeps its input alone (``core_attn``, ``mlp``, ``moe``,
``shared_experts``); B runs its forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add

from megatron_zb.errors import UsageError
from megatron_zb.plan.model import ModelConfig


@dataclass(frozen=True)
class Operator:
    """Products with weights and what runs between them: a mixer of tokens, an MLP or experts.

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
    if mixer.scan_flops:
        return Operator(*sizes, kept=mixer.scan_kept)
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
    latent = experts.latent_size or 0
    width = latent or hidden
    sent, each = experts.top_k * width, (gates + 1) * width * experts.ffn_hidden_size
    forward, backward = _activation(gates, inner)
    return Operator(
        weights=hidden * (experts.experts + 2 * latent),  # the router's, and into and out of latent
        outputs=gates * inner + latent,
        inputs=inner + latent,
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
    """Count the FLOPs that training on a number of tokens needs: three times F.

    Masked scores are not counted unless ``all_scores`` requests them, as Megatron-LM and many
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


# --- recomputation --------------------------------------------------------------------------------

RECOMPUTE = ("none", "selective", "full")
RECOMPUTE_FLAG = "--recompute"


@dataclass(frozen=True)
class Recomputed:
    """Recomputation of modules in one layer, for one token.

    Attributes:
        inputs: elements dropped that enter products with weights, in 8 bits with fp8.
        outputs: other elements dropped.
        normed: elements dropped that norms make, which sequence parallelism divides.
        scores: whether the scores of attention are dropped.
        weights: weights that are visited again.
        traffic: bytes that kernels between the products read and write again.
        kernels: kernels that run again.
        all_to_all: whether tokens are sent to their experts and back again.
    """

    inputs: int = 0
    outputs: int = 0
    normed: int = 0
    scores: bool = False
    weights: int = 0
    traffic: int = 0
    kernels: int = 0
    all_to_all: bool = False

    def __add__(self, other: Recomputed) -> Recomputed:
        return Recomputed(*map(add, vars(self).values(), vars(other).values()))


def modules_of(recompute: str) -> tuple[str, ...]:
    """Return the modules of a kind of recomputation, such as ``moe_act+layernorm``."""
    if recompute in ("none", "full"):
        return ()
    return ("core_attn",) if recompute == "selective" else tuple(recompute.split("+"))


def recomputed(model: ModelConfig, index: int, recompute: str) -> Recomputed:
    """Return what selective recomputation recomputes in a layer.

    A module within another one that is named is recomputed with it.
    """
    names = modules_of(recompute)
    parts = [MODULES[name](model, index) for name in names if _WITHIN.get(name) not in names]
    return sum(parts, Recomputed())


def check_recomputation(model: ModelConfig, recompute: str, flag: str = RECOMPUTE_FLAG) -> None:
    """Check one kind of recomputation, which the user gives by a flag.

    Raises:
        UsageError: it is unknown, or the model has no such modules.
    """
    if recompute in RECOMPUTE:
        return
    names, is_plans = modules_of(recompute), flag == RECOMPUTE_FLAG
    if unknown := [name for name in names if name not in MODULES]:
        known = f"{','.join(RECOMPUTE)}, or modules joined by +, of {','.join(MODULES)}"
        raise UsageError(
            f"{flag} '{unknown[0]}' is unknown: give one or more of "
            f"{known if is_plans else ' '.join(MODULES)}"
        )
    if len(set(names)) < len(names):
        given = recompute if is_plans else " ".join(names)
        raise UsageError(f"{flag} {given} names a module twice: leave one out")
    for name in names:
        layers = range(model.layers)
        if not any(recomputed(model, index, name) != Recomputed() for index in layers):
            raise UsageError(
                f"{flag} {name}: {model.name} has no such modules: leave it out"
                f"{', or give none' if is_plans else ''}"
            )


def _scores_again(model: ModelConfig, index: int) -> Recomputed:
    return Recomputed(scores=model.attends(index))


def _up_projections(model: ModelConfig, index: int) -> Recomputed:
    sizes = model.latent_attention
    if sizes is None or not model.attends(index):
        return Recomputed()
    heads, value = model.attention_heads, sizes.value_head_dim
    query = sizes.nope_head_dim + sizes.rope_head_dim
    made = heads * (2 * query + value)
    weights = sizes.kv_rank * heads * (sizes.nope_head_dim + value)
    weights += (sizes.query_rank or 0) * heads * query
    return Recomputed(outputs=made, weights=weights, traffic=2 * made, kernels=4)


def _norms(model: ModelConfig, index: int) -> Recomputed:
    del index
    normed = model.parts * model.hidden_size
    return Recomputed(normed=normed, kernels=model.parts)


def _dense_mlp(model: ModelConfig, index: int) -> Recomputed:
    return Recomputed() if model.experts_in(index) else _whole(mlp_operator(model, index))


def _shared_experts(model: ModelConfig, index: int) -> Recomputed:
    return _whole(mlp_operator(model, index)) if model.experts_in(index) else Recomputed()


def _experts_again(model: ModelConfig, index: int) -> Recomputed:
    return _whole(experts_operator(model, index)) + _shared_experts(model, index)


def _whole(operator: Operator | None) -> Recomputed:
    """Return an MLP or experts of which F keeps only the input."""
    if operator is None:
        return Recomputed()
    return Recomputed(
        inputs=operator.inputs + operator.sent,
        outputs=operator.outputs + operator.sent,
        weights=operator.weights + operator.visited,
        traffic=operator.forward,
        kernels=3 + operator.kernels,
        all_to_all=operator.sent > 0,
    )


def _activation_function(model: ModelConfig, index: int) -> Recomputed:
    """Return the activation function of the experts, whose output enters their second product."""
    inner = model.routed_inner(index)
    if not inner:
        return Recomputed()
    return Recomputed(inputs=inner, traffic=2 * (model.gates + 1) * inner, kernels=1)


_WITHIN = {"moe_act": "moe", "shared_experts": "moe"}
MODULES: dict[str, Callable[[ModelConfig, int], Recomputed]] = {
    "core_attn": _scores_again,
    "mla_up_proj": _up_projections,
    "layernorm": _norms,
    "mlp": _dense_mlp,
    "moe_act": _activation_function,
    "moe": _experts_again,
    "shared_experts": _shared_experts,
}
