"""The parser of a Megatron-LM checkout: a program that prints what it has, and what calls it."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_zb.megatron_lm import own_process

_ACTIONS = {
    "_StoreTrueAction": "true",
    "_StoreFalseAction": "false",
    "BooleanOptionalAction": "switch",
}
_LISTS = {None: "", "+": " ...", "*": " ..."}
_PLAIN = (str, int, float, bool, list, type(None))


@dataclass(frozen=True)
class OwnParser:
    """What Megatron-LM's own parser takes."""

    version: str
    """Its series, such as ``0.19``."""
    rows: list[list[str]]
    """Name, flags, kind of values and default of each argument, as ``arguments.csv`` has them."""
    new: list[str]
    """The flags of those that no version has that is known here."""


def read(root: Path) -> OwnParser:
    """Read the parser of a checkout.

    Raises:
        UsageError: it cannot be imported here.
    """
    failed = f"the arguments of the Megatron-LM in '{root}' cannot be read"
    return OwnParser(**own_process.answer(__name__, root, failed))


def _parser(root: str) -> OwnParser:
    """Import the parser of a checkout into this process."""
    sys.path.insert(0, root)
    from megatron_zb.megatron_core.cpu import run_on_cpu

    run_on_cpu(training_loop=True)
    from megatron.training import arguments

    importlib.reload(arguments)  # a patched checkout has hooked it
    from megatron_zb.megatron_core.versions import core_series
    from megatron_zb.megatron_lm.argument_table import new_arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    actions = [action for action in parser._actions if action.dest != "help"]
    new = new_arguments(parser)
    return OwnParser(
        ".".join(map(str, core_series())),
        [_row(action) for action in actions],
        [action.option_strings[0] for action in actions if action.dest in new],
    )


def _row(action: Any) -> list[str]:
    values = _ACTIONS.get(type(action).__name__)
    if values is None:
        word = {int: "number", float: "real"}.get(action.type, "text")
        values = word + _LISTS.get(action.nargs, " ...")
    default = action.default if isinstance(action.default, _PLAIN) else None
    return [action.dest, " ".join(action.option_strings), values, json.dumps(default)]


if __name__ == "__main__":
    print(json.dumps(asdict(_parser(sys.argv[1]))))
