"""Jobs of small models that write checkpoints by megatron-core and go on from them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpt_cases
import torch
import torch.distributed.checkpoint as dcp
from gpt_cases import GPTCase
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_zb.megatron_core.checkpoints import without_padding
from megatron_zb.megatron_core.random_streams import global_parameters
from megatron_zb.train import checkpoint


class Job:
    """The model and the optimizer of one run, which saves and loads them."""

    def __init__(self, case: GPTCase, adapter: Any, chunks: list[Any]) -> None:
        self.chunks = chunks
        self._function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        self._distributed = case.distributed_optimizer
        self._case = case
        self._layout: dict[str, Any] = dict(checkpoint.LAYOUT)
        if self._distributed:
            self._layout["distrib_optim_sharding_type"] = "fully_reshardable"
            self._layout["distrib_optim_fully_reshardable_mem_efficient"] = False
        self.optimizer: Any = gpt_cases.optimizer(case, chunks)
        if not hasattr(self.optimizer, "chained_optimizers"):
            self.optimizer.chained_optimizers = [self.optimizer]

    def train(self, steps: int) -> list[float]:
        """Return the losses of the last step, which one rank of a pipeline has."""
        records: list[Any] = []
        for _ in range(steps):
            gpt_cases._zero_gradients(self.chunks)
            data = [gpt_cases.microbatches(self._case, 4) for _ in self.chunks]
            records = gpt_cases.forward_backward(self._function, self.chunks, data, 4)
            self.optimizer.step()
        found: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, [float(r["lm loss"]) for r in records])
        return [loss for losses in found for loss in losses]

    def save(self, folder: Path) -> None:
        checkpoint.write(folder, 1, self._state(loading=False), self._layout)

    def _state(self, *, loading: bool) -> dict[str, Any]:
        """Return model and optimizer as Megatron's sharded tensors."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {**self._layout, "dp_cp_group": group}
        state = {
            key: chunk.sharded_state_dict(metadata=metadata)
            for key, chunk in checkpoint.by_key(self.chunks).items()
        }
        with without_padding(self.optimizer.chained_optimizers):
            optimizer = self.optimizer.sharded_state_dict(
                state, is_loading=loading, metadata=metadata
            )
        return {**state, "optimizer": optimizer}

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
            _prepare_torch_adam(self.optimizer)
        request = self._state(loading=True)
        state = dist_checkpointing.load(request, str(checkpoint.checkpoint_path(folder, 1)))
        for key, chunk in checkpoint.by_key(self.chunks).items():
            chunk.load_state_dict(state[key])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._distributed:
            _separate_steps(self.optimizer)

    def losses(self, folder: Path, *, begins: bool) -> list[float]:
        """Return the losses of two steps after a checkpoint, which the job writes if it begins."""
        if begins:
            self.train(2)
            self.save(folder)
        else:
            self.load(folder)
        return self.train(1) + self.train(1)

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: parameter.detach().clone()
            for chunk in self.chunks
            for name, parameter in global_parameters(chunk).items()
        }


def _prepare_torch_adam(optimizer: Any) -> None:
    """Let megatron-core's distributed optimizer load a checkpoint into torch's Adam.

    Where neither Transformer Engine nor Apex is installed, megatron-core 0.16.1 uses torch's Adam,
    but cannot load its state: it expects the state to exist, expects a `step` in it that the
    checkpoint holds elsewhere, and lets all parameters share one `step`, which then counts too
    fast (see _separate_steps).
    """
    for part, adam in _torch_adams(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                adam.state[parameter] = _first_state(parameter)
        part._set_main_param_and_optimizer_states = partial(_set_states, part)


def _first_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _torch_adams(optimizer: Any) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            yield part, part.optimizer


def _separate_steps(optimizer: Any) -> None:
    """Copy the `step` tensor that parameters share after loading, one copy for each."""
    for _, adam in _torch_adams(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()


def _set_states(part: Any, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    """Set a parameter's states as megatron-core's own method, keeping the `step` already loaded."""
    step = part._get_main_param_and_optimizer_states(parameter)["step"]
    type(part)._set_main_param_and_optimizer_states(part, parameter, {"step": step, **tensors})
