"""The command ``megatron-zb trace``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_zb import files
from megatron_zb.cli.ending import report_if_slow
from megatron_zb.errors import UsageError
from megatron_zb.tables import Column, Listing

if TYPE_CHECKING:
    from megatron_zb.measured.trace import ComparedStep, StepDifference

HELP = """\
Show one step of a run as it ran, beside what its own profile predicts for the same order of passes,
and where the difference is: passes that took longer than their median, waiting for messages, and
the host between the two. `--pipeline-profile run.yaml` of a run writes run.yaml and, next to it,
run.trace.json; in that step every F, B and W ran by itself, as they were timed, and none in pairs.

examples:
  megatron-zb trace run.yaml                        the table
  megatron-zb trace run.yaml --output step.png      a picture: measured above, predicted below
  megatron-zb trace run.yaml --output step.html     all of it as one page without network
  megatron-zb trace run.yaml --output step.json     for Perfetto or chrome://tracing

exit code: 0, or 2 with one sentence if a file is missing or broken."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trace``."""
    command.add_argument("profile", type=Path, metavar="PROFILE", help="of --pipeline-profile")
    command.add_argument(
        "--output", "-o", type=Path, metavar="FILE", help="write FILE.png, .svg, .html or .json"
    )


def run(arguments: argparse.Namespace) -> None:
    """Compare a measured step with its prediction, and print or write both.

    Raises:
        UsageError: an error that the user can correct.
    """
    from megatron_zb.measured.trace import compare

    with report_if_slow(f"simulating the step of {arguments.profile}"):
        found = compare(arguments.profile)
    if arguments.output is None:
        _print(found)
        return
    writer = _WRITERS.get(arguments.output.suffix.lower())
    if writer is None:
        raise UsageError(
            f"cannot write a trace into '{arguments.output}': give a name that ends in "
            f"{', '.join(_WRITERS)}"
        )
    files.check_writable(arguments.output)
    with report_if_slow(f"drawing {arguments.output}"):
        writer(found, arguments.output, arguments.profile)
    print(arguments.output)


def _write_picture(found: ComparedStep, path: Path, profile: Path) -> None:
    from megatron_zb.drawing.pictures import save_pictures

    save_pictures({"measured": found.measured, "predicted": found.predicted}, path)


def _write_page(found: ComparedStep, path: Path, profile: Path) -> None:
    from megatron_zb.drawing.html_run import save_step
    from megatron_zb.measured.profile import read_profile

    save_step(path, read_profile(profile), found)


def _write_json(found: ComparedStep, path: Path, profile: Path) -> None:
    from megatron_zb.schedules import interchange

    both = {"measured": found.measured, "predicted": found.predicted}
    files.write_text(path, interchange.to_chrome_trace(both))


_WRITERS: dict[str, Callable[[ComparedStep, Path, Path], None]] = {
    ".png": _write_picture,
    ".svg": _write_picture,
    ".html": _write_page,
    ".json": _write_json,
}


def _print(found: ComparedStep) -> None:
    from rich.console import Console

    differences = found.differences()
    console = Console()
    schedule = found.measured.schedule
    console.print(
        f"{schedule.name}: {len(differences)} ranks, {schedule.num_microbatches} microbatches; "
        "from a rank's first pass to its last",
        highlight=False,
    )
    worst = max(differences, key=lambda d: d.measured)
    console.print(Listing(_COLUMNS, differences).table(bold=[worst]))
    console.print(
        "compute, waiting and host: milliseconds more (+) or less (-) than predicted; together "
        "the difference. Waiting that is predicted is the bubble.",
        style="dim",
        highlight=False,
    )


_COLUMNS: Sequence[Column[StepDifference]] = (
    Column("rank", lambda d: d.rank),
    Column("ms measured", lambda d: 1000 * d.measured, ".2f"),
    Column("predicted", lambda d: 1000 * d.predicted, ".2f"),
    Column("compute", lambda d: 1000 * (d.compute_measured - d.compute_predicted), "+.2f"),
    Column("waiting", lambda d: 1000 * (d.waiting_measured - d.waiting_predicted), "+.2f"),
    Column("host", lambda d: 1000 * d.host, "+.2f"),
)
