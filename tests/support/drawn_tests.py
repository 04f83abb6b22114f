"""Which slow tests a whole run tries: those that a seed draws, another part for every commit.

Comparisons of trainings take seconds each, and all of them together an hour on two cores. A run
that is given a seed tries some of those marked long, a few of those marked slow, and fewer of the
combinations marked full, which no ordinary run tries. Several commits try what one leaves out;
--full leaves out nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Protocol, TypeVar

ONE_OF = {"long": 16, "slow": 40, "full": 200}
"""Of how many tests with this mark one is drawn."""


class Marked(Protocol):
    """What drawing needs of a test."""

    @property
    def nodeid(self) -> str: ...
    def get_closest_marker(self, name: str, /) -> object: ...


_Test = TypeVar("_Test", bound=Marked)


def left_out(items: Iterable[_Test], seed: str | None) -> dict[str, list[_Test]]:
    """Return the tests that a run leaves out, by their mark.

    Args:
        items: all tests.
        seed: any text; without it, all are tried but those marked full.
    """
    found: dict[str, list[_Test]] = {mark: [] for mark in ONE_OF}
    for item in items:
        marks = [mark for mark in ONE_OF if item.get_closest_marker(mark)]
        if not marks:
            continue
        mark = marks[-1]  # of a slow test's combinations, those marked full are as all others
        if not (mark != "full" if seed is None else _is_drawn(item, seed, ONE_OF[mark])):
            found[mark].append(item)
    return found


def _is_drawn(item: Marked, seed: str, one_of: int) -> bool:
    """Return the same in every process, whatever the other tests are."""
    return zlib.crc32(f"{seed} {item.nodeid}".encode()) % one_of == 0
