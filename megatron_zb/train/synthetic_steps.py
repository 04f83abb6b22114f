"""Steps of stages that sleep, on ranks of this machine; they show a bubble without a GPU."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch
import torch.distributed as dist

from megatron_zb import schedules
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.executor import Side, run_program
from megatron_zb.runtime.link_times import link_times
from megatron_zb.runtime.progress import RankProgress
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import v_shape
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


def seconds_of_link(rank: int, ranks: int) -> float:
    """Measure the mean seconds of a message between neighbours of a V; collective."""
    placement = v_shape(ranks)
    channels = Channels(list(range(ranks)), placement, "cpu")
    links = link_times(channels, placement, rank, lambda: torch.zeros(64))
    channels.close()
    total = torch.tensor([sum(links.values()), float(len(links))], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


class SleepingCopies:
    """The copy engines of a rank, each a thread that sleeps for what a copy takes."""

    def __init__(self, costs: StageCosts) -> None:
        self._costs = costs
        out = ThreadPoolExecutor(max_workers=1)
        assert costs.copies is not None
        back = ThreadPoolExecutor(max_workers=1) if costs.copies.full_duplex else out
        self._engines = {True: out, False: back}
        self._copies: dict[tuple[bool, int, int], Future[None]] = {}

    def begin(self, stage: int, microbatch: int, *, to_host: bool) -> None:
        """Begin the copy of a unit, after those that its engine has been given before."""
        copies = self._costs.of(microbatch).copies
        assert copies is not None
        copy = self._engines[to_host].submit(time.sleep, copies.seconds[stage])
        self._copies[to_host, stage, microbatch] = copy

    def end(self, stage: int, microbatch: int, *, to_host: bool) -> None:
        """Wait until the copy of a unit has ended."""
        self._copies.pop((to_host, stage, microbatch)).result()


class SyntheticStage:
    """A stage that sleeps for the seconds of F, B, W, BW and R and sends messages without content.

    The expert all-to-all of the costs sleeps in a separate thread; of microbatches
    in ``offloaded``, ``copies`` sleep for the copies to the host and back.
    """

    offloaded: Collection[int] = ()

    def __init__(self, stage: int, costs: StageCosts, copies: SleepingCopies | None = None) -> None:
        self._stage, self._costs, self._copies = stage, costs, copies
        self._is_last = stage == len(costs.seconds[PassKind.F]) - 1
        self._is_first = stage == 0
        self._payload = torch.zeros(64)
        self._network = ThreadPoolExecutor(max_workers=1)

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        self._run(PassKind.F, microbatch)
        return self.output(PassKind.F)

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self._run(PassKind.B, microbatch)
        return self.output(PassKind.B)

    def backward_weight(self, microbatch: int) -> None:
        self._run(PassKind.W, microbatch)

    def recompute(self, microbatch: int) -> None:
        self._run(PassKind.R, microbatch)

    def end_copy_out(self, microbatch: int) -> None:
        if self._copies is not None:
            self._copies.end(self._stage, microbatch, to_host=True)

    def begin_copy_in(self, microbatch: int) -> None:
        if self._copies is not None:
            self._copies.begin(self._stage, microbatch, to_host=False)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self._run(PassKind.BW, microbatch)
        return self.output(PassKind.BW)

    def output(self, kind: PassKind) -> torch.Tensor | None:
        """Return the message of a pass, None where no other stage reads one."""
        is_end = self._is_last if kind is PassKind.F else self._is_first
        return None if is_end else self._payload

    def _run(self, kind: PassKind, microbatch: int) -> None:
        copies = self._copies if microbatch in self.offloaded else None
        if copies is not None and kind in (PassKind.B, PassKind.BW):
            copies.end(self._stage, microbatch, to_host=False)
        self.compute(kind, microbatch)
        if self._all_to_all_seconds(kind, microbatch):
            self.all_to_all(kind, microbatch).result()
        if copies is not None and kind is PassKind.F:
            copies.begin(self._stage, microbatch, to_host=True)

    def compute(self, kind: PassKind, microbatch: int, share: float = 1.0) -> None:
        """Sleep for a share of what a pass takes without its all-to-all."""
        seconds = self._costs.duration(Pass(kind, self._stage, microbatch))
        time.sleep(share * (seconds - self._all_to_all_seconds(kind, microbatch)))

    def all_to_all(self, kind: PassKind, microbatch: int, share: float = 1.0) -> Future[None]:
        """Begin a share of a pass's all-to-all."""
        return self._network.submit(time.sleep, share * self._all_to_all_seconds(kind, microbatch))

    def _all_to_all_seconds(self, kind: PassKind, microbatch: int) -> float:
        costs = self._costs.of(microbatch)
        exchanges = {PassKind.F: PassKind.F, PassKind.B: PassKind.B, PassKind.BW: PassKind.B}
        seconds = costs.exchange.get(exchanges.get(kind, kind))
        return seconds[self._stage] if seconds else 0.0

    def reset(self) -> None:
        """Do nothing: there is nothing to forget."""


def run_together(forward: Side, backward: Side) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Run a pair of stages that sleep: while one side computes, the other has its all-to-all.

    F computes (attention), sends (dispatch), computes (experts) and receives (combine), the
    backward the other way round; each part is half of its side and waits for the one before it.
    """
    for _ in range(2):
        gradients = backward.stage.all_to_all(backward.kind, backward.microbatch, 0.5)
        forward.stage.compute(forward.kind, forward.microbatch, 0.5)
        gradients.result()
        tokens = forward.stage.all_to_all(forward.kind, forward.microbatch, 0.5)
        backward.stage.compute(backward.kind, backward.microbatch, 0.5)
        tokens.result()
    return forward.stage.output(forward.kind), backward.stage.output(backward.kind)


class SyntheticSteps:
    """Steps of one rank under a schedule; one to warm up has run."""

    def __init__(self, rank: int, schedule: schedules.Schedule, costs: schedules.Costs) -> None:
        placement = schedule.placement
        timeline = schedules.simulate(schedule, costs)
        table = timeline.costs
        self.rank, self.size = rank, placement.pipeline_size
        self.program = schedules.lower(schedule, timeline)
        self.channels = Channels(list(range(self.size)), placement, "cpu")
        copies = SleepingCopies(table) if schedule.offloaded else None
        self.stages = {s: SyntheticStage(s, table, copies) for s in placement.stages_of[rank]}
        for number, stage in self.stages.items():
            stage.offloaded = frozenset(m for held, m in schedule.offloaded if held == number)
        self.seconds()

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
                pairs=run_together,
            )
        elapsed = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        return elapsed.item()
