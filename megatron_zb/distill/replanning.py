"""Replanning: at a checkpoint, find the distribution anew from the times that stages took.

In training, a rank may be slower than another, or share its memory or its host. Where a stage takes
longer than its blocks take alone, all of them count as so much slower. If a step should take 5 %
less with another distribution, the run continues with that one from the checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from megatron_zb.distill import block_times
from megatron_zb.distill.report import BusyTime
from megatron_zb.distill.schedule.distribution import BlockCosts, Distribution, distribute
from megatron_zb.distill.student import Library, TeacherShape

GAIN = 0.05
"""The least share of a step that another distribution must save."""


def as_measured(
    costs: BlockCosts, distribution: Distribution, seconds: Sequence[float], microbatches: int
) -> BlockCosts:
    """Return costs with which every stage takes what it was measured to take.

    Args:
        costs: costs of the blocks by themselves.
        distribution: the distribution that was measured.
        seconds: busy seconds of a step, by stage.
        microbatches: microbatches per step.
    """
    factors = [
        measured / costs.stage_seconds(blocks, len(ranks), microbatches)
        for (blocks, ranks), measured in zip(distribution.ranges, seconds, strict=True)
        for _ in blocks
    ]

    def scaled(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(value * factor for value, factor in zip(values, factors, strict=True))

    return replace(
        costs,
        teacher=scaled(costs.teacher),
        student=scaled(costs.student),
        update=scaled(costs.update),
        relay=scaled(costs.relay),
        reduce=scaled(costs.reduce),
    )


def better(
    costs: BlockCosts, distribution: Distribution, places: int, microbatches: int
) -> tuple[Distribution, float] | None:
    """Return a distribution with which a step takes less, and by which share; None if none is.

    Args:
        costs: costs of the blocks, as measured in training.
        distribution: the one that is in use.
        places: ranks that may be used; those that share blocks count as one.
        microbatches: microbatches per step.
    """
    found = distribute(costs, places, microbatches)
    now, then = (costs.slowest(each, microbatches) for each in (distribution, found))
    return (found, 1 - then / now) if then <= (1 - GAIN) * now else None


class Replanner:
    """Measures stages in training, and finds a better distribution at a checkpoint.

    Args:
        args: arguments of the job.
        library: the candidates of each block.
        teacher: the teacher's sizes.
        microbatches: microbatches per step of a place.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        library: Library,
        teacher: TeacherShape,
        microbatches: int,
    ) -> None:
        self._args, self._library, self._teacher = args, library, teacher
        self._microbatches = microbatches
        self._costs: BlockCosts | None = None
        self.busy = BusyTime(on_gpu=not args.cpu)
        """Observer of this rank's passes."""

    def find(
        self, distribution: Distribution, place: int, places: int, steps: int
    ) -> tuple[Distribution, float] | None:
        """Return what :func:`better` finds, the same on all ranks. Collective.

        Blocks are timed alone at the first call.

        Args:
            distribution: the one in use since the last call.
            place: of this rank, from 0; ranks that share blocks have the same.
            places: their number.
            steps: steps since the last call.
        """
        if self._costs is None:
            times = block_times.measure(self._args, list(enumerate(self._library)), self._teacher)
            self._costs = block_times.costs(times)
        everywhere: list[tuple[int, float]] = [(0, 0.0)] * dist.get_world_size()
        dist.all_gather_object(everywhere, (place, self.busy.take()[0] / steps))
        seconds = [
            max(busy for at, busy in everywhere if at in ranks) for _, ranks in distribution.ranges
        ]
        if not all(seconds):
            return None
        costs = as_measured(self._costs, distribution, seconds, self._microbatches)
        return better(costs, distribution, places, self._microbatches)
