"""Updates one step late: time and memory of each row of a plan without a flush.

The search of a plan takes trainings whose updates come in time. This takes its rows, and builds
each again with ``update_delay=1``, as a run with ``--pipeline-update-delay 1`` does. The optimizer
is work of a rank; the reduction of gradients and the gathering of weights run beside passes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.parsing import gib
from megatron_zb.plan.byte_counts import OPTIMIZER, StateBytes
from megatron_zb.plan.features.catalog import features_of
from megatron_zb.plan.prediction import worst_rank
from megatron_zb.plan.rows import Prediction
from megatron_zb.plan.search import Plan
from megatron_zb.plan.stages import StageWorkload
from megatron_zb.plan.step import Travel, seconds_apart
from megatron_zb.plan.table import name_in, setting_of
from megatron_zb.schedules import PassKind, Schedule, catalog
from megatron_zb.schedules.features.update_delay import GROUPS
from megatron_zb.schedules.units import Updates

FLAG = "--late-updates"
OF_TRAINING = "--pipeline-update-delay"
_MOST_ROWS = 8
"""Rows that are built without a flush."""
_TURNS = 4
"""Microbatches of a step that is built, in multiples of the ranks; more add work and no waits."""
_FEEDBACK = 4
"""Bytes that error feedback keeps for each of the optimizer's weights."""


@dataclass(frozen=True)
class LateRow:
    """A row of a plan with late updates.

    Args:
        index: of the row in the plan.
        seconds: of a step.
        memory: of the worst rank, in bytes.
        fits: whether a GPU has as much.
    """

    index: int
    seconds: float
    memory: float
    fits: bool


def of_training(training: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Return the way of a training's arguments for those of a plan, if its updates are late."""
    if not training.pipeline_update_delay:
        return {}
    if training.pipeline_update_prediction is not None:
        keeps_update = training.pipeline_update_prediction == "linear"
    else:
        usual = "on" if "muon" in training.optimizer else "off"
        keeps_update = (training.pipeline_update_feedback or usual) == "on"
    return {"late_updates": ("feedback" if keeps_update else "plain", OF_TRAINING)}


def check_late(arguments: argparse.Namespace, flag: str) -> None:
    """Check that late updates go with the other arguments.

    Args:
        arguments: of the plan, with what those of a training give.
        flag: that asks for late updates.

    Raises:
        UsageError: they do not.
    """
    if arguments.late_updates is None:
        return
    others = (
        ("--lengths", arguments.lengths),
        ("--adapters", arguments.adapters),
        ("--post-validation", arguments.post_validation or None),
        ("--lora", arguments.lora),
    )
    for other, value in others:
        if value is not None:
            raise UsageError(f"{flag} cannot be combined with {other}: leave one out")


def with_late_updates(plan: Plan, way: str) -> list[LateRow]:
    """Return the rows of a plan that can have late updates, those with the most speed first.

    Args:
        way: ``plain``, or ``feedback`` with what error feedback or a linear prediction keeps.
    """
    found = list[LateRow]()
    built = set[tuple[object, ...]]()
    for index, row in enumerate(plan.ranked):
        known = (row.family, row.chunks, row.load.strategy, row.layout)
        is_other = row.megatron or row.timeline is None
        if is_other or known in built or len(found) >= _MOST_ROWS:
            continue
        built.add(known)
        found += _rebuilt(index, row, plan, way)
    return sorted(found, key=lambda it: (not it.fits, it.seconds / plan.ranked[it.index].tokens))


def _rebuilt(index: int, row: Prediction, plan: Plan, way: str) -> list[LateRow]:
    """Return a row with late updates, none for a schedule or features that cannot have them.

    Of many microbatches some are built; each of the others takes what the busiest rank computes.
    """
    assert row.costs is not None and row.schedule is not None
    features = features_of(row.runs)
    staged = _LateWorkload(
        row.load, row.schedule.placement, row.layout, features, feedback=way == "feedback"
    )
    states = max(staged.states, key=lambda s: s.parameters)
    travel = Travel.of(row.load, states)
    update = seconds_apart(row.load, states, post_validation=False)
    p, m = row.load.strategy.pipeline, row.num_microbatches
    few = min(m, _TURNS * p)
    family = catalog.family(row.family)
    try:
        late = schedules.build(
            row.family,
            pipeline_size=p,
            num_microbatches=few,
            costs=row.costs,
            chunks=row.chunks,
            placement=None if family.placement is not None else row.schedule.placement,
            memory_limit=row.memory_limit,
            update_delay=1,
            updates=Updates(update, travel.reduction, travel.gathering),
        )
    except UsageError:
        return []
    assert late.report is not None and late.report.period is not None
    each = (late.report.lower_bound / GROUPS - update) / few
    memory = worst_rank(staged, _without_updates(late), snapshot=False).total
    seconds = late.report.period + (m - few) * each
    return [LateRow(index, seconds, memory, memory <= plan.job.memory)]


@dataclass(frozen=True)
class _LateWorkload(StageWorkload):
    """A workload whose ranks keep copies of weights and gradients.

    Two copies of the weights, since the distributed optimizer gathers into a third one; two of the
    gradients, while they are reduced; and, with ``feedback``, the last update of each weight.
    """

    feedback: bool = False

    @cached_property
    def states(self) -> tuple[StateBytes, ...]:
        """Bytes that each pipeline rank keeps from step to step."""
        kept = _FEEDBACK / OPTIMIZER if self.feedback else 0.0
        return tuple(
            replace(
                it,
                weights=3 * it.weights,
                gradients=3 * it.gradients,
                optimizer=(1 + kept) * it.optimizer,
            )
            for it in super().states
        )


def _without_updates(late: Schedule) -> Schedule:
    """Return the order of passes that hold activations."""
    ranks = (tuple(p for p in rank if p.kind is not PassKind.U) for rank in late.ranks)
    return replace(late, ranks=tuple(ranks))


# --- a table, and JSON


def print_late(plan: Plan, rows: Sequence[LateRow], console: Console) -> None:
    """Print the rows, those with the most speed first, and what they gain."""
    console.print(Text("\nUpdates one step late, with no flush", style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("schedule", "setting"):
        table.add_column(column, no_wrap=True)
    for column in ("tokens/s/GPU", "in time", "memory", "fits"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        of = plan.ranked[row.index]
        table.add_row(
            name_in(plan, of),
            setting_of(of),
            f"{_speed(of, row):.0f}",
            f"{of.tokens_per_gpu:.0f}",
            gib(row.memory),
            "yes" if row.fits else "no",
        )
    console.print(table)
    console.print(Text(f" -  {advice(plan, rows)}"), highlight=False, soft_wrap=True)


def advice(plan: Plan, rows: Sequence[LateRow]) -> str:
    """Return what the fastest row that fits gains over the fastest one in time."""
    if not rows:
        return (
            "no row can have late updates: they need 1f1b, interleaved, auto, or a schedule whose "
            "name begins with v- or zb-, and no feature of the schedule"
        )
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return (
            "no row has room for a second copy of its weights and gradients: give more pipeline or "
            "tensor-parallel ranks"
        )
    best = fitting[0]
    of, in_time = plan.ranked[best.index], max(row.tokens_per_gpu for row in plan.ranked)
    gain = _speed(of, best) / in_time - 1
    if gain <= 0:
        return "updates in time are as fast: leave the delay out, since it changes the training"
    return (
        f"{gain:.1%} faster than the fastest row in time, but another training: "
        f"--pipeline-schedule {of.family} --pipeline-update-delay 1"
    )


def late_as_json(plan: Plan, rows: Sequence[LateRow]) -> dict[str, Any]:
    """Return the rows as data for JSON, in seconds and bytes."""
    return {
        "rows": [
            {
                "schedule": plan.ranked[row.index].candidate,
                "index": row.index,
                "seconds": row.seconds,
                "tokens_per_second_per_gpu": _speed(plan.ranked[row.index], row),
                "memory": row.memory,
                "fits": row.fits,
            }
            for row in rows
        ],
    }


def _speed(of: Prediction, row: LateRow) -> float:
    """Return the tokens per second and GPU."""
    return of.tokens / row.seconds / of.gpus
