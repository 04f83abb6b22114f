"""Rows of results: as a table in the terminal, and as data for JSON.

Each column says once what it has of a row, so that both forms show the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from rich.table import Table

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a :class:`Listing`.

    Args:
        title: at the top of the table; empty for a column that only JSON has.
        value: returns the value of a row; the table shows nothing for None.
        shown: how the table writes a value: a format such as ``.1f``, or a function that returns a
            text of rich or Python.
        name: the key in JSON; empty for a column that only the table has.
        is_text: the table aligns a column of words to the left, and one of numbers to the right.
        no_wrap: the table writes every value in one line.
    """

    title: str
    value: Callable[[Row], Any]
    shown: str | Callable[[Any], Any] = ""
    name: str = ""
    is_text: bool = False
    no_wrap: bool = False

    def cell(self, row: Row) -> Any:
        """Return what the table shows of a row."""
        value = self.value(row)
        if value is None:
            return ""
        return self.shown(value) if callable(self.shown) else format(value, self.shown)


@dataclass(frozen=True)
class Listing(Generic[Row]):
    """Rows of results, one below the other.

    Args:
        numbered: title and first number of a column in front that numbers the rows of the table;
            None for no such column.
    """

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    numbered: tuple[str, int] | None = None

    def table(self, *, bold: Iterable[Row] = (), wide: bool = False) -> Table:
        """Return the rows as a table of rich.

        Args:
            bold: the rows to set off, by identity.
            wide: two spaces between columns, not one.
        """
        from rich.table import Table
        from rich.text import Text

        padding = (0, 1) if wide else (0, 1, 0, 0)
        table = Table(box=None, pad_edge=False, header_style="bold", padding=padding)
        shown = [column for column in self.columns if column.title]
        if self.numbered is not None:
            table.add_column(self.numbered[0], justify="right")
        for column in shown:
            table.add_column(
                column.title,
                justify="left" if column.is_text else "right",
                no_wrap=column.no_wrap,
            )
        marked = set(map(id, bold))
        for index, row in enumerate(self.rows):
            cells = [] if self.numbered is None else [str(self.numbered[1] + index)]
            cells += [column.cell(row) for column in shown]
            texts = (Text(cell) if isinstance(cell, str) else cell for cell in cells)
            table.add_row(*texts, style="bold" if id(row) in marked else None)
        return table

    def as_json(self) -> list[dict[str, Any]]:
        """Return the rows as values for JSON, by the names of their columns."""
        named = [column for column in self.columns if column.name]
        return [{column.name: column.value(row) for column in named} for row in self.rows]
