"""Carry a schedule out on paper: when every pass starts and ends, and what memory it holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from megatron_zb.schedules.costs import StageCosts
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.relay import Product, Relay
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule, walk


class Priced(Protocol):
    """What passes cost on any placement: :class:`megatron_zb.schedules.Costs`, or block costs."""

    def for_placement(self, placement: Placement) -> StageCosts: ...


@dataclass(frozen=True)
class Timeline:
    """Result of :func:`simulate`; ``start[r]`` and ``end[r]`` run beside ``schedule.ranks[r]``.

    Times in seconds from the first start. ``bubble_rate`` is the share of the ranks' time, from
    the first start to the last end anywhere, in which they do not compute.
    ``peak_activation[r]`` counts microbatches of a whole rank (every F holds 1/chunks of one until
    its W or BW ends, every T one until its S ends); ``peak_memory[r]`` is in the unit of
    ``costs.activation`` and lets B free its share.
    """

    schedule: Schedule
    costs: StageCosts
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]

    @cached_property
    def makespan(self) -> float:
        first = min(times[0] for times in self.start if times)
        return max(times[-1] for times in self.end if times) - first

    @cached_property
    def period(self) -> float:
        """Seconds that each of many iterations in a row takes, with no barrier between them.

        A rank begins the next one when its own last pass has ended, so the rank that takes longest
        from its first start to its last end sets the pace.
        """
        ranks = zip(self.start, self.end, strict=True)
        return max(ends[-1] - starts[0] for starts, ends in ranks if starts)

    def seconds(self, *, in_a_row: bool) -> float:
        """What an iteration takes: by itself, or as one of many in a row."""
        return self.period if in_a_row else self.makespan

    @cached_property
    def bubble_rate(self) -> float:
        return self._idle_share(self.makespan)

    @cached_property
    def bubble_rate_in_a_row(self) -> float:
        """The bubble rate within :attr:`period`."""
        return self._idle_share(self.period)

    def _idle_share(self, seconds: float) -> float:
        busy = sum(self.costs.duration(p) for rank in self.schedule.ranks for p in rank)
        return 1.0 - busy / (len(self.schedule.ranks) * seconds)

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """The share of the makespan in which each rank computes."""
        busy = (sum(map(self.costs.duration, rank)) for rank in self.schedule.ranks)
        return tuple(seconds / self.makespan for seconds in busy)

    @cached_property
    def peak_activation(self) -> tuple[float, ...]:
        chunks = self.schedule.placement.chunks
        return tuple(peak_held_chunks(rank) / chunks for rank in self.schedule.ranks)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        return tuple(max(self.memory_curve(rank), default=0.0) for rank in range(len(self.start)))

    def memory_curve(self, rank: int) -> tuple[float, ...]:
        """Memory held while each pass of a rank runs, in the unit of ``costs.activation``."""
        return tuple(held for held, _ in self.memory_steps(rank))

    def memory_steps(self, rank: int) -> tuple[tuple[float, float], ...]:
        """Memory held while each pass of a rank runs and when it has ended, in the same unit."""
        held, steps = 0.0, []
        for p in self.schedule.ranks[rank]:
            activation = self.costs.activation[p.stage]
            kept = self.costs.held_for_weight[p.stage]
            if p.kind in (PassKind.F, PassKind.T):
                held += activation
            within = held
            if p.kind is PassKind.B:
                held -= activation - kept
            elif p.kind is PassKind.W:
                held -= kept
            elif p.kind in (PassKind.BW, PassKind.S):
                held -= activation
            steps.append((within, held))
        return tuple(steps)


def peak_held_chunks(passes: tuple[Pass, ...]) -> int:
    """The most chunk activations a rank holds at once: F until its W or BW, T until its S."""
    held = peak = 0
    for kind, _, _ in passes:
        if kind in (PassKind.F, PassKind.T):
            held += 1
            peak = max(peak, held)
        elif kind not in (PassKind.B, PassKind.U):
            held -= 1
    return peak


def simulate(schedule: Schedule, costs: Priced) -> Timeline:
    """Run every rank's passes in order, each as early as its inputs allow.

    Sends never block. B(stage) waits for B(stage+1) and, from another rank, one transfer more; a
    fused BW keeps the previous stage waiting until all of it has ended. T waits for the relayed
    activation, U until every rank of its stage has come to it, and the first T of a step for
    the updates that ``run_ahead`` asks for.

    Raises:
        InvalidSchedule: the ranks wait for one another in a circle.
        UsageError: the costs are for another pipeline size.
    """
    table = costs.for_placement(schedule.placement)
    if schedule.relay is not None:
        return _simulate_relay(schedule, schedule.relay, table)
    return _simulate_passes(schedule, table)


def _simulate_passes(schedule: Schedule, table: StageCosts) -> Timeline:
    """F, B, W and BW: the loop of :func:`walk` with the clock of each rank, as it runs often."""
    ranks, last = schedule.ranks, schedule.placement.num_stages - 1
    fused = table.fused
    forward_kind, backward_kind, weight_kind = PassKind.F, PassKind.B, PassKind.W
    clock, position = [0.0] * len(ranks), [0] * len(ranks)
    start: list[list[float]] = [[] for _ in ranks]
    end: list[list[float]] = [[] for _ in ranks]
    ready: dict[tuple[bool, int, int], float] = {}  # what F and B of a stage wait for
    waiting: dict[tuple[bool, int, int], int] = {}
    runnable = list(range(len(ranks) - 1, -1, -1))
    while runnable:
        rank = runnable.pop()
        passes, now, i = ranks[rank], clock[rank], position[rank]
        starts, ends = start[rank], end[rank]
        while i < len(passes):
            kind, stage, microbatch = passes[i]
            if kind is weight_kind:
                starts.append(now)
                now += table.weight[stage]
                ends.append(now)
                i += 1
                continue
            is_backward = kind is not forward_kind
            if stage != (last if is_backward else 0):
                need = (is_backward, stage, microbatch)
                arrival = ready.get(need)
                if arrival is None:
                    waiting[need] = rank
                    break
                if arrival > now:
                    now = arrival
            starts.append(now)
            if not is_backward:
                now += table.forward[stage]
                made, hop = (False, stage + 1, microbatch), table.forward_hop[stage]
            else:
                now += table.backward[stage] if kind is backward_kind else fused[stage]
                made, hop = (True, stage - 1, microbatch), table.backward_hop[stage]
            ends.append(now)
            ready[made] = now + hop
            waiter = waiting.pop(made, None)
            if waiter is not None:
                runnable.append(waiter)
            i += 1
        clock[rank], position[rank] = now, i
    blocked = [(r, i) for r, i in enumerate(position) if i < len(ranks[r])]
    _check_all_ran(schedule, blocked)
    return Timeline(schedule, table, tuple(map(tuple, start)), tuple(map(tuple, end)))


def _simulate_relay(schedule: Schedule, relay: Relay, table: StageCosts) -> Timeline:
    """A pass starts when its rank is free and all that it needs from other ranks is there."""
    placement = schedule.placement
    start: list[list[float]] = [[] for _ in schedule.ranks]
    end: list[list[float]] = [[] for _ in schedule.ranks]
    ready: dict[Product, float] = {}

    def run(rank: int, position: int, p: Pass) -> None:
        free = end[rank][-1] if end[rank] else 0.0
        begin = max([free, *(ready[need] for need in relay.needs(placement, rank, p))])
        finish = begin + table.duration(p)
        start[rank].append(begin)
        end[rank].append(finish)
        made = relay.makes(placement, rank, p)
        if made is not None:
            ready[made] = finish

    _check_all_ran(schedule, walk(schedule, run))
    return Timeline(schedule, table, tuple(map(tuple, start)), tuple(map(tuple, end)))


def _check_all_ran(schedule: Schedule, blocked: list[tuple[int, int]]) -> None:
    if blocked:
        rank, position = blocked[0]
        raise InvalidSchedule(
            f"{schedule.name}: rule 'progress': rank {rank} can never run "
            f"{schedule.ranks[rank][position]}",
            rank=rank,
            position=position,
        )
