"""Activation memory of every rank, and of its host, over time, as every drawing shows it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zb.schedules import Timeline


@dataclass(frozen=True)
class MemoryLine:
    """Memory of one rank: ``held[i]`` from ``times[i]`` to ``times[i + 1]``, the last for ever.

    Times in seconds; memory in microbatches of 1F1B's first rank (see :func:`microbatch`).
    """

    rank: int
    times: tuple[float, ...]
    held: tuple[float, ...]

    @property
    def peak(self) -> float:
        return max(self.held, default=0.0)


def memory_lines(timeline: Timeline) -> list[MemoryLine]:
    """Return a line for each rank; its highest step is the rank's ``timeline.peak_memory``."""
    return [_line(timeline, rank) for rank in range(len(timeline.start))]


def host_lines(timeline: Timeline) -> list[MemoryLine]:
    """Return a line for what the host holds of each rank, while each pass of the rank runs."""
    unit = microbatch(timeline)
    return [
        MemoryLine(rank, start, tuple(held / unit for held in timeline.host_curve(rank)))
        for rank, start in enumerate(timeline.start)
    ]


def worst_of(lines: list[MemoryLine]) -> MemoryLine:
    """Return the first of the lines with the highest peak."""
    return max(lines, key=lambda line: line.peak)


def microbatch(timeline: Timeline) -> float:
    """Return a microbatch's memory on 1F1B's first rank, in the unit of ``costs.activation``.

    That rank has the first p-th of the model, which is as many stages as a rank has chunks.
    """
    return sum(timeline.costs.activation[: timeline.schedule.placement.chunks]) or 1.0


def one_f_one_b_peak(timeline: Timeline) -> int:
    """Count the microbatches on 1F1B's first rank: one for every rank, or all if fewer."""
    return min(timeline.schedule.placement.pipeline_size, timeline.schedule.num_microbatches)


def _line(timeline: Timeline, rank: int) -> MemoryLine:
    unit = microbatch(timeline)
    starts, ends = timeline.start[rank], timeline.end[rank]
    times: list[float] = []
    held: list[float] = []

    def step(time: float, memory: float) -> None:
        if not held or memory / unit != held[-1]:
            times.append(time)
            held.append(memory / unit)

    for i, (within, after) in enumerate(timeline.memory_steps(rank)):
        step(starts[i], within)
        if i + 1 == len(starts) or starts[i + 1] > ends[i]:
            step(ends[i], after)
    return MemoryLine(rank, tuple(times), tuple(held))
