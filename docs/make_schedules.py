#!/usr/bin/env python3
"""Make what is generated in docs/schedules.md: pictures, and tables between the markers.

Pictures and the table of sizes come from the catalog. The measured tables come from the files in
docs/results; what they lack is said to be missing, with the command that makes it:

  python benchmarks/schedule_quality.py --output quality.json
  python benchmarks/exact_gap.py | tail -n 1 > exact.json
  python benchmarks/beside_others.py --output others.json
  python benchmarks/feature_gains.py varied | tail -n 1 > varied.json
  python docs/make_schedules.py --results quality.json --exact exact.json --others others.json
  python docs/make_schedules.py --varied varied.json
  python benchmarks/feature_gains.py second-model | tail -n 1 > second.json
  python docs/make_schedules.py --second-model second.json
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from megatron_zb import schedules
from megatron_zb.drawing.pictures import save_picture
from megatron_zb.schedules import Costs, Timeline, catalog
from megatron_zb.schedules.features.patches import idle_share, pipefusion

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "schedules.md"
QUALITY = Path("results") / "schedule_quality.json"
EXACT = Path("results") / "exact_gap.json"
OTHERS = Path("results") / "beside_others.json"
SECOND_MODEL = Path("results") / "second_model.json"
VARIED = Path("results") / "varied_passes.json"
QUALITY_COMMAND = "python benchmarks/schedule_quality.py --output FILE"
EXACT_COMMAND = "python benchmarks/exact_gap.py"
OTHERS_COMMAND = "python benchmarks/beside_others.py --output FILE"
VARIED_COMMAND = "python benchmarks/feature_gains.py varied"

# The table of sizes: p, m, and F, B, W and a transfer of one microbatch on one rank.
SIZES = (8, 32)
COSTS = (1.0, 1.2, 0.8, 0.05)
# The table of two directions: p, m, and costs with W and without.
DIRECTIONS_SIZES = (8, 8)
DIRECTIONS_COSTS = ((1.0, 1.0, 1.0, 0.0), (1.0, 1.0, 0.0, 0.0))
# The table of patches: p, and M and T of its rows.
PATCHES_RANKS = (4, 8)
PATCHES_ROWS = ((4, 8), (8, 8), (8, 32), (16, 32))
# The pictures: small enough to read every number in a page.
PICTURE_SIZES = (4, 8)
PICTURE_LIMITS = {"auto": 0.5}
COLOURS = 96


def main() -> None:
    args = _arguments()
    for given, kept in (
        (args.results, QUALITY),
        (args.exact, EXACT),
        (args.others, OTHERS),
        (args.varied, VARIED),
        (args.second_model, SECOND_MODEL),
    ):
        if given is not None:
            _keep(given, args.docs / kept)
    if not args.tables_only:
        for name in schedules.names():
            _draw(name, args.docs / "pictures" / f"{name}.png")
    quality = _read(args.docs / QUALITY)
    page = args.docs / PAGE.name
    text = page.read_text(encoding="utf-8")
    for name, lines in {
        "catalog": catalog_table(),
        "directions": directions_table(),
        "patches": patches_table(),
        "second model": second_model_table(_read(args.docs / SECOND_MODEL)),
        "grid": grid_table(quality),
        "unequal": unequal_table(quality),
        "time": time_table(quality),
        "large": large_table(quality),
        "exact": exact_table(_read(args.docs / EXACT)),
        "others": others_table(_read(args.docs / OTHERS)),
        "varied": varied_table(_read(args.docs / VARIED)),
    }.items():
        text = replaced(text, name, lines)
    page.write_text(text, encoding="utf-8")
    print(page)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, help="output of schedule_quality.py to keep")
    parser.add_argument("--exact", type=Path, help="last line of exact_gap.py to keep")
    parser.add_argument("--others", type=Path, help="output of beside_others.py to keep")
    parser.add_argument("--varied", type=Path, help="last line of feature_gains.py varied to keep")
    parser.add_argument(
        "--second-model", type=Path, help="last line of feature_gains.py second-model to keep"
    )
    parser.add_argument("--tables-only", action="store_true", help="leave the pictures as they are")
    parser.add_argument("--docs", type=Path, default=DOCS, help="another folder than this one")
    return parser.parse_args()


def _keep(given: Path, kept: Path) -> None:
    """Copy a result, checked to be JSON; parts that it lacks stay as they were."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    merged = {**_read(kept), **json.loads(given.read_text(encoding="utf-8"))}
    kept.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def replaced(text: str, name: str, lines: Iterable[str]) -> str:
    """The page with other lines between the markers of a name."""
    start, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"{PAGE.name} must have '{start}' and '{end}' once, in this order")
    body = "\n".join([start, "", *lines, "", end])
    return pattern.sub(lambda match: body, text)


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table: the first column to the left, the others to the right."""
    head, *body = [f"| {' | '.join(map(str, line))} |" for line in (headings, *rows)]
    return [head, "|---|" + "---:|" * (len(headings) - 1), *body]


def missing(what: str, command: str) -> list[str]:
    return [f"*{what} not been measured for this page yet; this makes it: `{command}`*"]


# --- from the catalog ---------------------------------------------------------------------------


def _timeline(
    name: str,
    sizes: tuple[int, int],
    costs: tuple[float, float, float, float],
    memory_limit: float | None = None,
) -> Timeline:
    p, m = sizes
    forward, backward, weight, p2p = costs
    uniform = Costs.uniform(
        pipeline_size=p, forward=forward, backward=backward, weight=weight, p2p=p2p
    )
    built = schedules.build(
        name, pipeline_size=p, num_microbatches=m, costs=uniform, memory_limit=memory_limit
    )
    return schedules.simulate(built, uniform)


def _draw(name: str, path: Path) -> None:
    """A picture with few colours and no metadata: small, and the same bytes for the same bars."""
    path.parent.mkdir(parents=True, exist_ok=True)
    timeline = _timeline(name, PICTURE_SIZES, (1.0, 1.0, 1.0, 0.0), PICTURE_LIMITS.get(name))
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / path.name
        save_picture(timeline, drawn)
        with Image.open(drawn) as image:
            few = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def catalog_table() -> list[str]:
    upstream = _timeline("1f1b", SIZES, COSTS)
    rows = []
    for name in schedules.names():
        timeline = _timeline(name, SIZES, COSTS)
        report = timeline.schedule.report
        assert report is not None
        rows.append(
            [
                f"[`{name}`](#{name})",
                f"{timeline.bubble_rate:.1%}",
                f"{upstream.makespan / timeline.makespan - 1:+.1%}",
                f"{max(timeline.peak_activation):g}",
                f"{abs(report.gap):.1%}",
                timeline.schedule.placement.chunks,
            ]
        )
    headings = ("schedule", "bubble rate", "throughput", "peak", "gap", "chunks per rank")
    whole = [f"`{name}`" for name in schedules.names() if not catalog.family(name).splits_backward]
    return [
        *table(headings, rows),
        "",
        f"{', '.join(whole[:-1])} and {whole[-1]} do not split the backward.",
    ]


def directions_table() -> list[str]:
    """Idle times of one and of two directions, with as many microbatches as ranks."""
    rows = []
    for name in ("chimera", "bitpipe", "interleaved", "v-zb", "dualpipe-v"):
        timelines = [_timeline(name, DIRECTIONS_SIZES, costs) for costs in DIRECTIONS_COSTS]
        rows.append(
            [
                f"`{name}`",
                timelines[0].schedule.placement.copies,
                *(f"{timeline.bubble_rate:.1%}" for timeline in timelines),
                f"{max(timelines[0].peak_activation):g}",
            ]
        )
    headings = (
        "schedule",
        "copies of the weights",
        "F, B and W alike",
        "no W, F and B alike",
        "peak",
    )
    return table(headings, rows)


def patches_table() -> list[str]:
    """Idle times of sampling in patches, as simulated and by formula."""
    rows = []
    for patches, steps in PATCHES_ROWS:
        cells: list[object] = [f"{patches} patches, {steps} time steps"]
        for p in PATCHES_RANKS:
            costs = Costs.uniform(pipeline_size=p, forward=1, backward=1, weight=0)
            timeline = schedules.simulate(pipefusion(p, patches, steps, costs), costs)
            cells += [f"{timeline.bubble_rate:.1%}", f"{idle_share(p, patches, steps):.1%}"]
        rows.append(cells)
    headings = [f"p = {p}, {how}" for p in PATCHES_RANKS for how in ("simulated", "by formula")]
    return table(["sampling", *headings], rows)


CASES = {
    "encoder": "encoder of this step, its layers cut over all ranks",
    "copies": "encoder of this step, a copy on each rank",
    "ahead": "frozen encoder of the next step, cut",
    "ahead, copies": "frozen encoder of the next step, copies",
    "teacher": "teacher",
}


def second_model_table(results: dict[str, Any]) -> list[str]:
    """Steps beside a second model with 16 microbatches, and what of it runs in the bubbles."""
    rows = {(it["case"], it["share"]): it for it in results["rows"] if it["microbatches"] == 16}
    shares = sorted({share for _, share in rows})
    body = []
    for case, words in CASES.items():
        cells = [rows[case, share] for share in shares]
        fits = [f"{it['makespan']:.1f} ({it['fits']:.0%})" for it in cells]
        elsewhere = [it.get("first") or it.get("before") for it in cells]
        first = ["" if it is None else f"{it:.1f}" for it in elsewhere]
        body.append([words, *fits, ", ".join(filter(None, first))])
    headings = ["second model", *(f"{share:.0%} of the idle time" for share in shares)]
    return table([*headings, "today's way"], body)


# --- from the results -----------------------------------------------------------------------------


def grid_table(quality: dict[str, Any]) -> list[str]:
    if "grid" not in quality:
        return missing("The grid has", f"{QUALITY_COMMAND} --parts grid states")
    cells = quality["grid"]["cells"]
    states, said = _states(quality)
    rows = []
    for limit in sorted({cell["memory_limit"] for cell in cells}):
        own = [cell for cell in cells if cell["memory_limit"] == limit]
        served = [cell for cell in own if cell["makespan"] is not None]
        both = [cell for cell in served if cell["best_known"] is not None]
        gains = states.get(limit, [])
        rows.append(
            [
                f"{limit:g}",
                _median([cell["best_known"] / cell["makespan"] for cell in both]),
                _median([cell["makespan"] / cell["bound_of_v"] for cell in served]),
                _median(gains),
            ]
        )
    headings = (
        "memory limit",
        "median gain",
        "above the bound",
        "median gain by recomputation or offload",
    )
    summary = [*_grid_summary(cells, quality["grid"]["summary"]), said]
    return [
        *textwrap.wrap(" ".join(summary), 120, break_on_hyphens=False),
        "",
        *table(headings, rows),
    ]


def _grid_summary(cells: Sequence[dict[str, Any]], summary: dict[str, Any]) -> list[str]:
    """Counts of the cells, and what the benchmark sums up itself."""
    served = [cell for cell in cells if cell["makespan"] is not None]
    known = [cell for cell in served if cell["best_known"] is not None]
    lost = sum(cell["makespan"] > cell["best_known"] * (1 + 1e-9) for cell in known)
    at_16 = "bubble at p=16, m=64, limit "
    bubbles = [
        f"{value}% ({name.removeprefix(at_16).removesuffix(' (%)')})"
        for name, value in summary.items()
        if name.startswith(at_16)
    ]
    gain_on_torch = summary["median gain on torch's best (%)"]
    return [
        f"`auto` finds an order in {len(served)} of {len(cells)} cells; in "
        f"{len(served) - len(known)} of them no published schedule fits.",
        f"It is slower than the best published one in {lost} cells, slower than the best of torch "
        f"in {summary['worse than installed torch']} (median gain {gain_on_torch}%), and faster in "
        f"{summary['strictly better, where there is anything to gain']} cells that leave anything "
        "to gain.",
        f"Its bubble rate at p = 16 and m = 64, by limit: {', '.join(bubbles)}.",
    ]


def unequal_table(quality: dict[str, Any]) -> list[str]:
    if "unequal" not in quality:
        return missing("Unequal costs have", f"{QUALITY_COMMAND} --parts unequal")
    gains: dict[str, list[float]] = {}
    for kind, *_, percent in quality["unequal"]["cells"]:
        gains.setdefault(kind, []).append(percent)
    rows = [
        [kind, _percent(statistics.median(found)), f"{min(found):.2f}-{_percent(max(found))}"]
        for kind, found in gains.items()
    ]
    (count,) = {len(found) for found in gains.values()}
    return table((f"costs, {count} cells each", "median gain", "range of gains"), rows)


def _states(quality: dict[str, Any]) -> tuple[dict[float, list[float]], str]:
    """What recomputation or offload gain, by limit, and how many cells gain or lose."""
    cells = quality.get("states", {"cells": []})["cells"]
    gains: dict[float, list[float]] = {}
    for cell in cells:
        gains.setdefault(cell["memory_limit"], []).append(cell["kept"] / cell["chosen"])
    faster = sum(gain > 1 + 1e-9 for of in gains.values() for gain in of)
    slower = sum(gain < 1 - 1e-9 for of in gains.values() for gain in of)
    said = f"Of {len(cells)} cells with recomputation or offload, {faster} are faster and {slower} "
    return gains, f"{said}slower than without."


def time_table(quality: dict[str, Any]) -> list[str]:
    if "time" not in quality:
        return missing("The times have", f"{QUALITY_COMMAND} --parts time")
    groups: dict[str, dict[str, list[float]]] = {}
    for key, seconds in quality["time"].items():
        name, p, m, *limit = key.split()
        size = f"{p.replace('=', ' = ')}, {m.replace('=', ' = ')}"
        kind = " ".join(["`auto`" if name == "auto" else "named schedules", *limit]) + ":"
        groups.setdefault(size, {}).setdefault(kind, []).append(seconds)
    lines = []
    for size, kinds in groups.items():
        said = []
        for kind, found in kinds.items():
            ends = dict.fromkeys((min(found), max(found)))
            said.append(f"{kind} {' to '.join(f'{each:g}' for each in ends)}")
        lines.append(f"- {size}. {'; '.join(said).capitalize()}.")
    return lines


def large_table(quality: dict[str, Any]) -> list[str]:
    if "large" not in quality:
        return missing("Searches at many ranks have", f"{QUALITY_COMMAND} --parts large")
    rows = [
        [f"{p:g}", f"{m:g}", f"{limit:g}", _percent(gap), f"{seconds:g}"]
        for p, m, limit, gap, seconds in quality["large"]
    ]
    return table(("p", "m", "memory limit", "above the bound", "seconds of processor"), rows)


def exact_table(exact: dict[str, Any]) -> list[str]:
    if not exact:
        return missing("The distance to exact optima has", EXACT_COMMAND)
    found = [
        f"- `{name}` is optimal in {gap['optimal']} of {gap['problems']} problems on the V (median "
        f"gap {_percent(100 * gap['median'])}, largest {_percent(100 * gap['largest'])})."
        for name, gap in exact["gap"].items()
    ]
    return [
        f"{exact['proven']} of {exact['problems']} optima were proven; the lower bound is the "
        f"optimum in {exact['bound_is_optimum']} of them, above it in "
        f"{exact['bounds_above_a_schedule']}.",
        "",
        *found,
    ]


def others_table(others: dict[str, Any]) -> list[str]:
    if not others:
        return missing("What others ship has", OTHERS_COMMAND)
    headings = ("schedule", "memory relative to 1F1B", "bubble rate", "`auto` is faster by")
    fastest: dict[str, dict[str, Any]] = {}  # with any number of chunks
    for row in sorted(others["rows"], key=lambda row: float(row["bubble"])):
        fastest.setdefault(row["schedule"].split(",")[0], row)
    rows = [
        [
            row["schedule"],
            f"{row['peak_of_1f1b']:.2f}",
            f"{row['bubble']:.1%}",
            f"{row['auto_faster']:.1%}",
        ]
        for row in fastest.values()
    ]
    return table(headings, rows)


def varied_table(varied: dict[str, Any]) -> list[str]:
    """Mean steps of schedules whose passes vary, each size with its own rows."""
    if not varied:
        return missing("Steps with passes that vary have", VARIED_COMMAND)
    shares = [f"{deviation:g}%" for deviation in varied["deviations"]]
    rows = [
        (
            f"{row['ranks']}, {row['microbatches']}: {_VARIED.get(row['name'], row['name'])}",
            *(f"{mean:.2f}" for mean in row["means"]),
        )
        for row in varied["rows"]
    ]
    return table(("p, m: schedule", *shares), rows)


_VARIED = {"fastest": "the fastest of `auto`", "auto": "`auto`"}


def _median(ratios: Sequence[float]) -> str:
    return _percent(100 * (statistics.median(ratios) - 1)) if ratios else "-"


def _percent(value: float) -> str:
    return f"{value:.2f}%"


if __name__ == "__main__":
    main()
