"""Words of a command that are its own, and those of a training behind them."""

from __future__ import annotations

import argparse

import pytest

from megatron_zb.errors import UsageError
from megatron_zb.parsing import (
    Argument,
    Parser,
    add_flags,
    check_bounds,
    separated,
    values_of_flags,
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(add_help=False)
    made.add_argument("--gpus", "-g", type=int)
    made.add_argument("--json", action="store_true")
    return made


def test_flags_take_one_value_or_none() -> None:
    assert values_of_flags(parser()) == {"--gpus": 1, "-g": 1, "--json": 0}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--gpus 4 --json train.py --gpus 8", "--gpus 4 --json -- train.py --gpus 8"),
        ("--json --gpus=4 train.py", "--json --gpus=4 -- train.py"),
        ("-g 4 -- train.py", "-g 4 -- train.py"),
        ("train.py --json", "-- train.py --json"),
        ("--json", "--json"),
    ],
)
def test_words_of_a_training_begin_with_the_first_that_is_not_the_commands(
    words: str, expected: str
) -> None:
    assert separated(words.split(), parser()) == expected.split()


FLAGS: dict[str, Argument] = {
    "train_iters": {"type": int, "above": 0, "metavar": "N"},
    "warm_up_iters": {"type": int, "least": 0, "default": 0, "help": "of the rate"},
    "save": {"metavar": "DIR"},
}


def test_flags_of_a_table_are_parsed_and_their_bounds_checked() -> None:
    made = Parser(add_help=False)
    add_flags(made, FLAGS, save={"default": "here"})
    usual = made.parse_args([])
    assert vars(usual) == {"train_iters": None, "warm_up_iters": 0, "save": "here"}
    check_bounds(usual, FLAGS)
    check_bounds(made.parse_args("--train-iters 1 --warm-up-iters 0".split()), FLAGS)
    for words, said in (
        ("--train-iters 0", "--train-iters is 0: it must be greater than 0"),
        ("--warm-up-iters -1", "--warm-up-iters is -1: it must be 0 or greater"),
    ):
        with pytest.raises(UsageError, match=f"^{said}$"):
            check_bounds(made.parse_args(words.split()), FLAGS)
