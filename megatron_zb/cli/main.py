"""The command `megatron-zb`.

The imports of a command are deferred until it runs, so that Ctrl-C is handled from the start.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_zb import __version__
from megatron_zb.cli.ending import ended, report_if_slow
from megatron_zb.cli.extensions import Commands, add_command

DOCTOR_HELP = """\
List the installed versions, which of them fit, which optional parts are active, and a remedy for
each missing part. Given a Megatron-LM checkout, list also whether it is supported, what its
training loop lacks, which of its arguments are new, and how to start it. Nothing is changed, and
nothing but torch is imported; the checkout's parser by another process.

A part is
  ok        there, in a version that fits
  optional  not there, not needed by every job, or newer than what was checked; see the advice
  missing   required and not there
  wrong     there, but in a version or a state that does not work

exit code: 0 if all that is required is there, 1 if anything is missing or wrong, 2 if the path is
no Megatron-LM checkout.

examples:
  megatron-zb doctor
  megatron-zb doctor ~/Megatron-LM
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line, which raises UsageError for mistakes."""
    from megatron_zb.cli.extensions import packages_with_commands
    from megatron_zb.parsing import Parser

    top: argparse.ArgumentParser = Parser(
        prog="megatron-zb",
        description="Pipeline schedules for Megatron: less bubble or less memory, same losses.",
    )
    top.add_argument("--version", action="version", version=f"megatron-zb {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_show(commands)
    _add_export(commands)
    for package in packages_with_commands():
        package.add_commands(commands)
    _add_trace(commands)
    _add_check(commands)
    _add_verify(commands)
    _add_doctor(commands)
    return top


def _add_show(commands: Commands) -> None:
    from megatron_zb.cli import show
    from megatron_zb.cli.extensions import extensions
    from megatron_zb.schedules import catalog

    summary = "draw a schedule and its memory in the terminal, as a picture or as a page"
    added = extensions()
    names = [*catalog.all_names(), *(extension.NAME for extension in added)]
    helps = [show.SHOW_HELP, *(extension.SHOW_HELP for extension in added)]
    description = "\n".join([*helps, f"schedules: {', '.join(names)}"])
    show.add_show(add_command(commands, "show", show.show, summary, description))


def _add_export(commands: Commands) -> None:
    from megatron_zb.cli import show
    from megatron_zb.cli.extensions import extensions
    from megatron_zb.schedules import catalog

    summary = "write a schedule for torch.distributed.pipelining or a trace viewer"
    helps = [show.EXPORT_HELP, *(extension.EXPORT_HELP for extension in extensions())]
    description = "\n".join([*helps, f"schedules: {', '.join(catalog.all_names())}"])
    show.add_export(add_command(commands, "export", show.export, summary, description))


def _add_trace(commands: Commands) -> None:
    from megatron_zb.cli import trace as tracing

    summary = "compare a step of a run with what its profile predicts"
    tracing.add_arguments(add_command(commands, "trace", tracing.run, summary, tracing.HELP))


def _add_check(commands: Commands) -> None:
    from megatron_zb.cli import check

    summary = "check the arguments of a training against a schedule, before it is started"
    check.add_arguments(add_command(commands, "check", check.run, summary, check.HELP))


def _add_verify(commands: Commands) -> None:
    from megatron_zb.cli import verify

    summary = "run a training with and without its schedule, and compare its losses"
    verify.add_arguments(add_command(commands, "verify", verify.run, summary, verify.HELP))


def _add_doctor(commands: Commands) -> None:
    summary = "list what is installed, what fits, and a remedy for each missing part"
    doctor = add_command(commands, "doctor", _doctor, summary, DOCTOR_HELP)
    doctor.add_argument(
        "checkout", type=Path, nargs="?", metavar="MEGATRON_LM", help="a Megatron-LM checkout"
    )
    doctor.add_argument("--json", action="store_true", help="print all findings as JSON")


def _doctor(arguments: argparse.Namespace) -> int:
    from megatron_zb.cli.doctor import as_json, examine, exit_code, print_findings

    with report_if_slow("examining the installation"):
        findings = examine(arguments.checkout)
    if arguments.json:
        print(json.dumps(as_json(findings), indent=2))
    else:
        print_findings(findings)
    return exit_code(findings)


def _separated(words: Sequence[str]) -> list[str]:
    """Put ``--`` before the words of a training, for the commands that take them."""
    if words[:1] not in (["check"], ["verify"]):
        return list(words)
    from megatron_zb.cli import check, verify
    from megatron_zb.parsing import separated

    own = argparse.ArgumentParser()
    (check if words[0] == "check" else verify).add_arguments(own)
    return [words[0], *separated(words[1:], own)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; a UsageError is printed as one sentence, with exit code 2."""
    words = sys.argv[1:] if argv is None else list(argv)

    def run() -> int | None:
        arguments = parser().parse_args(_separated(words))
        code: int | None = arguments.command(arguments)
        return code

    return ended("megatron-zb", run)
