"""What each flag of a training makes of right and of wrong values, and what settings refuse."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from recorded import assert_as_recorded

from megatron_zb.errors import UsageError
from megatron_zb.job import settings

RECORDED = Path(__file__).parent / "recorded"
VALUES = (
    *("0", "1", "2", "0.5", "-1", "2,1,1", "auto", "on", "off", "rank", "layer", "loop", "zigzag"),
    *("v-half", "40GiB", "run.yaml", "1e400", "nan", "", "Ett|ttL"),
)


class Mistyped(Exception):
    """What argparse would end the process with."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Mistyped(settings.describe(self, message))


def parser() -> argparse.ArgumentParser:
    return settings.add_megatron_lm_arguments(Parser(prog="train", allow_abbrev=False))


def outcome(words: list[str]) -> str:
    try:
        args = parser().parse_args(words)
    except Mistyped as error:
        return f"mistyped: {error}"
    usual = vars(parser().parse_args([]))
    changed = {name: value for name, value in vars(args).items() if value != usual[name]}
    said = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    try:
        flag = settings.chosen_flag(args)
        settings.check_unscheduled(args, settings.MEGATRON_LM)
    except UsageError as error:
        return f"{said or 'as by default'}; {error}"
    return f"{said or 'as by default'}{f'; chooses {flag}' if flag else ''}"


def test_each_flag_takes_the_values_that_it_took() -> None:
    lines = []
    for action in parser()._actions:
        if action.dest == "help":
            continue
        for flag in action.option_strings:
            tried = [[flag, value] for value in VALUES] if action.nargs != 0 else [[flag]]
            lines += [f"{' '.join(words)}: {outcome(words)}" for words in tried]
    assert_as_recorded("\n".join(lines), RECORDED / "flags.txt")
