"""Memory along an order of passes: what a rank holds, and which units it has room to keep."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

_Key = TypeVar("_Key", bound=Hashable)


class Held(NamedTuple):
    """What a rank holds while a pass runs, and after it."""

    within: float
    after: float


def walk(changes: Iterable[float]) -> list[Held]:
    """Return what a rank holds during each pass of an order, and after it.

    Args:
        changes: memory that each pass takes at its start, or frees at its end if negative.
    """
    held, found = 0.0, []
    for change in changes:
        within = held + change if change > 0.0 else held
        held += change
        found.append(Held(within, held))
    return found


def peak(changes: Iterable[float]) -> float:
    """Return the most that a rank holds in an order, 0 without passes."""
    return max((held.within for held in walk(changes)), default=0.0)


class Interval(NamedTuple):
    """Part of an order in which a rank holds more if it keeps a unit.

    Args:
        start: place from which on.
        stop: place before which it ends.
        size: memory of the unit.
    """

    start: int
    stop: int
    size: float


def keep(
    held: npt.NDArray[np.float64], units: Iterable[tuple[_Key, Interval]], limit: float
) -> set[_Key]:
    """Return the units that a rank has room to keep, the first ones first.

    Interval packing by a greedy rule: with the shortest lives first, many units fit.

    Args:
        held: the memory during each pass if no unit is kept; those that are kept are added.
        units: each with where it would be held, in the order in which they are tried.
        limit: the most memory.
    """
    kept = set()
    for key, (start, stop, size) in units:
        between = held[start:stop]
        if size <= 0.0 or float(between.max(initial=0.0)) + size <= limit:
            between += size
            kept.add(key)
    return kept
