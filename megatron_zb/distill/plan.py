"""``megatron-zb plan --student-config``: the command line and the table. Imports no torch."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from megatron_zb.distill.planning import (
    DistillPlanJob,
    DistillPlanRow,
    DistillPlanStage,
    flags_of,
    rows,
)
from megatron_zb.distill.student_files import read_student
from megatron_zb.errors import UsageError
from megatron_zb.measured.config import path_of
from megatron_zb.parsing import GIB, flag_of, gib
from megatron_zb.plan import request
from megatron_zb.tables import Column, Listing

# Of other plans, with what they have when they are not given.
_OF_OTHERS = {
    "profile": None,
    "microbatches": None,
    "memory_limit": None,
    "schedules": None,
    "tensor": None,
    "pipeline": None,
    "recompute": None,
    "adapters": None,
    "late_updates": None,
    "lora": None,
    "lengths": None,
    "packing": None,
    "no_overlap_p2p": False,
    "post_validation": False,
    "snapshot": False,
    "html": None,
    "chart": False,
}
_MOST_STAGES = 8
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def run(arguments: argparse.Namespace) -> None:
    """Find the ways to distil and print them.

    Raises:
        UsageError: a file, a field or an argument is wrong, or nothing fits.
    """
    job = _read(arguments)
    found = rows(job)
    if arguments.format == "json":
        print(json.dumps({"ranked": _listing(job, found).as_json()}, indent=2))
    else:
        _print(job, found, Console())


def _read(arguments: argparse.Namespace) -> DistillPlanJob:
    for name, nothing in _OF_OTHERS.items():
        if getattr(arguments, name) != nothing:
            raise UsageError(
                f"{flag_of(name)} has no meaning for a distillation: leave it out, or "
                "leave out --student-config"
            )
    if arguments.words:
        raise UsageError(
            "the arguments of a training do not describe a distillation: give the teacher with "
            "--config, or leave out --student-config"
        )
    plan, _ = request.read(argparse.Namespace(**{**vars(arguments), "micro_batch_size": None}))
    path = path_of("--student-config", "students", arguments.student_config)
    return DistillPlanJob(
        teacher=plan.model,
        student=read_student(path),
        device=plan.device,
        gpus=plan.gpus,
        memory=plan.memory,
        microbatch=_microbatch(arguments.micro_batch_size),
        global_batch=plan.global_batch,
        sequence=plan.sequence,
        tokens=_tokens(arguments.tokens),
    )


def _tokens(text: str | None) -> float | None:
    """Read a number of tokens, such as 2.5B.

    Raises:
        UsageError: it is none.
    """
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,9})?)([KMBT]?)", text)
    number = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 1 <= number < 1e18:
        raise UsageError(f"--tokens '{text}' is no number of tokens: give one, such as 2.5B")
    return number


def _microbatch(text: str | None) -> int:
    if text is None:
        return 1
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < 8 and int(text) > 0):
        raise UsageError(
            f"--micro-batch-size '{text}' is no number of samples: give one, such as 1"
        )
    return int(text)


def _listing(job: DistillPlanJob, found: Sequence[DistillPlanRow]) -> Listing[DistillPlanRow]:
    """Return the rows for both formats."""
    # the published practice, where the batch allows it
    slowest = next((row.seconds for row in found if row.distribution is None), None)
    by_hours = job.tokens is not None

    def hours(row: DistillPlanRow) -> float | None:
        return job.hours(row.seconds)

    columns: Sequence[Column[DistillPlanRow]] = (
        Column("way", lambda row: row.name, name="way", is_text=True, no_wrap=True),
        Column("", lambda row: row.distribution and row.distribution.spec, name="distribution"),
        Column("s a step", lambda row: row.seconds, ".4g", name="seconds_per_step"),
        Column(
            "" if by_hours else "samples/s",
            lambda row: job.global_batch / row.seconds,
            ".4g",
            name="samples_per_second",
        ),
        Column("hours" if by_hours else "", hours, ".4g"),
        Column("speed-up", lambda row: slowest and slowest / row.seconds, ".2f"),
        Column("GiB", lambda row: row.memory / GIB, ".1f", name="gib"),
        Column("ranges", lambda row: row.distribution and len(row.distribution.ranges)),
        Column("", hours, name="hours"),
        Column(
            "",
            lambda row: [asdict(stage) | {"seconds": stage.seconds} for stage in row.stages],
            name="stages",
        ),
        Column("", lambda row: list(flags_of(job, row)), name="flags"),
    )
    return Listing(columns, found, numbered=("#", 1))


def _print(job: DistillPlanJob, found: Sequence[DistillPlanRow], console: Console) -> None:
    console.print(
        Text(
            f"{job.student.name}, of {job.teacher.name}, on {job.gpus} {job.device.name}, "
            f"{gib(job.memory)} each; {job.global_batch} samples of {job.sequence} tokens in a "
            "step",
            style="bold",
        )
    )
    console.print(_listing(job, found).table())
    console.print(
        "counted, not measured; speed-up: over data-parallel, block by block; ranges of blocks",
        style="dim",
    )
    hours = job.hours(found[0].seconds)
    if hours is not None:
        console.print(f"{job.tokens:,.0f} tokens take {hours * job.gpus:,.4g} GPU hours")
    if found[0].stages:
        _print_stages(found[0], console)
    flags = flags_of(job, found[0])
    if flags:
        console.print(Text("\nflags of the first:", style="bold"))
        text = Text("  " + " \\\n  ".join(flags))
        console.print(text, highlight=False, soft_wrap=True)


def _print_stages(row: DistillPlanRow, console: Console) -> None:
    """Print the slowest stages of a row, on which the others wait."""
    console.print(Text("\nstages of the first, the slowest on top:", style="bold"))
    columns: Sequence[Column[DistillPlanStage]] = (
        Column("from", lambda stage: stage.first, is_text=True),
        Column("to", lambda stage: stage.last, is_text=True),
        Column("GPUs", lambda stage: stage.gpus),
        Column("s a step", lambda stage: stage.seconds, ".4g"),
        Column("teacher", lambda stage: stage.teacher, ".4g"),
        Column("students", lambda stage: stage.students, ".4g"),
        Column("update", lambda stage: stage.update, ".4g"),
        Column("busy", lambda stage: stage.seconds / row.seconds, ".0%"),
    )
    slowest = sorted(row.stages, key=lambda stage: -stage.seconds)[:_MOST_STAGES]
    console.print(Listing(columns, slowest).table())
    left = len(row.stages) - _MOST_STAGES
    gpus = sum(stage.gpus for stage in row.stages)
    busy = sum(stage.gpus * stage.seconds for stage in row.stages) / gpus / row.seconds
    more = f"{left} more stages; " if left > 0 else ""
    console.print(f"{more}{gpus} GPUs are busy for {busy:.0%} of a step on average", style="dim")
