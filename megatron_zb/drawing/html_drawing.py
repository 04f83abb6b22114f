"""SVG drawing of a schedule and of the memory of its ranks, and orders of passes as short text.

``html_parts/drawing.js`` takes the place of this still picture where scripts run, with the same
colours and rows of the same height: it draws from :func:`data`.

Pages embed orders as text. Others come with the package: ``html_parts/orders.json`` has every named
schedule but ``auto`` at the sizes of :data:`ORDER_SIZES`, built for equal costs (F = B = W = 1, no
transfer); ``scripts/make_orders.py`` makes it. The explorer of a page carries them out with the
reader's costs, which is exact; building them while a page is written would take too long.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import chain, groupby
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_zb.drawing.chart import (
    COPY_COLOURS,
    HOST_COLOUR,
    MEMORY_COLOUR,
    Bar,
    MemoryLine,
    TimeUnit,
    bars_of,
    colour_of,
    host_lines,
    legend_of,
    memory_lines,
    one_f_one_b_peak,
    text_colour_on,
    ticks,
    variants_of,
    worst_of,
)
from megatron_zb.drawing.html_units import OfUnits, of_units
from megatron_zb.errors import UsageError
from megatron_zb.schedules import Pass, PassKind, Schedule, Timeline, catalog, simulate
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.stage_costs import StageCosts
from megatron_zb.schedules.task_graph import Copy

_F, _B, _W, _BW, _U = PassKind.F, PassKind.B, PassKind.W, PassKind.BW, PassKind.U


if TYPE_CHECKING:
    from markupsafe import Markup


# --- orders as text


KINDS = (_F, _B, _W, _BW, _U)
ORDERS_FILE = Path(__file__).resolve().parent / "html_parts" / "orders.json"
MOST_MICROBATCHES = 64
ORDER_SIZES = tuple(
    (p, m * p) for p in (2, 3, 4, 6, 8, 12, 16) for m in (1, 2, 4, 8) if m * p <= MOST_MICROBATCHES
)
MOST_CHUNKS = 16
_FIRST = ord("A")


class _Joined(OfUnits, total=False):
    pairs: list[list[int]]


class Order(_Joined):
    """A schedule: ``ranks[r]`` has one character for each pass of rank r.

    The character is the ``kind * chunks + chunk``-th after A, with kinds counted as in
    :data:`KINDS`. Microbatches are not written: the F, the input and the weight
    gradients of a stage each take them in turn, unless ``turns`` has others. ``pairs[r]`` are the
    positions of the F of rank r that run as one with the pass behind them; left out where there are
    none.
    """

    name: str
    p: int
    m: int
    rank_of: list[int]
    ranks: list[str]


def is_text(schedule: Schedule) -> bool:
    """Return whether a schedule has only passes of :data:`KINDS`, which can be written as text."""
    return all(p.kind in KINDS for passes in schedule.ranks for p in passes)


def encode_order(schedule: Schedule) -> Order:
    """Write a schedule with no passes but those of :data:`KINDS` as text."""
    placement = schedule.placement
    chunks, chunk_of = placement.chunks, placement.chunk_of
    codes = {kind: _FIRST + i * chunks for i, kind in enumerate(KINDS)}
    order: Order = {
        "name": schedule.name,
        "p": placement.pipeline_size,
        "m": schedule.num_microbatches,
        "rank_of": list(placement.rank_of),
        "ranks": [
            "".join(chr(codes[p.kind] + chunk_of(p.stage)) for p in passes)
            for passes in schedule.ranks
        ],
        **of_units(schedule, KINDS),
    }
    if schedule.pairs:
        order["pairs"] = [
            [i for i, p in enumerate(passes) if p in schedule.pairs] for passes in schedule.ranks
        ]
    return order


def decode_order(order: Order) -> Schedule:
    """Read what :func:`encode_order` wrote; the names of the placement and the rules are lost."""
    placement, turns = Placement("", order["p"], tuple(order["rank_of"])), order.get("turns", {})
    ranks = []
    for rank, text in enumerate(order["ranks"]):
        done: Counter[tuple[PassKind, int]] = Counter()
        passes = []
        for letter in text:
            number, chunk = divmod(ord(letter) - _FIRST, placement.chunks)
            kind, stage = KINDS[number], placement.stages_of[rank][chunk]
            gradients = (PassKind.B, PassKind.W) if kind is PassKind.BW else (kind,)
            unit = done[gradients[0], stage]
            if taken := turns.get(gradients[0].value):
                unit = taken[stage if len(taken) > 1 else 0][unit]
            passes.append(Pass(kind, stage, unit))
            for gradient in gradients:
                done[gradient, stage] += 1
        ranks.append(tuple(passes))
    paired = zip(ranks, order.get("pairs", ()), strict=False)
    pairs = frozenset(passes[i] for passes, at in paired for i in at)
    return Schedule(order["name"], placement, order["m"], tuple(ranks), pairs=pairs)


def build_order(name: str, p: int, m: int) -> Order:
    """Build an order for equal costs, as the file has it."""
    return encode_order(catalog.build(name, pipeline_size=p, num_microbatches=m))


def order_names() -> list[str]:
    """Return the names of the file's schedules: all but ``auto``, whose search takes a minute."""
    return [name for name in catalog.names() if name != "auto"]


@cache
def packaged_orders() -> tuple[Order, ...]:
    """Return the orders of the file."""
    found: list[Any] = json.loads(ORDERS_FILE.read_text(encoding="utf-8"))
    return tuple(found)


# --- the still picture


@dataclass(frozen=True)
class DrawingSizes:
    """Sizes of a drawing in pixels.

    ``labels`` is left of the drawing and ``right`` right of it; a bar is ``bar`` high in its
    ``row``, and the memory of a rank at most ``most`` in its row of ``memory``; ``gap`` is between
    the two panels and ``axis`` below them. A still picture is ``width`` wide, the other as wide as
    the window, but no less than ``least``.
    """

    labels: int = 58
    right: int = 88
    row: int = 24
    bar: int = 21
    gap: int = 34
    memory: int = 20
    most: int = 17
    axis: int = 36
    digit: float = 5.2
    width: int = 1180
    least: int = 560


SIZES = DrawingSizes()
MOST_STILL = 6500
"""Most passes of a still picture; a larger one, which is unreadable, is drawn only by script."""
COPY_HEIGHT = 6
"""Pixels of a copy, in the row of its rank."""


def constants() -> dict[str, Any]:
    """Return the constants of the scripts: sizes, and names and colours of each kind's chunks."""
    chunks = range(1, MOST_CHUNKS + 1)
    shades = {
        kind.value: [[colour_of(kind, c, n) for c in range(n)] for n in chunks] for kind in KINDS
    }
    return {
        "sizes": asdict(SIZES),
        "kinds": {kind.value: kind.words for kind in KINDS},
        "shades": shades,
        "texts": {
            k: [list(map(text_colour_on, row)) for row in rows] for k, rows in shades.items()
        },
        "memory": MEMORY_COLOUR,
    }


@dataclass(frozen=True)
class Extent:
    """Room of a drawing: seconds, and microbatches on a rank; the same for pictures to compare."""

    seconds: float
    held: float

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> Extent:
        """Return the room that the largest takes."""
        held = [line.peak for timeline in timelines for line in memory_lines(timeline)]
        baseline = [one_f_one_b_peak(timeline) for timeline in timelines]
        return cls(max(timeline.makespan for timeline in timelines), max(*held, *baseline))


@dataclass(frozen=True)
class _Table:
    """Costs of stages that are known only for one placement."""

    costs: StageCosts

    def for_placement(self, placement: Placement) -> StageCosts:
        return self.costs


def data(
    timeline: Timeline, title: str, unit: TimeUnit, extent: Extent | None = None
) -> dict[str, Any]:
    """Return the data that the scripts draw a timeline from.

    Times are included only where simulating the schedule does not reproduce them. Pictures of one
    section that have an ``extent`` move and zoom together.
    """
    simulated = simulate(timeline.schedule, _Table(timeline.costs))
    is_simulated = (simulated.start, simulated.end) == (timeline.start, timeline.end)
    return {
        "title": title,
        "unit": asdict(unit),
        "order": encode_order(timeline.schedule),
        "costs": costs(timeline.costs),
        "times": None if is_simulated else [timeline.start, timeline.end],
        "extent": None if extent is None else asdict(extent),
    }


def costs(table: StageCosts) -> dict[str, list[float]]:
    """Return the costs of the stages by name, with one entry where all stages cost the same.

    None where they are unknown; ``pair_loss`` has one.

    Raises:
        UsageError: microbatches are not all alike; the scripts have one cost for all.
    """
    if table.microbatches:
        raise UsageError("a page draws microbatches that all cost the same: give it such costs")
    seconds, none = table.seconds, ()
    halves = tuple(map(add, seconds[_B], seconds[_W]))
    named: dict[str, Sequence[float]] = {
        "forward": seconds[_F],
        "backward": seconds[_B],
        "weight": seconds[_W],
        "forward_p2p": (*table.latency[_F][:-1], 0.0),
        "backward_p2p": (0.0, *table.latency[_B][1:]),
        "activation": table.memory["activation"],
        "held_for_weight": table.memory["held_for_weight"],
        "whole": none if seconds[_BW] == halves else seconds[_BW],
        "update": seconds.get(_U, none),
        "forward_comm": table.exchange.get(_F, none),
        "backward_comm": table.exchange.get(_B, none),
    }
    of_stages = {k: list(of[:1] if len(set(of)) == 1 else of) for k, of in named.items()}
    return of_stages | {"pair_loss": [table.pair_loss]}


def legend(timeline: Timeline) -> list[tuple[str, str]]:
    """Return the colour and the label of each kind of pass that occurs."""
    variants = variants_of(timeline.schedule)
    return [(colour_of(kind, i, variants), words) for kind, i, words in legend_of(timeline)]


def draw(
    timeline: Timeline, title: str, unit: TimeUnit, extent: Extent | None = None
) -> Markup | None:
    """Draw bars above, memory below and one axis of time; ``title`` is the picture's title.

    Without an ``extent``, the timeline fills the width. None if the schedule has more than
    :data:`MOST_STILL` passes.
    """
    from markupsafe import Markup, escape

    if sum(map(len, timeline.schedule.ranks)) > MOST_STILL:
        return None
    scale = _Scale(timeline, extent or Extent.of([timeline]))
    height = scale.bottom + SIZES.axis
    panels = (_bars, _memory, _copies) if timeline.copies else (_bars, _memory)
    rows = "".join(chain.from_iterable(panel(timeline, scale) for panel in panels))
    body = rows + "".join(_axis(scale, unit))
    return Markup(
        f'<svg class="schedule" role="img" width="{SIZES.width}" height="{height}" '
        f'viewBox="0 0 {SIZES.width} {height}"><title>{escape(title)}</title>{body}</svg>'
    )


class _Scale:
    """Conversion of seconds, ranks and microbatches to pixels."""

    def __init__(self, timeline: Timeline, extent: Extent) -> None:
        ranks = timeline.schedule.placement.pipeline_size
        self.inner = SIZES.width - SIZES.labels - SIZES.right
        self.seconds = extent.seconds
        self.per_second = self.inner / extent.seconds
        self.first = min(times[0] for times in timeline.start if times)
        self.top = ranks * SIZES.row + SIZES.gap
        self.copies = self.top + ranks * SIZES.memory + SIZES.gap
        self.bottom = self.copies - SIZES.gap
        if timeline.copies:
            self.bottom = self.copies + ranks * SIZES.memory
        self.most = extent.held

    def x(self, time: float) -> float:
        return SIZES.labels + (time - self.first) * self.per_second

    def y(self, rank: int, held: float) -> float:
        return self.top + (rank + 1) * SIZES.memory - 1 - held / self.most * SIZES.most


def _number(value: float) -> str:
    """Format a number with as many digits as are visible."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _bars(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    """Yield the names of the ranks, one path per colour of bars, and numbers where they fit."""
    ranks = timeline.schedule.placement.pipeline_size
    width, height = _number(timeline.makespan * scale.per_second), ranks * SIZES.row
    yield f'<rect class="ground" x="{SIZES.labels}" y="0" width="{width}" height="{height}"/>'
    for rank in range(ranks):
        y, name = rank * SIZES.row + SIZES.row / 2, _name(timeline, rank)
        yield f'<text class="name" x="{SIZES.labels - 8}" y="{_number(y)}">{name}</text>'
    bars = sorted(bars_of(timeline), key=lambda bar: (bar.kind.value, bar.chunk))
    for _, group in groupby(bars, key=lambda bar: (bar.kind, bar.chunk)):
        yield from _same_colour(list(group), scale)


def _same_colour(bars: Sequence[Bar], scale: _Scale) -> Iterator[str]:
    colour = bars[0].colour
    path = "".join(
        f"M{_number(scale.x(bar.start))},{_number(_top(bar))}"
        f"h{_number(width := (bar.end - bar.start) * scale.per_second)}"
        f"v{_number(_height(bar))}h-{_number(width)}z"
        for bar in bars
    )
    kind, chunk = bars[0].kind.value, bars[0].chunk
    yield f'<path class="bars" data-kind="{kind}" data-chunk="{chunk}" fill="{colour}" d="{path}"/>'
    yield f'<g class="numbers" fill="{text_colour_on(colour)}">'
    for bar in bars:
        number = str(bar.microbatch)
        if (bar.end - bar.start) * scale.per_second >= len(number) * SIZES.digit + 1:
            x, y = scale.x((bar.start + bar.end) / 2), _top(bar) + _height(bar) / 2
            yield f'<text x="{_number(x)}" y="{_number(y)}">{number}</text>'
    yield "</g>"


def _top(bar: Bar) -> float:
    lower = SIZES.bar / 2 if bar.half == 1 else 0
    return bar.rank * SIZES.row + (SIZES.row - SIZES.bar) / 2 + lower


def _height(bar: Bar) -> float:
    """Return the height of a bar: the two of a pair share it, F above."""
    return SIZES.bar if bar.half is None else SIZES.bar / 2


def _axis(scale: _Scale, unit: TimeUnit) -> Iterator[str]:
    y = scale.bottom
    yield f'<path class="axis" d="M{SIZES.labels},{y}h{scale.inner}"/>'
    for time in ticks(scale.seconds * unit.scale, scale.inner / 90):
        x = _number(scale.x(scale.first + time / unit.scale))
        yield f'<path class="axis" d="M{x},{y}v4"/>'
        yield f'<text class="tick" x="{x}" y="{y + 15}">{time:.6g}</text>'
    middle = SIZES.labels + scale.inner / 2
    yield f'<text class="tick" x="{middle:g}" y="{y + 31}">{unit.words}</text>'


def _memory(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    """Yield a row for each rank: its memory, 1F1B's peak as a dashed line, its peak at the end."""
    lines = memory_lines(timeline)
    worst, baseline = worst_of(lines), one_f_one_b_peak(timeline)
    yield (
        f'<text class="caption" x="{SIZES.labels}" y="{scale.top - 9}">activation memory held, in '
        f"microbatches of a rank; dashed: 1F1B's peak, {baseline:g}</text>"
    )
    for line in lines:
        level = _number(scale.y(line.rank, baseline))
        name, rank = "name worst" if line is worst else "name", _name(timeline, line.rank)
        middle = scale.top + line.rank * SIZES.memory + SIZES.memory / 2
        yield f'<text class="{name}" x="{SIZES.labels - 8}" y="{middle:g}">{rank}</text>'
        yield _line(line, scale)
        yield f'<path class="reference" d="M{SIZES.labels},{level}h{scale.inner}"/>'
        words = f"{line.peak:.4g}{' most' if line is worst else ''}"
        x = SIZES.labels + scale.inner + 6
        yield f'<text class="peak{name[4:]}" x="{x}" y="{middle:g}">{words}</text>'


def _name(timeline: Timeline, rank: int) -> str:
    return f"rank {timeline.number(rank)}"


def _line(line: MemoryLine, scale: _Scale) -> str:
    return _filled(line, "held", MEMORY_COLOUR, scale, partial(scale.y, line.rank))


def _filled(
    line: MemoryLine, name: str, colour: str, scale: _Scale, y: Callable[[float], float]
) -> str:
    steps = zip(line.times, line.held, strict=True)
    path = "".join(f"H{_number(scale.x(t))}V{_number(y(h))}" for t, h in steps)
    return (
        f'<path class="{name}" data-rank="{line.rank}" data-peak="{line.peak:.6g}" '
        f'fill="{colour}" d="M{SIZES.labels},{_number(y(0))}{path}"/>'
    )


def _copies(timeline: Timeline, scale: _Scale) -> Iterator[str]:
    """Yield a row for each rank: what its host holds, and its copies there and back."""
    lines = host_lines(timeline)
    most = max(line.peak for line in lines) or 1.0
    yield (
        f'<text class="caption" x="{SIZES.labels}" y="{scale.copies - 9}">copies to the host '
        "(above) and back (below); behind them what the host holds, and the peak, in microbatches "
        "of a rank</text>"
    )
    for line, copies in zip(lines, timeline.copies, strict=True):
        top = scale.copies + line.rank * SIZES.memory
        middle = top + SIZES.memory / 2

        def y(held: float, bottom: float = top + SIZES.memory - 1) -> float:
            return bottom - held / most * SIZES.most

        x, rank = SIZES.labels + scale.inner + 6, _name(timeline, line.rank)
        yield f'<text class="name" x="{SIZES.labels - 8}" y="{middle:g}">{rank}</text>'
        yield _filled(line, "host", HOST_COLOUR, scale, y)
        for to_host, colour in COPY_COLOURS.items():
            own = [copy for copy in copies if copy.to_host is to_host]
            yield _copied(own, middle - COPY_HEIGHT if to_host else middle, colour, scale)
        yield f'<text class="peak" x="{x}" y="{middle:g}">{line.peak:.4g}</text>'


def _copied(copies: Sequence[Copy], top: float, colour: str, scale: _Scale) -> str:
    path = "".join(
        f"M{_number(scale.x(copy.start))},{top:g}"
        f"h{_number(width := (copy.end - copy.start) * scale.per_second)}"
        f"v{COPY_HEIGHT}h-{_number(width)}z"
        for copy in copies
    )
    return f'<path class="copies" fill="{colour}" d="{path}"/>'
