"""Arguments of every supported Megatron-LM, and what each does together with a schedule.

``arguments.csv`` is written from Megatron-LM's own parsers by ``docs/make_arguments.py``;
``verdicts.yaml`` is written by hand. What is refused is in ``megatron_core/refusals.yaml``.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron_zb.parsing import Parser

_FOLDER = Path(__file__).parent
_TYPES = {"number": int, "real": float, "text": str}
_ACTIONS: dict[str, Any] = {
    "true": "store_true",
    "false": "store_false",
    "switch": argparse.BooleanOptionalAction,
}


class Verdict(Enum):
    """Verdict on an argument together with a schedule."""

    PROVEN = "proven"
    HARMLESS = "harmless"
    UNSEEN = "unseen"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Judgement:
    """The verdict on one argument, with the reason and the test or benchmark that shows it."""

    verdict: Verdict
    why: str
    shown_by: str = ""


UNKNOWN = Judgement(Verdict.UNKNOWN, "whether it goes with a schedule has not been looked at")


@dataclass(frozen=True)
class Argument:
    """One argument: its name in the namespace, its flags, the kind of its values, its default."""

    name: str
    flags: tuple[str, ...]
    values: str
    default: Any
    versions: frozenset[str]

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the argument to a parser."""
        kind, _, many = self.values.partition(" ")
        if kind in _ACTIONS:
            flags = [f for f in self.flags if kind != "switch" or not f.startswith("--no-")]
            parser.add_argument(*flags, dest=self.name, action=_ACTIONS[kind], default=self.default)
            return
        parser.add_argument(
            *self.flags,
            dest=self.name,
            type=_TYPES[kind],
            nargs="*" if many else None,
            default=self.default,
            metavar=kind.upper(),
        )


@cache
def arguments() -> tuple[Argument, ...]:
    """Return the arguments of all supported versions."""
    with (_FOLDER / "arguments.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            Argument(
                row["name"],
                tuple(row["flags"].split()),
                row["values"],
                json.loads(row["default"]),
                frozenset(row["versions"].split()),
            )
            for row in csv.DictReader(file)
        )


def parser_of(version: str) -> argparse.ArgumentParser:
    """Build the parser of Megatron-LM's arguments in a version such as ``0.19``.

    It raises UsageError for mistakes, and takes no abbreviations.
    """
    parser = Parser(allow_abbrev=False, add_help=False)
    for argument in arguments():
        if version in argument.versions:
            argument.add_to(parser)
    return parser


def new_arguments(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the arguments of Megatron-LM's own parser that no known version has, with defaults."""
    known = {argument.name for argument in arguments()}
    return {a.dest: a.default for a in parser._actions if a.dest not in known | {"help"}}


@cache
def _findings() -> dict[str, Judgement]:
    """Return the findings of ``verdicts.yaml`` by ``name`` or ``name=value``."""
    text = (_FOLDER / "verdicts.yaml").read_text(encoding="utf-8")
    return {
        word: Judgement(Verdict(group["verdict"]), group["why"], group.get("shown_by", ""))
        for group in yaml.safe_load(text)
        for word in group["arguments"].split()
    }


def judged() -> frozenset[str]:
    """Return the names of ``verdicts.yaml``, those of values as ``name=value``."""
    return frozenset(_findings())


def finding(name: str, value: Any) -> Judgement:
    """Return what is known of an argument with a value, of several values the one least known.

    What is refused is not looked at here.
    """
    findings, values = _findings(), value if isinstance(value, list | tuple) else [value]
    of_name = findings.get(name, UNKNOWN)
    each = [findings.get(f"{name}={one}", of_name) for one in values] or [of_name]
    return max(each, key=lambda finding: list(Verdict).index(finding.verdict))


def given(args: argparse.Namespace, version: str) -> Iterator[tuple[Argument, Any]]:
    """Yield the arguments of a version that have another value than their default, with it.

    Of several arguments with one name, the first has the default, as in argparse.
    """
    defaults: dict[str, Any] = {}
    for argument in arguments():
        if version in argument.versions and hasattr(args, argument.name):
            value, is_first = getattr(args, argument.name), argument.name not in defaults
            if is_first and value != defaults.setdefault(argument.name, argument.default):
                yield argument, value
