"""Seconds and bytes of vocabulary parallelism over all pipeline ranks.

Counted as :mod:`megatron_zb.plan.work` counts, kernel by kernel of the passes O, V, P, E and G:

- O multiplies for the logits of its rows and for its part of the input gradient, V for its weight
  gradient; each reads and writes its logits some times in 32 bits. All of it, and the kernels'
  overhead with it, is spent on every rank: shards that are too thin gain nothing.
- Tensor-parallel ranks gather the tokens in O and in V, and sum their parts and rows in O.
- P, on the last stage's rank, adds the parts of all ranks.
- The link of that rank carries a message to each of the others and takes one of twice the size from
  each, in every microbatch.
- E transfers the rows of all tokens, and G their gradients; the link of the first stage's rank
  takes a message from each of the others and carries one to each.
- Multi-token prediction does all this once more for each of its layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zb.measured.usual_gpu import (
    BYTES_OF_A_PART,
    GATHERED_IN_E,
    GATHERED_IN_O,
    GATHERED_IN_V,
    LOGIT_IN_O,
    LOGIT_IN_V,
)
from megatron_zb.plan.byte_counts import GRADIENT, OPTIMIZER, WEIGHT, ActivationBytes, StateBytes
from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.strategy import Strategy
from megatron_zb.plan.work import PassSeconds, Workload
from megatron_zb.schedules.placement import Placement

_KERNELS_OF_O, _KERNELS_OF_V = 16, 8
_KERNELS_OF_P, _KERNELS_OF_A_PART = 14, 8
_KERNELS_OF_E = 4  # and of G
# Bytes of each number of a token: its row looked up and masked; the part packed. In P, the sum
# divided and scaled at last. On the first stage, one more rank's rows added, in 16 bits.
_ROW, _PACKED, _DIVIDED, _ROW_ADDED = 8, 8, 28, 6
# Bytes of each logit that O has besides the logits, at most, and of each number of each part in P.
_WHILE_O, _WHILE_P = 12, 12
_LABEL = 16
CONNECTION = 4 * 2**20 + 524_288 + 4_915_200
"""Bytes that NCCL allocates by default to receive over a connection of one thread block.

They are the buffers of its three protocols (NCCL, src/init.cc)."""


def can_be_shared(model: ModelConfig, strategy: Strategy) -> bool:
    """Return whether the pipeline ranks can have equally many rows of the output layer."""
    return model.vocabulary % (strategy.pipeline * strategy.tensor) == 0


def more_connections(placement: Placement, rank: int) -> int:
    """Return the ranks that send to a rank only for the shards, not for its stages."""
    usual = {frozenset(pair) for pair in placement.peers}
    ends = (placement.rank_of[0], placement.rank_of[-1])
    others = range(placement.pipeline_size)
    pairs = {frozenset((r, end)) for r in others for end in ends if r != end}
    return sum(rank in pair for pair in pairs - usual)


@dataclass(frozen=True)
class CountedShard:
    """The shard of one rank in one microbatch, all of equal size."""

    load: Workload

    @property
    def _rows(self) -> float:
        strategy = self.load.strategy
        return self.load.model.vocabulary / (strategy.pipeline * strategy.tensor)

    @property
    def _logits(self) -> float:
        return self.load.model.depths * self.load.tokens * self._rows

    @property
    def _numbers(self) -> float:
        """Numbers of all tokens on a tensor-parallel rank between the products."""
        return self._kept_tokens * self.load.model.hidden_size

    @property
    def _all_numbers(self) -> float:
        """Numbers of all tokens."""
        return self.load.model.depths * self.load.tokens * self.load.model.hidden_size

    @property
    def _kept_tokens(self) -> float:
        return self.load.model.depths * self.load.kept_tokens

    @property
    def _collective(self) -> float:
        """Seconds of one gathering of all tokens."""
        return self.load.model.depths * self.load.collective()

    @property
    def _product(self) -> float:
        flops = 2 * self._logits * self.load.model.hidden_size
        return flops / self.load.device.matrix_products.reached

    @property
    def output(self) -> float:
        """Seconds of O."""
        numbers = _ROW * self._all_numbers + _PACKED * self._numbers
        moved = self.load.moved(LOGIT_IN_O * self._logits + numbers)
        messages = GATHERED_IN_O * self._collective
        return 2 * self._product + moved + messages + self.load.launches(_KERNELS_OF_O)

    @property
    def weight(self) -> float:
        """Seconds of V."""
        moved = self.load.moved(LOGIT_IN_V * self._logits) + self._added_by_slices
        messages = GATHERED_IN_V * self._collective
        return self._product + moved + messages + self.load.launches(_KERNELS_OF_V)

    @property
    def _added_by_slices(self) -> float:
        model = self.load.model
        rows = model.vocabulary / self.load.strategy.pipeline
        return self.load.added_by_slices(model.depths * rows * model.hidden_size).weight

    @property
    def loss(self) -> float:
        """Seconds of P, on the last stage's rank."""
        parts = self.load.strategy.pipeline
        moved = self.load.moved((BYTES_OF_A_PART * parts + _DIVIDED) * self._numbers)
        return moved + self.load.launches(_KERNELS_OF_P + parts * _KERNELS_OF_A_PART)

    @property
    def lookup(self) -> float:
        """Seconds of E, and of G."""
        moved = self.load.moved(_ROW * self._all_numbers)
        return moved + GATHERED_IN_E * self._collective + self.load.launches(_KERNELS_OF_E)

    @property
    def looked_up(self) -> PassSeconds:
        """Seconds in which the first stage adds what all ranks have looked up, discarding some."""
        others = self.load.strategy.pipeline - 1
        added = self.load.moved(_ROW_ADDED * others * self._numbers) + self.load.launches(others)
        return PassSeconds(added) + self.load.embedding_dropout()

    @property
    def last_norm(self) -> PassSeconds:
        """Seconds of the norms before the output layer, which are on the last stage."""
        each = self.load.launches(self.load.model.depths)
        forward, backward = self.load.moved(4 * self._numbers), self.load.moved(6 * self._numbers)
        return PassSeconds(forward + each, backward + each)

    @property
    def held(self) -> ActivationBytes:
        """Bytes from O to V: the last stage's output with its labels, and 16-bit logits."""
        tokens = 2 * self._numbers + _LABEL * self._kept_tokens
        return ActivationBytes(tokens + 2 * self._logits)

    @property
    def last_norm_held(self) -> ActivationBytes:
        """Bytes of the input of the last norm."""
        return ActivationBytes(2 * self._numbers)

    def passing(self, *, is_last: bool) -> float:
        """Return the bytes while O runs, or P on the last stage's rank, and those of messages.

        They are those of one microbatch, or of one slice.
        """
        parts, share = self.load.strategy.pipeline, self.load.largest_slice
        while_o, numbers = share * _WHILE_O * self._logits, share * self._numbers
        if not is_last:
            return while_o + 6 * numbers
        return max(while_o, _WHILE_P * parts * numbers) + 4 * parts * numbers

    @property
    def states(self) -> StateBytes:
        """Bytes of the rows from step to step; their optimizer is distributed over replicas."""
        weights = 1 if self.load.model.tied_embeddings else 2
        here = weights * self._rows * self.load.model.hidden_size
        sharded = here / self.load.strategy.replicas
        return StateBytes(WEIGHT * here, GRADIENT * here, OPTIMIZER * sharded, here)

    def crowding(self, near: int, far: int) -> float:
        """Return the seconds for which one microbatch's messages out use the last rank's links.

        ``near`` and ``far`` are the other ranks of the pipeline in its node and beyond. Messages
        in, of twice the size, take twice as long beside them.
        """
        links = self.load.device.messages
        size = self.load.model.depths * self.load.message() / self.load.largest_slice
        in_node, between = links.in_node.bandwidth, links.between_nodes.bandwidth
        return max(near * size / in_node, far * size / between)
