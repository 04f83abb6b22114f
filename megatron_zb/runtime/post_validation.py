"""Optimizer post-validation: a step of the optimizer without a barrier across the pipeline.

The norm of all gradients, and whether any is infinite, decide what the optimizer does. Instead of
being reduced over the pipeline before any rank may step, the state of the ranks so far travels down
the pipeline: each rank adds its own, steps at once if nothing in it forbids that, and passes it on.
The last rank holds the full state and tells it to the others, which learn it in the warm-up of
the next step: after the forwards that come before any other pass. Where the full state forbids what
was done, the ranks take the optimizer's step back, make the right one, and run the forwards anew.
Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, on bypassing optimizer synchronizations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_zb.runtime.channels import new_groups
from megatron_zb.runtime.executor import Allocate, Execution, Transport
from megatron_zb.runtime.observer import Observer
from megatron_zb.schedules.lowering import Program, Rollback


class StateExchange:
    """Exchange of a step's state: partial down the pipeline, and full from the last rank.

    A state is a vector of numbers that add up over the ranks. It travels between hosts, over a
    group of its own. The full one goes from the last rank directly to every other, so that a rank
    that waits for it waits for nothing but the ends of the step that it tells of.

    Args:
        pipeline_ranks: global ranks in logical order. Creating it is collective over the job.
        size: numbers in a state.
    """

    def __init__(self, pipeline_ranks: Sequence[int], size: int) -> None:
        self._ranks = list(pipeline_ranks)
        self._place = self._ranks.index(dist.get_rank())
        self._size = size
        [self._group] = new_groups([self._ranks], backend="gloo")
        self._sends: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._full: torch.Tensor | None = None
        self._full_work: dist.Work | None = None

    @property
    def _is_last(self) -> bool:
        return self._place == len(self._ranks) - 1

    def partial(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum of this rank's state and those before it; wait for the rank before."""
        if self._place == 0:
            return own.clone()
        received = self._empty()
        dist.recv(received, self._ranks[self._place - 1], group=self._group)
        return received + own

    def pass_on(self, partial: torch.Tensor) -> None:
        """Send the state to the next rank, or from the last one to all others; wait for none."""
        self.finish()
        if self._is_last:
            self._full = partial
            for rank in self._ranks[:-1]:
                self._send(partial, rank)
            return
        self._full = self._empty()
        self._full_work = dist.irecv(self._full, self._ranks[-1], group=self._group)
        self._send(partial, self._ranks[self._place + 1])

    def full(self) -> torch.Tensor:
        """Wait for the state of all ranks and return it."""
        assert self._full is not None, "no state has been passed on"
        if self._full_work is not None:
            self._full_work.wait()
            self._full_work = None
        return self._full

    def finish(self) -> None:
        """Wait until others have taken what was sent: they have, once they know the full state."""
        for work, _ in self._sends:
            assert work is not None  # None would mean that this rank is not in the group
            work.wait()
        self._sends.clear()

    def close(self) -> None:
        """Destroy the group; collective over the pipeline."""
        self.finish()
        dist.destroy_process_group(self._group)

    def _empty(self) -> torch.Tensor:
        return torch.empty(self._size, dtype=torch.float64, device="cpu")

    def _send(self, state: torch.Tensor, rank: int) -> None:
        self._sends.append((dist.isend(state, rank, group=self._group), state))


def run_from_cut(
    program: Program,
    cut: Rollback,
    rank: int,
    stages: Mapping[int, Any],
    channels: Transport,
    allocate: Allocate,
    *,
    is_right: Callable[[], bool],
    start_anew: Callable[[], None],
    observer: Observer | None = None,
) -> None:
    """Run a program whose forwards up to the cut may have to run twice.

    Args:
        stages: stages whose ``reset`` forgets the forwards that have run.
        is_right: waits until it is known whether the weights are right.
        start_anew: makes them right, and takes back what forwards have done outside the stages. No
            message is under way then, so it may wait for any rank.
        observer: is told what the rank does.
    """
    instructions, end = program.ranks[rank], cut.ends[rank]
    execution = Execution(program.send_slots, stages, channels, allocate, observer)
    execution.run(instructions[:end])
    if is_right():
        execution.run(instructions[end:])
    else:
        del execution
        for message in cut.drops[rank]:
            channels.take(message)
        channels.finish()
        for stage in stages.values():
            stage.reset()
        start_anew()
        Execution(program.send_slots, stages, channels, allocate, observer).run(instructions)
    channels.finish()
