"""Seconds of one microbatch on one layer and on the two ends of the model, for F, B and W.

One list of operators gives FLOPs, seconds and bytes. Biases, norms and convolutions have too few
weights to count.

Counted from floating-point operations and bytes, on one tensor-parallel rank:

- A matrix product with weights takes 2 FLOPs per token and weight in F, and as many in B and in W.
- The products with attention scores have no W. B takes twice as much as F, 2.5 times where the
  scores are computed again (FlashAttention-2, arXiv 2307.08691); half of them are masked there.
- A layer of a hybrid model is one part of a transformer's, Mamba-2 or gated delta (``mixers.py``).
- Norms, residuals, dropout, activation functions and softmax are limited by the memory: each tensor
  that a kernel reads or writes is counted with 2 bytes, 4 in the loss.
- Every kernel loses a fixed time, so that small microbatches are less efficient.
- Recomputation adds its part of F to B.
- Tensor parallelism with sequence parallelism gathers and scatters twice in F and in B (arXiv
  2205.05198); experts have two all-to-alls in each, and take no part in tensor parallelism but
  with expert tensor parallelism and in shared experts.
- Context parallelism shares out the tokens of a sample; keys and values travel around its ranks
  while the scores are computed, and their gradients back.
- In fp8, products with the weights of layers are as fast as the device has it; each tensor that
  enters one is read and written once more, in 8 bits and once transposed. Scores, router, embedding
  and output layer stay in 16 bits.
- A layer of multi-token prediction is a layer, a product of twice the width, and one more output
  layer (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from megatron_zb.measured.usual_gpu import LOGIT_IN_B, LOGIT_IN_F
from megatron_zb.plan.device import DeviceConfig, Link, Rate
from megatron_zb.plan.model import Experts, ModelConfig
from megatron_zb.plan.operators import (
    Operator,
    attention_flops,
    operators_of,
    predicted_layers,
    recomputed,
)
from megatron_zb.plan.strategy import SLICE_STEP, Strategy
from megatron_zb.schedules import Costs
from megatron_zb.schedules.features.slices import Slicing

# A random number of dropout costs as much time as this many bytes of traffic. An assumption.
_RANDOM = 6

# Kernels in F and in B of Megatron's layers with fused softmax, bias-dropout-add and bias-GELU; a
# product with weights is one more in F, B and W.
_NORMS_AND_THE_LIKE = (4, 7)  # of each part
_STREAMS = (7, 14)  # of hyper-connections around each part
_SCORES_STORED = (4, 6)  # two products and four, softmax, dropout
_SCORES_AGAIN = (1, 1)
_PRODUCTS = 2  # of each part: into attention and out of it, into the MLP and out of it
_AGAIN = 2.5  # B of kernels that compute their F again, in F's
_LOSS = (7, 4)

# Bytes of a key's or value's element with slices: copied into a buffer in F. In B, for all up to
# the slice: read in 16 bits and written in 32, added to what later slices left. With context
# parallelism, a half of what is gathered is copied twice, and of a sum that is scattered. The two
# runs of a slice have attention, a gradient of keys and values, and copies of queries and outputs.
_COPIED, _ADDED = 4, 2 + 4 + 3 * 4
_GATHERED, _SCATTERED = 6, 12
_RUNS = (7, 8)  # more kernels in F and B
_SUMMED = 2 * 4  # of a weight's gradient, read and written


def _elements_of_streams(streams: int) -> int:
    """Count what the hyper-connections of a part read and write in F, beyond one stream's sum.

    For an element of the hidden state, in Megatron's ``HyperConnectionModule``: the streams are
    read for their norm, for the product of the mappings, for the input of the part, which is
    written, and for the mixed streams, which are written, too. The output of the part is read and
    spread over the streams, and two sets of streams are read to write their sum. B reads and writes
    twice as much. The products themselves are too small to count.
    """
    read, written = 6 * streams + 1, 3 * streams + 1
    return read + written - (2 + 1)


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of F, B and W."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weight + other.weight,
        )

    def __mul__(self, count: float) -> PassSeconds:
        return PassSeconds(self.forward * count, self.backward * count, self.weight * count)

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class Workload:
    """A model on a device under a strategy; of a ``frozen`` one only adapters are trained."""

    model: ModelConfig
    device: DeviceConfig
    strategy: Strategy
    sequence: int
    frozen: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one of its context-parallel ranks."""
        return self.strategy.microbatch * self.sequence // self.strategy.context

    @property
    def kept_tokens(self) -> float:
        """Tokens of a microbatch between the products, on one tensor-parallel rank."""
        return self.tokens / (self.strategy.tensor if self.strategy.sequence_parallel else 1)

    @property
    def rate(self) -> Rate:
        """FLOP/s of products with the weights of layers."""
        if self.strategy.precision == "bf16":
            return self.device.matrix_products
        assert self.device.fp8_products is not None  # checked where the precision is read
        return self.device.fp8_products

    def layer(self, index: int) -> PassSeconds:
        """Return the work of one layer, with what it recomputes."""
        kind = self.model.kind(index)
        if kind not in self._layers:
            self._layers[kind] = self._layer(index)
        return self._layers[kind]

    @cached_property
    def _layers(self) -> dict[str, PassSeconds]:
        """Work of the layers counted so far, by their kind."""
        return {}

    def _layer(self, index: int) -> PassSeconds:
        operators, attends = operators_of(self.model, index), self.model.attends(index)
        scores = self._scores() + self._context_parallel() if attends else PassSeconds()
        scores += self._prefix() if attends else PassSeconds()
        rest = self._products(operators) + self._traffic(operators) + self._messages(index)
        rest += self._scan(index)
        if self.strategy.drops_all:
            again = scores.forward + rest.forward
        else:
            again = self._again(index, scores.forward)
        return scores + rest + PassSeconds(backward=again)

    @cached_property
    def slicing(self) -> Slicing | None:
        """Token slices of every microbatch, their lengths in tokens; None for whole ones."""
        slices, tokens = self.strategy.slices, self.sequence
        if slices == 1:
            return None
        whole, grows = self._whole_and_scores
        shares = grows.forward / whole.forward, grows.backward / whole.backward
        given = Slicing((tokens / slices,) * slices, *shares, joins_weight=False)
        if not self.strategy.by_time:
            return given
        costs = Costs.uniform(pipeline_size=1, p2p=0.0, **vars(whole))
        exact = Slicing.of_equal_time(
            slices, costs, attention=shares[0], attention_backward=shares[1]
        )
        step = SLICE_STEP * self.strategy.spread
        ends = [round(end * tokens / step) * step for end in accumulate(exact.lengths)]
        return replace(given, lengths=tuple(float(b - a) for a, b in pairwise([0, *ends])))

    @cached_property
    def _whole_and_scores(self) -> tuple[PassSeconds, PassSeconds]:
        """Seconds of a microbatch in the whole model, and those of :meth:`scores`."""
        layers = self.model.alike(range(self.model.layers)).items()
        ends = self.embedding() + self.output()
        whole = sum((self.layer(one) * count for one, count in layers), ends)
        return whole, sum((self.scores(one) * count for one, count in layers), PassSeconds())

    @property
    def largest_slice(self) -> float:
        """Share of a microbatch's tokens that its longest slice has."""
        return 1.0 if self.slicing is None else max(scale.tokens for scale in self.slicing.scales)

    @property
    def slowest_slice(self) -> float:
        """Share of a microbatch's seconds that its slowest slice takes."""
        if self.slicing is None:
            return 1.0
        work, _ = self._whole_and_scores
        parts = (
            it.forward * work.forward + it.backward * work.backward + it.tokens * work.weight
            for it in self.slicing.scales
        )
        return max(parts) / work.total

    def scores(self, index: int) -> PassSeconds:
        """Return the seconds of one layer that grow with the tokens before a slice.

        Scores are not stored; what is computed again is included.
        """
        if not self.model.attends(index):
            return PassSeconds()
        again = recomputed(self.model, index, self.strategy.recompute).scores
        again |= self.strategy.drops_all
        seconds = self._all_scores()
        backward = _AGAIN * seconds / 2 + (seconds / 2 if again else 0.0)
        return PassSeconds(seconds / 2, backward + self._prefix().backward)

    def _prefix(self) -> PassSeconds:
        """Return the work of putting the keys and values of all slices of a microbatch together."""
        strategy = self.strategy
        slices, ranks = strategy.slices, strategy.context
        if slices == 1:
            return PassSeconds()
        elements = ranks * self._keys_and_values
        # gradients up to the end of a slice, or to the ends of this rank's two runs of it
        ends = (slices + 1) / 2 if ranks == 1 else slices + 1 / (2 * ranks)
        copied = _COPIED if ranks == 1 else _GATHERED
        return PassSeconds(self.moved(copied * elements), self.moved(_ADDED * elements * ends))

    @property
    def _keys_and_values(self) -> float:
        """Elements of the keys and values of a microbatch in one layer on this rank."""
        return self.tokens * self.model.attention.kept_by_rank(self.strategy.tensor)

    def _gathered(self) -> PassSeconds:
        """Return the work of gathering keys and values of every slice, and scattering gradients.

        Keys and values have a collective each, for which the computation waits.
        """
        model, strategy = self.model, self.strategy
        received = (strategy.context - 1) * self._keys_and_values / 2 / strategy.slices
        calls, link = 2 * strategy.slices, self._context_link
        attended = model.attention.attended
        queries = model.attention_heads * model.attention.score_width - attended
        share = 4 * self.tokens / strategy.tensor
        summed = _SCATTERED * strategy.context * self._keys_and_values
        return self._begun(*_RUNS) + PassSeconds(
            calls * link.seconds(2 * received) + self.moved(share * attended),
            calls * link.seconds(4 * received) + self.moved(share * queries + summed),
        )

    def added_by_slices(self, weights: float) -> PassSeconds:
        """Return the work of reading and writing gradients of weights for W of every slice."""
        more = self.strategy.slices - 1
        return PassSeconds(0.0, 0.0, more * self.moved(_SUMMED * weights / self.strategy.tensor))

    def _again(self, index: int, scores: float) -> float:
        """Return the seconds of what selective recomputation computes again in one layer."""
        parts = recomputed(self.model, index, self.strategy.recompute)
        share = self.tokens / self.strategy.tensor
        moved = self.moved(parts.traffic * share + 4 * parts.normed * self.kept_tokens)
        seconds = 2 * parts.weights * share / self.rate.reached + moved
        seconds += self.all_to_all(index) if parts.all_to_all else 0.0
        return seconds + self.launches(parts.kernels) + (scores if parts.scores else 0.0)

    def products(self, weights: int) -> PassSeconds:
        """Return the work of a part with ``weights`` and nothing between its two products."""
        return self._weights(weights, parts=1)

    def block(self, weights: int, *, attends: bool) -> PassSeconds:
        """Return the work of a dense layer of ``weights``; ``attends`` adds the scores."""
        work = self._weights(weights, parts=2) + self._traffic(operators_of(self.model, 0))
        return work + self._scores() if attends else work

    def embedding(self) -> PassSeconds:
        """Return the work of the embedding: a look-up, and the sum of its gradients in 32 bits."""
        elements = self.tokens * self.model.hidden_size
        looked_up = PassSeconds(self.moved(4 * elements)) + self._begun(1, 0)
        if not self.frozen:
            looked_up += PassSeconds(0.0, 0.0, self.moved((2 + 2 * 4) * elements))
            looked_up += self._begun(0, 0, 1)
        return looked_up + self.embedding_dropout()

    def embedding_dropout(self) -> PassSeconds:
        """Return the work between the rows of the embedding and the first layer."""
        random = 2 * _RANDOM if self.model.dropout else 0
        elements = self.tokens * self.model.hidden_size
        return PassSeconds(self.moved(random * elements)) + self._begun(1, 0)

    def output(self) -> PassSeconds:
        """Return the work of the output layer, once more for each layer of multi-token prediction.

        The layers of prediction themselves are included.
        """
        return self._output() * self.model.depths + self.prediction()

    def prediction(self) -> PassSeconds:
        """Return the work of the layers of multi-token prediction."""
        joined = self._weights(2 * self.model.hidden_size**2, parts=2)
        layers = sum(map(self.layer, predicted_layers(self.model)), PassSeconds())
        return layers + joined * self.model.prediction_layers

    def _output(self) -> PassSeconds:
        """Return the work of the last norm, the vocabulary product and the loss in 32 bits."""
        logits = self.tokens * self.model.vocabulary / self.strategy.tensor
        product = 2 * logits * self.model.hidden_size / self.device.matrix_products.reached
        normed = self.kept_tokens * self.model.hidden_size
        forward = self.moved(LOGIT_IN_F * logits + 4 * normed)
        backward = self.moved(LOGIT_IN_B * logits + 6 * normed)
        work = PassSeconds(product + forward, product + backward) + self._begun(*_LOSS)
        if self.frozen:
            return work
        work += PassSeconds(0.0, 0.0, product) + self._begun(0, 0, 1)
        return work + self.added_by_slices(self.model.vocabulary * self.model.hidden_size)

    def message(self) -> float:
        """Return the bytes of the largest message between pipeline ranks, for each tensor rank."""
        return self.largest_slice * self._message()

    def _message(self) -> float:
        """Return the bytes of a microbatch between pipeline ranks, for each tensor rank."""
        return 2 * self.tokens * self.model.message_width / self.strategy.tensor

    def latency(self, in_node: bool, *, together: int = 1) -> float:
        """Return the seconds of a microbatch's message, or those of all slices, to another rank.

        Messages that travel ``together`` share a latency.
        """
        links = self.device.messages
        link = links.in_node if in_node else links.between_nodes
        slices = self.strategy.slices
        return slices * link.seconds(together * self._message() / slices) / together

    def moved(self, size: float) -> float:
        """Return the seconds in which kernels read and write a number of bytes."""
        return size / self.device.memory_bandwidth.reached

    def launches(self, kernels: int) -> float:
        """Return the overhead of a number of kernels."""
        return kernels * self.strategy.slices * self.device.kernels.seconds

    def _begun(self, forward: int, backward: int, weight: int = 0) -> PassSeconds:
        """Return the overhead of a number of kernels in F, B and W."""
        kernels = PassSeconds(forward, backward, weight) * self.strategy.slices
        return kernels * self.device.kernels.seconds

    def _products(self, operators: Sequence[Operator]) -> PassSeconds:
        weights = sum(one.weights + one.visited for one in operators)
        work = self._weights(weights, parts=self.model.parts) + self._casts(operators)
        return work + self._read_by_slices(operators)

    def _read_by_slices(self, operators: Sequence[Operator]) -> PassSeconds:
        """Return the work of slices that read all experts of a rank, beyond what products hide.

        Gradients of these experts are read and written, where :meth:`added_by_slices` has counted
        those that a token visits.
        """
        strategy, visited = self.strategy, sum(one.visited for one in operators)
        if strategy.slices == 1 or not visited:
            return PassSeconds()
        here = sum(one.routed for one in operators) / (strategy.expert * strategy.expert_tensor)
        product = 2 * self.tokens * visited / strategy.tensor / self.rate.reached
        late = max(0.0, strategy.slices * self.moved(2 * here) - product)
        work = PassSeconds(late, late)
        if self.frozen:
            return work
        summed = self.added_by_slices(here * strategy.tensor - visited).weight
        return work + PassSeconds(0.0, 0.0, late + summed)

    def _weights(self, weights: int, *, parts: int) -> PassSeconds:
        flops = 2 * self.tokens * weights / self.strategy.tensor
        seconds = flops / self.rate.reached
        kernels = _PRODUCTS * parts
        work = PassSeconds(seconds, seconds) + self._begun(kernels, kernels)
        if self.frozen:
            return work
        work += PassSeconds(0.0, 0.0, seconds) + self._begun(0, 0, kernels)
        return work + self.added_by_slices(weights)

    def _casts(self, operators: Sequence[Operator]) -> PassSeconds:
        """Return the work of casts to fp8: inputs in F, gradients of outputs in B.

        Each element is read in 2 bytes and written twice in 1 byte.
        """
        if self.strategy.precision == "bf16":
            return PassSeconds()
        parts = self.model.parts
        inputs = parts * self.model.hidden_size + sum(one.inputs for one in operators)
        outputs = parts * self.model.hidden_size + sum(one.outputs for one in operators)
        share = 4 * self.tokens / self.strategy.tensor
        moved = PassSeconds(self.moved(inputs * share), self.moved(outputs * share))
        return moved + self._begun(*[_PRODUCTS * parts] * 2)

    def _scan(self, index: int) -> PassSeconds:
        """Return the work of Mamba-2 or gated delta between its projections."""
        mixer = self.model.mixer_in(index)
        if mixer is None or not mixer.scan_flops:
            return PassSeconds()
        share = self.tokens / self.strategy.tensor
        flops = mixer.scan_flops / self.device.attention.reached
        seconds = share * (flops + self.moved(mixer.scan_bytes))
        return PassSeconds(seconds, _AGAIN * seconds) + self._begun(*mixer.scan_kernels)

    def _all_scores(self) -> float:
        """Return the seconds of the products with all scores in F, masked ones included."""
        flops = attention_flops(self.model, self.tokens, self.sequence) / self.strategy.tensor
        return flops / self.device.attention.reached

    def _scores(self) -> PassSeconds:
        """Return the work of products with the scores, and of the scores where they are stored."""
        model = self.model
        seconds = self._all_scores()
        if model.flash_attention:
            return PassSeconds(seconds / 2, _AGAIN * seconds / 2) + self._begun(*_SCORES_AGAIN)
        scores = self.tokens * self.sequence * model.attention_heads / self.strategy.tensor
        # F: written, softmax, dropout with its mask, read. B: the same backwards, four products.
        forward, backward = (13 + _RANDOM, 19) if model.dropout else (8, 14)
        moved = PassSeconds(self.moved(forward * scores), self.moved(backward * scores))
        return PassSeconds(seconds, 2 * seconds) + moved + self._begun(*_SCORES_STORED)

    def _traffic(self, operators: Sequence[Operator]) -> PassSeconds:
        """Return the work that is limited by the memory.

        Norms, residuals, dropout, activation function, layout of heads, tokens for experts.
        """
        between = self.model.parts * self.model.hidden_size
        kept_forward, kept_backward = (4 + 6) * between, (6 + 6) * between
        if self.model.dropout:
            kept_forward += (1 + _RANDOM) * between
            kept_backward += 5 * between
        begun = self._begun(*(kernels * self.model.parts for kernels in _NORMS_AND_THE_LIKE))
        if self.model.residual_streams > 1:
            mixed = 2 * _elements_of_streams(self.model.residual_streams) * between
            kept_forward, kept_backward = kept_forward + mixed, kept_backward + 2 * mixed
            begun += self._begun(*(kernels * self.model.parts for kernels in _STREAMS))
        begun += self._begun(*[sum(one.kernels for one in operators)] * 2)
        share, kept = self.tokens / self.strategy.tensor, self.kept_tokens
        forward = sum(one.forward for one in operators) * share + kept_forward * kept
        backward = sum(one.backward for one in operators) * share + kept_backward * kept
        return begun + PassSeconds(self.moved(forward), self.moved(backward))

    def _messages(self, index: int) -> PassSeconds:
        experts = self.model.experts_in(index)
        seconds = self.tensor_parallel(index)
        if experts is not None:
            seconds += self._expert_parallel(experts)
        return PassSeconds(seconds, seconds)

    def tensor_parallel(self, index: int) -> float:
        """Return the seconds of a layer's all-gathers and reduce-scatters in F, as many in B."""
        experts, parts = self.model.experts_in(index), self.model.parts
        if experts is not None and not experts.shared_ffn_hidden_size:
            parts -= 1
        return parts * (2 * self.collective())

    def all_to_all(self, index: int) -> float:
        """Return the seconds of the expert all-to-all in F of a layer; B has as many."""
        experts = self.model.experts_in(index)
        return 0.0 if experts is None else self._expert_parallel(experts)

    def collective(self) -> float:
        """Return the seconds of gathering or scattering all tokens over tensor-parallel ranks."""
        ranks = self.strategy.tensor
        if ranks == 1:
            return 0.0
        size = 2 * self.tokens * self.model.hidden_size * (ranks - 1) / ranks
        slices = self.strategy.slices
        return slices * self.device.collectives.in_node.seconds(size / slices)

    def _expert_parallel(self, experts: Experts) -> float:
        """Return the seconds of sending tokens to their experts and back.

        Shards of an expert gather and scatter. They lie next to one another, and ranks with other
        experts next to those.
        """
        strategy, links = self.strategy, self.device.collectives
        ranks, split = strategy.expert, strategy.expert_tensor
        width = experts.latent_size or self.model.hidden_size
        sent = 2 * self.tokens / strategy.tensor * experts.top_k * width
        seconds = 0.0
        if ranks > 1:
            near = max(1, min(ranks, self.device.node.gpus // split))
            inside = links.in_node.seconds(sent * (near - 1) / ranks)
            outside = links.between_nodes.seconds(sent * (ranks - near) / ranks)
            seconds += 2 * (inside if near == ranks else max(inside, outside))
        if split > 1:
            seconds += 2 * links.in_node.seconds(sent * (split - 1))
        return seconds

    def _context_parallel(self) -> PassSeconds:
        """Return the seconds that keys, values and their gradients take beyond the scores.

        They travel step by step around the ring: all but the first step is hidden by the scores.
        Those of slices are gathered.
        """
        ranks = self.strategy.context
        if ranks == 1:
            return PassSeconds()
        if self.strategy.gathers:
            return self._gathered()
        step = self._context_link.seconds(2 * self._keys_and_values)
        scores = self._scores()
        forward = (ranks - 1) * max(0.0, step - scores.forward / ranks)
        backward = (ranks - 1) * max(0.0, 2 * step - scores.backward / ranks)
        return PassSeconds(forward, backward)

    @property
    def ranks_in_node(self) -> int:
        """Pipeline ranks that share a node."""
        return max(1, self.device.node.gpus // self.strategy.model_ranks)

    @property
    def _context_link(self) -> Link:
        """Link between context-parallel ranks."""
        links = self.device.collectives
        near = self.strategy.spread <= self.device.node.gpus
        return links.in_node if near else links.between_nodes
