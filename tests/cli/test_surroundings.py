"""Commands in bad surroundings; tests/support/surroundings.py runs all of them in all of these."""

from __future__ import annotations

import pytest
import surroundings

CHOSEN = [
    ("show", "C locale, 0 columns"),
    ("show", "no output"),
    ("show", "full errors"),
    ("help", "full output"),
    ("export", "no streams"),
    ("picture", "full disk"),
    ("plan", "SIGTERM after 2.5 s"),
    ("trace", "terminal of 0 columns"),
    ("trace json", "SIGTERM after 1.0 s"),
]
"""Each has been seen to fail."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "surrounding"),
    [
        *CHOSEN,
        *(
            pytest.param(*pair, marks=pytest.mark.full)
            for pair in surroundings.drawn(40, "surroundings")
        ),
    ],
)
def test_a_command_ends_as_it_should(command: str, surrounding: str) -> None:
    assert surroundings.problems_of(command, surrounding) == []


def test_there_are_40_surroundings_and_10_commands() -> None:
    assert len(surroundings.SURROUNDINGS) >= 40
    assert len(surroundings.COMMANDS) >= 10
