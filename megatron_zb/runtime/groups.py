"""Process groups of which every rank of the job names its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


def new_groups(
    mine: Sequence[Sequence[int]], backend: str | None = None
) -> list[dist.ProcessGroup]:
    """A new group for each of the rank lists that this rank names, and belongs to.

    Collective over all ranks of the job: each makes the groups of all, in one order. Ranks that
    name the same list share its group.
    """
    wanted = [tuple(members) for members in mine]
    everyone: list[list[tuple[int, ...]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, wanted)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for members in sorted({m for named in everyone for m in named}):
        group = dist.new_group(list(members), backend=backend)
        if isinstance(group, dist.ProcessGroup):  # ranks outside get a number instead
            groups[members] = group
    return [groups[members] for members in wanted]
