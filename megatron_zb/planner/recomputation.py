"""Selective recomputation in Megatron's layers: what each of ``--recompute-modules`` saves.

A module either discards its output, which its last kernel can make again (``mla_up_proj``,
``moe_act``, ``layernorm``), or keeps its input alone (``core_attn``, ``mlp``, ``moe``,
``shared_experts``); B runs its forward again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import add

from megatron_zb.errors import UsageError
from megatron_zb.planner.model import ModelConfig
from megatron_zb.planner.operators import Operator, experts_operator, mlp_operator

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Recomputed:
    """What modules of one layer drop in F and compute again in B, for one token.

    Attributes:
        inputs: elements dropped that enter products with weights, in 8 bits with fp8.
        outputs: other elements dropped.
        normed: elements dropped that norms make, which sequence parallelism divides.
        scores: whether the scores of attention are dropped.
        weights: weights that are visited again.
        traffic: bytes that kernels between the products read and write again.
        kernels: kernels that run again.
        exchanges: whether tokens are sent to their experts and back again.
    """

    inputs: int = 0
    outputs: int = 0
    normed: int = 0
    scores: bool = False
    weights: int = 0
    traffic: int = 0
    kernels: int = 0
    exchanges: bool = False

    def __add__(self, other: Recomputed) -> Recomputed:
        return Recomputed(*map(add, vars(self).values(), vars(other).values()))


def modules_of(recompute: str) -> tuple[str, ...]:
    """Return the modules of a kind of recomputation, such as ``moe_act+layernorm``."""
    if recompute in ("none", "full"):
        return ()
    return ("core_attn",) if recompute == "selective" else tuple(recompute.split("+"))


def recomputed(model: ModelConfig, index: int, recompute: str) -> Recomputed:
    """Return what a layer drops and computes again, unless everything is recomputed."""
    parts = [MODULES[name](model, index) for name in modules_of(recompute)]
    return sum(parts, Recomputed())


def check(model: ModelConfig, recompute: str) -> None:
    """Check one kind of recomputation of ``--recompute``.

    Raises:
        UsageError: it is unknown, or the model has no such modules.
    """
    if recompute in RECOMPUTE:
        return
    names = modules_of(recompute)
    if unknown := [name for name in names if name not in MODULES]:
        raise UsageError(
            f"--recompute '{unknown[0]}' is unknown: give one or more of {','.join(RECOMPUTE)}, "
            f"or modules joined by +, of {','.join(MODULES)}"
        )
    if len(set(names)) < len(names):
        raise UsageError(f"--recompute {recompute} names a module twice: leave one out")
    for name in names:
        layers = range(model.layers)
        if not any(recomputed(model, index, name) != Recomputed() for index in layers):
            raise UsageError(
                f"--recompute {name}: {model.name} has no such modules: leave it out, or give none"
            )


def _scores(model: ModelConfig, index: int) -> Recomputed:
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


def _experts(model: ModelConfig, index: int) -> Recomputed:
    return _whole(experts_operator(model, index)) + _shared_experts(model, index)


def _whole(operator: Operator | None) -> Recomputed:
    """Return an MLP or experts of which F keeps the input alone."""
    if operator is None:
        return Recomputed()
    return Recomputed(
        inputs=operator.inputs + operator.sent,
        outputs=operator.outputs + operator.sent,
        weights=operator.weights + operator.visited,
        traffic=operator.forward,
        kernels=3 + operator.kernels,
        exchanges=operator.sent > 0,
    )


def _activation_function(model: ModelConfig, index: int) -> Recomputed:
    """Return the activation function of the experts, whose output enters their second product."""
    operator = experts_operator(model, index)
    if operator is None:
        return Recomputed()
    moved = 2 * (operator.outputs + operator.inputs)
    return Recomputed(inputs=operator.inputs, traffic=moved, kernels=1)


MODULES: dict[str, Callable[[ModelConfig, int], Recomputed]] = {
    "core_attn": _scores,
    "mla_up_proj": _up_projections,
    "layernorm": _norms,
    "mlp": _dense_mlp,
    "moe_act": _activation_function,
    "moe": _experts,
    "shared_experts": _shared_experts,
}
