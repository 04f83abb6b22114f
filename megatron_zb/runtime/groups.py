"""Process groups, of which every rank of the job names its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_zb.errors import UsageError


@dataclass(frozen=True)
class GroupOptions:
    """Options of process groups; the defaults suit messages between pipeline ranks.

    ``nccl`` has attributes of ``ProcessGroupNCCL.Options`` and of its ``config`` by their names. A
    receive that waits for its message occupies its thread blocks, which then compute nothing, so
    few are asked for; their kernels start ahead of others. Other backends ignore ``nccl``.
    """

    nccl: Mapping[str, Any] = field(
        default_factory=lambda: {"max_ctas": 2, "is_high_priority_stream": True}
    )

    def with_one_block(self) -> GroupOptions:
        """Return these options, with kernels of one thread block: a rank may have many links."""
        others = {name: value for name, value in self.nccl.items() if name != "min_ctas"}
        return replace(self, nccl={**others, "max_ctas": 1})

    def for_backend(self, backend: str) -> Any:
        """Return the ``pg_options`` for ``dist.new_group``.

        Raises:
            UsageError: this torch's NCCL has no option of one of the names.
        """
        if "nccl" not in backend:
            return None
        options: Any = dist.ProcessGroupNCCL.Options()
        for name, value in self.nccl.items():
            owner = options if hasattr(options, name) else options.config
            if not hasattr(owner, name):
                raise UsageError(
                    f"NCCL's process groups have no option '{name}' in torch {torch.__version__}: "
                    "take it out of pp in the file of --nccl-communicator-config-path"
                )
            setattr(owner, name, value)
        return options


def new_groups(
    mine: Sequence[Sequence[int]],
    backend: str | None = None,
    options: GroupOptions | None = None,
) -> list[dist.ProcessGroup]:
    """Make a group for each of the rank lists that this rank names, and belongs to.

    Collective over all ranks of the job: each makes the groups of all, in one order. Ranks that
    name the same list share its group; the same ranks in another order have another one. The groups
    have the timeout of the job.
    """
    options = options or GroupOptions(nccl={})
    wanted = [tuple(members) for members in mine]
    everyone: list[list[tuple[int, ...]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, wanted)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for members in sorted({m for named in everyone for m in named}):
        group = dist.new_group(
            list(members),
            timeout=_timeout_of_job(),
            backend=backend,
            pg_options=options.for_backend(backend or dist.get_backend()),
        )
        if isinstance(group, dist.ProcessGroup):  # ranks outside get a number instead
            groups[members] = group
    return [groups[members] for members in wanted]


def _timeout_of_job() -> timedelta | None:
    """Return the timeout given to ``init_process_group``, None for torch's default."""
    world: Any = dist.group.WORLD
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None
