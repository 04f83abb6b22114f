"""Faults take minutes: the ordinary tests have a few, `scripts/test.sh --faults` has all."""

from __future__ import annotations

import os

import pytest

VARIABLE = "MEGATRON_ZB_FAULTS"
"""Set to a file, it asks for all faults, and is where their results are written."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get(VARIABLE):
        return
    left_out = [item for item in items if item.get_closest_marker("all_faults")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
