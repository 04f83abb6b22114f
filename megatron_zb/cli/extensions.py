"""Extensions of the command line by other subpackages: commands, schedules, kinds of plan.

The core imports none of them, so they are named here and imported when a command needs them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

if TYPE_CHECKING:
    from megatron_zb.schedules import Timeline

_WITH_COMMANDS = ("megatron_zb.plan.cli", "megatron_zb.train.cli")
_WITH_SCHEDULES = ("megatron_zb.distill.cli", "megatron_zb.cli.patches")
_WITH_PLANS = ("megatron_zb.distill.cli",)

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class WithCommands(Protocol):
    """A module that adds commands of its subpackage."""

    def add_commands(self, commands: Commands) -> None:
        """Add the commands, each with :func:`add_command`."""


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    """Add a command that calls ``run``; the summary stands in the list of all commands."""
    command = commands.add_parser(
        name,
        help=summary,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=run)
    return command


class Extension(Protocol):
    """A module that adds a schedule."""

    NAME: str
    """The name of its schedule."""
    UNITS: Mapping[str, str]
    """Arguments that it needs beside the ranks, each with its letter: the number of units that
    passes work on, and how often these repeat."""
    SHOW_HELP: str
    EXPORT_HELP: str

    def add_arguments(self, command: argparse.ArgumentParser) -> None:
        """Add the arguments that only its schedule takes to ``show`` or ``export``."""

    def check(self, arguments: argparse.Namespace) -> None:
        """Reject arguments that do not apply to the schedule that is named.

        Raises:
            UsageError: names the argument.
        """

    def timeline(self, arguments: argparse.Namespace) -> Timeline:
        """Simulate its schedule.

        Raises:
            UsageError: the arguments contradict one another.
        """


class WithPlan(Protocol):
    """A module that adds a kind of plan."""

    def add_plan_arguments(self, command: argparse.ArgumentParser) -> None:
        """Add arguments to ``plan``."""

    def plan(self, arguments: argparse.Namespace) -> bool:
        """Print its plan if the arguments request it; return whether they do.

        Raises:
            UsageError: a file, a field or an argument is wrong, or nothing fits.
        """


def packages_with_commands() -> list[WithCommands]:
    """Import the modules that add commands."""
    return [cast(WithCommands, import_module(name)) for name in _WITH_COMMANDS]


def extensions() -> list[Extension]:
    """Import the modules that add a schedule."""
    return [cast(Extension, import_module(name)) for name in _WITH_SCHEDULES]


def packages_with_plans() -> list[WithPlan]:
    """Import the modules that add a kind of plan."""
    return [cast(WithPlan, import_module(name)) for name in _WITH_PLANS]


def extension_of(name: str | None) -> Extension | None:
    """Return the extension that has a schedule of this name, if any."""
    return next((extension for extension in extensions() if name == extension.NAME), None)
