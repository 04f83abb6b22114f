"""Costs on a usual GPU, counted from the sizes of a model, until a profile measures them.

Vocabulary parallelism takes more than the products with the weight. Those costs are in forwards of
one layer: a byte of memory traffic takes as long as 200 operations, a byte between tensor-parallel
ranks as long as 2000. The planner counts the same bytes for the device of the plan. Copies to the
host have the bandwidth of PCIe 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zb.schedules import Costs
from megatron_zb.schedules.features.vocabulary import Vocabulary

_FLOPS_PER_BYTE = 200
_FLOPS_PER_BYTE_SENT = 2000
BYTES_OF_A_PART = 36
"""Bytes that P moves for each number of a token to add the part of one shard, with its row."""
LOGIT_IN_F, LOGIT_IN_B = 38, 14
"""Bytes that a whole output layer moves for each logit. F: to 32 bits, maximum, difference,
exponential, sum, quotient. B: scaled, to 16 bits."""
LOGIT_IN_O, LOGIT_IN_V = 36, 36
"""Bytes that shards move for each logit. O: to 32 bits, maximum, difference, exponential, sum, to
16 bits. V: to 32 bits, difference, exponential, times the gradient, to 16 bits."""
GATHERED_IN_O, GATHERED_IN_V, GATHERED_IN_E = 3, 1, 1
"""Gatherings over the tensor-parallel ranks, and sums: of parts and of rows in O, of rows in E."""
_MORE_BYTES_OF_A_LOGIT = LOGIT_IN_O + LOGIT_IN_V - LOGIT_IN_F - LOGIT_IN_B


@dataclass(frozen=True)
class ShardOverhead:
    """Work in forwards of a layer of the model.

    ``adding`` is that of one rank's part in P, ``gathering`` that of one gathering of all tokens
    over the tensor-parallel ranks, ``traffic`` that of the logits of all shards together.
    """

    adding: float = 0.0
    gathering: float = 0.0
    traffic: float = 0.0

    @classmethod
    def of_sizes(
        cls, layer_flops: float, vocabulary: int, hidden: int, tensor: int
    ) -> ShardOverhead:
        """Count it.

        Args:
            layer_flops: FLOPs of a token in the forward of a layer.
            vocabulary: rows of the output layer.
            hidden: hidden size.
            tensor: tensor-parallel ranks.
        """
        sent = 2 * hidden * (tensor - 1)  # on each rank, for tensor times the layer's FLOPs
        return cls(
            adding=BYTES_OF_A_PART * hidden * _FLOPS_PER_BYTE / layer_flops,
            gathering=sent * _FLOPS_PER_BYTE_SENT / layer_flops,
            traffic=_MORE_BYTES_OF_A_LOGIT * vocabulary * _FLOPS_PER_BYTE / layer_flops,
        )

    def times(self, depths: int) -> ShardOverhead:
        """Return the work for the tokens of a number of depths of prediction."""
        return ShardOverhead(depths * self.adding, depths * self.gathering, depths * self.traffic)

    def costs(
        self,
        costs: Costs,
        layer: float,
        *,
        products: float,
        weight: float,
        embedding: float,
        held: float,
    ) -> Costs:
        """Return the costs with a vocabulary-parallel output layer and embedding.

        Args:
            costs: those of the layers, without both.
            layer: seconds of the forward of a layer.
            products: seconds of the logits and of the input gradient on all ranks together.
            weight: seconds of the weight gradient.
            embedding: seconds of a whole embedding, all its passes together. They are E's and G's
                on every rank, where all tokens are looked up and most of them masked.
            held: what all shards hold from O to V.
        """
        p = costs.pipeline_size
        traffic = self.traffic * layer / 2
        gathering = p * self.gathering * layer
        return costs.having(
            Vocabulary(
                output=products + traffic + GATHERED_IN_O * gathering,
                weight=weight + traffic + GATHERED_IN_V * gathering,
                loss=p * self.adding * layer,
                held=held,
                lookup=p * embedding / 2 + GATHERED_IN_E * gathering,
            )
        )


# --- copies to the host ---------------------------------------------------------------------------


# FLOPs that a device does while its link carries one byte. A GPU: 400 TFLOP/s and 55 GB/s each way
# (PCIe 5); a CPU, which copies within its own memory: 50 GFLOP/s and 5 GB/s.
FLOPS_PER_BYTE = {"cuda": 400e12 / 55e9, "cpu": 50e9 / 5e9}


def copy_share(hidden_size: int, device_type: str) -> float:
    """Return what copying a layer's activations one way takes, as a share of its F, B and W.

    A layer of ``hidden_size`` h holds about 34 h bytes of each token in 16 bits, for 72 h^2 FLOPs.
    Where ranks share a layer, both are divided alike.
    """
    return 34 / (72 * hidden_size) * FLOPS_PER_BYTE[device_type]
