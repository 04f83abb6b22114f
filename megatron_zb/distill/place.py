"""The position of this rank in a distribution of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from megatron_zb.distill.lanes import Lanes
from megatron_zb.distill.schedule.distribution import Distribution
from megatron_zb.errors import UsageError
from megatron_zb.runtime.channels import new_groups

_ONE_RANK = Lanes()


class Holders(NamedTuple):
    """Process groups of the ranks that hold the same parameters, and sum their gradients."""

    dense: dist.ProcessGroup
    experts: dist.ProcessGroup
    """Of experts that are split over ranks; the same group if none are."""

    def close(self) -> None:
        """Destroy the groups; collective over their ranks."""
        for group in dict.fromkeys(self):
            dist.destroy_process_group(group)


@dataclass(frozen=True)
class Place:
    """The stage of one rank, and its position there."""

    blocks: range
    places: tuple[int, ...]
    """Places of the stage: ranks, or groups of ranks that share its blocks."""
    stage: int
    is_first: bool
    is_last: bool
    copies: Holders
    lanes: Lanes = _ONE_RANK
    shares_last: bool = False
    """Whether the next stage begins with the last block of this one, for further candidates."""

    @classmethod
    def of_this_rank(cls, distribution: Distribution, lanes: Lanes = _ONE_RANK) -> Place:
        """Find this rank's stage, and connect the ranks of every stage; collective over all ranks.

        A rank beyond those of the distribution has no blocks, and idles.
        """
        rank = dist.get_rank()
        mine = lanes.place_of(rank)
        if mine >= distribution.num_ranks:
            copies = _copies(lanes, (mine,))
            return cls(range(0), (mine,), -1, False, False, copies, lanes)
        stage = distribution.stage_on(mine)
        blocks, places = distribution.ranges[stage]
        is_last = stage == len(distribution.ranges) - 1
        copies = _copies(lanes, places)
        return cls(blocks, tuple(places), stage, stage == 0, is_last, copies, lanes)

    @property
    def is_leader(self) -> bool:
        """Whether this rank is of the first place of its stage."""
        return self.lanes.place_of(dist.get_rank()) == self.places[0]

    def leader_of(self, distribution: Distribution, stage: int) -> int:
        """Return the rank of another stage's first place, in the lane of this rank."""
        return self.lanes.rank_at(distribution.ranges[stage][1][0], dist.get_rank())

    @property
    def lane(self) -> int:
        """Position of this rank among those that share the blocks of its place."""
        return dist.get_rank() % self.lanes.size

    @property
    def tensor_lane(self) -> int:
        """Position of this rank in its tensor-parallel group."""
        return self.lanes.tensor_lane(dist.get_rank())


def _copies(lanes: Lanes, places: Sequence[int]) -> Holders:
    rank = dist.get_rank()
    dense = [other for place in places for other in lanes.alike(place, rank)]
    return Holders(*new_groups([dense, [lanes.rank_at(place, rank) for place in places]]))


def parse_distribution(
    text: str,
    num_blocks: int,
    world_size: int | None,
    what: str = "block",
    lanes: Lanes = _ONE_RANK,
) -> Distribution:
    """Parse `--distribution 0-3:1,4-7:2`: ranges of blocks, each with its number of places.

    `world_size` is the number of ranks to check against; None for no such check. `what` is
    distributed: blocks, or the candidates of a library. `lanes` are the ranks of a place.

    Raises:
        UsageError: it cannot be parsed, or does not fit the blocks or the ranks.
    """
    example = _example(num_blocks, (world_size or 2 * lanes.size) // lanes.size)
    try:
        distribution = Distribution.parse(text)
    except UsageError as error:
        raise UsageError(f"--distribution: {error}; here, for example, {example}") from None
    if distribution.num_blocks != num_blocks:
        raise UsageError(
            f"--distribution '{text}' ends with {what} {distribution.num_blocks - 1}, but the last "
            f"{what} is {num_blocks - 1}: give all of them, such as {example}"
        )
    ranks = distribution.num_ranks * lanes.size
    if world_size is not None and ranks != world_size:
        raise UsageError(
            f"--distribution '{text}' is for {ranks} ranks, but {world_size} were started: start "
            f"torchrun with --nproc-per-node {ranks}"
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
