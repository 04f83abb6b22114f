"""Words of a command that are its own, and those of a training behind them."""

from __future__ import annotations

import argparse

import pytest

from megatron_zb.parsing import separated, values_of_flags


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
