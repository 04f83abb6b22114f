"""What the planner predicts beside what others have measured."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
from brief_searches import briefly
from small_models import ROOT

from megatron_zb.plan.strategy import candidates_of


def validation() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))  # it has a part beside it
    spec = importlib.util.spec_from_file_location(
        "make_validation", ROOT / "docs" / "make_validation.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


VALIDATION = validation()
THROUGHPUT = sys.modules["published_throughput"]

# Setups that are quick to simulate; docs/validation.md has all of them, and those that miss.
IN_ORDER = [
    ("Zero Bubble, table 4", 2),
    ("Zero Bubble, table 4", 3),
    ("Zero Bubble, table 4", 4),
    ("Zero Bubble, table 4", 5),
    ("Zero Bubble, table 4", 6),
]
CLOSE_ONLY = [("Zero Bubble, table 4", 0), ("Users' report, 6.2B on 8 ranks", 0)]


# The first and the last of a table, and one of each other kind; all with --full.
ORDINARY = [IN_ORDER[0], IN_ORDER[-1], *CLOSE_ONLY]


@pytest.mark.parametrize(
    ("table", "column"),
    [
        setup if setup in ORDINARY else pytest.param(*setup, marks=pytest.mark.full)
        for setup in IN_ORDER + CLOSE_ONLY
    ],
)
def test_published_ratios_are_met_within_ten_percent(table: str, column: int) -> None:
    (found,) = (t for t in VALIDATION.tables() if t["name"] == table)
    with briefly():  # fast enough to be as close
        rows = VALIDATION.rows(found, found["columns"][column])
    assert [row.schedule for row in rows if not row.is_close] == []
    if (table, column) in IN_ORDER:
        assert VALIDATION.order_misses(rows) == []


def test_the_counted_times_are_near_the_profiled_ones() -> None:
    lines = VALIDATION.profile_lines()[2:]
    assert len(lines) == len(VALIDATION.PROFILED) >= 4
    for line in lines:
        assert line.count("(") == 4
        assert all(abs(int(part.split("%")[0])) <= 12 for part in line.split("(")[1:])


@pytest.mark.parametrize("setup", ["GPT 38.5B, p=32, m=512", "GPT 98.5B, 40 GPUs, batch 160"])
def test_the_rows_have_the_published_order_of_the_large_setups(setup: str) -> None:
    """They take minutes to simulate, so that the rows that were written are read."""
    rows = [row for row in VALIDATION.read_ratios() if row.setup.startswith(setup)]
    assert len(rows) >= 4
    assert sorted(rows, key=lambda row: row.published) == sorted(
        rows, key=lambda row: row.predicted
    )
    assert all(row.is_close for row in rows)


def test_the_page_sums_up_the_rows() -> None:
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    ratios, throughput = VALIDATION.read_ratios(), VALIDATION.read_throughput()
    assert page == VALIDATION.page(ratios, throughput), "run docs/make_validation.py --page"
    for rows, tables in ((ratios, VALIDATION.tables()), (throughput, THROUGHPUT.tables())):
        assert list(dict.fromkeys(row.table for row in rows)) == [t["name"] for t in tables]


def test_the_written_ratios_are_no_worse_than_published() -> None:
    compared = [row for row in VALIDATION.read_ratios() if row.published != 1]
    assert sum(not row.is_close for row in compared) <= 1
    setups = VALIDATION.setups(VALIDATION.read_ratios())
    assert sum(not VALIDATION.order_misses(rows) for rows in setups) >= 15


# Runs that are quick to simulate, of each table one at least.
QUICK = [
    ("Megatron-LM's table", "16B"),
    ("Megatron-LM's table", "32B"),
    ("Reducing Activation", "22B"),
    ("Reducing Activation", "22B baseline"),
    ("Efficient Large-Scale", "18.4B"),
]


@pytest.mark.parametrize(("table", "run"), QUICK)
def test_published_throughput_is_met_within_ten_percent(table: str, run: str) -> None:
    (found,) = (t for t in THROUGHPUT.tables() if t["name"].startswith(table))
    row = next(r for r in found["rows"] if r["name"] == run)
    assert THROUGHPUT.throughput(found, row).is_close


@pytest.mark.parametrize("run", ["177B", "314B", "405B", "175B on", "530B on", "1T on", "145.6B"])
def test_the_large_runs_were_met_within_ten_percent(run: str) -> None:
    rows = [row for row in VALIDATION.read_throughput() if row.setup.startswith(run)]
    assert rows
    assert [row.setup for row in rows if not row.is_close] == []


def test_what_was_fitted_is_little_of_what_is_compared() -> None:
    rows = VALIDATION.read_throughput()
    assert 2 * sum(row.fitted for row in rows) < len(rows)
    assert not any(row.fitted for row in rows if "405B" in row.setup or "A100" in row.table)
    held_out = [row for row in rows if not row.fitted]
    assert sum(not row.is_close for row in held_out) <= 3


def test_a_published_layout_with_an_empty_stage_needs_its_flag() -> None:
    """30 layers on the 32 stages of a V, whose ends hold no layer beside embedding and output."""
    (v_zb,) = (c for c in candidates_of(["v-zb"]) if c.name == "v-zb")
    counts = (0, *[1] * 30, 0)
    assert not v_zb.has_by_default(counts, v_zb.placement(16, 2))
    assert v_zb.has_by_default((1,) * 32, v_zb.placement(16, 2))
