"""SVG of a plan's rows: tokens per second over memory, the Pareto front, and a GPU's memory.

Nothing needs colour: points of the front are filled and joined by a line, others are rings, and
each has the number of its row beside it and the row's words as its title.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from megatron_zb.drawing.axis import Axis
from megatron_zb.planner.table import Point

if TYPE_CHECKING:
    from markupsafe import Markup

WIDTH, HEIGHT = 420, 300
_RIGHT, _TOP, _BOTTOM = 14, 38, 44
_RADIUS = 5.0
_DIGIT, _LINE = 8.0, 13.0
# Where a number may be beside its point, best first: from the point to the middle of the number.
_BESIDE = ((1, 0), (0, -1), (-1, 0), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))


@dataclass(frozen=True)
class _Box:
    """A rectangle by its middle."""

    x: float
    y: float
    width: float
    height: float

    def overlap(self, other: _Box) -> float:
        """Return the area that two rectangles share."""
        wide = (self.width + other.width) / 2 - abs(self.x - other.x)
        high = (self.height + other.height) / 2 - abs(self.y - other.y)
        return max(wide, 0.0) * max(high, 0.0)


class _Plot:
    """Conversion of GiB and tokens to pixels."""

    def __init__(self, points: Sequence[Point], limit: float) -> None:
        self.gib = Axis.around([*(point.gib for point in points), limit])
        self.tokens = Axis.around([point.tokens for point in points])
        self.left = 14 + _DIGIT * max(len(f"{value:.6g}") for value in self.tokens.ticks)

    def x(self, gib: float) -> float:
        return self.left + self.gib.share(gib) * (WIDTH - self.left - _RIGHT)

    def y(self, tokens: float) -> float:
        return HEIGHT - _BOTTOM - self.tokens.share(tokens) * (HEIGHT - _TOP - _BOTTOM)


def draw(points: Sequence[Point], limit: float, title: str) -> Markup:
    """Draw the rows of a plan; ``limit`` is the GiB of a GPU."""
    from markupsafe import Markup, escape

    plot = _Plot(points, limit)
    body = [*_axes(plot), _limit(plot, limit), _front(points, plot)]
    body += _points(points, plot, limit)
    return Markup(
        f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f"<title>{escape(title)}</title>{''.join(body)}</svg>"
    )


def _axes(plot: _Plot) -> Iterator[str]:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    yield _text("", 4, 13, "tokens/s/GPU") + '<g class="grid">'
    for value in plot.tokens.ticks:
        yield f'<path d="M{plot.left:g},{plot.y(value):.1f}H{right}"/>'
    for value in plot.gib.ticks:
        yield f'<path d="M{plot.x(value):.1f},{_TOP}V{bottom}"/>'
    yield "</g>"
    for value in plot.tokens.ticks:
        yield _text("left", plot.left - 6, plot.y(value) + 4, f"{value:.6g}")
    for value in plot.gib.ticks:
        yield _text("middle", plot.x(value), bottom + 17, f"{value:.6g}")
    yield _text("middle", (plot.left + right) / 2, HEIGHT - 6, "GiB of the worst rank")


def _text(name: str, x: float, y: float, words: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}">{words}</text>'


def _limit(plot: _Plot, limit: float) -> str:
    x = plot.x(limit)
    path = f"M{x:.1f},{_TOP - 8}V{HEIGHT - _BOTTOM}"
    words = _text("left", x, _TOP - 12, f"all of a GPU: {limit:.1f} GiB")
    return f'<path class="limit" data-gib="{limit:.6g}" d="{path}"/>{words}'


def _corners(points: Sequence[Point], plot: _Plot) -> list[tuple[float, float]]:
    """Return the corners of the most tokens for any memory: steps up to the right end."""
    front = sorted((p for p in points if p.on_front), key=lambda p: p.gib)
    places = [(plot.x(p.gib), plot.y(p.tokens)) for p in front]
    ends = [*(x for x, _ in places[1:]), float(WIDTH - _RIGHT)]
    steps = zip(places, ends, strict=True)
    return list(chain.from_iterable(((x, y), (end, y)) for (x, y), end in steps))


def _front(points: Sequence[Point], plot: _Plot) -> str:
    path = "L".join(f"{x:.1f},{y:.1f}" for x, y in _corners(points, plot))
    return f'<path class="front" d="M{path}"/>'


def _points(points: Sequence[Point], plot: _Plot, limit: float) -> Iterator[str]:
    from markupsafe import escape

    numbers = _numbers(points, plot, limit)
    for point in points:
        x, y = plot.x(point.gib), plot.y(point.tokens)
        box = numbers[point.place]
        said = f"{point.place}. {point.sentence}{', on the front' if point.on_front else ''}"
        yield (
            f'<g class="point{" best" if point.on_front else ""}" data-place="{point.place}" '
            f'data-gib="{point.gib:.6g}" data-tokens="{point.tokens:.6g}">'
            f'<title>{escape(said)}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS:g}"/>'
            f"{_text('middle', box.x, box.y + 4.5, str(point.place))}</g>"
        )


def _numbers(points: Sequence[Point], plot: _Plot, limit: float) -> dict[int, _Box]:
    """Return where the number of each point is, those of the front first: off all else."""
    rings = {p.place: _Box(plot.x(p.gib), plot.y(p.tokens), 11, 11) for p in points}
    lines = [
        _Box((a + c) / 2, (b + d) / 2, abs(c - a) + 2, abs(d - b) + 2)
        for (a, b), (c, d) in pairwise(_corners(points, plot))
    ]
    lines.append(_Box(plot.x(limit), HEIGHT / 2, 2, HEIGHT))
    found: dict[int, _Box] = {}
    for point in sorted(points, key=lambda p: not p.on_front):
        taken = [*rings.values(), *found.values(), *lines]
        boxes = _beside(rings[point.place], len(str(point.place)))
        found[point.place] = min(boxes, key=lambda box: sum(map(box.overlap, taken)))
    return found


def _beside(ring: _Box, digits: int) -> list[_Box]:
    """Return the places for a number that lie within the drawing."""
    width = digits * _DIGIT + 2
    away_x, away_y = _RADIUS + width / 2 + 1, _RADIUS + _LINE / 2 + 1
    boxes = [_Box(ring.x + dx * away_x, ring.y + dy * away_y, width, _LINE) for dx, dy in _BESIDE]
    return [box for box in boxes if width / 2 <= box.x <= WIDTH - width / 2]
