"""``megatron-zb check``: whether a run's arguments go with a pipeline schedule."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_zb.megatron_core.versions import NEWEST, SERIES
from megatron_zb.parsing import positive

if TYPE_CHECKING:
    from megatron_zb.megatron_lm import checking

HELP = """\
Check the arguments of a training against a pipeline schedule, as the start of the job does, before
anything is started. Needs megatron-core, but no GPU and no Megatron-LM.

Every argument that is not at its default is one of
  proven    a test shows the result of Megatron's own schedule with it
  harmless  of no concern to a schedule
  unseen    works as far as a CPU can tell; only a GPU can show the rest
  refused   cannot be combined; the reason says what to change
  unknown   not looked at, as it is new in this version

exit code: 0 if nothing is refused, 2 otherwise.

examples:
  megatron-zb check -- --pipeline-schedule v-half --pipeline-model-parallel-size 4 \\
      --num-layers 32 --micro-batch-size 1 --global-batch-size 64 --bf16
  megatron-zb check --json --gpus 64 --megatron-version 0.16 -- $MY_ARGUMENTS
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--megatron-version",
        choices=[series.text for series in SERIES],
        default=NEWEST,
        help=f"of Megatron-LM (default: {NEWEST})",
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


def separated(words: Sequence[str]) -> list[str]:
    """Put ``--`` before the first word that is none of the command's own options."""
    own = {"--megatron-version": 1, "--gpus": 1, "--json": 0, "-h": 0, "--help": 0}
    at = 0
    while at < len(words) and words[at].partition("=")[0] in own:
        at += 1 + own[words[at].partition("=")[0]] * ("=" not in words[at])
    rest = list(words[at:])
    return [*words[:at], *([] if rest[:1] == ["--"] or not rest else ["--"]), *rest]


def run(arguments: argparse.Namespace) -> int:
    """Check and print; return the exit code.

    Raises:
        UsageError: an argument is not known, or no schedule is chosen.
    """
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron's, about what a GPU would need
        from megatron_zb.megatron_lm import checking

    version = arguments.megatron_version
    args = checking.parse(arguments.words, version, arguments.gpus)
    report = checking.check(args, version)
    if arguments.json:
        print(json.dumps(as_json(report, version)))
    else:
        _print(report)
    return 0 if report.runs else 2


def as_json(report: checking.Report, version: str) -> dict[str, object]:
    """Return a report for other programs."""
    return {
        "megatron": version,
        "schedule": report.choice,
        "runs": report.runs,
        "arguments": [
            {
                "argument": each.flag,
                "verdict": each.finding.verdict.value,
                "why": each.finding.why,
                "shown_by": each.finding.shown_by,
            }
            for each in report.checked
        ],
    }


def _print(report: checking.Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from megatron_zb.megatron_lm.argument_table import Verdict

    console = Console()
    shown = [v for v in Verdict if v not in (Verdict.PROVEN, Verdict.HARMLESS)]
    rows = [each for verdict in shown[::-1] for each in report.of(verdict)]
    if rows:
        table = Table("argument", "verdict", "why", box=None, pad_edge=False)
        for each in rows:
            table.add_row(*map(Text, (each.flag, each.finding.verdict.value, each.finding.why)))
        console.print(table)
    counted = ((verdict, len(report.of(verdict))) for verdict in Verdict)
    said = ", ".join(f"{count} {verdict.value}" for verdict, count in counted if count)
    verb = "runs" if report.runs else "does not run"
    console.print(Text(f"{verb} with {report.choice}: {said}"))
