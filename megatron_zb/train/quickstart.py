"""Train a small GPT on 4 CPU ranks with Megatron's own schedule and with four of this package.

Run as `megatron-zb quickstart`. Megatron's own goes first; the others must have its losses, bit for
bit, and its gradient norms in every iteration. Bubbles are shown by steps of the same programs
whose stages sleep, since ranks that share cores fill one another's bubbles.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_zb import files, schedules
from megatron_zb.drawing.pictures import save_picture
from megatron_zb.errors import UsageError
from megatron_zb.train.corpus import MOST_BYTES, library_files, write_corpus
from megatron_zb.train.watched_run import NewRecords, Record, RunFailed, run

UPSTREAM = "upstream"
SCHEDULES = ("v-half", "v-min", "v-zb", "zb-h1")
PIPELINE_SIZE = 4
NUM_MICROBATCHES = 8
MICRO_BATCH_SIZE = 2

TRAINING_ARGUMENTS = {
    "--pipeline-model-parallel-size": PIPELINE_SIZE,
    "--num-layers": 8,
    "--hidden-size": 128,
    "--num-attention-heads": 8,
    "--seq-length": 192,
    "--micro-batch-size": MICRO_BATCH_SIZE,
    "--global-batch-size": NUM_MICROBATCHES * MICRO_BATCH_SIZE,
    "--lr": 3e-3,
    # Norms are summed in the order of the layers on each rank, so the last bits may differ between
    # placements, and a gradient clipped by a norm would differ, too.
    "--clip-grad": 0,
    "--eval-iters": 1,
    "--log-interval": 1,
}

# Of a step whose stages sleep: F, B and W of one microbatch on one rank. Long beside a message, and
# all of it takes less than half a minute.
MILLISECONDS = (16.0, 16.0, 16.0)
REPETITIONS = 3

SMALLEST_FALL_OF_LOSS = 1.0
LARGEST_NORM_DIFFERENCE = 1e-6  # of the norm of Megatron's own, see --clip-grad above
# Of the peak of Megatron's own: 3/4 and 1/2 of the microbatches, and what a chunk holds besides.
LARGEST_PEAK = {"v-half": 0.80, "v-min": 0.55}


class QuickstartFailure(Exception):
    """Failure of a run, or a result that is not as required. The message is one sentence."""


@dataclass(frozen=True)
class Result:
    """Logged results of one run."""

    losses: list[float]
    grad_norms: list[float]
    eval_loss: float
    peak_activation_bytes: list[int]
    seconds_per_iteration: float
    predicted_bubble_rate: float


@dataclass(frozen=True)
class SleepingStep:
    """A step of all ranks whose stages sleep, in seconds."""

    predicted_seconds: float
    measured_seconds: float
    predicted_bubble_rate: float

    @property
    def measured_bubble_rate(self) -> float:
        """The share of the measured step in which ranks do not sleep for a pass."""
        busy = self.predicted_seconds * (1 - self.predicted_bubble_rate)
        return 1 - busy / self.measured_seconds


def run_quickstart(arguments: argparse.Namespace) -> int:
    """Run everything; return 0 if all results are as required, 1 if not.

    Raises:
        UsageError: an error that the user can correct.
    """
    try:
        _quickstart(arguments, Console())
    except (QuickstartFailure, RunFailed) as error:
        print(f"quickstart: failed: {error}", file=sys.stderr)
        return 1
    return 0


def _quickstart(arguments: argparse.Namespace, console: Console) -> None:
    data_path = arguments.data_path
    if data_path is not None and not Path(f"{data_path}.idx").is_file():
        raise UsageError(
            f"there is no {data_path}.idx: make it with scripts/prepare_text.py "
            f"--output-prefix {data_path}, or leave --data-path out"
        )
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {arguments.output} cannot be made: {error.strerror}") from error
    for name in (UPSTREAM, *SCHEDULES):
        save_picture(_timeline(name), arguments.output / f"{name}.png")
    if data_path is None:
        prefix = arguments.output / "text"
        arguments.data_path = str(prefix)
        if not Path(f"{prefix}.idx").is_file():  # an earlier run may have written it
            written = write_corpus(prefix, library_files(), MOST_BYTES)
            console.print(written, highlight=False, soft_wrap=True)
    results = {name: _train(name, arguments, console) for name in (UPSTREAM, *SCHEDULES)}
    console.print(table(results))
    console.print(why_times_tell_little(_cores()), highlight=False)
    steps = _sleep(arguments.output, console)
    console.print(table_of_steps(steps))
    _write_summary(results, steps, arguments.output / "summary.json")
    console.print(f"pictures, logs and summary.json are in {arguments.output}", highlight=False)
    check(results)


def _timeline(name: str) -> schedules.Timeline:
    """Simulate a schedule under equal costs, as it is built when nothing has been measured."""
    costs = schedules.Costs.uniform(
        pipeline_size=PIPELINE_SIZE, forward=1.0, backward=1.0, weight=1.0
    )
    schedule = schedules.build(
        "1f1b" if name == UPSTREAM else name,
        pipeline_size=PIPELINE_SIZE,
        num_microbatches=NUM_MICROBATCHES,
        costs=costs,
    )
    return schedules.simulate(schedule, costs)


def _train(name: str, arguments: argparse.Namespace, console: Console) -> Result:
    records = arguments.output / f"{name}.jsonl"
    records.unlink(missing_ok=True)
    command = training_command(name, arguments.data_path, arguments.train_iters, records)
    with _progress_bar(console, name, arguments.train_iters) as show:
        try:
            run(command, printed=arguments.output / f"{name}.log", records=records, show=show)
        except RunFailed as error:
            raise RunFailed(f"{name}: {error}") from error
    result = read_result(NewRecords(records)(), _timeline(name).bubble_rate)
    if len(result.losses) != arguments.train_iters:
        raise QuickstartFailure(
            f"{records} has {len(result.losses)} iterations instead of {arguments.train_iters}"
        )
    return result


def training_command(name: str, data_path: str, iterations: int, records: Path) -> list[str]:
    """Return the command that trains with a schedule.

    `upstream` is Megatron without this package's flag.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(PIPELINE_SIZE), "-m", "megatron_zb.train", "--cpu"]
    for flag, value in TRAINING_ARGUMENTS.items():
        command += [flag, str(value)]
    command += ["--train-iters", str(iterations), "--eval-interval", str(iterations)]
    command += ["--data-path", data_path]
    command += ["--log-file", str(records), "--measure-activation-memory"]
    if name != UPSTREAM:
        command += ["--pipeline-schedule", name]
    return command


@contextmanager
def _progress_bar(
    console: Console, name: str, iterations: int
) -> Iterator[Callable[[Record], None]]:
    """Yield a function that moves a progress bar with each record."""
    columns = (
        TextColumn("{task.description:7}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=iterations, state="starting 4 ranks")

        def show(record: Record) -> None:
            if "lm_loss" in record:
                state = f"loss {record['lm_loss']:.4f}"
                progress.update(task, completed=record["iteration"], state=state)

        yield show


def read_result(records: Sequence[Record], predicted_bubble_rate: float) -> Result:
    """Read the results that a run has logged.

    ``predicted_bubble_rate`` is for a run that has predicted none, such as Megatron's own.
    """
    iterations = [record for record in records if "lm_loss" in record]
    final = records[-1]
    evaluations = [record["eval_loss"] for record in records if "eval_loss" in record]
    predicted = final["predicted_bubble_rate"]
    return Result(
        losses=[record["lm_loss"] for record in iterations],
        grad_norms=[record["grad_norm"] for record in iterations],
        eval_loss=evaluations[-1],
        peak_activation_bytes=final["peak_activation_bytes"],
        seconds_per_iteration=final["seconds_per_iteration"],
        predicted_bubble_rate=predicted_bubble_rate if predicted is None else predicted,
    )


def check(results: Mapping[str, Result]) -> None:
    """Check the results of all runs against those of Megatron's own schedule.

    Losses must be equal and fall, norms equal but for rounding, memory as promised.

    Raises:
        QuickstartFailure: one of these does not hold.
    """
    upstream = results[UPSTREAM]
    for name, result in results.items():
        different = first_difference(result, upstream) or first_other_norm(result, upstream)
        if different is not None:
            raise QuickstartFailure(f"{name} differs from {UPSTREAM} {different}")
        if name in LARGEST_PEAK and not peak_of_upstream(result, upstream) <= LARGEST_PEAK[name]:
            raise QuickstartFailure(
                f"{name} held {peak_of_upstream(result, upstream):.3f} of the activation memory of "
                f"{UPSTREAM}, more than {LARGEST_PEAK[name]:g}"
            )
    fall = upstream.losses[0] - upstream.losses[-1]
    # Written so that a loss that is not a number fails, too.
    if not fall >= SMALLEST_FALL_OF_LOSS:
        raise QuickstartFailure(
            f"the loss fell by {fall:.3f} in {len(upstream.losses)} iterations, "
            f"less than {SMALLEST_FALL_OF_LOSS:g}"
        )


def first_difference(result: Result, upstream: Result) -> str | None:
    """Describe the first loss that differs from Megatron's own schedule; None if there is none."""
    pairs = zip(result.losses, upstream.losses, strict=True)
    for iteration, (mine, theirs) in enumerate(pairs, start=1):
        if mine != theirs:
            return f"first in iteration {iteration}: loss {mine!r} instead of {theirs!r}"
    if result.eval_loss != upstream.eval_loss:
        return f"in the evaluation: loss {result.eval_loss!r} instead of {upstream.eval_loss!r}"
    return None


def first_other_norm(result: Result, upstream: Result) -> str | None:
    """Describe the first gradient norm that differs beyond rounding; None if there is none."""
    pairs = zip(result.grad_norms, upstream.grad_norms, strict=True)
    for iteration, (mine, theirs) in enumerate(pairs, start=1):
        # Written so that a norm that is not a number differs, too.
        if not abs(mine - theirs) <= LARGEST_NORM_DIFFERENCE * theirs:
            return f"first in iteration {iteration}: gradient norm {mine!r} instead of {theirs!r}"
    return None


def peak_of_upstream(result: Result, upstream: Result) -> float:
    """Return the peak activation memory of the worst rank, as a fraction of Megatron's own."""
    return max(result.peak_activation_bytes) / max(upstream.peak_activation_bytes)


def table(results: Mapping[str, Result]) -> Table:
    """Build the table of results."""
    upstream = results[UPSTREAM]
    return _table(
        f"{PIPELINE_SIZE} pipeline ranks, {NUM_MICROBATCHES} microbatches",
        "peak: activation memory of the worst rank, ratio to upstream; bubble: predicted",
        "final\nloss,equal\nlosses,equal\nnorms,peak\nMiB,peak\nratio,bubble,s per\niter.",
        {
            name: (
                f"{result.losses[-1]:.6f}",
                "yes" if first_difference(result, upstream) is None else "NO",
                "yes" if first_other_norm(result, upstream) is None else "NO",
                f"{max(result.peak_activation_bytes) / 2**20:.1f}",
                f"{peak_of_upstream(result, upstream):.2f}",
                f"{result.predicted_bubble_rate:.1%}",
                f"{result.seconds_per_iteration:.3f}",
            )
            for name, result in results.items()
        },
    )


def _table(title: str, caption: str, headings: str, rows: Mapping[str, Sequence[str]]) -> Table:
    """Build a table for 80 columns with a row for each schedule."""
    columns = Table(title=title, caption=caption)
    columns.add_column("schedule")
    for heading in headings.split(","):
        columns.add_column(heading, justify="right", no_wrap=True)
    for name, cells in rows.items():
        columns.add_row(name, *cells)
    return columns


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def why_times_tell_little(cores: int) -> str:
    """Explain why the times of the table show no bubbles on so few cores."""
    if cores < PIPELINE_SIZE:
        why = (
            f"{PIPELINE_SIZE} ranks share {cores} {'core' if cores == 1 else 'cores'}, so that "
            "where one rank waits another computes, and no time is lost in a bubble"
        )
    else:
        why = (
            "the passes of so small a model are short, and ranks on the cores of one machine slow "
            "one another down"
        )
    return (
        f"\nThe times above do not show bubbles: {why}. A rank that sleeps needs no core: "
        f"below, F, B and W of a microbatch on a rank sleep for {MILLISECONDS[0]:g} ms each, in "
        "the same programs."
    )


def sleeping_command(records: Path, scheduled: Sequence[str]) -> list[str]:
    """Return the command that times steps whose stages sleep."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(PIPELINE_SIZE), "-m", "megatron_zb.train.sleeping_steps"]
    command += ["--schedules", *scheduled, "--num-microbatches", str(NUM_MICROBATCHES)]
    command += ["--milliseconds", *map(str, MILLISECONDS), "--repetitions", str(REPETITIONS)]
    return [*command, "--log-file", str(records)]


def _sleep(output: Path, console: Console) -> dict[str, SleepingStep]:
    """Time steps of 1F1B, which is Megatron's own schedule, and of this package's schedules."""
    records = output / "sleeping_steps.jsonl"
    records.unlink(missing_ok=True)
    command = sleeping_command(records, ["1f1b", *SCHEDULES])
    with console.status("timing steps whose stages sleep, about 20 s"):
        run(
            command,
            printed=output / "sleeping_steps.log",
            records=records,
            show=lambda record: None,
        )
    return read_steps(NewRecords(records)())


def read_steps(records: Sequence[Record]) -> dict[str, SleepingStep]:
    """Return the logged steps by schedule."""
    steps = {}
    for record in records:
        times = {name: value for name, value in record.items() if name != "schedule"}
        steps[record["schedule"]] = SleepingStep(**times)
    return steps


def table_of_steps(steps: Mapping[str, SleepingStep]) -> Table:
    """Build the table of steps whose stages sleep, measured and predicted."""
    upstream = steps["1f1b"]
    return _table(
        "the same programs, with stages that sleep",
        "step: milliseconds, the median measured; 1f1b is Megatron's own schedule",
        "step\npredicted,step\nmeasured,measured /\n1f1b,bubble\npredicted,bubble\nmeasured",
        {
            name: (
                f"{1000 * step.predicted_seconds:.0f}",
                f"{1000 * step.measured_seconds:.0f}",
                f"{step.measured_seconds / upstream.measured_seconds:.2f}",
                f"{step.predicted_bubble_rate:.1%}",
                f"{step.measured_bubble_rate:.1%}",
            )
            for name, step in steps.items()
        },
    )


def _write_summary(
    results: Mapping[str, Result], steps: Mapping[str, SleepingStep], path: Path
) -> None:
    summary = {
        "pipeline_size": PIPELINE_SIZE,
        "num_microbatches": NUM_MICROBATCHES,
        "schedules": {name: asdict(result) for name, result in results.items()},
        "sleeping_steps": {name: asdict(step) for name, step in steps.items()},
    }
    files.write_text(path, json.dumps(summary, indent=1) + "\n")
