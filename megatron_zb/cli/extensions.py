"""What packages beside this one add to ``show``, ``export`` and ``plan``."""

from __future__ import annotations

import argparse
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

from megatron_zb.schedules import Timeline

# Packages that may be installed, each with a module `cli` that is an Extension.
_PACKAGES = ("megatron_zb_distill",)


class Extension(Protocol):
    """A module that adds a schedule and a kind of plan."""

    NAME: str
    """The name of its schedule."""
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

    def add_plan_arguments(self, command: argparse.ArgumentParser) -> None:
        """Add arguments to ``plan``."""

    def plan(self, arguments: argparse.Namespace) -> bool:
        """Print its plan if the arguments ask for it; return whether they do.

        Raises:
            UsageError: a file, a field or an argument is wrong, or nothing fits.
        """


def extensions() -> list[Extension]:
    """Import the extensions that are installed."""
    return [
        cast(Extension, import_module(f"{package}.cli"))
        for package in _PACKAGES
        if find_spec(package) is not None
    ]


def extension_of(name: str | None) -> Extension | None:
    """Return the extension that has a schedule of this name, if any."""
    return next((extension for extension in extensions() if name == extension.NAME), None)
