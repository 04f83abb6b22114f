"""Save and load adapters, each in a separate folder, in Megatron's torch_dist format.

An adapter is saved and loaded apart from the others and from the base model:

    SAVE/french/adapter.json                       what its weights are made by
    SAVE/french/iter_0000100/                      weights, optimizer, learning rate after 100 steps
    SAVE/french/latest_checkpointed_iteration.txt  100

``latest_checkpointed_iteration.txt`` is written when the checkpoint is complete, so a job that is
killed while it saves goes on from the checkpoint before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.utils import (
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)

from megatron_zb import files
from megatron_zb.errors import UsageError
from megatron_zb.lora.adapter_file import FLAG, AdapterJob
from megatron_zb.lora.training import AdapterOptimizer
from megatron_zb.parsing import flag_of

_TRACKER, _ABOUT = "latest_checkpointed_iteration.txt", "adapter.json"


def steps_saved(folder: Path | None, job: AdapterJob, tensor_parallel: int) -> int:
    """Return the steps after which an adapter has been saved last, 0 if it has not.

    Args:
        folder: of the checkpoints of all adapters.
        job: the adapter.
        tensor_parallel: ranks of tensor parallelism.

    Raises:
        UsageError: the checkpoint is of other weights, or its files cannot be read.
    """
    if folder is None:
        return 0
    own = folder / job.name
    tracker = own / _TRACKER
    if not tracker.exists():
        return 0
    text = files.read_tracker(tracker)
    if not text.isdecimal():
        raise UsageError(
            f"{tracker} has {text[:40]!r}, which is no number of steps: write that of a folder "
            "beside it, such as 100 for iter_0000100"
        )
    at = _iteration(own, int(text))
    if not at.is_dir():
        raise UsageError(
            f"{tracker} names step {int(text)}, but there is no {at}: write the step of a folder "
            "that is there, or give another --save"
        )
    about = _read_about(own / _ABOUT)
    for key, value in _about(job, tensor_parallel).items():
        if about.get(key) != value:
            where = f"in the file of {FLAG}" if key in job.shape else f"as {flag_of(key)}"
            raise UsageError(
                f"adapter {job.name} has {key} {_said(value)}, but {own} was trained with "
                f"{_said(about.get(key))}: give that {where}, or another --save"
            )
    return int(text)


def _iteration(own: Path, step: int) -> Path:
    return own / f"iter_{step:07d}"


def _about(job: AdapterJob, tensor_parallel: int) -> dict[str, Any]:
    return {**job.shape, "tensor_model_parallel_size": tensor_parallel}


def _said(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _read_about(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(files.read_text(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no JSON"
        raise UsageError(
            f"{path} cannot be read: {reason}; give another --save, where the adapter begins anew"
        ) from error
    return found if isinstance(found, dict) else {}


class AdapterCheckpoints:
    """Checkpoints of the adapters of a job.

    Args:
        folder: of all adapters.
        metadata: of Megatron's sharded state dicts.
    """

    def __init__(self, folder: Path, metadata: Mapping[str, Any]) -> None:
        self._folder, self._metadata = folder, dict(metadata)

    def save(
        self, job: AdapterJob, adapter: AdapterOptimizer, step: int, tensor_parallel: int
    ) -> None:
        """Save an adapter after a number of steps; collective over the job."""
        own = self._folder / job.name
        into = _iteration(own, step)
        is_first = dist.get_rank() == 0
        if is_first:
            into.mkdir(parents=True, exist_ok=True)
            files.write_text(own / _ABOUT, f"{json.dumps(_about(job, tensor_parallel))}\n")
        dist.barrier()
        state = self._state(adapter, is_loading=False)
        dist_checkpointing.save(state, str(into))
        dist.barrier()
        if is_first:
            files.write_text(own / _TRACKER, f"{step}\n")

    def load(self, job: AdapterJob, adapter: AdapterOptimizer, step: int) -> None:
        """Load an adapter that has been saved after a number of steps; collective over the job."""
        state = self._state(adapter, is_loading=True)
        loaded = dist_checkpointing.load(state, str(_iteration(self._folder / job.name, step)))
        for name, weight in adapter.named_weights().items():
            weight.data.copy_(loaded["weights"][name])
        adapter.optimizer.load_state_dict(loaded["optimizer"])
        adapter.scheduler.load_state_dict(loaded["scheduler"])

    def _state(self, adapter: AdapterOptimizer, *, is_loading: bool) -> dict[str, Any]:
        weights = {name: _sharded(name, w) for name, w in adapter.named_weights().items()}
        return {
            "weights": weights,
            "optimizer": adapter.optimizer.sharded_state_dict(
                weights, is_loading, metadata=self._metadata
            ),
            "scheduler": adapter.scheduler.state_dict(),
        }


def _sharded(name: str, weight: Any) -> Any:
    if getattr(weight, "tensor_model_parallel", False):
        return make_tp_sharded_tensor_for_checkpoint(weight, name, weight.partition_dim)
    return make_sharded_tensor_for_checkpoint(weight, name)
