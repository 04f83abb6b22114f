"""The figures of docs/late_updates.md are those of their results, and of the catalog."""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "late_updates.md").read_text(encoding="utf-8")


@cache
def script() -> Any:
    """The script that makes the tables."""
    sys.path.insert(0, str(DOCS))
    try:
        return import_module("make_late_updates")
    finally:
        sys.path.remove(str(DOCS))


def results(name: str) -> Any:
    return json.loads((DOCS / "results" / name).read_text(encoding="utf-8"))


def test_the_losses_are_those_of_the_runs() -> None:
    make = script()
    table = make.convergence_table(results("delayed_convergence.json"))
    assert make.replaced(PAGE, "convergence", table) == PAGE


@pytest.mark.parametrize(
    ("name", "m"), [("1f1b", 8), ("1f1b", 32), ("interleaved", 8), ("zb-h1", 16), ("v-min", 8)]
)
def test_the_periods_are_those_of_the_catalog(name: str, m: int) -> None:
    cells = " | ".join(map(str, script().seconds_of(name, m)))
    assert f"| `{name}` | {m} | {cells} |" in PAGE


def test_all_periods_but_two_with_a_gathering_are_the_work_of_a_rank() -> None:
    make = script()
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(rows) == len(make.SCHEDULES) * len(make.MICROBATCHES)
    assert all(row.split("|")[4] == row.split("|")[5] for row in rows)
    assert all(row.split("|")[6] == row.split("|")[8] for row in rows)
    longer = [row for row in rows if row.split("|")[7] != row.split("|")[8]]
    assert [row.split("|")[1:3] for row in longer] == [[" `1f1b` ", " 8 "], [" `zb-h1` ", " 8 "]]


def test_the_speeds_are_those_of_the_benchmark() -> None:
    rows = results("late_updates.cpu.json")["rows"]
    page = " ".join(PAGE.split())
    ratios = {name: f"{row['ratio']:.2f}" for name, row in rows.items()}
    assert f"took {ratios['1f1b']} of the time of one with a flush under `1f1b`" in page
    assert f"and {ratios['v-zb']} under `v-zb`" in page
