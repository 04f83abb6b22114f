"""Train a small GPT on 4 CPU ranks with stock Megatron and with four schedules and compare them.

Run as `python -m megatron_zb.quickstart`. Stock Megatron goes first; the others must have its
losses, bit for bit, and its gradient norms in every iteration.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.pictures import save_picture
from megatron_zb.watched_run import NewRecords, Record, RunFailed, run

STOCK = "stock"
SCHEDULES = ("v-half", "v-min", "v-zb", "zb-h1")
PIPELINE_SIZE = 4
NUM_MICROBATCHES = 8
MICRO_BATCH_SIZE = 2
TRAIN_ITERATIONS = 36

# An iteration takes about as long with every schedule, because there are fewer cores than ranks:
# what differs here is memory. On 4 GPUs the bubble would show in the time, too.
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

SMALLEST_FALL_OF_LOSS = 1.0
LARGEST_NORM_DIFFERENCE = 1e-6  # of stock's norm, see --clip-grad above
# Of stock's peak: 3/4 and 1/2 of the microbatches, and what a chunk holds besides activations.
LARGEST_PEAK = {"v-half": 0.80, "v-min": 0.55}


class QuickstartFailure(Exception):
    """A run failed or its result is not what it has to be. The message is one sentence."""


@dataclass(frozen=True)
class Result:
    """What one run has logged."""

    losses: list[float]
    grad_norms: list[float]
    eval_loss: float
    peak_activation_bytes: list[int]
    seconds_per_iteration: float
    predicted_bubble_rate: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; 0 when all is as it has to be, 1 when not, 2 for the user's to mend."""
    arguments = _parser().parse_args(argv)
    console = Console()
    try:
        _quickstart(arguments, console)
    except (QuickstartFailure, RunFailed) as error:
        print(f"quickstart: failed: {error}", file=sys.stderr)
        return 1
    except UsageError as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_zb.quickstart", description=__doc__)
    parser.add_argument(
        "--data-path",
        required=True,
        metavar="PREFIX",
        help="PREFIX.bin and PREFIX.idx, as scripts/prepare_text.py writes them",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/quickstart"),
        metavar="DIR",
        help="where logs, pictures and summary.json go (default: %(default)s)",
    )
    parser.add_argument(
        "--train-iters",
        type=int,
        default=TRAIN_ITERATIONS,
        metavar="N",
        help="iterations of each run (default: %(default)s)",
    )
    return parser


def _quickstart(arguments: argparse.Namespace, console: Console) -> None:
    if not Path(f"{arguments.data_path}.idx").is_file():
        raise UsageError(
            f"there is no {arguments.data_path}.idx: make it with scripts/prepare_text.py "
            f"--output-prefix {arguments.data_path}"
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in (STOCK, *SCHEDULES):
        _draw(name, arguments.output / f"{name}.png")
        results[name] = _train(name, arguments, console)
    console.print(table(results))
    _write_summary(results, arguments.output / "summary.json")
    console.print(f"pictures, logs and summary.json are in {arguments.output}", highlight=False)
    check(results)


def _draw(name: str, path: Path) -> None:
    save_picture(_timeline(name), path)


def _timeline(name: str) -> schedules.Timeline:
    """The schedule under equal costs, as it is built when nothing has been measured."""
    costs = schedules.Costs.uniform(
        pipeline_size=PIPELINE_SIZE, forward=1.0, backward=1.0, weight=1.0
    )
    schedule = schedules.build(
        "1f1b" if name == STOCK else name,
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
    """The command that trains with a schedule; `stock` is Megatron without this package's flag."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(PIPELINE_SIZE), "-m", "megatron_zb.pretrain_gpt", "--cpu"]
    for flag, value in TRAINING_ARGUMENTS.items():
        command += [flag, str(value)]
    command += ["--train-iters", str(iterations), "--eval-interval", str(iterations)]
    command += ["--data-path", data_path]
    command += ["--log-file", str(records), "--measure-activation-memory"]
    if name != STOCK:
        command += ["--pipeline-schedule", name]
    return command


@contextmanager
def _progress_bar(
    console: Console, name: str, iterations: int
) -> Iterator[Callable[[Record], None]]:
    """A bar that moves with the records it is called with."""
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
    """What a run has logged. The bubble rate is for a run that has predicted none, as stock's."""
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
    """Losses must be stock's and fall, norms stock's but for rounding, memory as promised.

    Raises:
        QuickstartFailure: they are not or have not.
    """
    stock = results[STOCK]
    for name, result in results.items():
        different = first_difference(result, stock) or first_other_norm(result, stock)
        if different is not None:
            raise QuickstartFailure(f"{name} differs from {STOCK} {different}")
        if name in LARGEST_PEAK and not peak_of_stock(result, stock) <= LARGEST_PEAK[name]:
            raise QuickstartFailure(
                f"{name} held {peak_of_stock(result, stock):.3f} of the activation memory of "
                f"{STOCK}, more than {LARGEST_PEAK[name]:g}"
            )
    fall = stock.losses[0] - stock.losses[-1]
    # Written so that a loss that is not a number fails, too.
    if not fall >= SMALLEST_FALL_OF_LOSS:
        raise QuickstartFailure(
            f"the loss fell by {fall:.3f} in {len(stock.losses)} iterations, "
            f"less than {SMALLEST_FALL_OF_LOSS:g}"
        )


def first_difference(result: Result, stock: Result) -> str | None:
    """Where the losses of a run are not exactly those of stock Megatron, in words."""
    pairs = zip(result.losses, stock.losses, strict=True)
    for iteration, (mine, theirs) in enumerate(pairs, start=1):
        if mine != theirs:
            return f"first in iteration {iteration}: loss {mine!r} instead of {theirs!r}"
    if result.eval_loss != stock.eval_loss:
        return f"in the evaluation: loss {result.eval_loss!r} instead of {stock.eval_loss!r}"
    return None


def first_other_norm(result: Result, stock: Result) -> str | None:
    """Where a gradient norm of a run is not that of stock Megatron but for rounding, in words."""
    pairs = zip(result.grad_norms, stock.grad_norms, strict=True)
    for iteration, (mine, theirs) in enumerate(pairs, start=1):
        # Written so that a norm that is not a number differs, too.
        if not abs(mine - theirs) <= LARGEST_NORM_DIFFERENCE * theirs:
            return f"first in iteration {iteration}: gradient norm {mine!r} instead of {theirs!r}"
    return None


def peak_of_stock(result: Result, stock: Result) -> float:
    """The peak activation memory of the worst rank, as a fraction of stock's."""
    return max(result.peak_activation_bytes) / max(stock.peak_activation_bytes)


def table(results: Mapping[str, Result]) -> Table:
    """What the runs came to, for 80 columns."""
    stock = results[STOCK]
    columns = Table(
        title=f"{PIPELINE_SIZE} pipeline ranks, {NUM_MICROBATCHES} microbatches",
        caption="peak: activation memory of the worst rank; bubble: predicted",
    )
    columns.add_column("schedule")
    for heading in (
        "final\nloss",
        "losses\n= stock",
        "norms\n= stock",
        "peak\nMiB",
        "peak /\nstock",
        "bubble",
        "s per\niter.",
    ):
        columns.add_column(heading, justify="right", no_wrap=True)
    for name, result in results.items():
        columns.add_row(
            name,
            f"{result.losses[-1]:.6f}",
            "yes" if first_difference(result, stock) is None else "NO",
            "yes" if first_other_norm(result, stock) is None else "NO",
            f"{max(result.peak_activation_bytes) / 2**20:.1f}",
            f"{peak_of_stock(result, stock):.2f}",
            f"{result.predicted_bubble_rate:.1%}",
            f"{result.seconds_per_iteration:.3f}",
        )
    return columns


def _write_summary(results: Mapping[str, Result], path: Path) -> None:
    summary = {
        "pipeline_size": PIPELINE_SIZE,
        "num_microbatches": NUM_MICROBATCHES,
        "schedules": {name: asdict(result) for name, result in results.items()},
    }
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
