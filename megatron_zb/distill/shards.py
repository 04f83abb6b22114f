"""How the ranks of a place split the parameters of a block, and what they sum over one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron_zb.distill.lanes import Lanes
from megatron_zb.distill.place import Holders

Tensors = dict[str, torch.Tensor]

_EXPERT = ".local_experts."


def whole(layer: Any) -> Tensors:
    """Return a layer's parameters in one piece, but for experts of other ranks.

    Collective over a tensor-parallel group.
    """
    return {n: _joined(layer, n, parameter) for n, parameter in layer.named_parameters()}


def with_all_experts(layer: Any, weights: Tensors) -> Tensors:
    """Return :func:`whole`'s parameters with the experts of all ranks, numbered as in the layer.

    Collective over an expert-parallel group.
    """
    if layer.config.expert_model_parallel_size == 1:
        return weights
    group = parallel_state.get_expert_model_parallel_group()
    found = {}
    for name, weight in weights.items():
        if _EXPERT not in name:
            found[name] = weight
            continue
        of_ranks = [torch.empty_like(weight) for _ in range(group.size())]
        dist.all_gather(of_ranks, weight.contiguous(), group=group)
        found |= {_numbered(layer, name, rank): each for rank, each in enumerate(of_ranks)}
    return found


def name_in_layer(layer: Any, name: str) -> str:
    """Return the name of this rank's parameter among :func:`with_all_experts`."""
    if _EXPERT not in name:
        return name
    return _numbered(layer, name, parallel_state.get_expert_model_parallel_rank())


def _numbered(layer: Any, name: str, rank: int) -> str:
    """Return the name of a rank's expert with its number in the layer."""
    before, expert, after = name.partition(_EXPERT)
    number, _, rest = after.partition(".")
    config = layer.config
    first = rank * (config.num_moe_experts // config.expert_model_parallel_size)
    return f"{before}{expert}{first + int(number)}.{rest}"


def number_of(layer: Any) -> int:
    """Return the number of elements of a layer's parameters, of all ranks that split them."""
    experts = layer.config.expert_model_parallel_size
    return sum(
        parameter.numel() * _split_over(layer, parameter) * (experts if _EXPERT in name else 1)
        for name, parameter in layer.named_parameters()
    )


def shard_of(layer: Any, name: str, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter that is given in one piece."""
    size = _split_over(layer, parameter)
    if size == 1:
        return value
    dim = _dimension(parameter)
    lane = parallel_state.get_tensor_model_parallel_rank()
    parts = [part.chunk(size, dim)[lane] for part in value.chunk(_parts(layer, name), dim)]
    return torch.cat(parts, dim)


def _joined(layer: Any, name: str, parameter: torch.Tensor) -> torch.Tensor:
    mine, size = parameter.detach(), _split_over(layer, parameter)
    if size == 1:
        return mine
    dim = _dimension(parameter)
    shards = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(
        shards, mine.contiguous(), group=parallel_state.get_tensor_model_parallel_group()
    )
    split = [shard.chunk(_parts(layer, name), dim) for shard in shards]
    return torch.cat([piece for part in zip(*split, strict=True) for piece in part], dim)


def _dimension(parameter: Any) -> int:
    """Return the dimension along which Megatron shards a parameter."""
    return int(parameter.partition_dim)


def _split_over(layer: Any, parameter: torch.Tensor) -> int:
    """Return the number of ranks that a parameter is split over."""
    split = getattr(parameter, "tensor_model_parallel", False)
    return layer.config.tensor_model_parallel_size if split else 1


def _parts(layer: Any, name: str) -> int:
    """Return the number of matrices in a parameter, each of which is sharded separately."""
    return 2 if layer.config.gated_linear_unit and ".linear_fc1." in name else 1


class ShardedGradients:
    """Sums and norms of a block's gradients over the ranks that share or copy it."""

    def __init__(self, lanes: Lanes, parameters: Mapping[str, torch.Tensor]) -> None:
        """Describe the parameters of a block, by the attributes that Megatron sets."""
        self._lanes = lanes
        self._experts = {n for n, p in parameters.items() if not getattr(p, "allreduce", True)}
        self._of_shards = {n for n, p in parameters.items() if getattr(p, "sequence_parallel", 0)}
        self._counted = {n for n, p in parameters.items() if self._is_counted(n, p)}

    def _is_counted(self, name: str, parameter: torch.Tensor) -> bool:
        """Return whether this rank's part goes into a norm, once for each parameter of a block."""
        if self._lanes.size == 1:
            return True
        rank = dist.get_rank()
        split = getattr(parameter, "tensor_model_parallel", False)
        first = name in self._experts or not self._lanes.expert_lane(rank)
        return first and (split or not self._lanes.tensor_lane(rank))

    def sum(self, gradients: Mapping[str, torch.Tensor], copies: Holders | None) -> None:
        """Sum gradients in place over copies, and over shards of the sequence, as Megatron does.

        Args:
            gradients: by the names of the parameters.
            copies: the ranks that hold the same; None for one rank.
        """
        if copies is not None:
            dense = [g for name, g in gradients.items() if name not in self._experts]
            _sum(dense, copies.dense)
            _sum([gradients[n] for n in gradients if n in self._experts], copies.experts)
        if self._lanes.tensor > 1:
            of_shards = [gradients[n] for n in gradients if n in self._of_shards]
            _sum(of_shards, parallel_state.get_tensor_model_parallel_group())

    def norm(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the norm of a block's gradients, equal on all ranks of the place."""
        counted = [g for name, g in gradients.items() if name in self._counted]
        total = torch.nn.utils.get_total_norm(counted)
        if self._lanes.size == 1:
            return total
        square = total.to(next(iter(gradients.values())).device).square()
        dist.all_reduce(square, group=parallel_state.get_expert_tensor_and_model_parallel_group())
        return square.sqrt()


def _sum(gradients: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    if group.size() == 1 or not gradients:
        return
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(total)


def mean_of_shards(values: torch.Tensor) -> torch.Tensor:
    """Return the mean over all shards of a sequence, whose gradient is that of this rank's part."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    total: torch.Tensor = reduce_from_tensor_model_parallel_region(values.mean() / size)
    return total
