"""Steps of stages that sleep, on ranks of this machine; they show a bubble without a GPU."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext

import torch
import torch.distributed as dist

from megatron_zb import schedules
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.executor import (
    TRAINING,
    PairHandler,
    one_after_the_other,
    run_program,
)
from megatron_zb.runtime.progress import RankProgress
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.stage_costs import StageCosts


def join(rank: int, ranks: int, meeting_point: str | None = None) -> None:
    """Make this process a rank of a gloo group.

    Args:
        rank: of this process.
        ranks: number of ranks.
        meeting_point: a path that does not exist yet; None for the address that torchrun gives.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    _sleep_exactly()
    torch.set_num_threads(1)
    place = "env://" if meeting_point is None else f"file://{meeting_point}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)


def _sleep_exactly() -> None:
    """Ask Linux to end this thread's sleeps on time; by default they may all be 50 µs too long."""
    set_timer_slack = 29
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_timer_slack, ctypes.c_ulong(1))


_HANDLERS = {
    **TRAINING,
    PassKind.F: lambda stage, microbatch, *received: stage.forward(microbatch, *received),
    PassKind.U: lambda stage, microbatch: stage.update(microbatch),
}


class SyntheticStage:
    """A stage that sleeps for as long as its passes take, and sends messages without content."""

    def __init__(self, stage: int, costs: StageCosts) -> None:
        self._stage, self._costs = stage, costs
        self._payload = torch.zeros(64)

    def forward(
        self,
        microbatch: int,
        activation: torch.Tensor | None = None,
        other: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Sleep for F, which may also read the output of a second model."""
        self.run(PassKind.F, microbatch)
        return self.output(PassKind.F)

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self.run(PassKind.B, microbatch)
        return self.output(PassKind.B)

    def backward_weight(self, microbatch: int) -> None:
        self.run(PassKind.W, microbatch)

    def recompute(self, microbatch: int) -> None:
        self.run(PassKind.R, microbatch)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self.run(PassKind.BW, microbatch)
        return self.output(PassKind.BW)

    def update(self, microbatch: int) -> None:
        self.run(PassKind.U, microbatch)

    def output(self, kind: PassKind) -> torch.Tensor | None:
        """Return the message of a pass, which is dropped where no other stage reads it."""
        return self._payload

    def run(self, kind: PassKind, microbatch: int) -> None:
        """Sleep for as long as a pass takes."""
        time.sleep(self._costs.duration(Pass(kind, self._stage, microbatch)))

    def reset(self) -> None:
        """Do nothing: there is nothing to forget."""


class SyntheticSteps:
    """Steps of one rank under a schedule; one to warm up has run."""

    def __init__(
        self,
        rank: int,
        schedule: schedules.Schedule,
        costs: schedules.Costs,
        pairs: PairHandler = one_after_the_other,
    ) -> None:
        placement = schedule.placement
        timeline = schedules.simulate(schedule, costs)
        self.rank, self.size, self._pairs = rank, placement.pipeline_size, pairs
        self.program = schedules.lower(schedule, timeline)
        more_peers = schedule.rules.more_peers(placement)
        self.channels = Channels(list(range(self.size)), placement, "cpu", more_peers=more_peers)
        self.stages = self.stages_of(schedule, timeline.costs)
        self.seconds()

    def stages_of(
        self, schedule: schedules.Schedule, table: StageCosts
    ) -> Mapping[int, SyntheticStage]:
        """Return the stages of this rank."""
        return {s: SyntheticStage(s, table) for s in schedule.placement.stages_of[self.rank]}

    def seconds(self, progress: RankProgress | None = None) -> float:
        """Run a step and return its seconds, from a barrier to the end of the last rank."""
        dist.barrier()
        start = time.perf_counter()
        with progress.step() if progress else nullcontext():
            run_program(
                self.program,
                self.rank,
                self.stages,
                self.channels,
                lambda message: torch.empty(64),
                progress,
                handlers=_HANDLERS,
                pairs=self._pairs,
            )
        elapsed = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        return elapsed.item()
