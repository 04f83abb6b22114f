"""Points of a plan's rows, the Pareto front, and their chart in the terminal."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_zb.drawing.chart import round_step
from megatron_zb.parsing import GIB
from megatron_zb.plan.search import Plan
from megatron_zb.plan.table import name_in, places, setting_of

# --- axes


@dataclass(frozen=True)
class Axis:
    """An axis from its first tick to its last."""

    ticks: tuple[float, ...]

    @classmethod
    def around(cls, values: Iterable[float], about: int = 5) -> Axis:
        """Return an axis that has room for all values, with about the given number of steps."""
        least, most = min(found := list(values)), max(found)
        span, size = most - least, max(abs(least), abs(most))
        step = round_step(span if span > 1e-9 * size else size or 1.0, about)
        first, last = math.floor(least / step), math.ceil(most / step)
        return cls(tuple(i * step for i in range(first, max(last, first + 1) + 1)))

    def share(self, value: float) -> float:
        """Return where a value lies, from 0 for the first tick to 1 for the last."""
        return (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])


# --- points of speed and memory, and the Pareto front


@dataclass(frozen=True)
class Point:
    """A row of a plan: its place in the table, GiB of its worst rank, tokens per second and GPU.

    ``on_front``: no other row is as fast in as little memory, or better in one of them.
    """

    place: int
    name: str
    setting: str
    gib: float
    tokens: float
    on_front: bool

    @property
    def sentence(self) -> str:
        """The row in words, without its place."""
        return f"{self.name}, {self.setting}: {self.tokens:.0f} tokens/s/GPU in {self.gib:.1f} GiB"


def points(plan: Plan) -> list[Point]:
    """Return a point for each row of the table, fastest first."""
    rows = [(place, plan.ranked[index]) for place, index in places(plan)]
    sizes = [(row.memory.total / GIB, row.tokens_per_gpu) for _, row in rows]
    return [
        Point(place, name_in(plan, row), setting_of(row), *size, on_front=is_on_front(size, sizes))
        for (place, row), size in zip(rows, sizes, strict=True)
    ]


def is_on_front(size: tuple[float, float], sizes: list[tuple[float, float]]) -> bool:
    """Return whether none of ``sizes`` has less memory and as many tokens, or more and as much."""
    memory, tokens = size
    return not any(other != size and other[0] <= memory and other[1] >= tokens for other in sizes)


# --- the chart in the terminal


WIDTH = 80
ON_FRONT, OTHER, LIMIT = "*", "o", ":"
_HEIGHT = 17
_LEFT = 8  # columns of the axis and its numbers
_COLUMNS = WIDTH - _LEFT - 4  # with room for a number beside the last


def plan_chart(points: Sequence[Point], limit: float) -> str:
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
