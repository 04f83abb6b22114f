"""The launcher, noting the collectives between the last pass of an iteration and the next first.

Each rank writes a JSON line for every such time, with the name of each collective and the ranks
that take part, into a file of its own in the folder that COLLECTIVES names.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_zb.launch import main
from megatron_zb.runtime.autograd_stage import AutogradStage
from megatron_zb.runtime.channels import Channels

NAMES = """
all_reduce all_reduce_coalesced all_gather all_gather_into_tensor all_gather_object broadcast
broadcast_object_list barrier monitored_barrier reduce reduce_scatter reduce_scatter_tensor gather
gather_object scatter scatter_object_list all_to_all all_to_all_single
_all_gather_base _reduce_scatter_base
""".split()


class Between:
    """What happens between the end of an iteration's passes and the next forward."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: list[tuple[str, list[int]]] | None = None

    def note(self, name: str, group: Any) -> None:
        if self._seen is not None:
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            self._seen.append((name, ranks))

    def begin(self) -> None:
        self._seen = []

    def end(self) -> None:
        if self._seen is not None:
            with self._file.open("a") as lines:
                lines.write(json.dumps(self._seen) + "\n")
        self._seen = None


def watch(between: Between) -> None:
    for name in NAMES:
        setattr(dist, name, _noted(getattr(dist, name), between))
    finish, forward = Channels.finish, AutogradStage.forward

    def finished(self: Channels) -> None:
        finish(self)
        between.begin()

    def began(self: AutogradStage, microbatch: int, activation: Any) -> Any:
        between.end()
        return forward(self, microbatch, activation)

    Channels.finish, AutogradStage.forward = finished, began  # type: ignore[method-assign]


def _noted(function: Any, between: Between) -> Any:
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        between.note(function.__name__, signature.bind(*args, **keywords).arguments.get("group"))
        return function(*args, **keywords)

    return call


if __name__ == "__main__":
    watch(Between(Path(os.environ["COLLECTIVES"]) / os.environ["RANK"]))
    main(sys.argv[1:])
