"""Numbers of weights of a model's parts: those of its products.

Biases, norms and what else Mamba-2 has, such as its convolution, are too few to count.
"""

from __future__ import annotations

from megatron_zb.planner.model import ModelConfig


def mixer_weights(model: ModelConfig, index: int) -> int:
    """Count the weights of a layer's attention or Mamba-2; 0 where it has neither."""
    mixer = model.mixer_in(index)
    return 0 if mixer is None else mixer.weights


def mlp_weights(model: ModelConfig, index: int) -> int:
    """Count the weights that every token visits: a dense MLP, or shared experts and the router."""
    dense = (model.gates + 1) * model.hidden_size * model.dense_inner(index)
    experts = model.experts_in(index)
    return dense if experts is None else dense + model.hidden_size * experts.experts


def expert_weights(model: ModelConfig, index: int, experts: int) -> int:
    """Count the weights of ``experts`` experts of a layer; 0 in a dense one."""
    found = model.experts_in(index)
    if found is None:
        return 0
    return experts * (model.gates + 1) * model.hidden_size * found.ffn_hidden_size


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


def all_weights(model: ModelConfig) -> int:
    """Count the weights of the whole model."""
    experts = model.experts.experts if model.experts else 0
    layers = sum(
        mixer_weights(model, index)
        + mlp_weights(model, index)
        + expert_weights(model, index, experts)
        for index in [*range(model.layers), *predicted_layers(model)]
    )
    layers += joining_weights(model)
    ends = model.hidden_size * model.vocabulary
    return layers + ends * (1 if model.tied_embeddings else 2)
