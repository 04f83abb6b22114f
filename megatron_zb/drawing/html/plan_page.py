"""The page of a plan: ``megatron-zb plan ... --html FILE``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_zb import schedules
from megatron_zb.drawing.html import explorer, page, plan_chart
from megatron_zb.drawing.html.schedule_page import picture
from megatron_zb.drawing.memory_lines import memory_lines, one_f_one_b_peak, worst_of
from megatron_zb.drawing.palette import MEMORY_SHADES, MILLISECONDS
from megatron_zb.measured.units import GIB, gib
from megatron_zb.planner import table
from megatron_zb.planner.candidate import MEGATRON_1F1B
from megatron_zb.planner.flags import flags
from megatron_zb.planner.prediction import Prediction
from megatron_zb.planner.reasons import reason
from megatron_zb.planner.search import Plan
from megatron_zb.planner.table import points

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
    page.check(path)
    job = plan.job
    page.write(
        path,
        "plan.html",
        {
            "title": f"{job.model.name} on {job.gpus} {job.device.name} - megatron_zb",
            "job": job,
            "memory": gib(job.memory),
            "rows": [_row(plan, place, index) for place, index in table.places(plan)],
            "parts": _parts(plan),
            "missing": plan.nothing_for,
            **_chart(plan),
            "plan": plan,
            "pictures": _pictures(plan),
            "explorer": _explorer(plan),
        },
    )


def _chart(plan: Plan) -> dict[str, Any]:
    found = points(plan)
    title = "tokens per second and GPU over the memory of the worst rank"
    return {
        "chart": plan_chart.draw(found, plan.job.memory / GIB, title),
        "front": [point for point in found if point.on_front],
    }


def _row(plan: Plan, place: int, index: int) -> dict[str, Any]:
    row, job = plan.ranked[index], plan.job
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
        "reason": reason(plan, index),
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
    """Return pictures of the first few rows with a pipeline, and of Megatron's 1F1B to compare."""
    rows = [(place, plan.ranked[index]) for place, index in table.places(plan)]
    with_pipeline = [(place, row) for place, row in rows if row.schedule is not None]
    return [
        _picture(row, place)
        for number, (place, row) in enumerate(with_pipeline)
        if number < _DRAWN or row.candidate == MEGATRON_1F1B
    ]


def _picture(row: Prediction, place: int) -> dict[str, Any]:
    timeline = row.timeline
    assert timeline is not None
    peak, stock = worst_of(memory_lines(timeline)).peak, one_f_one_b_peak(timeline)
    name = f"{place}. {row.name}: {table.setting_of(row)}"
    return {
        "name": name,
        "microbatches": row.num_microbatches,
        "drawn": timeline.schedule.num_microbatches,
        "sentence": f"bubble {row.bubble:.1%}; at most {peak:.4g} microbatches on a rank "
        f"({peak / stock:.2f} of 1F1B's); {1000 * row.pipeline_seconds:.1f} ms",
        **picture(timeline, name, MILLISECONDS),
    }


def _explorer(plan: Plan) -> dict[str, Any]:
    """Return the explorer's variables: the fastest row with a pipeline comes first.

    The other rows of the same sizes and costs follow.
    """
    with_pipeline = [(r.costs, r.timeline) for r in plan.ranked if r.costs and r.timeline]
    if not with_pipeline:
        shown = schedules.build("1f1b", pipeline_size=4, num_microbatches=8)
        equal = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1, weight=1)
        return explorer.context([schedules.simulate(shown, equal)], equal)
    costs, _ = with_pipeline[0]
    own = [timeline for of, timeline in with_pipeline if of == costs]
    m = own[0].schedule.num_microbatches
    alike = [timeline for timeline in own if timeline.schedule.num_microbatches == m]
    return explorer.context(alike, costs, unit=MILLISECONDS)
