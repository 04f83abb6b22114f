"""Groups of GPUs for several adapters: which of them to put together, and on how many GPUs.

A group has an equal part of the GPUs and some of the adapters, which share its pipeline. All groups
run at the same time. So one group has the fewest idle ranks if its pipeline is filled, and several
have shorter pipelines, or fewer replicas that take part in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_zb.errors import UsageError
from megatron_zb.lora.adapter_file import AdapterEntry
from megatron_zb.plan.features.adapters import AdapterRow, Jobs, hours, jobs_of
from megatron_zb.plan.rows import Prediction
from megatron_zb.plan.search import Plan, search
from megatron_zb.plan.strategy import ScheduleCandidate
from megatron_zb.plan.table import name_in, setting_of

_MOST_ROWS = 2
"""Schedules of this package that are tried for each number of groups."""


@dataclass(frozen=True)
class Grouped:
    """The fastest way for a number of groups.

    Args:
        plan: of one group.
        index: of the row in that plan.
        sets: names of the adapters of each group.
        seconds: until the last group has done its steps.
        is_shared: whether the adapters of the slowest group share its pipeline, or come one after
            another.
    """

    plan: Plan
    index: int
    sets: tuple[tuple[str, ...], ...]
    seconds: float
    is_shared: bool

    @property
    def gpus(self) -> int:
        """GPUs of a group."""
        return self.plan.job.gpus


@dataclass(frozen=True)
class Groups:
    """The fastest way for each number of groups, one group first.

    Args:
        found: the ways.
        missing: why there is none for other numbers of groups.
    """

    found: list[Grouped]
    missing: dict[int, str]


def grouped(plan: Plan, rows: Sequence[AdapterRow], entries: Sequence[AdapterEntry]) -> Groups:
    """Return the fastest way for each number of groups.

    Args:
        plan: for all GPUs.
        rows: of this plan with all adapters, the fastest first. Groups are searched with the
            schedules of the first ones, and Megatron's; ``auto`` is left out, as every number of
            groups would need its long search.
        entries: the adapters.
    """
    whole = _fastest(plan, entries, 1) if rows else None
    found = [] if whole is None else [whole]
    missing: dict[int, str] = {}
    own = [plan.ranked[row.index] for row in rows if _is_brief(plan.ranked[row.index])]
    candidates = [row.runs for row in own if not row.megatron][:_MOST_ROWS]
    for groups in _numbers(plan.job.gpus, len(entries)) if candidates else ():
        try:
            found.append(_searched(plan, groups, candidates, entries))
        except UsageError as error:
            missing[groups] = str(error)
    return Groups(found, missing)


def _is_brief(row: Prediction) -> bool:
    """Return whether a row's schedule is built without a long search."""
    return row.candidate.split()[0] != "auto"


def _numbers(gpus: int, adapters: int) -> Iterator[int]:
    """Yield numbers of groups of GPUs: no more than adapters, and each with 2 GPUs or more."""
    yield from (n for n in range(2, adapters + 1) if gpus % n == 0 and gpus // n >= 2)


def _searched(
    plan: Plan,
    groups: int,
    candidates: Sequence[ScheduleCandidate],
    entries: Sequence[AdapterEntry],
) -> Grouped:
    """Search for the settings of one of some groups; return the fastest way.

    Raises:
        UsageError: no setting fits into its GPUs, or suits all batches.
    """
    smaller = search(replace(plan.job, gpus=plan.job.gpus // groups), candidates, tries=1)
    found = _fastest(smaller, entries, groups)
    if found is None:
        raise UsageError("no setting that fits has microbatches that divide all batches")
    return found


def _fastest(plan: Plan, entries: Sequence[AdapterEntry], groups: int) -> Grouped | None:
    found: Grouped | None = None
    for index, jobs in jobs_of(plan.ranked, entries, len(plan.ranked)):
        if not _is_brief(jobs.row):
            continue
        sets = [jobs.some(numbers) for numbers in _dealt(jobs, groups)]
        seconds = [of.seconds(plan.job.memory) for of in sets]
        longest = max(range(groups), key=seconds.__getitem__)
        if found is None or seconds[longest] < found.seconds:
            names = tuple(tuple(entry.name for entry in of.entries) for of in sets)
            is_shared = len(names[longest]) == 1 or seconds[longest] < sets[longest].apart()
            found = Grouped(plan, index, names, seconds[longest], is_shared)
    return found


def _dealt(jobs: Jobs, groups: int) -> list[list[int]]:
    """Deal adapters out to groups: the longest one first, each to the group with the least so far.

    This is the rule of the longest processing time (Graham, 1969).
    """
    seconds = [jobs.some([i]).apart() for i in range(len(jobs.entries))]
    sets: list[list[int]] = [[] for _ in range(groups)]
    for i in sorted(range(len(seconds)), key=lambda i: -seconds[i]):
        min(sets, key=lambda numbers: sum(seconds[j] for j in numbers)).append(i)
    return [sorted(numbers) for numbers in sets]


# --- a table, and JSON


def print_groups(plan: Plan, groups: Groups, console: Console) -> None:
    """Print a row for each number of groups, and why others have none."""
    if len(groups.found) + len(groups.missing) < 2:
        return
    console.print(Text("\ngroups of GPUs, each with some of the adapters", style="bold"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("GPUs", "schedule", "setting"):
        table.add_column(column, no_wrap=True)
    table.add_column("hours", justify="right", no_wrap=True)
    table.add_column("adapters of each group")
    for of in groups.found:
        row = of.plan.ranked[of.index]
        sets = " | ".join(" ".join(names) for names in of.sets)
        way = "" if of.is_shared else ", one after another"
        name, setting = name_in(of.plan, row), setting_of(row)
        table.add_row(f"{len(of.sets)} × {of.gpus}", name, setting, hours(of.seconds), sets + way)
    console.print(table)
    for number, why in groups.missing.items():
        said = Text(f" -  {number} × {plan.job.gpus // number}: {why}")
        console.print(said, highlight=False, soft_wrap=True)


def groups_as_json(groups: Groups) -> list[dict[str, Any]]:
    """Return the rows as data for JSON, in seconds."""
    return [
        {
            "groups": len(of.sets),
            "gpus_of_each": of.gpus,
            "schedule": of.plan.ranked[of.index].candidate,
            "setting": setting_of(of.plan.ranked[of.index]),
            "adapters": [list(names) for names in of.sets],
            "is_shared": of.is_shared,
            "seconds": of.seconds,
        }
        for of in groups.found
    ]
