"""A schedule as one HTML file that needs no network, from a template with its style and scripts.

The page's explorer carries orders out with the reader's costs and makes none. It has the page's own
schedules with the page's costs; those of :data:`QUICK` built for the same costs; and, where all
ranks are alike, the orders that come with the package (see
:mod:`megatron_zb.drawing.html_drawing`).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_zb import __version__, files
from megatron_zb.drawing import html_drawing
from megatron_zb.drawing.chart import (
    COST_UNIT,
    TimeUnit,
    memory_lines,
    one_f_one_b_peak,
    ranks_of_job,
    report_of,
    title_of,
)
from megatron_zb.drawing.html_work import PageWork
from megatron_zb.errors import UsageError
from megatron_zb.schedules import Costs, Report, Schedule, Timeline, catalog, simulate
from megatron_zb.schedules.costs import filled
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.passes import PassKind

_F, _B, _W = PassKind.F, PassKind.B, PassKind.W


if TYPE_CHECKING:
    from jinja2 import Environment


# --- any page


ENDING = ".html"
SCRIPTS = ("simulator.js", "drawing.js", "explorer.js", "wider.js")
STYLE = "style.css"
PARTS = Path(__file__).resolve().parent / "html_parts"


def check(path: Path) -> None:
    """Check that a page can be written, so that a long search does not fail at its end.

    Raises:
        UsageError: the name does not end in .html, it is a folder's, or jinja2 is missing.
    """
    if path.suffix.lower() != ENDING:
        raise UsageError(f"cannot write a page into '{path}': give a name that ends in {ENDING}")
    if path.is_dir():
        raise UsageError(f"cannot write a page into '{path}': it is a folder; give a file's name")
    _environment()


def write(path: Path, template: Path, context: dict[str, Any], *, of_job: bool = False) -> None:
    """Fill a template and write it.

    Args:
        path: the file; its folder is made.
        template: a file, which extends ``base.html`` of the folder ``html_parts``.
        context: what the template calls by name; text in it is escaped.
        of_job: the scripts name ranks as a job does, by Megatron's pipeline ranks.

    Raises:
        UsageError: as :func:`check`, or the file cannot be written.
    """
    check(path)
    scripts, style = {name: _part(name) for name in SCRIPTS}, _part(STYLE)
    text = (
        _environment(template.parent)
        .get_template(template.name)
        .render(
            **context,
            constants={**html_drawing.constants(), "ofJob": of_job},
            scripts=scripts,
            style=style,
            policy=_policy(scripts.values(), style),
            version=__version__,
        )
    )
    files.write_text(path, text)


def _environment(folder: Path = PARTS) -> Environment:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise UsageError(
            "pages need jinja2: install it with pip install 'megatron-zb[plots]'"
        ) from error
    return Environment(
        loader=FileSystemLoader([folder, PARTS]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _part(name: str) -> Any:
    """Return a file of the package as markup, to be embedded in the page unchanged."""
    from markupsafe import Markup

    return Markup("\n" + (PARTS / name).read_text(encoding="utf-8"))


def _policy(scripts: Any, style: str) -> str:
    """Return the content security policy: these scripts and this style, nothing from elsewhere."""
    allowed = " ".join(_digest(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# --- the explorer


_FAMILIES = tuple(map(catalog.family, catalog.names()))
FIXED = tuple(family.name for family in _FAMILIES if not family.follows_costs)
"""Schedules whose order does not depend on costs."""
QUICK = tuple(family.name for family in _FAMILIES if not family.searches)
"""Schedules whose order is built at once, without a search."""
MOST_PASSES = 60_000
"""Most passes of a page's schedule; more take minutes to draw, and a file of many megabytes."""
_TIMES = ("forward", "backward", "weight", "p2p")
_EQUAL = {**dict(zip(_TIMES, (1.0, 1.0, 1.0, 0.0), strict=True)), "limit": None}


def check_size(schedule: Schedule) -> None:
    """Reject a schedule that is too large for a page.

    Raises:
        UsageError: the schedule has more than :data:`MOST_PASSES` passes.
    """
    passes = sum(map(len, schedule.ranks))
    if passes > MOST_PASSES:
        raise UsageError(
            f"{schedule.name}: {passes} passes are too many for a page: give fewer ranks or "
            f"microbatches, for at most {MOST_PASSES}"
        )


def explorer_context(
    own: Sequence[Timeline],
    costs: Costs | None = None,
    limit: float | None = None,
    unit: TimeUnit = COST_UNIT,
) -> dict[str, Any]:
    """Return the variables of the explorer's template.

    Args:
        own: the schedules of the page, of one pipeline size and number of microbatches; the first
            is drawn first. Those with passes that the scripts lack are left out; where all
            are, 1F1B is drawn.
        costs: the costs of all of them; None where their stages differ, as layers spread
            in several ways do.
        limit: the memory limit they were built for, as a share of 1F1B's peak.
        unit: unit of the times on the page.
    """
    if costs is not None:
        costs = costs.without(lambda it: it.frees_activations or isinstance(it, Vocabulary))
    known = [timeline for timeline in own if html_drawing.is_text(timeline.schedule)]
    own, limit = (known, limit) if known else ([_baseline(own[0], costs)], None)
    first, work = own[0], PageWork.of(own[0].schedule)
    p, m = first.schedule.placement.pipeline_size, first.schedule.num_microbatches
    alike = costs is not None and _is_alike(costs)
    times = _means(first, costs, unit)
    built: dict[str, float | None] = {**times, "limit": limit}
    entries: dict[tuple[str, int, int], dict[str, Any]] = {}
    for timeline in own:
        _add(entries, timeline, built, alike)
    if costs is not None:
        for name in QUICK if p * m <= MOST_PASSES // 6 else ():
            timeline = simulate(work.build(name, p, costs), costs)
            _add(entries, timeline, {**built, "limit": None}, alike)
    for order in html_drawing.packaged_orders() if alike and work.adapters is None else ():
        entries.setdefault(
            (order["name"], order["p"], order["m"]),
            {
                "order": order,
                "costs": None,
                "built": None if order["name"] in FIXED else _EQUAL,
                "choices": "",
            },
        )
    names = dict.fromkeys(entry["order"]["name"] for entry in entries.values())
    return {
        "data": {
            "initial": {"schedule": first.schedule.name, "p": p, "m": m, **built},
            "names": list(names),
            "orders": list(entries.values()),
            "alike": alike,
            "work": {"flags": work.flags, "note": work.note, "update": work.update},
            "unit": asdict(unit),
        }
    }


def _baseline(timeline: Timeline, costs: Costs | None) -> Timeline:
    """Return 1F1B of the same sizes, for equal costs where none are given."""
    p = timeline.schedule.placement.pipeline_size
    costs = costs or Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=1.0)
    return simulate(PageWork.of(timeline.schedule).build("1f1b", p), costs)


def _add(
    entries: dict[tuple[str, int, int], dict[str, Any]],
    timeline: Timeline,
    built: dict[str, float | None],
    alike: bool,
) -> None:
    schedule = timeline.schedule
    sizes = schedule.placement.pipeline_size, schedule.num_microbatches
    entries.setdefault(
        (schedule.name, *sizes),
        {
            "order": html_drawing.encode_order(schedule),
            "costs": None if alike else html_drawing.costs(timeline.costs),
            "built": None if schedule.name in FIXED else built,
            "choices": _choices(schedule),
        },
    )


def _is_alike(costs: Costs) -> bool:
    """Return whether all ranks and links cost the same, as in :meth:`Costs.uniform`."""
    p = costs.pipeline_size
    return costs == Costs.uniform(
        pipeline_size=p,
        forward=costs.seconds[_F][0],
        backward=costs.seconds[_B][0],
        weight=costs.seconds[_W][0],
        p2p=costs.p2p[0][1],
    )


def _means(timeline: Timeline, costs: Costs | None, unit: TimeUnit) -> dict[str, float]:
    """Return times of a microbatch on a rank and of a transfer; rounded means if stages differ."""
    if costs is not None and _is_alike(costs):
        times = (*(costs.seconds[kind][0] for kind in (_F, _B, _W)), costs.p2p[0][1])
        return dict(zip(_TIMES, (time * unit.scale for time in times), strict=True))
    table, p = timeline.costs, timeline.schedule.placement.pipeline_size
    latencies = [late for late in (*table.latency[_F][:-1], *table.latency[_B][1:]) if late > 0]
    means = [sum(table.seconds[kind]) / p for kind in (_F, _B, _W)]
    means.append(sum(latencies) / len(latencies) if latencies else 0.0)
    return {
        name: float(f"{mean * unit.scale:.4g}") for name, mean in zip(_TIMES, means, strict=True)
    }


def _choices(schedule: Schedule) -> str | None:
    """Return the flags that a schedule needs besides its name; None where it has no name."""
    if schedule.name not in catalog.names() or PageWork.of(schedule).flags is None:
        return None
    family, chunks = catalog.family(schedule.name), schedule.placement.chunks
    choices = [f"--chunks {chunks}"] if family.takes_chunks else []
    if family.takes_group_size:
        stage = schedule.placement.stages_of[0][0]
        group = next(
            (i for i, p in enumerate(schedule.ranks[0]) if p.stage != stage),
            schedule.num_microbatches,
        )
        choices.append(f"--group-size {group}")
    return " ".join(choices)


# --- ``megatron-zb show NAME --output FILE.html``


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
    check(path)
    check_size(timeline.schedule)
    write(
        path,
        PARTS / "schedule.html",
        {
            "title": f"{timeline.schedule.name} - megatron_zb",
            "name": timeline.schedule.name,
            "sentences": [
                title_of(timeline),
                report_of(report),
                *filter(None, [timeline.schedule.reason, ranks_of_job(timeline)]),
            ],
            "facts": _facts(timeline, report, costs),
            "picture": picture(timeline, title_of(timeline)),
            "ranks": _ranks(timeline),
            "explorer": explorer_context([timeline], costs, limit),
        },
    )


def picture(
    timeline: Timeline,
    title: str,
    unit: TimeUnit = COST_UNIT,
    extent: html_drawing.Extent | None = None,
) -> dict[str, Any]:
    """Return the variables of the template of a picture; with an ``extent``, one of several.

    There are no data for the scripts where passes are of kinds that these do not support.
    """
    is_text = html_drawing.is_text(timeline.schedule)
    return {
        "svg": html_drawing.draw(timeline, title, unit, extent),
        "data": html_drawing.data(timeline, title, unit, extent) if is_text else None,
        "legend": html_drawing.legend(timeline),
    }


def _facts(timeline: Timeline, report: Report, costs: Costs) -> dict[str, str]:
    placement = timeline.schedule.placement
    p = placement.pipeline_size
    times = [sum(costs.seconds[kind]) / p for kind in (_F, _B, _W)]
    return {
        "pipeline ranks": f"{p}",
        "microbatches": f"{timeline.schedule.num_microbatches}",
        "chunks of a rank": f"{placement.chunks} ({placement.name})",
        "F, B, W of a microbatch on a rank": ", ".join(f"{time:g}" for time in times),
        "transfer between ranks": f"{costs.p2p[0][1]:g}",
        **_facts_of_recompute_and_offload(costs),
        "makespan": f"{timeline.makespan:.6g}",
        "lower bound": f"{report.lower_bound:.6g}",
        "bubble rate": f"{timeline.bubble_rate:.1%}",
    }


def _facts_of_recompute_and_offload(costs: Costs) -> dict[str, str]:
    found = {"R": costs.feature(Recomputation), "a copy to the host": costs.feature(Offload)}
    return {
        f"{what} of a microbatch on a rank": f"{sum(filled(it.seconds)) / costs.pipeline_size:g}"
        for what, it in found.items()
        if it is not None
    }


def _ranks(timeline: Timeline) -> list[dict[str, str]]:
    baseline = one_f_one_b_peak(timeline)
    rows = []
    for line in memory_lines(timeline):
        passes = timeline.schedule.ranks[line.rank]
        rows.append(
            {
                "rank": f"{timeline.number(line.rank)}",
                "passes": f"{len(passes)}",
                "idle": f"{1 - timeline.utilisation[line.rank]:.1%}",
                "peak": f"{line.peak:.4g}",
                "share": f"{line.peak / baseline:.1%}",
            }
        )
    return rows
