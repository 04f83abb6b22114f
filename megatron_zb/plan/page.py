"""Pages of a plan, from counted costs or from a profile.

The chart of a plan's rows has tokens per second over memory, the Pareto front, and a GPU's memory.
Nothing needs colour: points of the front are filled and joined by a line, others are rings, and
each has the number of its row beside it and the row's words as its title.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_zb import schedules
from megatron_zb.drawing import html_drawing, html_page, html_run
from megatron_zb.drawing.chart import (
    MEMORY_SHADES,
    MILLISECONDS,
    memory_lines,
    one_f_one_b_peak,
    worst_of,
)
from megatron_zb.drawing.html_page import picture
from megatron_zb.measured.trace import ComparedStep
from megatron_zb.parsing import GIB, gib
from megatron_zb.plan import table
from megatron_zb.plan.chart import Axis, Point, points
from megatron_zb.plan.features.catalog import stands_apart
from megatron_zb.plan.from_profile import MeasuredRow, ProfileRequest
from megatron_zb.plan.reasons import of_given, reason
from megatron_zb.plan.rows import Prediction
from megatron_zb.plan.search import Plan
from megatron_zb.plan.strategy import MEGATRON_1F1B
from megatron_zb.plan.table import flags

if TYPE_CHECKING:
    from markupsafe import Markup

_TEMPLATE = Path(__file__).resolve().parent / "plan.html"


# --- tokens per second over memory


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


def draw_chart(points: Sequence[Point], limit: float, title: str) -> Markup:
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


# --- ``megatron-zb plan ... --html FILE``


_DRAWN = 3
_NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "weight_queue": "waiting for W",
    "logits": "logits",
    "messages": "messages",
    "snapshot": "snapshot",
    "reserved": "reserved",
    "fragmentation": "fragments",
}
# Memory's hue in three shades, each plain, hatched, dotted and lined.
_PATTERNS = ("", "hatched", "dotted", "lined")
_FILLS = dict(zip(_NAMES, ((s, p) for p in _PATTERNS for s in MEMORY_SHADES), strict=False))


def save_plan(path: Path, plan: Plan) -> None:
    """Write the page of a plan.

    Args:
        path: a file that ends in .html.
        plan: the result of the search.

    Raises:
        UsageError: the file cannot be written, or jinja2 is missing.
    """
    html_page.check(path)
    job = plan.job
    html_page.write(
        path,
        _TEMPLATE,
        {
            "title": f"{job.model.name} on {job.gpus} {job.device.name} - megatron_zb",
            "job": job,
            "memory": gib(job.memory),
            "rows": _rows(plan),
            "parts": _parts(plan),
            "missing": plan.nothing_for,
            **_chart(plan),
            "plan": plan,
            "pictures": _pictures(plan),
            "explorer": _explorer(plan),
        },
        of_job=True,
    )


def _chart(plan: Plan) -> dict[str, Any]:
    found = points(plan)
    title = "tokens per second and GPU over the memory of the worst rank"
    return {
        "chart": draw_chart(found, plan.job.memory / GIB, title),
        "front": [point for point in found if point.on_front],
    }


def _rows(plan: Plan) -> list[dict[str, Any]]:
    """Return all rows; the run as given comes first."""
    ranked = [
        _row(plan, str(place), plan.ranked[index], reason(plan, index))
        for place, index in table.places(plan)
    ]
    if plan.given is None:
        return ranked
    return [_row(plan, table.GIVEN, plan.given, of_given(plan) or ""), *ranked]


def _row(plan: Plan, place: str, row: Prediction, why: str) -> dict[str, Any]:
    job = plan.job
    return {
        "place": place,
        "name": table.name_in(plan, row),
        "title": f"{row.name}, {table.setting_of(row)}",
        "setting": table.setting_of(row),
        "tokens": f"{row.tokens_per_gpu:.0f}",
        "mfu": f"{row.mfu:.1%}",
        "bubble": f"{row.bubble:.1%}",
        "gib": f"{row.memory.total / GIB:.1f}",
        "share": min(1.0, row.memory.total / job.memory),
        "rank": row.memory.rank,
        "sizes": _sizes(row, job.memory),
        "reason": why,
        "flags": " \\\n  ".join(flags(row, job.global_batch)),
    }


def _sizes(row: Prediction, memory: float) -> list[dict[str, Any]]:
    """Return each part of the worst rank's memory: GiB, and begin and share in % of all memory."""
    begin, out = 0.0, []
    for part, size in row.memory.parts().items():
        shade, pattern = _FILLS[part]
        share = size / memory
        out.append(
            {
                "part": part,
                "name": _NAMES[part],
                "gib": f"{size / GIB:.1f}",
                "begin": f"{100 * begin:.3f}",
                "share": f"{100 * share:.3f}",
                "shade": shade,
                "pattern": pattern,
            }
        )
        begin += share
    return out


def _parts(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Return the name, label, shade and pattern of each part that any row has."""
    return [
        (part, _NAMES[part], *fill)
        for part, fill in _FILLS.items()
        if any(row.memory.parts()[part] for row in plan.ranked)
    ]


def _pictures(plan: Plan) -> list[dict[str, Any]]:
    """Return pictures of the first few rows with a pipeline, and of Megatron's 1F1B to compare.

    There are none of parts of microbatches.
    """
    rows = [(place, plan.ranked[index]) for place, index in table.places(plan)]
    whole = [(place, row) for place, row in rows if not stands_apart(row)]
    with_pipeline = [(place, row) for place, row in whole if row.schedule is not None]
    return [
        _picture(row, place)
        for number, (place, row) in enumerate(with_pipeline)
        if number < _DRAWN or row.candidate == MEGATRON_1F1B
    ]


def _picture(row: Prediction, place: int) -> dict[str, Any]:
    assert row.timeline is not None
    timeline = replace(row.timeline, of_job=True)
    peak, baseline = worst_of(memory_lines(timeline)).peak, one_f_one_b_peak(timeline)
    name = f"{place}. {row.name}: {table.setting_of(row)}"
    return {
        "name": name,
        "microbatches": row.num_microbatches,
        "drawn": timeline.schedule.num_microbatches,
        "sentence": f"bubble {row.bubble:.1%}; at most {peak:.4g} microbatches on a rank "
        f"({peak / baseline:.2f} of 1F1B's); {1000 * row.pipeline_seconds:.1f} ms",
        **picture(timeline, name, MILLISECONDS),
    }


def _explorer(plan: Plan) -> dict[str, Any]:
    """Return the explorer's variables: the fastest row that the explorer can draw comes first.

    It has a pipeline, whole microbatches and no passes of vocabulary parallelism. The other rows of
    the same sizes and costs follow.
    """
    whole = [row for row in plan.ranked if not stands_apart(row)]
    with_pipeline = [
        (row.costs, row.timeline)
        for row in whole
        if row.costs and row.timeline and html_drawing.is_text(row.timeline.schedule)
    ]
    if not with_pipeline:
        shown = schedules.build("1f1b", pipeline_size=4, num_microbatches=8)
        equal = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1, weight=1)
        return html_page.explorer_context([schedules.simulate(shown, equal)], equal)
    costs, _ = with_pipeline[0]
    own = [timeline for of, timeline in with_pipeline if of == costs]
    m = own[0].schedule.num_microbatches
    alike = [timeline for timeline in own if timeline.schedule.num_microbatches == m]
    return html_page.explorer_context(alike, costs, unit=MILLISECONDS)


# --- ``plan --profile FILE --html``


def save_measured_plan(
    path: Path,
    asked: ProfileRequest,
    found: Sequence[MeasuredRow],
    missing: dict[str, str],
    compared: ComparedStep | None,
) -> None:
    """Write the page of a plan for measured costs, with the step that was measured if there is one.

    Raises:
        UsageError: the file cannot be written, or jinja2 is missing.
    """
    best = {
        f"{place}. {row.name}": replace(row.timeline, of_job=True)
        for place, row in enumerate(found, 1)
    }
    html_run.write_run(
        path,
        asked.profile,
        {
            "microbatches": asked.num_microbatches,
            "rows": [_measured_row(row, place) for place, row in enumerate(found, 1)],
            "missing": missing,
            "pictures": html_run.pictures_of(dict(islice(best.items(), _DRAWN))),
            **html_run.step_of(compared),
        },
        [row.timeline for row in found],
    )


def _measured_row(row: MeasuredRow, place: int) -> dict[str, str]:
    return {
        "place": str(place),
        "name": row.name,
        "title": row.name,
        "ms": f"{1000 * row.seconds:.4g}",
        "even": f"{1000 * row.seconds_even:.4g}",
        "bubble": f"{row.bubble:.1%}",
        "gib": f"{row.activation_bytes / GIB:.3g}",
        "rank": str(row.rank),
        "layers": "even" if row.is_even else row.written,
        "flags": " \\\n  ".join(row.flags),
    }
