"""Rows of results, as a table and for JSON."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.text import Text

from megatron_zb.tables import Column, Listing

Row = tuple[str, float, float | None]
COLUMNS: tuple[Column[Row], ...] = (
    Column("name", lambda row: row[0], name="name", is_text=True),
    Column("seconds", lambda row: row[1], ".2f", name="seconds"),
    Column("gain", lambda row: row[2], "+.0%"),
    Column("", lambda row: row[2], name="gain"),
)
ROWS: list[Row] = [("v-half", 1.25, 0.1), ("[1f1b]", 10.0, None)]


def printed(listing: Listing[Row], capsys: pytest.CaptureFixture[str]) -> list[str]:
    Console(width=60, color_system=None).print(listing.table())
    return capsys.readouterr().out.splitlines()


def test_a_table_has_the_columns_with_a_title(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(Listing(COLUMNS, ROWS), capsys) == [
        "name   seconds gain",
        "v-half    1.25 +10%",
        "[1f1b]   10.00     ",
    ]


def test_json_has_the_columns_with_a_name_and_their_values() -> None:
    assert Listing(COLUMNS, ROWS).as_json() == [
        {"name": "v-half", "seconds": 1.25, "gain": 0.1},
        {"name": "[1f1b]", "seconds": 10.0, "gain": None},
    ]


def test_rows_are_numbered_in_front_of_the_table_alone(capsys: pytest.CaptureFixture[str]) -> None:
    listing = Listing(COLUMNS[:1], ROWS, numbered=("#", 1))
    assert printed(listing, capsys) == ["# name  ", "1 v-half", "2 [1f1b]"]
    assert listing.as_json() == [{"name": "v-half"}, {"name": "[1f1b]"}]


def test_a_row_is_set_off_and_a_cell_has_its_own_style() -> None:
    column: Column[Row] = Column("name", lambda row: row[0], lambda name: Text(name, style="red"))
    table = Listing([column], ROWS).table(bold=ROWS[1:])
    assert [row.style for row in table.rows] == [None, "bold"]
    assert [cell.style for cell in table.columns[0].cells if isinstance(cell, Text)] == ["red"] * 2
