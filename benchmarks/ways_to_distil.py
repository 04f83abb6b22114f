"""Ways to distil block by block, on the same ranks: pipelined, and data-parallel in two manners."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from distilled_blocks import Blocks

from megatron_zb.distill.relay_steps import Exchange, relay_steps
from megatron_zb.distill.schedule.distribution import BlockCosts, Distribution
from megatron_zb.distill.schedule.step_by_step import step_by_step
from megatron_zb.runtime.channels import Channels, new_groups
from megatron_zb.schedules.placement import Placement

Run = Callable[[int], None]
"""Carries out so many steps on this rank."""
Close = Callable[[], None]
"""Destroys the groups of a way, whose threads would take time from others."""


@dataclass(frozen=True)
class WithoutRelay(BlockCosts):
    """Costs of stages that run the teacher from its first block on themselves."""

    def _teacher(self, blocks: range) -> float:
        return sum(self.teacher[: blocks.stop])

    @classmethod
    def like(cls, costs: BlockCosts) -> WithoutRelay:
        return cls(**vars(costs))


class _Stage:
    """Some blocks in a row as the executor runs them; gradients are summed over ``group``."""

    def __init__(self, blocks: Blocks, held: range, group: dist.ProcessGroup) -> None:
        self._blocks, self._held, self._group = blocks, held, group
        self._lessons: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def teach(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        given = self._blocks.read(microbatch) if activation is None else activation
        for block in self._held:
            wanted = self._blocks.teach(block, given)
            self._lessons.append((block, given, wanted))
            given = wanted
        return given

    def study(self, microbatch: int) -> None:
        for block, given, wanted in self._lessons:
            self._blocks.study(block, given, wanted)
        self._lessons.clear()

    def update(self, step: int) -> None:
        summing = [self._blocks.start_reduce(block, self._group) for block in self._held]
        for block, finish in zip(self._held, summing, strict=True):
            finish()
            self._blocks.update(block)


def pipelined(
    blocks: Blocks, distribution: Distribution, microbatches: int, run_ahead: int
) -> tuple[Run, Close]:
    """Pipe-BD, through the package's schedule and runtime. Collective over all ranks."""
    rank, placement = dist.get_rank(), distribution.placement
    held, ranks = _share(distribution)
    [group] = new_groups([ranks])
    if rank >= distribution.num_ranks:
        Channels([rank], Placement("alone", 1, (0,)), "cpu").close()
        return _idle, partial(dist.destroy_process_group, group)
    channels = Channels(list(range(distribution.num_ranks)), placement, "cpu")
    program = step_by_step(distribution, microbatches, run_ahead)
    stage = _Stage(blocks, held, group)
    exchange = Exchange(channels, lambda _: blocks.empty())

    def run(steps: int) -> None:
        for _ in relay_steps(program, rank, stage, exchange, first=0, until=steps):
            pass

    def close() -> None:
        channels.close()
        dist.destroy_process_group(group)

    return run, close


def unrelayed(blocks: Blocks, distribution: Distribution, microbatches: int) -> tuple[Run, Close]:
    """The same stages with no relay: each runs the teacher from the data on. Collective."""
    held, ranks = _share(distribution)
    [group] = new_groups([ranks])
    place = ranks.index(dist.get_rank())
    close = partial(dist.destroy_process_group, group)
    if not held:
        return _idle, close
    stage = _Stage(blocks, held, group)

    def run(steps: int) -> None:
        for step in range(steps):
            for microbatch in _own(step, microbatches, place, len(ranks)):
                given = blocks.read(microbatch)
                for block in range(held.start):
                    given = blocks.teach(block, given)
                stage.teach(microbatch, given)
                stage.study(microbatch)
            stage.update(step)

    return run, close


def _idle(steps: int) -> None:
    """Do nothing: the rank has no blocks."""


def _share(distribution: Distribution) -> tuple[range, tuple[int, ...]]:
    """The blocks of this rank, and the ranks it shares them with; none for a rank that idles."""
    rank = dist.get_rank()
    if rank >= distribution.num_ranks:
        return range(0), (rank,)
    return distribution.ranges[distribution.stage_on(rank)]


def block_by_block(blocks: Blocks, microbatches: int) -> Run:
    """The published practice: for every block, data and teacher from the first block on, anew.

    All ranks have a share of the microbatches. Summing the gradients of a block overlaps with the
    next block's computation.
    """
    rank, world = dist.get_rank(), dist.get_world_size()

    def run(steps: int) -> None:
        for step in range(steps):
            summing: list[Callable[[], None]] = []
            for block in range(blocks.costs.num_blocks):
                for microbatch in _own(step, microbatches, rank, world):
                    given = blocks.read(microbatch)
                    for before in range(block):
                        given = blocks.teach(before, given)
                    blocks.study(block, given, blocks.teach(block, given))
                summing.append(blocks.start_reduce(block, dist.group.WORLD))
            _finish(blocks, summing)

    return run


def all_blocks_at_once(blocks: Blocks, microbatches: int) -> Run:
    """Data-parallel without redundancy: the teacher runs once and all students learn from it.

    Every rank holds the whole teacher, all students and the states of their optimizers. Summing
    begins with the last microbatch of a block, and overlaps with what is left.
    """
    rank, world = dist.get_rank(), dist.get_world_size()

    def run(steps: int) -> None:
        for step in range(steps):
            summing: list[Callable[[], None]] = []
            own = _own(step, microbatches, rank, world)
            for microbatch in own:
                given = blocks.read(microbatch)
                for block in range(blocks.costs.num_blocks):
                    wanted = blocks.teach(block, given)
                    blocks.study(block, given, wanted)
                    given = wanted
                    if microbatch == own[-1]:
                        summing.append(blocks.start_reduce(block, dist.group.WORLD))
            _finish(blocks, summing)

    return run


def _own(step: int, microbatches: int, place: int, among: int) -> range:
    """Numbers of the microbatches that come to one of so many ranks."""
    return range(step * microbatches + place, (step + 1) * microbatches, among)


def _finish(blocks: Blocks, summing: Iterable[Callable[[], None]]) -> None:
    for block, finish in enumerate(summing):
        finish()
        blocks.update(block)


def seconds_block_by_block(costs: BlockCosts, ranks: int, microbatches: int) -> float:
    """What a step of :func:`block_by_block` takes on paper."""
    ends, clock = [], 0.0
    for block in range(costs.num_blocks):
        each = sum(costs.teacher[: block + 1]) + costs.student[block]
        clock += microbatches / ranks * each
        ends.append(clock)
    return _with_sums(costs, ranks, ends)


def seconds_all_at_once(costs: BlockCosts, ranks: int, microbatches: int) -> float:
    """What a step of :func:`all_blocks_at_once` takes on paper."""
    clock = (microbatches / ranks - 1) * (sum(costs.teacher) + sum(costs.student))
    ends = []
    for block in range(costs.num_blocks):
        clock += costs.teacher[block] + costs.student[block]
        ends.append(clock)
    return _with_sums(costs, ranks, ends)


def _with_sums(costs: BlockCosts, ranks: int, ends: list[float]) -> float:
    """Sum each block's gradients from the end of its computation on, one at a time, and update."""
    link, summed = 0.0, []
    for end, seconds in zip(ends, costs.reduce, strict=True):
        link = max(link, end) + seconds * 2 * (ranks - 1) / ranks
        summed.append(link)
    clock = ends[-1]
    for ready, seconds in zip(summed, costs.update, strict=True):
        clock = max(clock, ready) + seconds
    return clock
