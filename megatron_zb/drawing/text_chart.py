"""A plan's rows in the terminal: tokens per second over memory, in plain characters."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence

from megatron_zb.drawing.axis import Axis
from megatron_zb.planner.table import Point

WIDTH = 80
ON_FRONT, OTHER, LIMIT = "*", "o", ":"
_HEIGHT = 17
_LEFT = 8  # columns of the axis and its numbers
_COLUMNS = WIDTH - _LEFT - 4  # with room for a number beside the last


def chart(points: Sequence[Point], limit: float) -> str:
    """Return the chart and what its marks mean, no wider than :data:`WIDTH`.

    Args:
        points: the rows of the plan.
        limit: the GiB of a GPU.
    """
    drawing = _Drawing(points, limit)
    return "\n".join(["tokens/s/GPU", *drawing.lines(), *_meaning(points, limit)])


class _Drawing:
    """Cells of the chart: the marks of points, then a number beside each mark where there is room.

    Points of one cell share it, with a number each.
    """

    def __init__(self, points: Sequence[Point], limit: float) -> None:
        self.gib = Axis.around([*(point.gib for point in points), limit])
        self.tokens = Axis.around([point.tokens for point in points])
        self.cells = [[" "] * (WIDTH - _LEFT) for _ in range(_HEIGHT)]
        for cells in self.cells:
            cells[self._column(limit)] = LIMIT
        places: defaultdict[tuple[int, int], list[Point]] = defaultdict(list)
        for point in points:
            places[self._row(point.tokens), self._column(point.gib)].append(point)
        for (row, column), found in places.items():
            self.cells[row][column] = ON_FRONT if any(p.on_front for p in found) else OTHER
        for (row, column), found in places.items():
            self._number(row, column, ",".join(str(p.place) for p in found))

    def _row(self, tokens: float) -> int:
        return round((1 - self.tokens.share(tokens)) * (_HEIGHT - 1))

    def _column(self, gib: float) -> int:
        return round(self.gib.share(gib) * (_COLUMNS - 1))

    def _number(self, row: int, column: int, text: str) -> None:
        """Write a number right of its mark, or else left, above or below."""
        middle = column - len(text) // 2
        right, left = (row, column + 1), (row, column - len(text))
        for y, x in (right, left, (row - 1, middle), (row + 1, middle)):
            if self._is_free(y, x, len(text)):
                self.cells[y][x : x + len(text)] = text
                return

    def _is_free(self, row: int, column: int, length: int) -> bool:
        """Return whether nothing is there, and no other number would run into it."""
        if not (0 <= row < _HEIGHT and 0 <= column <= WIDTH - _LEFT - length):
            return False
        around = self.cells[row][max(column - 1, 0) : column + length + 1]
        within = self.cells[row][column : column + length]
        return set(within) == {" "} and not any(cell.isdigit() for cell in around)

    def lines(self) -> Iterator[str]:
        """Yield the rows with their axis, and the axis below."""
        named = {self._row(value): _label(value, _LEFT - 2) for value in self.tokens.ticks}
        for row, cells in enumerate(self.cells):
            yield f"{named.get(row, ''):>{_LEFT - 2}} |{''.join(cells)}".rstrip()
        below = [" "] * WIDTH
        for value in self.gib.ticks:
            text = f"{value:.6g}"
            start = max(self._column(value) + _LEFT - len(text) // 2, 0)
            below[start : start + len(text)] = text
        yield f"{'':{_LEFT - 1}}+{'-' * _COLUMNS}"
        yield "".join(below).rstrip()
        yield f"{'GiB of the worst rank':^{WIDTH}}".rstrip()


def _label(value: float, width: int) -> str:
    """Return a number with as many digits as there is room for, 6 at most."""
    texts = [f"{value:.{digits}g}" for digits in range(6, 0, -1)]
    return next((text for text in texts if len(text) <= width), texts[-1])


def _meaning(points: Sequence[Point], limit: float) -> Iterator[str]:
    yield f"{LIMIT} all of a GPU, {limit:.1f} GiB"
    yield f"{ON_FRONT} the front: no other row is as fast in as little memory"
    for point in points:
        if point.on_front:
            said = f"{point.place}. {point.sentence}"
            yield from textwrap.wrap(said, WIDTH, initial_indent="  ", subsequent_indent="     ")
    others = ", ".join(f"{point.place} {point.name}" for point in points if not point.on_front)
    yield from textwrap.wrap(f"{OTHER} others: {others}", WIDTH) if others else ()
