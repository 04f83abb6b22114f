"""Stages that sleep, whose exchanges and copies run beside what a rank computes."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.executor import Side
from megatron_zb.runtime.link_times import link_times
from megatron_zb.schedules import Costs, Schedule
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import v_shape
from megatron_zb.schedules.stage_costs import StageCosts
from megatron_zb.train.synthetic_steps import SyntheticStage, SyntheticSteps


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


class OverlappedStage(SyntheticStage):
    """A stage whose expert all-to-all sleeps in a separate thread.

    Of microbatches in ``offloaded``, ``copies`` sleep for the copies to the host and back.
    """

    offloaded: Collection[int] = ()

    def __init__(self, stage: int, costs: StageCosts, copies: SleepingCopies | None = None) -> None:
        super().__init__(stage, costs)
        self._copies = copies
        self._network = ThreadPoolExecutor(max_workers=1)

    def end_copy_out(self, microbatch: int) -> None:
        if self._copies is not None:
            self._copies.end(self._stage, microbatch, to_host=True)

    def begin_copy_in(self, microbatch: int) -> None:
        if self._copies is not None:
            self._copies.begin(self._stage, microbatch, to_host=False)

    def run(self, kind: PassKind, microbatch: int) -> None:
        """Sleep for a pass, its all-to-all and its copies."""
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


class OverlappedSteps(SyntheticSteps):
    """Steps of one rank whose pairs, exchanges and copies overlap."""

    def __init__(self, rank: int, schedule: Schedule, costs: Costs) -> None:
        super().__init__(rank, schedule, costs, run_together)

    def stages_of(self, schedule: Schedule, table: StageCosts) -> Mapping[int, SyntheticStage]:
        copies = SleepingCopies(table) if schedule.offloaded else None
        stages = {
            s: OverlappedStage(s, table, copies) for s in schedule.placement.stages_of[self.rank]
        }
        for number, stage in stages.items():
            stage.offloaded = frozenset(m for held, m in schedule.offloaded if held == number)
        return stages
