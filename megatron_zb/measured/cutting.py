"""What it takes to cut an output layer over all ranks, besides its products with the weight.

Counted from the sizes of a model, in forwards of one of its layers, for usual GPUs: a byte of
memory traffic takes as long as 200 operations, a byte between tensor-parallel ranks as long as
2000.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_zb.schedules import Costs

_FLOPS_PER_BYTE = 200
_FLOPS_PER_BYTE_SENT = 2000
_BYTES_OF_A_PART = 36
"""Bytes that P moves for each number of a token to add the part of one shard, in 32 bits."""
_MORE_BYTES_OF_A_LOGIT = 20
"""Bytes that O and V move for each logit beyond those of a whole output layer."""
_GATHERED_IN_O, _GATHERED_IN_V, _GATHERED_IN_E = 3, 1, 1
"""Gatherings over the tensor-parallel ranks, and sums: of parts and of rows in O, of rows in E."""


@dataclass(frozen=True)
class Cutting:
    """Work in forwards of a layer of the model.

    ``adding`` is that of one rank's part in P, ``gathering`` that of one gathering of all tokens
    over the tensor-parallel ranks, ``traffic`` that of the logits of all shards together.
    """

    adding: float = 0.0
    gathering: float = 0.0
    traffic: float = 0.0

    @classmethod
    def of_sizes(cls, args: Any, layer_flops: float, vocabulary: int) -> Cutting:
        """Count it for Megatron's arguments.

        Args:
            args: ``hidden_size`` and ``tensor_model_parallel_size``.
            layer_flops: FLOPs of a token in the forward of a layer.
            vocabulary: rows of the output layer.
        """
        hidden, tensor = args.hidden_size, args.tensor_model_parallel_size
        sent = 2 * hidden * (tensor - 1)  # on each rank, for tensor times the layer's FLOPs
        return cls(
            adding=_BYTES_OF_A_PART * hidden * _FLOPS_PER_BYTE / layer_flops,
            gathering=sent * _FLOPS_PER_BYTE_SENT / layer_flops,
            traffic=_MORE_BYTES_OF_A_LOGIT * vocabulary * _FLOPS_PER_BYTE / layer_flops,
        )

    def costs(
        self, costs: Costs, layer: float, *, products: float, weight: float, held: float = 0.0
    ) -> Costs:
        """Return the costs with a cut output layer.

        Args:
            costs: those of the layers.
            layer: seconds of the forward of a layer.
            products: seconds of the logits and of the input gradient on all ranks together.
            weight: seconds of the weight gradient.
            held: what all shards hold from O to V.
        """
        p = costs.pipeline_size
        traffic = self.traffic * layer / 2
        gathering = p * self.gathering * layer
        return costs.with_vocabulary(
            output=products + traffic + _GATHERED_IN_O * gathering,
            weight=weight + traffic + _GATHERED_IN_V * gathering,
            loss=p * self.adding * layer,
            held=held,
            lookup=_GATHERED_IN_E * gathering,
        )
