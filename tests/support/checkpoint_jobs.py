"""Jobs of small models that write checkpoints by megatron-core and go on from them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpt_cases
import torch
import torch.distributed.checkpoint as dcp
from gpt_cases import GPTCase
from megatron.core import dist_checkpointing
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_zb.megatron_core.random_streams import global_parameters
from megatron_zb.train import checkpoint


class Job:
    """The model and the optimizer of one run, which saves and loads them."""

    def __init__(self, case: GPTCase, adapter: Any, chunks: list[Any]) -> None:
        self.chunks = chunks
        self._function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        self._distributed = case.distributed_optimizer
        self._case = case
        self.trainee: Any = SimpleNamespace(
            chunks=chunks, optimizer=gpt_cases.optimizer(case, chunks)
        )
        if not hasattr(self.trainee.optimizer, "chained_optimizers"):
            self.trainee.optimizer.chained_optimizers = [self.trainee.optimizer]

    def train(self, steps: int) -> list[float]:
        """Return the losses of the last step, which one rank of a pipeline has."""
        records: list[Any] = []
        for _ in range(steps):
            gpt_cases._zero_gradients(self.chunks)
            data = [gpt_cases.microbatches(self._case, 4) for _ in self.chunks]
            records = gpt_cases.forward_backward(self._function, self.chunks, data, 4)
            self.trainee.optimizer.step()
        found: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, [float(r["lm loss"]) for r in records])
        return [loss for losses in found for loss in losses]

    def save(self, folder: Path) -> None:
        metadata = checkpoint._metadata(self._distributed)
        state = checkpoint._state(self.trainee, metadata, loading=False)
        checkpoint.write(folder, 1, state, checkpoint._storable(metadata))

    def contents(self, folder: Path) -> dict[str, torch.Tensor]:
        """Return what is in the checkpoint, by Megatron's names.

        Read by torch: Megatron's own function for this fails with torch 2.15.
        """
        reader = FileSystemReader(checkpoint.checkpoint_path(folder, 1))
        stored = reader.read_metadata().state_dict_metadata
        found: dict[str, Any] = {
            name: torch.empty(about.size, dtype=about.properties.dtype)
            for name, about in stored.items()
            if isinstance(about, TensorStorageMetadata)
        }
        dcp.load(found, storage_reader=reader, no_dist=True)
        return found

    def load(self, folder: Path) -> None:
        if self._distributed:
            checkpoint._prepare_torch_adam(self.trainee.optimizer)
        metadata = checkpoint._metadata(self._distributed)
        request = checkpoint._state(self.trainee, metadata, loading=True)
        state = dist_checkpointing.load(request, str(checkpoint.checkpoint_path(folder, 1)))
        for chunk, key in zip(self.chunks, checkpoint._model_keys(self.trainee), strict=True):
            chunk.module.load_state_dict(state[key])
        self.trainee.optimizer.load_state_dict(state["optimizer"])
        if self._distributed:
            checkpoint._separate_steps(self.trainee.optimizer)

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: parameter.detach().clone()
            for chunk in self.chunks
            for name, parameter in global_parameters(chunk).items()
        }
