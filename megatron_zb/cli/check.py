"""``megatron-zb check``: whether a run's arguments go with a pipeline schedule."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_zb.cli.ending import report_if_slow
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.versions import SERIES, training_loop_needs
from megatron_zb.megatron_lm import own_process
from megatron_zb.megatron_lm.checkout import checkout_at
from megatron_zb.parsing import positive
from megatron_zb.tables import Column, Listing

if TYPE_CHECKING:
    from megatron_zb.megatron_lm import checking

HELP = """\
Check the arguments of a training against a pipeline schedule, as the start of the job does, before
anything is started. Needs megatron-core, but no GPU. With --megatron-lm, or where a Megatron-LM of
that version is installed, its own validation of the arguments is run, too.

Every argument that is not at its default is one of
  proven    a test shows the result of Megatron's own schedule with it
  harmless  of no concern to a schedule
  unseen    works as far as it has been tried; the reason names what is missing, such as a GPU
  refused   cannot be combined; the reason names the change to make
  unknown   not looked at, as it is new in this version

exit code: 0 if nothing is refused, 2 otherwise.

examples:
  megatron-zb check -- --pipeline-schedule v-half --pipeline-model-parallel-size 4 \\
      --num-layers 32 --micro-batch-size 1 --global-batch-size 64 --bf16
  megatron-zb check --json --gpus 64 --megatron-version 0.16 -- $MY_ARGUMENTS
  megatron-zb check --megatron-lm ~/Megatron-LM -- $MY_ARGUMENTS
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``check``."""
    parser.add_argument(
        "--megatron-version",
        choices=[series.text for series in SERIES],
        help="of Megatron-LM (default: that of the checkout, or of the installed megatron-core)",
    )
    parser.add_argument(
        "--megatron-lm",
        type=Path,
        metavar="CHECKOUT",
        help="whose own validation is run, too (default: one that is installed)",
    )
    parser.add_argument(
        "--gpus",
        type=positive,
        metavar="N",
        help="of the job (default: those of one replica of the model)",
    )
    parser.add_argument("--json", action="store_true", help="print all findings as JSON")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="ARGUMENT",
        help="of the training, with --pipeline-schedule, after --",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check and print; return the exit code.

    Raises:
        UsageError: an argument is not known, or no schedule is chosen.
    """
    import warnings

    from megatron_zb.megatron_lm import checking

    if not arguments.words:
        raise UsageError(
            "the arguments of a training are missing: give them after --, with "
            "--pipeline-schedule among them, such as -- --pipeline-schedule v-half "
            "--pipeline-model-parallel-size 4"
        )
    with report_if_slow("checking the arguments"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron's, about what a GPU would need
        root = _megatron_lm(arguments)
        version, of = _version(arguments.megatron_version, root)
        args = checking.parse(arguments.words, version, arguments.gpus)
        report = checking.check(args, version)
        if report.runs and root is not None:
            report = checking.validate(report, root, arguments.words, args.world_size)
    if arguments.json:
        print(json.dumps(as_json(report, version)))
    else:
        _print(report, f"Megatron {version}, {of}")
    return 0 if report.runs else 2


def _version(asked: str | None, root: Path | None) -> tuple[str, str]:
    """Return the series whose arguments are checked, and where it comes from."""
    if asked is not None:
        return asked, "as asked"
    if root is not None:
        return _series_at(root), f"of {root}"
    return installed_series(), "as megatron-core is installed"


def installed_series() -> str:
    """Return the series of the installed megatron-core, at most the newest that is known here."""
    numbers = re.findall(r"\d+", metadata.version("megatron-core"))
    return training_loop_needs([*map(int, numbers)]).text


def _megatron_lm(arguments: argparse.Namespace) -> Path | None:
    """Return the folder of the Megatron-LM whose validation is to be run, None if there is none.

    Raises:
        UsageError: the checkout has another version than the one that is requested.
    """
    asked = arguments.megatron_version
    if arguments.megatron_lm is None:
        found = own_process.installed()
        return found if found is not None and asked in (None, _series_at(found)) else None
    found = checkout_at(arguments.megatron_lm).root
    if asked not in (None, _series_at(found)):
        raise UsageError(
            f"--megatron-version is {asked}, but --megatron-lm {found} has {_series_at(found)}: "
            "leave one out"
        )
    return found


def _series_at(root: Path) -> str:
    """Return the series of a checkout, at most the newest that is known here."""
    return training_loop_needs(checkout_at(root).version).text


def as_json(report: checking.CheckReport, version: str) -> dict[str, object]:
    """Return a report for other programs."""
    return {
        "megatron": version,
        "schedule": report.choice,
        "runs": report.runs,
        "validated_by": report.validated,
        "arguments": Listing(_COLUMNS, report.checked).as_json(),
    }


_COLUMNS: Sequence[Column[checking.Checked]] = (
    Column("argument", lambda it: it.flag, name="argument", is_text=True),
    Column("verdict", lambda it: it.finding.verdict.value, name="verdict", is_text=True),
    Column("why", lambda it: it.finding.why, name="why", is_text=True),
    Column("", lambda it: it.finding.shown_by, name="shown_by"),
)


def _print(report: checking.CheckReport, version: str) -> None:
    """Print the arguments that need a look, a summary, and the version that was checked."""
    from rich.console import Console
    from rich.text import Text

    from megatron_zb.megatron_lm.argument_table import Verdict

    console = Console()
    shown = [v for v in Verdict if v not in (Verdict.PROVEN, Verdict.HARMLESS)]
    rows = [each for verdict in shown[::-1] for each in report.of(verdict)]
    if rows:
        console.print(Listing(_COLUMNS, rows).table(wide=True))
    counted = ((verdict, len(report.of(verdict))) for verdict in Verdict)
    said = ", ".join(f"{count} {verdict.value}" for verdict, count in counted if count)
    verb = "runs" if report.runs else "does not run"
    console.print(Text(f"{verb} with {report.choice}: {said} ({version})"), soft_wrap=True)
    if report.validated is not None:
        console.print(Text(f"Megatron-LM {report.validated} has validated the arguments itself"))
    elif report.runs:
        console.print(
            Text("Megatron-LM has not validated the arguments itself: give --megatron-lm CHECKOUT")
        )
