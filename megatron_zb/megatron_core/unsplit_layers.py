"""Report of the layers whose weight gradient B computes, and their share of each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.stages import Iteration, device


class UnsplitLayers:
    """The unsplit layers of a rank's chunks: named once each, counted after the first step.

    Args:
        splits: one for each chunk.
        physical: the stages that the chunks hold.
        count: function called on every rank with the share of each stage's weight gradients, by
            their sizes, that B computes.
    """

    def __init__(
        self,
        splits: Sequence[SplitBackward],
        physical: PhysicalPlacement,
        count: Callable[[list[float]], None],
    ) -> None:
        self._splits, self._physical = splits, physical
        self._count: Callable[[list[float]], None] | None = count

    def after_step(self, iteration: Iteration) -> None:
        """Name new layers on the first replica; the first call is collective over the job."""
        lines = [line for split in self._splits for line in split.news()]
        groups = (getattr(iteration.pg_collection, name, None) for name in ("tp", "dp_cp"))
        if lines and all(group is None or group.rank() == 0 for group in groups):
            for line in lines:
                print(f"megatron_zb: {line}", flush=True)
        if self._count is not None:
            count, self._count = self._count, None
            count(self._shares(iteration.pp_rank))

    def _shares(self, pp_rank: int) -> list[float]:
        """Return the largest share of each stage on any rank; schedules must be equal on all."""
        shares = torch.zeros(self._physical.placement.num_stages, device=device())
        for chunk, split in enumerate(self._splits):
            shares[self._physical.stage(pp_rank, chunk)] = split.unsplit_share
        dist.all_reduce(shares, op=dist.ReduceOp.MAX)
        found: list[float] = shares.tolist()
        return found
