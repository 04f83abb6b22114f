"""Argument parser of every command, and sizes of memory as users write them.

UsageErrors give valid examples.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_zb.errors import UsageError

_MOST = 1_000_000  # ranks, microbatches, chunks
LONGEST_TIME = 1e12
"""Longest time of a pass, in any unit; sums of longer ones would lose their digits."""


class Written:
    """A value of several parts, such as a limit of memory, whose text has all that users give."""


class Parser(argparse.ArgumentParser):
    """Argument parser that reports mistakes as UsageError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", int, _whole_number)
        self.register("type", float, _number)
        self.register("type", Path, _path)

    def defaults(self) -> dict[str, Any]:
        """Return the default of every argument, required ones included."""
        return {action.dest: action.default for action in self._actions if action.dest != "help"}

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments and reject unknown ones.

        A command's own parser knows best which flag was meant.
        """
        found, left = super().parse_known_args(*args, **kwargs)
        if left:
            self.error(_describe_of_unknown(left[0], sorted(self._option_string_actions)))
        return found, left

    def error(self, message: str) -> NoReturn:
        raise UsageError(describe(self, message))

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print a help text; argparse would hide that it cannot be written."""
        if message:
            (file or sys.stderr).write(message)


def describe(parser: argparse.ArgumentParser, message: str) -> str:
    """Rewrite what argparse says of a mistake as one sentence that says what would be right."""
    if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
        return _describe_of_missing(parser, missing.group(1).split(", "))
    if one_of := re.fullmatch(r"one of the arguments (.*) is required", message):
        return f"one argument is missing: give {' or '.join(one_of.group(1).split())}"
    if ambiguous := re.fullmatch(r"ambiguous option: (\S+) could match (.*)", message):
        return f"{ambiguous.group(1)} is short for several: write out {ambiguous.group(2)}"
    if unknown := re.fullmatch(r"unrecognized arguments: (\S+).*", message, flags=re.DOTALL):
        return _describe_of_unknown(unknown.group(1), sorted(parser._option_string_actions))
    found = re.fullmatch(r"argument (.+?): (.*)", message, flags=re.DOTALL)
    action = _named(parser, found.group(1)) if found else None
    if found is None or action is None:
        return message
    name, what = _written(action), found.group(2)
    if what.startswith("expected"):
        return f"{name} is given without a value: write {_example(action)}"
    if wrong := re.match(r"invalid choice: (.*) \(choose from", what):
        return _describe_of_choice(name, wrong.group(1), list(action.choices or ()))
    if number := re.fullmatch(r"invalid (int|float) value: (.*)", what, flags=re.DOTALL):
        return f"{name}: {number.group(2)} is {_NO_NUMBER[number.group(1)]}"
    if what.startswith("ignored explicit argument"):
        return f"{name} takes no value: leave out what stands after the ="
    return f"{name}: {what}"


_NO_NUMBER = {"int": "not a whole number, such as 8", "float": "not a number, such as 0.5"}


def _named(parser: argparse.ArgumentParser, name: str) -> argparse.Action | None:
    """Return the argument that argparse calls ``name`` in a message."""
    return next((a for a in parser._actions if name in _names(a)), None)


def _describe_of_missing(parser: argparse.ArgumentParser, names: Sequence[str]) -> str:
    action = _named(parser, names[0])
    if action is None:
        return f"{names[0]} is missing"
    if action.choices is not None:
        return f"{_written(action)} is missing: give one of {_listed(action.choices)}"
    return f"{_written(action)} is missing: give {_example(action)}"


def _names(action: argparse.Action) -> tuple[str, ...]:
    metavar = (action.metavar,) if isinstance(action.metavar, str) else ()
    return ("/".join(action.option_strings), *action.option_strings, *metavar, action.dest)


def _written(action: argparse.Action) -> str:
    """Return an argument as a user writes it: its long flag, or the metavar of a positional one."""
    if action.option_strings:
        return max(action.option_strings, key=len)
    return action.metavar if isinstance(action.metavar, str) else action.dest


def _example(action: argparse.Action) -> str:
    if not action.option_strings:
        return _written(action)
    if action.choices is not None:
        return f"{_written(action)} {next(iter(action.choices))}"
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return f"{_written(action)} {metavar}"


def _listed(choices: Any) -> str:
    return ", ".join(map(str, choices))


def _describe_of_choice(name: str, wrong: str, choices: Sequence[Any]) -> str:
    near = difflib.get_close_matches(wrong.strip("'"), [str(c) for c in choices], n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return f"{name} {wrong} is unknown: give one of {_listed(choices)}{meant}"


def _describe_of_unknown(word: str, known: Sequence[str]) -> str:
    if not word.startswith("-"):
        return f"unknown argument '{word}': leave it out, or write the flag that it belongs to"
    near = difflib.get_close_matches(word.partition("=")[0], known, n=1)
    hint = f"did you mean {near[0]}?" if near else "--help lists what there is"
    return f"unknown argument '{word}': {hint}"


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is {_NO_NUMBER['int']}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is {_NO_NUMBER['float']}") from None


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: give the name of a file or folder")
    return Path(text)


def flag_of(name: str) -> str:
    """Return the flag of an argument's name: ``--train-iters`` of ``train_iters``."""
    return "--" + name.replace("_", "-")


Argument = Mapping[str, Any]
"""The arguments of ``add_argument`` for a flag, and perhaps a bound of its number.

``above`` is a bound that the number has to exceed, ``least`` the smallest number. ``flag`` is the
flag itself, where it is not the name of its value.
"""
_BOUNDS = ("above", "least")


def add_flags(
    group: argparse._ActionsContainer,
    flags: Mapping[str, Argument],
    **changed: Argument,
) -> None:
    """Add flags by the names of their values.

    Args:
        changed: other arguments of ``add_argument`` for some of them.
    """
    for name, argument in flags.items():
        given = {**argument, **changed.get(name, {})}
        flag = given.pop("flag", flag_of(name))
        group.add_argument(flag, dest=name, **{k: v for k, v in given.items() if k not in _BOUNDS})


def check_bounds(args: argparse.Namespace, flags: Mapping[str, Argument]) -> None:
    """Check the numbers that have a bound, where they are given.

    Raises:
        UsageError: one is too small.
    """
    for name, argument in flags.items():
        above, least = argument.get("above"), argument.get("least")
        value = None if above is None and least is None else getattr(args, name)
        if value is None:
            continue
        if above is not None and value <= above:
            raise UsageError(f"{flag_of(name)} is {value}: it must be greater than {above}")
        if least is not None and value < least:
            raise UsageError(f"{flag_of(name)} is {value}: it must be {least} or greater")


def seconds(text: str) -> float:
    """Parse a time from 0 to :data:`LONGEST_TIME`."""
    time = _number(text)
    if not 0 <= time <= LONGEST_TIME:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a time: give a number from 0 to {LONGEST_TIME:g}, such as 1.5"
        )
    return time


def positive(text: str) -> int:
    """Parse a whole number from 1 to 1,000,000."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 1 or more")
    if int(text) > _MOST:
        raise argparse.ArgumentTypeError(f"{text} is more than {_MOST}")
    return int(text)


def values_of_flags(parser: argparse.ArgumentParser) -> dict[str, int]:
    """Return the flags of a parser, each with the number of values that it takes, 0 or 1."""
    return {
        flag: int(action.nargs != 0) for action in parser._actions for flag in action.option_strings
    }


def separated(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Put ``--`` before the first word that is none of a parser's own flags and their values."""
    own, at = values_of_flags(parser), 0
    while at < len(words) and words[at].partition("=")[0] in own:
        at += 1 + own[words[at].partition("=")[0]] * ("=" not in words[at])
    rest = list(words[at:])
    return [*words[:at], *([] if rest[:1] == ["--"] or not rest else ["--"]), *rest]


# --- sizes of memory: ``80GiB`` to bytes, and bytes to ``12.3 GiB``


GIB = 2**30

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": GIB,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", flags=re.ASCII)


def read_size(text: str) -> float | None:
    """Return the bytes of a size with a unit, such as ``80GiB``; None for any other text."""
    found = _SIZE.fullmatch(text)
    factor = _UNITS.get(found.group(2).lower()) if found else None
    return float(found.group(1)) * factor if found and factor is not None else None


def size_in_bytes(text: str, what: str) -> float:
    """Read a size such as ``80GiB``, ``80GB`` or ``85899345920B``.

    Raises:
        UsageError: the text is no size, it has no unit, or the size is zero.
    """
    found = _SIZE.fullmatch(text)
    if found and not found.group(2):
        number = found.group(1)
        raise UsageError(f"{what} '{text}' has no unit: give {number}GiB, or {number}B for bytes")
    size = read_size(text)
    if not size:
        raise UsageError(f"{what} '{text}' is not a size of memory: give, for example, 80GiB")
    return size


def gib(size: float) -> str:
    """Format bytes as GiB, with one digit after the point."""
    return f"{size / GIB:.1f} GiB"
