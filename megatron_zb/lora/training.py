"""The optimizers of several adapters, and the reduction of their gradients.

Each adapter has what it would have in a separate run of Megatron: data parallelism over its
weights, an optimizer, a schedule of its learning rate, and a loss scale. They step one after
another when the pipeline is empty, so an optimizer may communicate with other pipeline ranks: it
clips by the norm of the whole adapter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron_zb.errors import UsageError
from megatron_zb.lora.layers import DIVIDED


class TrainedWeights(Protocol):
    """The weights of one training in one model chunk: a module, with names in the whole model."""

    config: Any

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        """Return the weights by name, such as ``decoder.layers.3.mlp.linear_fc1.down``."""


class SelectableWeights(Protocol):
    """The weights of several trainings in the model chunks of a rank."""

    def select(self, chunk: int, name: str | None) -> None:
        """Let a chunk compute with those of a training; those of others are not touched."""


class Stepped(NamedTuple):
    """What an optimizer has done.

    Args:
        is_done: whether it has changed the weights.
        norm: of the gradient; None if it was not computed.
        rate: learning rate of the step.
    """

    is_done: bool
    norm: float | None
    rate: float

    @property
    def is_finite(self) -> bool:
        """Whether the norm is a number, where it is known."""
        return self.norm is None or math.isfinite(self.norm)


@dataclass(frozen=True)
class AdapterOptimizer:
    """One adapter in training.

    Args:
        chunks: its weights in each model chunk that has any, wrapped for data parallelism.
        optimizer: of Megatron, over these.
        scheduler: of the learning rate and the weight decay.
        samples: of a step, over all replicas.
    """

    chunks: Sequence[Any]
    optimizer: Any
    scheduler: Any
    samples: int

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def clear(self) -> None:
        """Set the gradients to zero."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def reduce(self) -> None:
        """Average the gradients over the replicas, and add up what sequence parallelism divides."""
        for chunk in self.chunks:
            chunk.finish_grad_sync()
        divided = [w.main_grad for w in self.weights() if getattr(w, DIVIDED, False)]
        if divided:
            whole = _flatten_dense_tensors(divided)
            dist.all_reduce(whole, group=parallel_state.get_tensor_model_parallel_group())
            for gradient, summed in zip(
                divided, _unflatten_dense_tensors(whole, divided), strict=True
            ):
                gradient.copy_(summed)

    def has_finite_gradients(self) -> bool:
        """Return whether all gradients on this rank are numbers."""
        sums = [b.grad_data.sum(dtype=torch.float32) for c in self.chunks for b in c.buffers]
        return all(bool(it.isfinite()) for it in sums)

    def step(self) -> Stepped:
        """Step the optimizer and the schedule of its learning rate."""
        rate = self.rate
        is_done, norm, _ = self.optimizer.step()
        if is_done:
            self.scheduler.step(increment=self.samples)
        return Stepped(bool(is_done), None if norm is None else float(norm), rate)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights and their gradients on this rank; the optimizer has more."""
        weights = sum(w.numel() * w.element_size() for w in self.weights())
        gradients = (b.grad_data for c in self.chunks for b in c.buffers)
        return weights + sum(it.numel() * it.element_size() for it in gradients)

    def weights(self) -> Iterable[Any]:
        """Yield the weights on this rank."""
        for chunk in self.chunks:
            yield from chunk.module.parameters()

    def named_weights(self) -> dict[str, Any]:
        """Return the weights on this rank, by their names in the whole model."""
        return {n: w for chunk in self.chunks for n, w in chunk.module.named_weights().items()}


class AdapterOptimizers:
    """The adapters of a model: selected by the passes of their microbatches, stepped at the end.

    Args:
        weights: of the adapters, by kind.
        each: their training, by name.
        config: of the model.
    """

    def __init__(
        self,
        weights: Sequence[SelectableWeights],
        each: Mapping[str, AdapterOptimizer],
        config: Any,
    ) -> None:
        self._weights, self._config = weights, config
        self.each = each

    def select(self, chunk: int, adapter: str) -> None:
        """Let a chunk compute with an adapter, whose loss scale counts from now on."""
        for weights in self._weights:
            weights.select(chunk, adapter)
        self._config.grad_scale_func = self.each[adapter].optimizer.scale_loss

    def select_everywhere(self, chunks: int, adapter: str) -> None:
        """Let all model chunks compute with an adapter, as an evaluation does."""
        for chunk in range(chunks):
            self.select(chunk, adapter)

    def update(self, chunk: int, adapter: str) -> None:
        """Leave the update to the end of the step, when the whole pipeline has its gradients."""

    def gradients_ready(self, chunk: int, adapter: str) -> None:
        """Leave the gradients to the end of the step."""

    def catch_up(self, adapter: str) -> None:
        """Do nothing: a step of the pipeline has one step of each adapter."""

    # --- after a step of the pipeline

    def end_step(self, adapter: str) -> None:
        """Make the gradients of an adapter complete; collective over the replicas."""
        self.each[adapter].reduce()

    def is_finite(self, adapter: str) -> bool:
        """Return whether the gradients of an adapter are numbers, as far as this rank knows."""
        return self.each[adapter].has_finite_gradients()

    def stepped(self, adapter: str) -> list[Stepped]:
        """Step the optimizer of an adapter, and return what it has done; collective over the model.

        With steps within a step of the pipeline, these have been done.
        """
        return [self.each[adapter].step()]


def wrapped(weights: Sequence[TrainedWeights], ddp_config: Any, name: str) -> list[Any]:
    """Wrap the weights of an adapter for data parallelism; collective over the model.

    Args:
        weights: of the adapter in each chunk of this rank; those without any are left out.
        ddp_config: Megatron's.
        name: of the adapter, for errors.

    Raises:
        UsageError: a pipeline rank has no layer of the adapter.
    """
    from megatron.core.distributed import DistributedDataParallel

    own = [it for it in weights if it.named_weights()]
    group = parallel_state.get_pipeline_model_parallel_group()
    counts: list[int] = [0] * group.size()
    dist.all_gather_object(counts, len(own), group=group)
    if 0 in counts:
        raise UsageError(
            f"adapter {name}: pipeline rank {counts.index(0)} has none of its modules: give it "
            "modules that every rank has, such as linear_proj, or fewer pipeline ranks"
        )
    config = get_model_config(own[0])
    return [DistributedDataParallel(config, ddp_config, it, disable_bucketing=True) for it in own]
