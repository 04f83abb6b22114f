"""Several LoRA adapters in one pipeline: the time of all jobs together, and one after another.

The search of a plan takes one training on a frozen base. This takes its rows, and simulates each
with the adapters of a file: every step of the pipeline takes one step of each adapter that has
steps left, as a run with ``--pipeline-adapters`` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.lora.adapter_file import ALL, EXAMPLES, LORA, AdapterEntry, AdapterFile
from megatron_zb.measured.config import read
from megatron_zb.plan.rows import Prediction
from megatron_zb.plan.search import Plan
from megatron_zb.plan.table import name_in, setting_of
from megatron_zb.schedules import Costs, Schedule, catalog
from megatron_zb.schedules.features.adapters import Adapter, Adapters

FLAG = "--adapters"
_MOST_ROWS = 4
"""Rows of this package that are simulated with adapters: each builds several schedules."""


@dataclass(frozen=True)
class AdapterRow:
    """Seconds of all jobs with the setting of a row of a plan.

    Args:
        index: of the row in the plan.
        apart: one after another.
        together: in one pipeline; None under Megatron's own schedules, which have no adapters, and
            for copies of all weights that have no room.
    """

    index: int
    apart: float
    together: float | None

    @property
    def seconds(self) -> float:
        """The less of both."""
        return self.apart if self.together is None else min(self.apart, self.together)


def asked_adapters(arguments: argparse.Namespace) -> list[AdapterEntry] | None:
    """Return the adapters that the arguments request, None without a file.

    A plan with LoRA adapters is one of a frozen base. It is for the batch of the largest one.

    Raises:
        UsageError: the file is wrong, lacks a number, or does not go with another argument.
    """
    if arguments.adapters is None:
        return None
    if arguments.lengths is not None:
        raise UsageError(f"{FLAG} cannot be combined with --lengths: leave one out")
    path = Path(arguments.adapters)
    entries = read(path, AdapterFile).adapters
    for entry in entries:
        for key in ("batch", "steps"):
            if getattr(entry, key) is None:
                raise UsageError(
                    f"{path}: adapter {entry.name} has no {key}, by which a plan counts its steps: "
                    f"give it, such as {key}: {EXAMPLES[key]}"
                )
    kinds = {entry.weights for entry in entries}
    if len(kinds) > 1:
        raise UsageError(
            f"{path}: a plan counts one kind of weights, and the adapters have lora and all: make "
            "a file for each"
        )
    arguments.lora = True if kinds == {LORA} else arguments.lora
    if arguments.global_batch_size is None:
        arguments.global_batch_size = max(entry.batch or 0 for entry in entries)
    return entries


def with_adapters(plan: Plan, entries: Sequence[AdapterEntry]) -> list[AdapterRow]:
    """Simulate the rows of a plan with adapters, those with the least time first.

    Rows whose microbatches do not divide the batch of an adapter are left out.
    """
    found = [
        AdapterRow(index, jobs.apart(), jobs.together() if jobs.share(plan.job.memory) else None)
        for index, jobs in jobs_of(plan.ranked, entries, _MOST_ROWS)
    ]
    return sorted(found, key=lambda row: row.seconds)


def jobs_of(
    ranked: Sequence[Prediction], entries: Sequence[AdapterEntry], most: int
) -> Iterator[tuple[int, Jobs]]:
    """Yield the adapters in the settings of rows, each with the index of its row.

    Args:
        ranked: the rows of a plan.
        entries: the adapters.
        most: rows of this package; those of Megatron's schedules are not counted.
    """
    for index, row in enumerate(ranked):
        if row.timeline is None or row.costs is None or not (row.megatron or most):
            continue
        jobs = Jobs.of(row, entries)
        if jobs is not None:
            most -= not row.megatron
            yield index, jobs


@dataclass(frozen=True)
class Jobs:
    """The adapters in the setting of one row: microbatches of a step, and steps."""

    row: Prediction
    costs: Costs
    entries: tuple[AdapterEntry, ...]
    sizes: tuple[tuple[int, int], ...]
    known: dict[tuple[int, ...], float] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Prediction, entries: Sequence[AdapterEntry]) -> Jobs | None:
        """Return the adapters of a row, None if its microbatches do not divide a batch."""
        together = row.load.strategy.microbatch * row.load.strategy.data
        assert row.costs is not None
        if any((entry.batch or 0) % together for entry in entries):
            return None
        sizes = [((entry.batch or 0) // together, entry.steps or 0) for entry in entries]
        return cls(row, row.costs, tuple(entries), tuple(sizes))

    def some(self, numbers: Sequence[int]) -> Jobs:
        """Return some of the adapters, by their numbers."""
        entries = tuple(self.entries[i] for i in numbers)
        return replace(self, entries=entries, sizes=tuple(self.sizes[i] for i in numbers))

    def share(self, memory: float) -> bool:
        """Return whether the adapters can share a pipeline whose ranks have this memory.

        LoRA adapters are small, and not counted. Copies of all weights are.
        """
        if self.row.megatron:
            return False
        own, copies = self.row.memory, sum(it.weights == ALL for it in self.entries)
        of_copy = own.weights + own.gradients + own.optimizer
        return own.total + max(copies - 1, 0) * of_copy <= memory

    def seconds(self, memory: float) -> float:
        """Return the seconds of all jobs in the faster way."""
        apart = self.apart()
        return min(apart, self.together()) if self.share(memory) else apart

    def apart(self) -> float:
        """Return the seconds of all jobs one after another."""
        return sum(steps * self._seconds((m,)) for m, steps in self.sizes)

    def together(self) -> float:
        """Return the seconds of all jobs, of which fewer are left the longer it goes on."""
        seconds, done = 0.0, 0
        for end in sorted({steps for _, steps in self.sizes}):
            going = tuple(sorted(m for m, steps in self.sizes if steps >= end))
            seconds += (end - done) * self._seconds(going)
            done = end
        return seconds

    def _seconds(self, microbatches: tuple[int, ...]) -> float:
        """Return the seconds of one step of each of some adapters."""
        if microbatches not in self.known:
            timeline = schedules.simulate(self._built(microbatches), self.costs)
            updates = len(microbatches) * self.row.step_seconds
            self.known[microbatches] = timeline.makespan + updates
        return self.known[microbatches]

    def _built(self, microbatches: tuple[int, ...]) -> Schedule:
        row = self.row
        assert row.schedule is not None
        is_one = len(microbatches) == 1
        adapters = tuple(Adapter(str(i), m) for i, m in enumerate(microbatches))
        family = catalog.family(row.family)
        return schedules.build(
            row.family,
            pipeline_size=row.load.strategy.pipeline,
            num_microbatches=microbatches[0] if is_one else None,
            adapters=None if is_one else Adapters(adapters),
            costs=self.costs,
            chunks=row.chunks,
            placement=None if family.placement is not None else row.schedule.placement,
            memory_limit=row.memory_limit,
        )


# --- a table, and JSON


def print_adapters(
    plan: Plan, rows: Sequence[AdapterRow], entries: Sequence[AdapterEntry], console: Console
) -> None:
    """Print the rows, those with the least time first, and what they gain."""
    title = f"\n{len(entries)} adapters, hours until all have done their steps"
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("schedule", "setting"):
        table.add_column(column, no_wrap=True)
    for column in ("together", "one after another"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        of = plan.ranked[row.index]
        together = "-" if row.together is None else hours(row.together)
        table.add_row(name_in(plan, of), setting_of(of), together, hours(row.apart))
    console.print(table)
    console.print(Text(f" -  {advice(plan, rows)}"), highlight=False, soft_wrap=True)


def advice(plan: Plan, rows: Sequence[AdapterRow]) -> str:
    """Return what the fastest way gains over the fastest one after another."""
    shared = [row for row in rows if row.together is not None]
    if not shared and any(not plan.ranked[row.index].megatron for row in rows):
        return (
            "copies of all weights have no room beside one another: give fewer of them, or more "
            "pipeline or tensor-parallel ranks"
        )
    if not shared:
        return (
            "no schedule of this package has microbatches that divide the batch of every adapter: "
            "give batches with a larger common divisor"
        )
    least = min(row.apart for row in rows)
    best = min(shared, key=lambda row: row.together or 0.0)
    assert best.together is not None
    gain = 1 - best.together / least
    if gain <= 0:
        return "one after another is as fast: the pipeline has little idle time to fill"
    return (
        f"together, all are done in {gain:.1%} less time than the fastest one after another: "
        f"--pipeline-adapters FILE --pipeline-schedule {plan.ranked[best.index].family}"
    )


def adapters_as_json(
    plan: Plan, rows: Sequence[AdapterRow], entries: Sequence[AdapterEntry]
) -> dict[str, Any]:
    """Return the rows as data for JSON, in seconds."""
    return {
        "names": [entry.name for entry in entries],
        "rows": [
            {
                "schedule": plan.ranked[row.index].candidate,
                "index": row.index,
                "together_seconds": row.together,
                "one_after_another_seconds": row.apart,
            }
            for row in rows
        ],
    }


def hours(seconds: float) -> str:
    """Return seconds in hours, with three digits."""
    return f"{seconds / 3600:.3g}"
