"""Rendezvouss of the ranks before a training, with the store of a job."""

from __future__ import annotations

import torch.distributed as dist
from ranks import RankPools

from megatron_zb.job.agreement import Rendezvous


def met(places: list[str]) -> list[bool]:
    """Whether the ranks have met at each place, all with the same values."""
    rendezvous = Rendezvous(dist.get_rank(), dist.get_world_size(), 60)
    return [rendezvous.agree(place, {"--num-layers": 4}, None) for place in places]


def test_ranks_meet_at_one_place_after_the_other(ranks: RankPools) -> None:
    assert ranks(2).run(met, places=["first", "second"]) == [[True, True]] * 2
