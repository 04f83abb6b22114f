"""Optimizer steps of adapters within a step of the pipeline, which stays filled between them.

A step of an optimizer clips by the norm of the whole adapter, to which every pipeline rank adds its
part. No rank may wait for that in the middle of its passes, or ranks would wait for one another.
So:

1. When the last B of an adapter's step has run on all chunks of a rank, the rank reduces its
   gradients over the replicas, and starts the sum of the squares over the model's ranks. It goes on
   with passes of other adapters.
2. Before the first F of the adapter's next step, the rank waits for the sum, clips and steps. The
   first stage runs this F after its last B of the step before, which is the last of all stages: so
   every rank has started its sum by then, and none waits for a rank that waits for it.
3. What is still open at the end is stepped there.

B of a stage run in the order of the units, so all ranks start their sums in one order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

from megatron_zb.lora.training import (
    AdapterOptimizer,
    AdapterOptimizers,
    SelectableWeights,
    Stepped,
)
from megatron_zb.runtime.channels import new_groups


class _Sum(NamedTuple):
    """A sum of squares that has been started."""

    work: Any
    squares: torch.Tensor


class StreamedOptimizers(AdapterOptimizers):
    """Optimizers of adapters that step while passes of other adapters run.

    Collective over the job, as it makes a process group.

    Args:
        weights: of the adapters, by kind.
        each: their training, by name.
        config: of the model.
        chunks: model chunks of this rank.
    """

    def __init__(
        self,
        weights: Sequence[SelectableWeights],
        each: Mapping[str, AdapterOptimizer],
        config: Any,
        chunks: int,
    ) -> None:
        super().__init__(weights, each, config)
        ranks = dist.get_process_group_ranks(parallel_state.get_model_parallel_group())
        (self._group,) = new_groups([ranks])
        self._chunks = chunks
        self._missing: dict[str, int] = {}
        self._started: dict[str, _Sum] = {}
        self._stepped: dict[str, list[Stepped]] = {}

    def gradients_ready(self, chunk: int, adapter: str) -> None:
        missing = self._missing.get(adapter, self._chunks) - 1
        self._missing[adapter] = missing
        if missing:
            return
        del self._missing[adapter]
        own = self.each[adapter]
        own.reduce()
        own.optimizer.prepare_grads()
        squares = _squares(own)
        self._started[adapter] = _Sum(
            dist.all_reduce(squares, group=self._group, async_op=True), squares
        )

    def catch_up(self, adapter: str) -> None:
        started = self._started.pop(adapter, None)
        if started is None:
            return
        started.work.wait()
        norm = math.sqrt(started.squares.item())
        stepped = self._stepped.setdefault(adapter, [])
        is_broken = bool(stepped) and not stepped[-1].is_finite  # it has ended
        own = self.each[adapter]
        stepped.append(Stepped(False, norm, own.rate) if is_broken else _step(own, norm))
        own.clear()

    def end_step(self, adapter: str) -> None:
        self.catch_up(adapter)

    def is_finite(self, adapter: str) -> bool:
        return all(it.is_finite for it in self._stepped.get(adapter, []))

    def stepped(self, adapter: str) -> list[Stepped]:
        return self._stepped.pop(adapter, [])


def _squares(own: AdapterOptimizer) -> torch.Tensor:
    """Return the sum of the squares of the gradients on this rank, each weight once."""
    gradients = [
        weight.main_grad
        for weight in own.weights()
        if param_is_not_tensor_parallel_duplicate(weight)
    ]
    zero = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
    return sum((it.float().square().sum() for it in gradients), start=zero)


def _step(own: AdapterOptimizer, norm: float) -> Stepped:
    """Step an optimizer whose gradients are prepared, unless their norm is no number."""
    rate = own.rate
    if not math.isfinite(norm):
        return Stepped(False, norm, rate)
    most = own.optimizer.config.clip_grad
    if most > 0:
        clip_grad_by_total_norm_fp32(own.optimizer.get_parameters(), most, norm)
    own.optimizer.step_with_ready_grads()
    own.scheduler.step(increment=own.samples)
    return Stepped(True, norm, rate)
