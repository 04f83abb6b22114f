"""The position of this rank in a distribution of blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from megatron_zb.errors import UsageError
from megatron_zb.runtime.channels import new_groups
from megatron_zb_distill.schedule.distribution import Distribution


@dataclass(frozen=True)
class Place:
    """The stage of one rank."""

    blocks: range
    ranks: tuple[int, ...]
    stage: int
    is_first: bool
    is_last: bool
    group: dist.ProcessGroup
    """Process group of the ranks of the stage."""
    shares_last: bool = False
    """Whether the next stage begins with the last block of this one, for further candidates."""

    @classmethod
    def of_this_rank(cls, distribution: Distribution) -> Place:
        """Find this rank's stage, and connect the ranks of every stage; collective over all ranks.

        A rank beyond those of the distribution has no blocks, and idles.
        """
        rank = dist.get_rank()
        if rank >= distribution.num_ranks:
            (group,) = new_groups([(rank,)])
            return cls(range(0), (rank,), -1, False, False, group)
        stage = distribution.stage_on(rank)
        blocks, ranks = distribution.ranges[stage]
        (group,) = new_groups([ranks])
        is_last = stage == len(distribution.ranges) - 1
        return cls(blocks, tuple(ranks), stage, stage == 0, is_last, group)

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its stage."""
        return dist.get_rank() == self.ranks[0]

    @property
    def partners(self) -> dist.ProcessGroup | None:
        """Process group to sum gradients over; None for a stage on one rank."""
        return self.group if len(self.ranks) > 1 else None


def parse_distribution(
    text: str, num_blocks: int, world_size: int | None, what: str = "block"
) -> Distribution:
    """Parse `--distribution 0-3:1,4-7:2`: ranges of blocks, each with its number of ranks.

    `world_size` is the number of ranks to check against; None for no such check. `what` is
    distributed: blocks, or the candidates of a library.

    Raises:
        UsageError: it cannot be parsed, or does not fit the blocks or the ranks.
    """
    try:
        distribution = Distribution.parse(text)
    except UsageError as error:
        example = _example(num_blocks, world_size or 2)
        raise UsageError(f"--distribution: {error}; here, for example, {example}") from None
    if distribution.num_blocks != num_blocks:
        raise UsageError(
            f"--distribution '{text}' ends with {what} {distribution.num_blocks - 1}, but the last "
            f"{what} is {num_blocks - 1}: give all of them, such as "
            f"{_example(num_blocks, world_size or 2)}"
        )
    if world_size is not None and distribution.num_ranks != world_size:
        raise UsageError(
            f"--distribution '{text}' is for {distribution.num_ranks} ranks, but {world_size} were "
            f"started: start torchrun with --nproc-per-node {distribution.num_ranks}"
        )
    return distribution


def _example(num_blocks: int, world_size: int) -> str:
    half = num_blocks // 2
    if half == 0 or world_size == 1:
        return f"0-{num_blocks - 1}:{world_size}"
    return f"0-{half - 1}:1,{half}-{num_blocks - 1}:{world_size - 1}"


def check_distribution(distribution: Distribution, num_microbatches: int) -> None:
    """Check that the microbatches of a step can be dealt out evenly to the ranks of every stage.

    Raises:
        UsageError: they cannot.
    """
    for blocks, ranks in distribution.ranges:
        if num_microbatches % len(ranks):
            raise UsageError(
                f"blocks {blocks.start} to {blocks.stop - 1} run on {len(ranks)} ranks, to which "
                f"the {num_microbatches} microbatches of a step cannot be dealt out evenly: change "
                "--global-batch-size, --micro-batch-size or --distribution"
            )
