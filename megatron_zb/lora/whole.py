"""Whole models in one pipeline: every training has a copy of all weights of the base.

This is for trials of one small model, with other learning rates, data or seeds (several models in
one pipeline are the subject of *Hydra*, arXiv 2110.08633). A model chunk is built once. Before a
pass of a training, its weights take their places in the layers of the chunk: a pass of autograd
keeps those that it has been computed with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model

from megatron_zb.errors import UsageError
from megatron_zb.lora.layers import DIVIDED
from megatron_zb.megatron_core.random_streams import global_modules

_NORMS_OF_HEADS = "q_layernorm", "k_layernorm"
"""Norms that each tensor-parallel rank applies to its own heads."""


class _Place(NamedTuple):
    """Where a layer has a weight."""

    module: torch.nn.Module
    name: str


class CopiedWeights(torch.nn.Module):
    """The weights of one training in one model chunk, as a module that data parallelism can wrap.

    Args:
        config: of the model.
        chunk: the model chunk, with the weights to begin with.
        only_trained: whether weights that are frozen are left out, and are those of the chunk.
    """

    def __init__(self, config: Any, chunk: Any, *, only_trained: bool = False) -> None:
        super().__init__()
        self.config = config
        self._places: dict[str, _Place] = {}
        self._named: dict[str, torch.nn.Parameter] = {}
        for place, module in global_modules(chunk).items():
            for name, weight in module._parameters.items():
                if weight is not None and (weight.requires_grad or not only_trained):
                    whole = f"{place}.{name}" if place else name
                    self._add(whole, _Place(module, name), weight)

    def _add(self, name: str, place: _Place, weight: torch.nn.Parameter) -> None:
        copy = torch.nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
        copy.__dict__.update(weight.__dict__)  # Megatron's: how it is sharded, what it counts as
        is_norm_of_heads = any(norm in name for norm in _NORMS_OF_HEADS)
        if is_norm_of_heads and self.config.tensor_model_parallel_size > 1:
            setattr(copy, DIVIDED, True)
        self._places[name], self._named[name] = place, copy
        self.register_parameter(name.replace(".", "/"), copy)

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        """Return the weights by their names in the whole model."""
        return dict(self._named)

    def put(self) -> None:
        """Let the layers of the chunk compute with these weights."""
        for name, (module, own) in self._places.items():
            module._parameters[own] = self._named[name]


class WholeModels:
    """Copies of the weights of a rank's model chunks, one for each training.

    Args:
        chunks: the model chunks, with the weights of the base.
        names: of the trainings that have copies.
        only_trained: whether frozen weights are there once, for all.
    """

    def __init__(
        self, chunks: Sequence[Any], names: Sequence[str], *, only_trained: bool = False
    ) -> None:
        config = get_model_config(chunks[0])
        plain = [unwrap_model(chunk) for chunk in chunks]
        self.weights: dict[str, list[CopiedWeights]] = {
            name: [CopiedWeights(config, chunk, only_trained=only_trained) for chunk in plain]
            for name in names
        }
        """Weights of each training in each chunk."""
        self._base = [_Original(chunk) for chunk in plain]
        self._selected: list[str | None] = [None] * len(chunks)

    def select(self, chunk: int, name: str | None) -> None:
        """Let a chunk compute with the weights of a training from now on, or with the base."""
        own = name if name in self.weights else None
        if own == self._selected[chunk]:
            return
        self._selected[chunk] = own
        (self._base[chunk] if own is None else self.weights[own][chunk]).put()


class _Original:
    """The weights that a model chunk was built with."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._weights = [
            (module, name, weight)
            for module in chunk.modules()
            for name, weight in module._parameters.items()
        ]

    def put(self) -> None:
        """Let the chunk compute with them again."""
        for module, name, weight in self._weights:
            module._parameters[name] = weight


# --- memory


@dataclass(frozen=True)
class CopyBytes:
    """Bytes of one training on a rank.

    Args:
        weights: of the copies.
        gradients: of the buffers that gradients are summed in.
        states: of the optimizer, with its copies of the weights in float32.
    """

    weights: int
    gradients: int
    states: int

    @classmethod
    def of(cls, chunks: Sequence[Any], arguments: Any, replicas: int) -> CopyBytes:
        """Count them from the weights of model chunks.

        Args:
            arguments: of Megatron-LM, of which precision and optimizer follow.
            replicas: ranks over which the distributed optimizer shards its states.
        """
        sizes = [(w.numel(), w.element_size()) for c in chunks for w in c.parameters()]
        of_sum = 4 if arguments.accumulate_allreduce_grads_in_fp32 else 0
        per_number = 8 if arguments.optimizer == "adam" else 4
        states = sum(n * (per_number + (4 if size < 4 else 0)) for n, size in sizes)
        return cls(
            sum(n * size for n, size in sizes),
            sum(n * max(size, of_sum) for n, size in sizes),
            states // replicas if arguments.use_distributed_optimizer else states,
        )

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.states


def check_fits(names: Sequence[str], each: CopyBytes, free: int) -> None:
    """Refuse copies that no rank has room for, before the first one is made; collective.

    Args:
        names: of the trainings that have copies.
        each: bytes of one on this rank.
        free: bytes that are free on this rank.

    Raises:
        UsageError: on every rank, with the number that fits on the rank with the least room.
    """
    fits = free // max(each.total, 1)
    of_all: list[tuple[int, int, int]] = [(0, 0, 0)] * dist.get_world_size()
    dist.all_gather_object(of_all, (fits, each.total, free))
    least = min(range(len(of_all)), key=lambda rank: of_all[rank])
    fits, needed, has = of_all[least]
    if fits >= len(names):
        return
    what = f"{fits} of them fit: leave out {', '.join(names[fits:])}" if fits else "none fits"
    raise UsageError(
        f"{len(names)} adapters with weights: all take {_mib(len(names) * needed)} on rank "
        f"{least}, where {_mib(has)} are free: {what}, or give more pipeline or tensor-parallel "
        "ranks"
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def free_bytes(chunk: Any) -> int:
    """Return the bytes that are free for this rank where a model chunk is.

    That is on its device, or this rank's share of the host's memory.
    """
    if next(chunk.parameters()).is_cuda:
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + unused
    return _available_on_host() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _available_on_host() -> int:
    """Return the bytes that programs can take, those of the cache of files included."""
    with suppress(OSError):
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
        if found:
            return 1024 * int(found[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
