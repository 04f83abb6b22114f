"""Which slow tests a run tries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from drawn_tests import ONE_OF, left_out


class Named:
    """As much of a test as drawing looks at."""

    def __init__(self, number: int, *marks: str) -> None:
        self.nodeid, self._marks = f"tests/test_some.py::test[{number}]", marks

    def get_closest_marker(self, mark: str) -> str | None:
        return mark if mark in self._marks else None


def drawn(items: list[Named], seed: str | None) -> set[Named]:
    out = left_out(items, seed)
    return {*items} - {item for of_mark in out.values() for item in of_mark}


@pytest.mark.parametrize("mark", [*ONE_OF])
def test_several_seeds_draw_what_one_leaves_out(mark: str) -> None:
    items = [Named(number, mark) for number in range(400)]
    one_of = ONE_OF[mark]
    by_seed = [drawn(items, str(seed)) for seed in range(12 * one_of)]
    sizes = [len(items) for items in by_seed]
    assert 0.8 < sum(sizes) / len(sizes) * one_of / len(items) < 1.2
    assert len(set.union(*by_seed)) == len(items)
    assert drawn(items, "1") == by_seed[1] != by_seed[2]


def test_without_a_seed_slow_tests_are_tried_and_further_combinations_are_not() -> None:
    usual, slow, long, full, both = items = [
        Named(0),
        Named(1, "slow"),
        Named(4, "long"),
        Named(2, "full"),
        Named(3, "full", "slow"),
    ]
    assert drawn(items, None) == {usual, slow, long}
    assert all(usual in drawn(items, str(seed)) for seed in range(20))
    out = left_out([full, both], None)
    assert [len(out[mark]) for mark in ("slow", "full")] == [0, 2]


@pytest.mark.slow
def test_a_run_says_how_many_it_leaves_out() -> None:
    file = Path(__file__).resolve().parents[1] / "cli" / "test_cli_ends.py"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    listed = {}
    for options in ((), ("--draw", "1")):
        done = subprocess.run(
            [*command, *options, str(file)], capture_output=True, text=True, check=False
        )
        listed[options] = done.stdout.count("::"), done.stdout
    (most, without), (count, said) = listed.values()
    assert "slow tests" not in without
    assert count < most
    assert f"{most - count} slow tests that --draw 1 leaves out" in said
