"""Runs of small models whose order is noted: what a rank does, and what it has found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import gpt_cases
import torch.distributed as dist
from gpt_cases import GPTCase, built, forward_backward, microbatches
from joined_pairs import dropping, joined
from recompute_offload import with_recompute_offload

from megatron_zb import schedules
from megatron_zb.runtime.activation_memory import StreamEngines
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.features.slices import Slicing
from sanitizer.device import noting
from sanitizer.plants import planted

_STEPS = 2
_PIECE = 2**12
"""Bytes of a piece of the host's memory: few, so that memory of one unit is used for the next."""


@dataclass(frozen=True)
class Trial:
    """A small GPT and its schedule, with shares of units that are recomputed and offloaded.

    ``pairs`` joins every F with the backward behind it, of microbatches of which R runs again
    some, if they are ``recomputed``.
    """

    case: GPTCase = field(default_factory=GPTCase)
    schedule: str = "v-half"
    recompute: float = 0.0
    offload: float = 0.0
    pairs: bool = False
    recomputed: bool = False
    microbatches: int = 5

    def order(self, pipeline_size: int) -> str | Schedule:
        """Return what the adapter is made of."""
        if not (self.recompute or self.offload or self.pairs):
            return self.schedule
        kept = schedules.build(
            self.schedule,
            pipeline_size=pipeline_size,
            num_microbatches=self.microbatches,
            slices=Slicing.parse(self.case.slices or "1"),
        )
        if self.recomputed:
            return dropping(joined(kept))
        return (
            joined(kept)
            if self.pairs
            else with_recompute_offload(kept, 3, self.recompute, self.offload)
        )


@dataclass(frozen=True)
class Noted:
    """What a rank has done: kernels; violations, and host waits in passes, with their numbers."""

    kernels: int
    violations: dict[str, int]
    host_waits: dict[str, int]


@contextmanager
def _notes() -> Iterator[Callable[[], Noted]]:
    found: list[Noted] = []
    with noting() as order:
        before = order.kernels
        yield lambda: found[0]
        violations = {
            f"{v.kind}: {v.first}\n  with {v.second}": n for v, n in order.violations.items()
        }
        found.append(Noted(order.kernels - before, violations, dict(order.host_waits)))


def run(trial: Trial, plant: str = "") -> Noted:
    """Train a small GPT for two steps on this rank."""
    case, m = trial.case, trial.microbatches
    p = dist.get_world_size() // (case.tensor_parallel * case.data_parallel)
    with (
        mock.patch.object(StreamEngines, "piece", _PIECE),
        planted(plant),
        built(case, trial.order(p), m) as (adapter, chunks),
        _notes() as noted,
    ):
        assert adapter is not None
        for _ in range(_STEPS):
            gpt_cases._zero_gradients(chunks)
            data: list[Any] = [microbatches(case, m) for _ in chunks]
            forward_backward(adapter.forward_backward_func, chunks, data, m)
    return noted()


def noted_of(function: Callable[..., Any], **arguments: Any) -> Noted:
    """Note the order of any function that runs passes."""
    with _notes() as noted:
        function(**arguments)
    return noted()
