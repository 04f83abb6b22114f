"""Simulation of a schedule: start and end of every pass, and the memory that it holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_zb.schedules.costs import check_number
from megatron_zb.schedules.memory import Held, peak, walk
from megatron_zb.schedules.passes import Pair, Pass, PassKind
from megatron_zb.schedules.rules import TRAINING, Rules
from megatron_zb.schedules.schedule import InvalidSchedule, Schedule
from megatron_zb.schedules.stage_costs import Priced, StageCosts
from megatron_zb.schedules.task_graph import Copy, replay


@dataclass(frozen=True)
class Timeline:
    """Result of :func:`simulate`; ``start[r]`` and ``end[r]`` run beside ``schedule.ranks[r]``.

    Times in seconds from the first start; both passes of a pair have those of the pair.
    ``bubble_rate`` is the share of the ranks' time, from the first start to the last end anywhere,
    in which they run nothing. ``peak_activation[r]`` counts microbatches of a whole rank (every F
    holds 1/chunks of one until its W or BW ends, or its R instead where it has one; every T one
    until its S ends); ``peak_memory[r]`` is in the unit of ``activation`` and lets B free its
    share. ``copies[r]`` are those of the rank's offloaded units, in the order in which they were
    requested; empty if there are none. ``peak_host[r]`` is what the host holds of them, in the same
    unit.
    """

    schedule: Schedule
    costs: StageCosts
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    copies: tuple[tuple[Copy, ...], ...] = ()
    of_job: bool = False
    """Whether ranks are named by Megatron's pipeline rank, as in a job."""

    def number(self, rank: int) -> int:
        """Return the number of a rank for users."""
        return self.schedule.placement.pipeline_rank(rank) if self.of_job else rank

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

    def seconds(self, *, back_to_back: bool) -> float:
        """Return the seconds of an iteration: by itself, or as one of many in a row."""
        return self.period if back_to_back else self.makespan

    @cached_property
    def bubble_rate(self) -> float:
        return self._idle_share(self.makespan)

    @cached_property
    def bubble_rate_back_to_back(self) -> float:
        """Bubble rate within :attr:`period`."""
        return self._idle_share(self.period)

    def _idle_share(self, seconds: float) -> float:
        ranks = self.schedule.ranks
        busy = sum(seconds for rank in range(len(ranks)) for seconds in self._durations(rank))
        return 1.0 - busy / (len(ranks) * seconds)

    def _durations(self, rank: int) -> Iterator[float]:
        """Yield the seconds of every pass or pair of a rank."""
        passes, pairs = self.schedule.ranks[rank], self.schedule.pairs
        paired = False
        for i, p in enumerate(passes):
            if pairs and p in pairs:
                paired = True
                yield self.costs.pair_seconds(Pair(p, passes[i + 1]))
            elif paired:
                paired = False
            else:
                yield self.costs.duration(p)

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """Share of the makespan in which each rank computes."""
        busy = (sum(self._durations(rank)) for rank in range(len(self.schedule.ranks)))
        return tuple(seconds / self.makespan for seconds in busy)

    @cached_property
    def peak_activation(self) -> tuple[float, ...]:
        schedule = self.schedule
        chunks = schedule.rules.chunks(schedule.placement)
        return tuple(
            peak_held_chunks(rank, schedule.rules, schedule.recomputed) / chunks
            for rank in schedule.ranks
        )

    @cached_property
    def microbatch(self) -> float:
        """Memory of a microbatch on 1F1B's first rank, in the unit of ``activation``.

        That rank has the first p-th of the model: as many stages as a rank has of one copy.
        """
        chunks = self.schedule.rules.chunks(self.schedule.placement)
        return sum(self.costs.memory["activation"][:chunks]) or 1.0

    @cached_property
    def peak_microbatches(self) -> tuple[float, ...]:
        """Peaks of ranks in whole microbatches: :attr:`peak_activation`.

        Where activations are recomputed or offloaded, of their memory, which has what is left of
        them.
        """
        if self.schedule.recomputed or self.schedule.offloaded:
            return tuple(memory / self.microbatch for memory in self.peak_memory)
        rules, counted = self.schedule.rules, self.schedule.num_microbatches
        share = rules.whole_microbatches(self.schedule) / counted
        return tuple(units * share for units in self.peak_activation)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        return tuple(max(self.memory_curve(rank), default=0.0) for rank in range(len(self.start)))

    @cached_property
    def peak_host(self) -> tuple[float, ...]:
        return tuple(max(self.host_curve(rank), default=0.0) for rank in range(len(self.start)))

    def host_curve(self, rank: int) -> tuple[float, ...]:
        """Return the memory that the host holds while each pass of a rank runs.

        Of every offloaded unit, from the end of its F, when the copy out begins, to the start of
        its B, which the copy in has ended before.
        """
        found = []
        for p in self.schedule.ranks[rank]:
            change = 0.0
            if (p.stage, p.microbatch) in self.schedule.offloaded:
                sign = {PassKind.F: 1, PassKind.B: -1, PassKind.BW: -1}.get(p.kind, 0)
                change = sign * self.costs.of(p.microbatch).memory["activation"][p.stage]
            found.append(change)
        # the host takes at the end of a pass and frees at its start: the reverse of a device
        return tuple(0.0 - held.within for held in walk(-change for change in found))

    def memory_curve(self, rank: int) -> tuple[float, ...]:
        """Return the memory held while each pass of a rank runs, in units of activation."""
        return tuple(held.within for held in self.memory_steps(rank))

    def memory_steps(self, rank: int) -> tuple[Held, ...]:
        """Return the memory held while each pass of a rank runs and after it, in the same unit."""
        found = []
        are_alike = not (self.costs.microbatches or self.schedule.recomputed)
        changes: dict[tuple[object, ...], float] = {}
        for p in self.schedule.ranks[rank]:
            key = p[:2] if are_alike else p
            if (change := changes.get(key)) is None:
                change = changes[key] = self.schedule.memory_change(p, self.costs)
            found.append(change)
        return tuple(walk(found))


def peak_held_chunks(
    passes: Sequence[Pass],
    rules: Rules = TRAINING,
    recomputed: Collection[tuple[int, int]] = (),
) -> int:
    """Count the most chunk activations a rank holds at once, each whole until no pass needs it."""
    changes = []
    for p in passes:
        assert rules.kind(p.kind) is not None, f"{rules.name} has no {p.kind} passes"
        changes.append(rules.counts_as(p, recomputed=(p.stage, p.microbatch) in recomputed))
    return int(peak(changes))


def simulate(schedule: Schedule, costs: Priced) -> Timeline:
    """Run every rank's passes in order, each as early as its inputs allow.

    B(stage) waits for B(stage+1) and, from another rank, one transfer more; a fused BW keeps the
    previous stage waiting until all of it has ended. See :func:`~task_graph.replay`. The costs are
    of whole microbatches.

    Raises:
        InvalidSchedule: the ranks wait for one another in a circle.
        UsageError: the costs are for another pipeline size, or another number of microbatches.
    """
    table = schedule.rules.unit_costs(schedule, costs).for_placement(schedule.placement)
    check_number(table, schedule.num_microbatches)
    done = replay(schedule.orders, table)
    _check_all_ran(schedule, done.blocked)
    copies = tuple(tuple(of_rank.copies) for of_rank in done.engines)
    start, end = (tuple(map(tuple, times)) for times in (done.start, done.end))
    return Timeline(schedule, table, start, end, copies)


def _check_all_ran(schedule: Schedule, blocked: list[tuple[int, int]]) -> None:
    if blocked:
        rank, position = blocked[0]
        raise InvalidSchedule(
            f"{schedule.name}: rule 'progress': rank {rank} can never run "
            f"{schedule.ranks[rank][position]}",
            rank=rank,
            position=position,
        )
