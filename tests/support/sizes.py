"""Sizes that tests draw from: small ones, and large ones with scripts/test.sh --full."""

from __future__ import annotations

import os
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


ONE_OF_EACH_SHAPE = one_of_each_shape(schedules.names())
