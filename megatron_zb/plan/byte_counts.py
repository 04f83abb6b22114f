"""Bytes of a rank's permanent states, and of a microbatch's tensors after F and after B.

Activations are counted tensor by tensor as in *Reducing Activation Recomputation* (arXiv
2205.05198), with 16 bits for each and one byte for each dropout mask; with sequence parallelism all
of them are divided by the tensor ranks. W needs the input of each weight and the gradient of its
output; what of them sequence parallelism gathers is held until W as each rank's own shard. In fp8
Transformer-Engine's layers hold it whole, which is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.operators import (
    joining_weights,
    operators_of,
    predicted_layers,
    recomputed,
    weights_of,
)
from megatron_zb.plan.work import Workload

# Bytes of each weight: 16-bit weight, 32-bit gradient, and Adam's 32-bit weight and two moments.
WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12
FP8_COPIES = 2  # of a layer's weight: in 8 bits, and transposed in 8 bits


FOR_WEIGHT = "held_for_weight"
"""The table of bytes that wait for W, in the table of kinds of passes."""


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of one microbatch: after its F, after its B, and at most while its B runs.

    ``kept_input`` are those after an F whose activations are to be recomputed.
    """

    activation: float = 0.0
    for_weight: float = 0.0
    in_backward: float = 0.0
    kept_input: float = 0.0

    def of(self, table: str) -> float:
        """Return the bytes by the name of their table in the table of kinds of passes."""
        tables = {FOR_WEIGHT: self.for_weight, "kept_input": self.kept_input}
        return tables.get(table, self.activation)

    def __add__(self, other: ActivationBytes) -> ActivationBytes:
        return ActivationBytes(
            self.activation + other.activation,
            self.for_weight + other.for_weight,
            max(self.in_backward, other.in_backward),
        )

    def __mul__(self, share: float) -> ActivationBytes:
        return ActivationBytes(
            self.activation * share, self.for_weight * share, self.in_backward * share
        )


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a rank keeps from step to step."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    parameters: float = 0.0
    routed: float = 0.0  # of the parameters, those of experts

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(*map(add, vars(self).values(), vars(other).values()))


def layer_held(load: Workload, index: int) -> ActivationBytes:
    """Count the bytes of a microbatch in one layer, given what is recomputed."""
    model, operators = load.model, operators_of(load.model, index)
    hidden = model.parts * model.hidden_size  # elements between the products
    scores = _scores(model, index, load.sequence)
    needed: float = 4 * hidden + sum(one.needed for one in operators)
    masks = hidden if model.dropout else 0
    streams = 2 * model.residual_streams * hidden if model.residual_streams > 1 else 0
    stored = needed + masks + streams + sum(one.kept for one in operators) + scores
    share = load.tokens / load.strategy.tensor
    gathered = 0.0
    if load.strategy.gathers and model.attends(index):
        stored += 2 * model.attention.attended  # of both runs, and of these put together
        gathered = keys_and_values(load) * (1 - 1 / load.strategy.context)  # from other ranks
    # What sequence parallelism would share out weighs more without it.
    everything = stored + (load.kept_tokens / share - 1) * (4 * hidden + masks + streams)
    if load.strategy.precision != "bf16":
        everything -= hidden + sum(one.inputs + one.sent for one in operators)
        needed /= 2
    for_weight = 0.0 if load.frozen else needed * share
    if load.strategy.drops_all:
        kept = 2 * load.model.message_width * load.kept_tokens
        if load.strategy.slices > 1 and model.attends(index):  # slices behind it read them
            kept += keys_and_values(load)
        return ActivationBytes(kept, for_weight, everything * share)
    dropped = _dropped(load, index, scores)
    if dropped:
        return ActivationBytes(everything * share - dropped + gathered, for_weight, dropped)
    return ActivationBytes(everything * share + gathered, min(for_weight, everything * share))


def _dropped(load: Workload, index: int, scores: float) -> float:
    """Count the bytes of a microbatch that selective recomputation discards in one layer."""
    model, share = load.model, load.tokens / load.strategy.tensor
    of_token = recomputed(model, index, load.strategy.recompute)
    width = 2 if load.strategy.precision == "bf16" else 1
    size = width * of_token.inputs + 2 * of_token.outputs + (scores if of_token.scores else 0)
    return size * share + width * of_token.normed * load.kept_tokens


def output_held(load: Workload) -> ActivationBytes:
    """Count the bytes of the output layer, once more for each layer of multi-token prediction.

    The layers of prediction themselves are included.
    """
    return sum([_output_held(load)] * load.model.depths, prediction_held(load))


def prediction_held(load: Workload) -> ActivationBytes:
    """Count the bytes of the layers of multi-token prediction."""
    joined = 4 * load.tokens * load.model.hidden_size / load.strategy.tensor
    held = ActivationBytes()
    for index in predicted_layers(load.model):
        held += layer_held(load, index) + ActivationBytes(joined, 0.0 if load.frozen else joined)
    return held


def _output_held(load: Workload) -> ActivationBytes:
    """Count the inputs of the last norm and of the output layer, and the logits' gradient for W.

    That gradient has 16 bits. The rest of the logits is counted separately.
    """
    size = 2 * load.tokens * load.model.hidden_size / load.strategy.tensor
    gradient = 2 * load.tokens * load.model.vocabulary / load.strategy.tensor
    return ActivationBytes(2 * size, 0.0 if load.frozen else size + gradient)


def embedding_held(load: Workload) -> ActivationBytes:
    """Count the bytes of the dropout mask, if there is dropout."""
    size = load.tokens * load.model.hidden_size / load.strategy.tensor
    return ActivationBytes(size) if load.model.dropout else ActivationBytes()


def keys_and_values(load: Workload) -> float:
    """Count the bytes of the keys and values of a microbatch in one layer, of all its slices.

    Context-parallel ranks have those of the whole sample.
    """
    tokens = load.strategy.context * load.tokens
    return 2 * tokens * load.model.attention.kept_by_rank(load.strategy.tensor)


def logits(load: Workload) -> float:
    """Count the bytes of 16-bit logits, 32-bit softmax and 32-bit gradient at a time.

    They are of one microbatch, or of one slice.
    """
    tokens = load.largest_slice * load.tokens
    return (2 + 4 + 4) * tokens * load.model.vocabulary / load.strategy.tensor


def message_buffers(load: Workload, chunks: int) -> float:
    """Count the bytes of one message in and one out, in both directions, for each chunk."""
    return 4 * chunks * load.message() if load.strategy.pipeline > 1 else 0.0


def rank_states(
    load: Workload,
    layers: Sequence[int],
    embedding: bool,
    output: bool,
    *,
    ends_apart: bool = False,
) -> StateBytes:
    """Count the states of a rank with these layers; the optimizer is distributed over data ranks.

    In fp8, a layer's weights keep two more bytes: themselves and their transpose in 8 bits. Frozen
    weights have no gradient and no optimizer state. Ends that are apart from the stages are left
    out.
    """
    model, strategy = load.model, load.strategy
    dense, routed = weights_of(model, [*layers, *(predicted_layers(model) if output else [])])
    dense += joining_weights(model) if output else 0
    routed_here = routed / (strategy.expert_tensor * strategy.expert)
    in_layers = dense / strategy.tensor + routed_here
    # A tied output layer and a layer of prediction need a copy of the embedding on their rank.
    ends = 1 if embedding and output and model.tied_embeddings else embedding + output
    if output and model.prediction_layers and not model.tied_embeddings and not embedding:
        ends += 1
    ends_here = (0 if ends_apart else ends) * model.hidden_size * model.vocabulary / strategy.tensor
    here = in_layers + ends_here
    optimized = (here - routed_here) / strategy.replicas + routed_here / strategy.expert_replicas
    weights = WEIGHT * here + (0 if strategy.precision == "bf16" else FP8_COPIES * in_layers)
    if load.frozen:
        return StateBytes(weights)
    return StateBytes(weights, GRADIENT * here, OPTIMIZER * optimized, here, routed_here)


def _scores(model: ModelConfig, index: int, sequence: int) -> float:
    """Count the bytes of a token's stored attention scores.

    These are the softmax, and with dropout its mask and its output.
    """
    if model.flash_attention or not model.attends(index):
        return 0.0
    return (5 if model.dropout else 2) * model.attention_heads * float(sequence)
