"""Automatic hybrid distribution of blocks onto stages, and of ranks onto stages.

Source: Pipe-BD, arXiv 2301.12443 (automatic hybrid distribution).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from megatron_zb.errors import UsageError
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import GroupPlacement, Placement, grouped
from megatron_zb.schedules.stage_costs import StageCosts

_STAGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?(?::(\d{1,6}))?")


@dataclass(frozen=True)
class Distribution:
    """A distribution of blocks and ranks onto stages.

    Stage s is ``ranges[s] = (blocks, ranks)``: a contiguous range of blocks, and its ranks.
    The blocks of the stages follow one another from block 0, and so do the ranks from rank 0.
    """

    ranges: tuple[tuple[range, tuple[int, ...]], ...]

    @classmethod
    def of(cls, stages: Iterable[tuple[int, int]]) -> Distribution:
        """Build a distribution from the numbers of blocks and of ranks of each stage, in order.

        Raises:
            UsageError: there is no stage, or one without a block or without a rank.
        """
        ranges: list[tuple[range, tuple[int, ...]]] = []
        block = rank = 0
        for blocks, ranks in stages:
            if blocks < 1 or ranks < 1:
                raise UsageError(
                    f"stage {len(ranges)} has {blocks} blocks and {ranks} ranks: "
                    "give every stage 1 or more of each"
                )
            ranges.append((range(block, block + blocks), tuple(range(rank, rank + ranks))))
            block, rank = block + blocks, rank + ranks
        if not ranges:
            raise UsageError("a distribution without a stage was asked for: give 1 or more")
        return cls(tuple(ranges))

    @classmethod
    def parse(cls, text: str) -> Distribution:
        """Parse stages as users write them: ``0-3:1,4-7:2``, ``0-3,4-7:2``, ``5:1`` for a block.

        Raises:
            UsageError: the text is something else, or a block is left out or in two stages.
        """
        stages: list[tuple[int, int]] = []
        block = 0
        for part in text.split(","):
            found = _STAGE.fullmatch(part.strip())
            if found is None:
                raise UsageError(
                    f"'{part}' in the distribution '{text}' is no stage: "
                    "write BLOCKS:RANKS, such as 0-3:1 or 4:2"
                )
            first, last = int(found[1]), int(found[2] or found[1])
            if first != block or last < first:
                raise UsageError(
                    f"stage {len(stages)} of the distribution '{text}' has blocks {first} to "
                    f"{last}: give blocks from {block} on, in order and without a gap"
                )
            stages.append((last + 1 - first, int(found[3] or 1)))
            block = last + 1
        return cls.of(stages)

    @property
    def spec(self) -> str:
        """Text form that :meth:`parse` reads, such as ``0-3:1,4-7:2``."""
        return ",".join(
            f"{blocks.start}-{blocks.stop - 1}:{len(ranks)}" for blocks, ranks in self.ranges
        )

    @property
    def num_blocks(self) -> int:
        return self.ranges[-1][0].stop

    @property
    def num_ranks(self) -> int:
        return sum(len(ranks) for _, ranks in self.ranges)

    @cached_property
    def placement(self) -> GroupPlacement:
        """Placement of the stages, with the rank of each microbatch in each stage."""
        return grouped([ranks for _, ranks in self.ranges])

    def stage_on(self, rank: int) -> int:
        """Return the stage of a rank."""
        return self.placement.stages_of[rank][0]

    def __str__(self) -> str:
        return ", ".join(
            f"{_describe('block', blocks)} on {_describe('rank', ranks)}"
            for blocks, ranks in self.ranges
        )


def _describe(what: str, numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"


def evenly(blocks: int, ranks: int) -> Distribution:
    """Distribute blocks to ranks with a difference of one at most; ranks beyond the blocks idle.

    Raises:
        UsageError: there is no block or no rank.
    """
    stages = min(blocks, ranks)
    if stages < 1:
        raise UsageError(f"{blocks} blocks on {ranks} ranks: give 1 or more of each")
    return Distribution.of(
        ((s + 1) * blocks // stages - s * blocks // stages, 1) for s in range(stages)
    )


@dataclass(frozen=True)
class BlockCosts:
    """Seconds per block, each a value for every block of the teacher.

    ``teacher``: the teacher's forward of one microbatch. ``student``: forward, loss and backward of
    the block's students on one microbatch. ``update``: of the students, once a step. ``relay``: the
    time that handing the block's output of one microbatch to the next rank keeps a rank from
    computing. ``reduce``: one transfer of the students' gradients over a link; a ring over k ranks
    takes 2(k-1)/k of it. ``memory``: what the block and its students hold on each of their ranks,
    in any unit.
    """

    teacher: tuple[float, ...]
    student: tuple[float, ...]
    update: tuple[float, ...]
    relay: tuple[float, ...]
    reduce: tuple[float, ...]
    memory: tuple[float, ...]

    @classmethod
    def of(
        cls,
        *,
        teacher: Sequence[float],
        student: Sequence[float],
        update: float | Sequence[float] = 0.0,
        relay: float | Sequence[float] = 0.0,
        reduce: float | Sequence[float] = 0.0,
        memory: float | Sequence[float] = 0.0,
    ) -> BlockCosts:
        """Build the costs of ``len(teacher)`` blocks; a single number applies to every block.

        Raises:
            UsageError: lengths do not match, a value is negative or not finite, or no block takes
                any time.
        """
        blocks = len(teacher)

        def each(values: float | Sequence[float]) -> tuple[float, ...]:
            if isinstance(values, int | float):
                return (float(values),) * blocks
            return tuple(values)

        costs = cls(
            tuple(teacher), tuple(student), each(update), each(relay), each(reduce), each(memory)
        )
        costs._check()
        return costs

    def _check(self) -> None:
        blocks = self.num_blocks
        for name in ("teacher", "student", "update", "relay", "reduce", "memory"):
            values: tuple[float, ...] = getattr(self, name)
            if len(values) != blocks:
                raise UsageError(
                    f"block costs: {name} has {len(values)} entries, there are {blocks} blocks"
                )
            if not all(0 <= value < float("inf") for value in values):
                raise UsageError(
                    f"block costs: {name} is {list(values)}: give finite values of 0 or more"
                )
        if not sum(self.teacher) + sum(self.student) > 0:
            raise UsageError("block costs: no block takes any time: give a positive one, as 1.0")

    @property
    def num_blocks(self) -> int:
        return len(self.teacher)

    def stage_costs(self, distribution: Distribution) -> StageCosts:
        """Return the seconds of T (with its relay), S and U (with its all-reduce) of each stage.

        Raises:
            UsageError: the distribution is of another number of blocks.
        """
        if distribution.num_blocks != self.num_blocks:
            raise UsageError(
                f"block costs are for {self.num_blocks} blocks, "
                f"the distribution has {distribution.num_blocks}"
            )
        ranges = distribution.ranges
        seconds = {
            PassKind.T: tuple(self._teacher(blocks) for blocks, _ in ranges),
            PassKind.S: tuple(sum(self.student[b] for b in blocks) for blocks, _ in ranges),
            PassKind.U: tuple(self._update(blocks, len(ranks)) for blocks, ranks in ranges),
        }
        return StageCosts(seconds, latency={}, memory={"activation": (1.0,) * len(ranges)})

    def _teacher(self, blocks: range) -> float:
        is_last = blocks.stop == self.num_blocks
        return sum(self.teacher[b] for b in blocks) + (
            0.0 if is_last else self.relay[blocks.stop - 1]
        )

    def _update(self, blocks: range, degree: int) -> float:
        seconds = sum(self.reduce[b] for b in blocks) * 2 * (degree - 1) / degree
        return seconds + sum(self.update[b] for b in blocks)

    def stage_seconds(self, blocks: range, degree: int, microbatches: int) -> float:
        """Return the seconds of one step of a stage on ``degree`` ranks, without waits for others.

        Args:
            blocks: blocks of the stage.
            degree: ranks of the stage, each of which takes ``microbatches / degree`` microbatches.
            microbatches: microbatches per step.
        """
        each = self._teacher(blocks) + sum(self.student[b] for b in blocks)
        return microbatches // degree * each + self._update(blocks, degree)

    def held(self, blocks: range) -> float:
        """Return the memory of a stage on each of its ranks."""
        return sum(self.memory[b] for b in blocks)

    def lower_bound(self, distribution: Distribution, microbatches: int, steps: int) -> float:
        """Return a lower bound in seconds: each stage's first microbatch to arrive, and its steps.

        Raises:
            UsageError: the distribution is of another number of blocks.
        """
        teacher = self.stage_costs(distribution).seconds[PassKind.T]
        return max(
            sum(teacher[:stage]) + steps * self.stage_seconds(blocks, len(ranks), microbatches)
            for stage, (blocks, ranks) in enumerate(distribution.ranges)
        )

    def slowest(self, distribution: Distribution, microbatches: int) -> float:
        """Return the seconds of a step of the slowest stage: the step time of a long run."""
        return max(
            self.stage_seconds(blocks, len(ranks), microbatches)
            for blocks, ranks in distribution.ranges
        )


@dataclass(frozen=True)
class RelayCosts:
    """Block costs laid out by a distribution, for :func:`megatron_zb.schedules.simulate`."""

    blocks: BlockCosts
    distribution: Distribution

    def for_placement(self, placement: Placement) -> StageCosts:
        """Return the costs of the stages.

        Raises:
            UsageError: the placement is not the distribution's.
        """
        if placement != self.distribution.placement:
            raise UsageError(
                f"costs are for {self.distribution}, the placement has stages on other ranks"
            )
        return self.blocks.stage_costs(self.distribution)


def distribute(
    costs: BlockCosts, ranks: int, microbatches: int, memory_limit: float = inf
) -> Distribution:
    """Return the distribution whose slowest stage is the fastest of all; exact.

    Every contiguous division of the blocks into stages and every number of ranks per stage that
    divides ``microbatches`` is considered, on at most ``ranks`` ranks. Among equals it is one with
    the fewest ranks, and then with the most stages, of which each rank holds the least. The time
    of a stage is :meth:`BlockCosts.stage_seconds`. Where summing gradients is free and there is no
    memory limit, dealing all blocks out to all ranks is hard to beat: give both.

    Args:
        costs: costs of the blocks.
        ranks: available ranks; some are left idle where they gain nothing.
        microbatches: microbatches per step.
        memory_limit: memory of a rank, in the unit of ``costs.memory``.

    Raises:
        UsageError: there is no rank or no microbatch, or the ranks cannot hold the blocks.
    """
    if ranks < 1 or microbatches < 1:
        raise UsageError(
            f"{ranks} ranks and {microbatches} microbatches per step: give 1 or more of each"
        )
    degrees = [k for k in range(1, min(ranks, microbatches) + 1) if microbatches % k == 0]
    seconds = _all_stage_seconds(costs, degrees, microbatches, memory_limit)
    candidates = sorted({s for of_end in seconds for of_start in of_end for s in of_start} - {inf})
    if not candidates or _cheapest(seconds, degrees, candidates[-1])[-1].ranks > ranks:
        raise UsageError(
            f"{ranks} ranks of {memory_limit:g} cannot hold {costs.num_blocks} blocks of "
            f"{sum(costs.memory):g} in all, of which the largest has {max(costs.memory):g}: "
            "give more ranks, or more memory"
        )
    low, high = 0, len(candidates) - 1
    while low < high:  # the smallest limit that few enough ranks can keep
        middle = (low + high) // 2
        if _cheapest(seconds, degrees, candidates[middle])[-1].ranks <= ranks:
            high = middle
        else:
            low = middle + 1
    return Distribution.of(_stages(_cheapest(seconds, degrees, candidates[low])))


class _Prefix(NamedTuple):
    """The fewest ranks, and then the most stages, that run the first blocks within a time limit.

    ``start`` and ``degree`` are of the last stage. The smallest, as a tuple, is the best.
    """

    ranks: float
    minus_stages: int
    start: int
    degree: int


def _all_stage_seconds(
    costs: BlockCosts, degrees: Sequence[int], microbatches: int, memory_limit: float
) -> list[list[list[float]]]:
    """Return ``[end][start][i]``: seconds of blocks start to end - 1 on degrees[i] ranks.

    A value is infinite where a rank cannot hold the stage.
    """

    def of(blocks: range) -> list[float]:
        if costs.held(blocks) > memory_limit:
            return [inf] * len(degrees)
        return [costs.stage_seconds(blocks, k, microbatches) for k in degrees]

    return [[of(range(start, end)) for start in range(end)] for end in range(costs.num_blocks + 1)]


def _cheapest(
    seconds: list[list[list[float]]], degrees: Sequence[int], limit: float
) -> list[_Prefix]:
    """Return the cheapest stages within the limit for each number of first blocks."""
    best = [_Prefix(0, 0, 0, 0)]
    for of_end in seconds[1:]:
        least = _Prefix(inf, 0, 0, 0)
        for start, of_start in enumerate(of_end):
            before = best[start]
            if before.ranks + 1 > least.ranks:
                continue
            for degree, taken in zip(degrees, of_start, strict=True):
                if taken <= limit:
                    found = _Prefix(before.ranks + degree, before.minus_stages - 1, start, degree)
                    least = min(least, found)
                    break  # degrees rise
        best.append(least)
    return best


def _stages(best: list[_Prefix]) -> list[tuple[int, int]]:
    """Return the numbers of blocks and of ranks of each stage, first to last."""
    stages, end = [], len(best) - 1
    while end:
        stages.append((end - best[end].start, best[end].degree))
        end = best[end].start
    return stages[::-1]
