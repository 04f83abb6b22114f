"""Seconds of one microbatch on one layer and on the two ends of the model, for F, B and W.

Counted from floating-point operations and bytes, on one tensor-parallel rank:

- A matrix product with weights takes 2 FLOPs per token and weight in F, and as many in B and in W.
- The products with attention scores have no W. B takes twice as much as F, 2.5 times where the
  scores are computed again (FlashAttention-2, arXiv 2307.08691); half of them are masked there.
- Norms, residuals, dropout, activation functions and softmax are limited by the memory: each tensor
  that a kernel reads or writes is counted with 2 bytes, 4 in the loss.
- Every kernel loses a fixed time, so that small microbatches are less efficient.
- Recomputation adds its part of F to B.
- Tensor parallelism with sequence parallelism gathers and scatters twice in F and in B (arXiv
  2205.05198); experts exchange tokens twice in each.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zb.planner.device import DeviceConfig
from megatron_zb.planner.model import ModelConfig
from megatron_zb.planner.parameters import attention_weights, expert_weights, mlp_weights
from megatron_zb.planner.strategy import Strategy

# A random number of dropout costs as much time as this many bytes of traffic. An assumption.
_RANDOM = 6

# Kernels in F and in B of Megatron's layers with fused softmax, bias-dropout-add and bias-GELU; a
# product with weights is one more in F, B and W.
_NORMS_AND_THE_LIKE = (8, 14)
_SCORES_STORED = (4, 6)  # two products and four, softmax, dropout
_SCORES_AGAIN = (1, 1)
_ROUTING = (6, 6)
_PRODUCTS = 4  # queries with keys and values, their projection, up, down
_LOSS = (7, 4)


@dataclass(frozen=True)
class Work:
    """Seconds of F, B and W."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weight + other.weight,
        )

    def __mul__(self, count: float) -> Work:
        return Work(self.forward * count, self.backward * count, self.weight * count)

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class Workload:
    """A model on a device under a strategy."""

    model: ModelConfig
    device: DeviceConfig
    strategy: Strategy
    sequence: int

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.strategy.microbatch * self.sequence

    def layer(self, index: int) -> Work:
        """One layer, with what it recomputes."""
        scores = self._scores()
        rest = self._products(index) + self._traffic(index) + self._messages(index)
        again = {"none": 0.0, "selective": scores.forward}.get(
            self.strategy.recompute, scores.forward + rest.forward
        )
        return scores + rest + Work(backward=again)

    def block(self, weights: int, *, attends: bool) -> Work:
        """A dense layer with so many weights in its place; ``attends``: with scores."""
        work = self._weights(weights) + self._traffic(0)
        return work + self._scores() if attends else work

    def embedding(self) -> Work:
        """A look-up, and the sum of its gradients in 32 bits."""
        random = 2 * _RANDOM if self.model.dropout else 0
        elements = self.tokens * self.model.hidden_size
        forward, weight = elements * (4 + random), elements * (2 + 2 * 4)
        return Work(self._moved(forward), 0.0, self._moved(weight)) + self._begun(2, 0, 1)

    def output(self) -> Work:
        """The last norm, the product with the vocabulary and the loss in 32 bits."""
        logits = self.tokens * self.model.vocabulary / self.strategy.tensor
        product = 2 * logits * self.model.hidden_size / self.device.matrix_products.reached
        normed = self.tokens * self.model.hidden_size / self.strategy.tensor
        # F: to 32 bits, maximum, difference, exponential, sum, quotient. B: scaled, to 16 bits.
        forward = self._moved(38 * logits + 4 * normed)
        backward = self._moved(14 * logits + 6 * normed)
        return Work(product + forward, product + backward, product) + self._begun(*_LOSS, 1)

    def message(self) -> float:
        """Bytes of one message between pipeline ranks, for each tensor rank."""
        return 2 * self.tokens * self.model.hidden_size / self.strategy.tensor

    def hop(self, in_node: bool, *, together: int = 1) -> float:
        """Seconds of one message between pipeline ranks; so many ``together`` wait but once."""
        links = self.device.messages
        link = links.in_node if in_node else links.between_nodes
        return link.seconds(together * self.message()) / together

    def _moved(self, size: float) -> float:
        return size / self.device.memory_bandwidth.reached

    def _begun(self, forward: int, backward: int, weight: int = 0) -> Work:
        """What so many kernels lose."""
        return Work(forward, backward, weight) * self.device.kernels.seconds

    def _products(self, index: int) -> Work:
        model = self.model
        experts = expert_weights(model, index, model.experts.top_k) if model.experts else 0
        return self._weights(attention_weights(model) + mlp_weights(model, index) + experts)

    def _weights(self, weights: int) -> Work:
        flops = 2 * self.tokens * weights / self.strategy.tensor
        seconds = flops / self.device.matrix_products.reached
        return Work(seconds, seconds, seconds) + self._begun(*[_PRODUCTS] * 3)

    def _scores(self) -> Work:
        """Products with the scores, and what is done to the scores where they are stored."""
        model = self.model
        flops = attention_flops(model, self.tokens, self.sequence) / self.strategy.tensor
        seconds = flops / self.device.attention.reached
        if model.flash_attention:
            return Work(seconds / 2, 2.5 * seconds / 2) + self._begun(*_SCORES_AGAIN)
        scores = self.tokens * self.sequence * model.attention_heads / self.strategy.tensor
        # F: written, softmax, dropout with its mask, read. B: the same backwards, four products.
        forward, backward = (13 + _RANDOM, 19) if model.dropout else (8, 14)
        moved = Work(self._moved(forward * scores), self._moved(backward * scores))
        return Work(seconds, 2 * seconds) + moved + self._begun(*_SCORES_STORED)

    def _traffic(self, index: int) -> Work:
        """Norms, residuals, dropout, activation function, layout of heads, tokens for experts."""
        model = self.model
        hidden, inner = model.hidden_size, self._inner(index)
        heads = (model.attention_heads + 2 * model.groups) * model.head
        gates = 2 if model.gated_mlp else 1
        forward = (8 + 12) * hidden + 2 * (gates + 1) * inner + 4 * heads
        backward = (12 + 12) * hidden + 2 * (2 * gates + 1) * inner + 4 * heads
        if model.dropout:
            forward += 2 * (1 + _RANDOM) * hidden
            backward += 2 * 5 * hidden
        begun = self._begun(*_NORMS_AND_THE_LIKE)
        if model.experts and index >= model.experts.dense_layers:
            forward += 8 * model.experts.top_k * hidden
            backward += 8 * model.experts.top_k * hidden
            begun += self._begun(*_ROUTING)
        share = self.tokens / self.strategy.tensor
        return Work(self._moved(forward * share), self._moved(backward * share)) + begun

    def _inner(self, index: int) -> int:
        """Elements of an MLP's activation function for each token."""
        experts = self.model.experts
        if experts is None or index < experts.dense_layers:
            return self.model.ffn
        return experts.top_k * experts.ffn_hidden_size + experts.shared_ffn_hidden_size

    def _messages(self, index: int) -> Work:
        seconds = self._tensor_parallel()
        if self.model.experts and index >= self.model.experts.dense_layers:
            seconds += self._expert_parallel(self.model.experts.top_k)
        return Work(seconds, seconds)

    def _tensor_parallel(self) -> float:
        """Two all-gathers and two reduce-scatters."""
        ranks = self.strategy.tensor
        if ranks == 1:
            return 0.0
        each = 2 * self.tokens * self.model.hidden_size * (ranks - 1) / ranks
        return 4 * self.device.collectives.in_node.seconds(each)

    def _expert_parallel(self, top_k: int) -> float:
        """Tokens go to their experts and come back."""
        ranks, tensor = self.strategy.expert, self.strategy.tensor
        if ranks == 1:
            return 0.0
        links = self.device.collectives
        link = links.in_node if ranks * tensor <= self.device.node.gpus else links.between_nodes
        each = 2 * self.tokens / tensor * top_k * self.model.hidden_size * (ranks - 1) / ranks
        return 2 * link.seconds(each)


def attention_flops(model: ModelConfig, tokens: int, sequence: int) -> float:
    """FLOPs of the products with all scores of a layer in F, masked ones included."""
    latent = model.latent_attention
    wide = 2 * model.head
    if latent is not None:
        wide = latent.nope_head_dim + latent.rope_head_dim + latent.value_head_dim
    return 2.0 * tokens * sequence * model.attention_heads * wide


def model_flops(model: ModelConfig, tokens: int, sequence: int) -> float:
    """FLOPs that training on so many tokens needs: three times F, masked scores not counted."""
    per_token = 0.0
    for index in range(model.layers):
        experts = expert_weights(model, index, model.experts.top_k) if model.experts else 0
        per_token += 2 * (attention_weights(model) + mlp_weights(model, index) + experts)
    per_token += 2 * model.hidden_size * model.vocabulary
    scores = model.layers * attention_flops(model, tokens, sequence) / 2
    return 3 * (per_token * tokens + scores)
