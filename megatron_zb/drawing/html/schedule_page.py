"""The page of one schedule: ``megatron-zb show NAME --output FILE.html``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_zb.drawing.html import drawing, explorer, orders, page
from megatron_zb.drawing.memory_lines import memory_lines, one_f_one_b_peak
from megatron_zb.drawing.palette import COST_UNIT, TimeUnit, report_of, title_of
from megatron_zb.schedules import Costs, Report, Timeline


def save_schedule(
    path: Path, timeline: Timeline, report: Report, costs: Costs, limit: float | None = None
) -> None:
    """Write the page of a schedule.

    Args:
        path: a file that ends in .html.
        timeline: the schedule and its times.
        report: its distance to the lower bound.
        costs: the costs that it was built for.
        limit: the user's memory limit as a share of 1F1B's peak, if any.

    Raises:
        UsageError: the file cannot be written, jinja2 is missing, or the schedule is too large.
    """
    page.check(path)
    explorer.check_size(timeline.schedule)
    page.write(
        path,
        "schedule.html",
        {
            "title": f"{timeline.schedule.name} - megatron_zb",
            "name": timeline.schedule.name,
            "sentences": [
                title_of(timeline),
                report_of(report),
                *filter(None, [timeline.schedule.reason]),
            ],
            "facts": _facts(timeline, report, costs),
            "picture": picture(timeline, title_of(timeline)),
            "ranks": _ranks(timeline),
            "explorer": explorer.context([timeline], costs, limit),
        },
    )


def picture(
    timeline: Timeline,
    title: str,
    unit: TimeUnit = COST_UNIT,
    extent: drawing.Extent | None = None,
) -> dict[str, Any]:
    """Return the variables of the template of a picture; with an ``extent``, one of several.

    There are no data for the scripts where passes are of kinds that these do not support.
    """
    is_text = orders.is_text(timeline.schedule)
    return {
        "svg": drawing.draw(timeline, title, unit, extent),
        "data": drawing.data(timeline, title, unit, extent) if is_text else None,
        "legend": drawing.legend(timeline),
    }


def _facts(timeline: Timeline, report: Report, costs: Costs) -> dict[str, str]:
    placement = timeline.schedule.placement
    p = placement.pipeline_size
    times = [sum(slices) / p for slices in (costs.forward, costs.backward, costs.weight)]
    return {
        "pipeline ranks": f"{p}",
        "microbatches": f"{timeline.schedule.num_microbatches}",
        "chunks of a rank": f"{placement.chunks} ({placement.name})",
        "F, B, W of a microbatch on a rank": ", ".join(f"{time:g}" for time in times),
        "transfer between ranks": f"{costs.p2p[0][1]:g}",
        **_facts_of_states(costs),
        "makespan": f"{timeline.makespan:.6g}",
        "lower bound": f"{report.lower_bound:.6g}",
        "bubble rate": f"{timeline.bubble_rate:.1%}",
    }


def _facts_of_states(costs: Costs) -> dict[str, str]:
    facts = {"R": costs.recompute, "a copy to the host": costs.copy}
    return {
        f"{what} of a microbatch on a rank": f"{sum(slices) / costs.pipeline_size:g}"
        for what, slices in facts.items()
        if slices
    }


def _ranks(timeline: Timeline) -> list[dict[str, str]]:
    stock = one_f_one_b_peak(timeline)
    rows = []
    for line in memory_lines(timeline):
        passes = timeline.schedule.ranks[line.rank]
        rows.append(
            {
                "rank": f"{line.rank}",
                "passes": f"{len(passes)}",
                "idle": f"{1 - timeline.utilisation[line.rank]:.1%}",
                "peak": f"{line.peak:.4g}",
                "share": f"{line.peak / stock:.1%}",
            }
        )
    return rows
