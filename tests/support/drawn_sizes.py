"""Sizes that tests draw from: small ones, and large ones with scripts/test.sh --full."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from megatron_zb import schedules

IS_FULL = "TESTS_FULL" in os.environ
"""Set by conftest.py, which must not import this."""

RANKS = 16 if IS_FULL else 8
MICROBATCHES = 64 if IS_FULL else 24
EXAMPLES = 15 if IS_FULL else 5
"""Of a search, which takes from tenths of a second to seconds."""
SEARCHES = 5 if IS_FULL else 2
"""Examples of a search of all placements."""
AUTO_WITH_FULL = [
    pytest.param(name, marks=pytest.mark.full) if name == "auto" else name
    for name in schedules.names()
]
"""All schedules, where a search of ``auto`` would take most of the time."""


def one_of_each_shape(names: list[str]) -> list[Any]:
    """Those of one, two and four chunks, where others look alike; all with --full."""
    ordinary = ("1f1b", "v-half", "wave")
    return [
        name if name in ordinary else pytest.param(name, marks=pytest.mark.full) for name in names
    ]


def first(count: int, values: Sequence[Any]) -> list[Any]:
    """All values, of which the ordinary run tries the first ones; the others are marked full.

    A negative ``count`` is that of the others, as in a slice.
    """
    others = [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)
        for value in values[count:]
    ]
    return [*values[:count], *others]


def every_value(*axes: Sequence[Any], most: int | None = None) -> list[Any]:
    """All combinations, of which the ordinary run tries so many that each value occurs.

    It tries ``most`` of them at most. The others are marked full.
    """
    most = max(map(len, axes)) if most is None else most
    ordinary = {tuple(i % len(axis) for axis in axes) for i in range(most)}
    places = product(*(range(len(axis)) for axis in axes))
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, place, strict=True)),
            marks=() if place in ordinary else pytest.mark.full,
        )
        for place in places
    ]


ONE_OF_EACH_SHAPE = one_of_each_shape(schedules.names())
