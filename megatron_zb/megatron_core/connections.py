"""Connections of a pipeline's ranks: channels of the steps, and the watchdog over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.distributed_c10d import _get_default_store

from megatron_zb import files
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.step import Step, StepPart, device, on_gpu
from megatron_zb.runtime.channels import Channels, GroupOptions, KnownShapes, ShapedChannels
from megatron_zb.runtime.observer import Observer
from megatron_zb.runtime.progress import RankProgress
from megatron_zb.runtime.watchdog import Watchdog, WatchedRank

_PIPELINE = "pp"

PHASES = {
    ("megatron.core.dist_checkpointing.", "save"): "writing a checkpoint",
    ("megatron.training.checkpointing", "save_checkpoint"): "writing a checkpoint",
    ("megatron.core.dist_checkpointing.", "load"): "reading a checkpoint",
    ("megatron.core.optimizer.", "step"): "in the optimizer step",
    ("megatron.core.distributed.finalize_model_grads", "finalize_model_grads"): "reducing "
    "gradients",
    ("megatron.training.training", "evaluate"): "in an evaluation",
}
"""Megatron's activities between two steps, by its functions: for the watchdog's report."""


class ChannelsPart(StepPart):
    """Connects the ranks of a pipeline at the first step, which is collective over the job.

    Where every message may have another shape, headers travel ahead of messages, unless all ranks
    know the shapes.
    """

    def __init__(self, options: GroupOptions | None = None) -> None:
        self._options = options or GroupOptions()
        self.channels: Channels | None = None
        self._headers: Channels | None = None

    @property
    def exchanges_no_shapes(self) -> bool:
        """Whether no step until now had messages whose shape their reader did not know."""
        return self._headers is None

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        if self.channels is None:
            self.channels = self._connected(step, device())
        channels = self.channels
        channels.activation_memory = step.memory
        step.channels = step.transport = channels
        stages = step.physical.placement.num_stages
        if step.made_up is not None:
            step.transport = step.made_up
        elif step.shapes is not None:
            step.transport = KnownShapes(channels, step.shape_of_message, stages)
        elif step.shapes_vary:
            if self._headers is None:
                self._headers = self._connected(step, "cpu", "gloo")
            step.transport = ShapedChannels(channels, self._headers, stages)
        with channels.capturing(step.captured):
            yield

    def _connected(self, step: Step, where: Any, backend: str | None = None) -> Channels:
        placement = step.program.schedule.placement
        return Channels(
            step.physical.pipeline_ranks(step.pg_collection.pp),
            placement,
            where,
            more_peers=step.program.schedule.rules.more_peers(placement),
            backend=backend,
            options=self._options,
        )

    def close(self) -> None:
        for channels in filter(None, (self.channels, self._headers)):
            channels.close()
        self.channels = self._headers = None


class WatchPart(StepPart):
    """Tracks the progress of this rank, and lets a watchdog end a job that has stopped.

    Args:
        timeout: seconds without progress after which the watchdog asks all ranks; None for no
            watchdog.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self.timeout = timeout
        self.progress = RankProgress()
        self._watchdog: Watchdog | None = None
        self._is_watching = False

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        if not self._is_watching:
            self._is_watching = True
            self._watch(step)
        if step.captured:  # no step: nothing runs
            yield
            return
        if step.channels is not None:
            step.channels.until_taken = self.progress.until_taken
        with self.progress.step():
            yield

    def _watch(self, step: Step) -> None:
        schedule = step.program.schedule
        self.progress = RankProgress(on_gpu=on_gpu(), phases=PHASES, schedule=schedule)
        if self.timeout is not None:
            ranks = step.physical.pipeline_ranks(step.pg_collection.pp)
            me, job = torch.distributed.get_rank(), range(torch.distributed.get_world_size())
            mirrored = step.physical.mirrored
            place = WatchedRank(ranks.index(me), tuple(ranks), tuple(job), mirrored)
            store = torch.distributed.PrefixStore("megatron_zb/watchdog", _get_default_store())
            self._watchdog = Watchdog(self.progress, place, store, self.timeout)

    def observers(self, step: Step) -> Sequence[Observer]:
        return (self.progress,)

    def forget_marks(self) -> None:
        """Wait for the device, and let the watchdog ask it nothing until the next step."""
        if on_gpu():
            torch.cuda.synchronize()
        self.progress.forget_marks()

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
        self._watchdog, self._is_watching = None, False

    def abandon(self) -> None:
        if self._watchdog is not None:
            self._watchdog.begin_to_stop()


def group_options(
    config_path: str | None = None, high_priority_groups: Sequence[str] = ()
) -> GroupOptions:
    """Return Megatron's settings of its pipeline group over the defaults of :class:`GroupOptions`.

    Args:
        config_path: the YAML file of ``--nccl-communicator-config-path``.
        high_priority_groups: the groups of ``--high-priority-stream-groups``.

    Raises:
        UsageError: the file cannot be read, or has no settings by the names of groups.
    """
    nccl: dict[str, Any] = dict(GroupOptions().nccl)
    if config_path is not None:
        nccl |= _settings(config_path)
    if _PIPELINE in high_priority_groups:
        nccl["is_high_priority_stream"] = True
    if nccl.get("min_ctas", 0) > nccl["max_ctas"]:
        nccl["max_ctas"] = nccl["min_ctas"]
    return GroupOptions(nccl=nccl)


def _settings(config_path: str) -> dict[str, Any]:
    flag = f"--nccl-communicator-config-path {config_path}"
    try:
        found = yaml.safe_load(files.read_text(Path(config_path)))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} cannot be read: {' '.join(str(error).split())}") from None
    settings = (found or {}).get(_PIPELINE) or {} if isinstance(found or {}, dict) else None
    if not isinstance(settings, dict):
        raise UsageError(
            f"{flag} is no table of settings by the names of process groups, such as "
            "pp: {max_ctas: 4}"
        )
    return settings
