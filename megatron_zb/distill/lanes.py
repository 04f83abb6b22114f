"""The ranks of one place of the relay, which share every block of the place."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Lanes:
    """Sizes of the groups of ranks that share a block.

    A place has ``tensor * expert`` consecutive ranks, those of a tensor-parallel group next to one
    another, as in Megatron. Messages go between ranks of one lane. Each expert-parallel lane has
    separate microbatches.
    """

    tensor: int = 1
    expert: int = 1

    @classmethod
    def of(cls, args: argparse.Namespace) -> Lanes:
        """Return the sizes that the arguments give."""
        return cls(args.tensor_model_parallel_size, args.expert_model_parallel_size)

    @property
    def size(self) -> int:
        return self.tensor * self.expert

    def place_of(self, rank: int) -> int:
        """Return the place of a rank."""
        return rank // self.size

    def rank_at(self, place: int, rank: int) -> int:
        """Return the rank of a place in the lane of `rank`."""
        return place * self.size + rank % self.size

    def tensor_lane(self, rank: int) -> int:
        """Return a rank's position in its tensor-parallel group."""
        return rank % self.tensor

    def expert_lane(self, rank: int) -> int:
        """Return a rank's position in its expert-parallel group."""
        return rank % self.size // self.tensor

    def alike(self, place: int, rank: int) -> list[int]:
        """Return the ranks of a place that have what `rank` has of parameters outside experts."""
        first = place * self.size + self.tensor_lane(rank)
        return [first + lane * self.tensor for lane in range(self.expert)]
