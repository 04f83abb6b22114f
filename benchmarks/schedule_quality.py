#!/usr/bin/env python3
"""How good are the schedules? Against every published one, the lower bound, and unequal costs.

Six parts, each printed as a table:
  grid     `auto` in every cell of data/frontier.csv (best known makespan of public schedulers at
           the same memory limit, all timed in one simulator), and against the schedules of the
           installed torch.distributed.pipelining in our own simulator
  unequal  costs that differ between stages, ranks and links: built from the real costs against
           built from their median, both timed at the real ones
  parts    what each idea brings: four chunks, BW where it is free, memory that B frees
  time     seconds to generate, lowering and the proof against deadlock included
  large    distance of `auto` to its lower bound at 16 and 32 ranks, and seconds of processor
  states   `auto` in every cell again with recomputation and offload, beside
           the makespans of --kept, which are those of an earlier grid; hours, so only where --parts
           names it

The last line is one JSON object with everything that was measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch_schedules import torch_schedules

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import averaged
from megatron_zb.schedules.features import recomputation
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.placement import v_shape

FRONTIER = Path(__file__).with_name("data") / "frontier.csv"
KEPT = Path(__file__).parents[1] / "docs" / "results" / "schedule_quality.json"
KEPT_INPUT = 0.06  # of the activation of a rank's microbatch
COPY = 0.3  # of its F, B and W, one way
SAME = 1e-9  # relative: two makespans closer than this are equal
PROVEN = 1e-3  # relative distance to the bound within which nothing is left to gain


@dataclass(frozen=True)
class Request:
    """What `auto` is asked for: F, B, W and a transfer cost ``costs``."""

    pipeline_size: int
    num_microbatches: int
    costs: tuple[float, float, float, float]
    memory_limit: float

    @property
    def request(self) -> tuple[int, int, tuple[float, float, float, float], float]:
        return self.pipeline_size, self.num_microbatches, self.costs, self.memory_limit


@dataclass(frozen=True)
class Cell(Request):
    """One line of the frontier, and what `auto` reached there (None: it refused the limit)."""

    bound_of_v: float
    best_known: float | None
    best_known_schedule: str
    best_found: float | None
    best_torch: float | None = None
    makespan: float | None = None
    bubble_rate: float | None = None
    chunks: int | None = None
    refusal: str = ""
    seconds: float = 0.0


def main() -> None:
    args = _arguments()
    results: dict[str, Any] = {}
    parts: dict[str, Callable[[argparse.Namespace], Any]] = {
        "grid": grid,
        "unequal": unequal,
        "parts": parts_of_the_gain,
        "time": generation_time,
        "large": large,
        "states": states,
    }
    for name in args.parts or (name for name in parts if name != "states"):
        results[name] = parts[name](args)
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: _summary(result) for name, result in results.items()}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts",
        nargs="*",
        choices=["grid", "unequal", "parts", "time", "large", "states"],
        help="only these (default: all but states)",
    )
    parser.add_argument("--frontier", type=Path, default=FRONTIER, help="another grid to run")
    parser.add_argument("--ranks", type=int, nargs="*", help="only cells of these pipeline sizes")
    parser.add_argument(
        "--kept", type=Path, default=KEPT, help="JSON of a grid where all is kept (default: docs)"
    )
    parser.add_argument(
        "--state-seconds",
        type=float,
        default=12.0,
        help="of the search for what is dropped, on each placement (default 12, as in training)",
    )
    parser.add_argument("--processes", type=int, default=2, help="cells at a time (default 2)")
    parser.add_argument("--output", type=Path, help="write every cell to this JSON file")
    return parser.parse_args()


def _summary(result: Any) -> Any:
    return result["summary"] if isinstance(result, dict) and "summary" in result else result


# --- grid ---------------------------------------------------------------------------------------


def grid(args: argparse.Namespace) -> dict[str, Any]:
    cells = _asked_for(args)
    with ProcessPoolExecutor(args.processes) as pool:
        done = list(track(pool.map(_solve, cells), "grid", total=len(cells), transient=True))
    _print_limits(done)
    summary = _grid_summary(done)
    _print_dictionary("grid", summary)
    return {"summary": summary, "cells": [asdict(cell) for cell in done]}


def _asked_for(args: argparse.Namespace) -> list[Cell]:
    return [c for c in _read(args.frontier) if not args.ranks or c.pipeline_size in args.ranks]


def _read(path: Path) -> list[Cell]:
    with path.open(encoding="utf-8", newline="") as file:
        return [_cell(row) for row in csv.DictReader(file)]


def _cell(row: dict[str, str]) -> Cell:
    def number(name: str) -> float | None:
        return float(row[name]) if row.get(name) else None

    forward, backward, weight, p2p = (
        float(row[name]) for name in ("forward", "backward", "weight", "p2p")
    )
    return Cell(
        pipeline_size=int(row["pipeline_size"]),
        num_microbatches=int(row["num_microbatches"]),
        costs=(forward, backward, weight, p2p),
        memory_limit=float(row["memory_limit"]),
        bound_of_v=float(row["lower_bound_makespan"]),
        best_known=number("best_known_makespan"),
        best_known_schedule=row.get("best_known_schedule", ""),
        best_found=number("best_found_makespan"),
    )


def _costs(p: int, times: tuple[float, float, float, float]) -> schedules.Costs:
    forward, backward, weight, p2p = times
    return schedules.Costs.uniform(
        pipeline_size=p, forward=forward, backward=backward, weight=weight, p2p=p2p
    )


def _solve(cell: Cell) -> Cell:
    costs = _costs(cell.pipeline_size, cell.costs)
    start = time.perf_counter()
    try:
        found = schedules.build(
            "auto",
            pipeline_size=cell.pipeline_size,
            num_microbatches=cell.num_microbatches,
            costs=costs,
            memory_limit=cell.memory_limit,
        )
    except UsageError as error:
        return Cell(**{**asdict(cell), "costs": cell.costs, "refusal": str(error)})
    seconds = time.perf_counter() - start
    timeline = schedules.simulate(found.validate(), costs)
    assert max(timeline.peak_activation) <= cell.memory_limit * cell.pipeline_size * (1 + 1e-6)
    return Cell(
        **{
            **asdict(cell),
            "costs": cell.costs,
            "best_torch": _best_torch(cell, costs),
            "makespan": timeline.makespan,
            "bubble_rate": timeline.bubble_rate,
            "chunks": found.placement.chunks,
            "seconds": seconds,
        }
    )


def _best_torch(cell: Cell, costs: schedules.Costs) -> float | None:
    """The fastest schedule of the installed torch that keeps the cell's limit."""
    limit = cell.memory_limit * cell.pipeline_size * (1 + 1e-9)
    sizes = (cell.pipeline_size, cell.num_microbatches)
    offered = torch_schedules(*sizes, chunks=(2, 4, 8)).schedules.values()
    timelines = [schedules.simulate(schedule, costs) for schedule in offered]
    fitting = [t.makespan for t in timelines if max(t.peak_activation) <= limit]
    return min(fitting, default=None)


def _grid_summary(cells: list[Cell]) -> dict[str, Any]:
    served = [c for c in cells if c.makespan is not None]
    known = [c for c in cells if c.best_known is not None]
    worse = [c for c in known if _ratio(c, c.best_known) > 1 + SAME]
    open_cells = [c for c in known if _ratio_of(c.best_known, c.bound_of_v) > 1 + PROVEN]
    better = [c for c in open_cells if _ratio(c, c.best_known) < 1 - SAME]
    by_torch = [c for c in served if c.best_torch is not None]
    return {
        "cells": len(cells),
        "served": len(served),
        "served where nothing published fits": sum(c.best_known is None for c in served),
        "worse than best known": len(worse),
        "strictly better, where there is anything to gain": f"{len(better)} of {len(open_cells)}",
        "worse than installed torch": sum(_ratio(c, c.best_torch) > 1 + SAME for c in by_torch),
        "median gain on torch's best (%)": _middle(
            _ratio_of(c.best_torch, c.makespan) for c in by_torch
        ),
        **_single_cells(served),
    }


def _ratio(cell: Cell, reference: float | None) -> float:
    return math.inf if cell.makespan is None else _ratio_of(cell.makespan, reference)


def _ratio_of(value: float | None, reference: float | None) -> float:
    assert value is not None and reference is not None
    return value / reference


def _percent(ratio: float) -> float:
    return round(100 * (ratio - 1), 3)


def _single_cells(cells: list[Cell]) -> dict[str, float]:
    """Bubbles that the literature reports most: p=16, m=64 at F, B, W = 1, 1.2, 0.8."""
    return {
        f"bubble at p=16, m=64, limit {c.memory_limit:g} (%)": round(100 * (c.bubble_rate or 0), 2)
        for c in cells
        if (c.pipeline_size, c.num_microbatches) == (16, 64)
        and c.costs == (1000.0, 1200.0, 800.0, 50.0)
        and c.memory_limit in (0.5, 0.625, 1.0)
    }


def _print_limits(cells: list[Cell]) -> None:
    table = Table(title="auto, by memory limit (fraction of 1F1B)")
    for heading in (
        "limit",
        "cells",
        "served",
        "median gap to V's bound %",
        "largest %",
        "median gain on best known %",
        "largest loss to best found %",
        "on more than 2 chunks",
    ):
        table.add_column(heading, justify="right")
    for limit in sorted({c.memory_limit for c in cells}):
        rows = [c for c in cells if c.memory_limit == limit]
        served = [c for c in rows if c.makespan is not None]
        gaps = [_ratio(c, c.bound_of_v) for c in served]
        gains = [_ratio_of(c.best_known, c.makespan) for c in served if c.best_known]
        found = [_ratio(c, c.best_found) for c in served if c.best_found]
        table.add_row(
            f"{limit:g}",
            str(len(rows)),
            str(len(served)),
            _middle(gaps),
            _highest(gaps),
            _middle(gains),
            _highest(found),
            str(sum((c.chunks or 0) > 2 for c in served)),
        )
    Console().print(table)


def _middle(ratios: Iterable[float]) -> str:
    values = list(ratios)
    return f"{_percent(statistics.median(values)):.2f}" if values else "-"


def _highest(ratios: Iterable[float]) -> str:
    values = list(ratios)
    return f"{_percent(max(values)):.2f}" if values else "-"


def _print_dictionary(title: str, values: dict[str, Any]) -> None:
    table = Table(title=title, show_header=False)
    for name, value in values.items():
        table.add_row(name, str(value))
    Console().print(table)


# --- unequal costs --------------------------------------------------------------------------------


def unequal_costs(kind: str, p: int) -> schedules.Costs:
    """F, B, W = 1, 1.2, 0.8 a rank, with one thing that is not like the rest."""
    slices = 2 * p
    factor = [1.0] * slices
    slowdown = [1.0] * p
    links = [[0.0 if a == b else 0.05 for b in range(p)] for a in range(p)]
    if kind == "output layer worth 1.5 layers":  # four layers a rank, two a slice
        factor[-1] += 0.75
    elif kind == "uneven layout":
        factor = [1.5 if i % 4 == 0 else 5 / 6 for i in range(slices)]
    elif kind == "slow link":
        links[p // 2 - 1][p // 2] = links[p // 2][p // 2 - 1] = 1.0
    elif kind == "slow rank":
        slowdown[p // 3] = 1.3
    return schedules.Costs.of_slices(
        pipeline_size=p,
        forward=[x * 0.5 for x in factor],
        backward=[x * 0.6 for x in factor],
        weight=[x * 0.4 for x in factor],
        p2p=links,
        slowdown=slowdown,
    )


UNEQUAL = ("output layer worth 1.5 layers", "uneven layout", "slow link", "slow rank")


def unequal(args: argparse.Namespace) -> dict[str, Any]:
    cells = [
        (kind, p, rounds * p, limit)
        for kind in UNEQUAL
        for p in (4, 8, 16)
        for rounds in (2, 4)
        for limit in (0.5, 0.75, 1.0)
    ]
    with ProcessPoolExecutor(args.processes) as pool:
        ratios = list(track(pool.map(_unequal_cell, cells), "unequal", total=len(cells)))
    table = Table(title="built from the median costs, over built from the real ones, both at real")
    table.add_column("costs")
    for heading in ("median %", "least %", "most %"):
        table.add_column(heading, justify="right")
    for kind in UNEQUAL:
        own = [r for cell, r in zip(cells, ratios, strict=True) if cell[0] == kind]
        table.add_row(kind, _middle(own), f"{_percent(min(own)):.2f}", _highest(own))
    Console().print(table)
    summary = {"median gain (%)": _percent(statistics.median(ratios))}
    _print_dictionary("unequal costs", summary)
    return {
        "summary": summary,
        "cells": [[*cell, _percent(r)] for cell, r in zip(cells, ratios, strict=True)],
    }


def _unequal_cell(cell: tuple[str, int, int, float]) -> float:
    kind, p, m, limit = cell
    costs = unequal_costs(kind, p)
    make = partial(schedules.build, "auto", pipeline_size=p, num_microbatches=m, memory_limit=limit)
    aware = schedules.simulate(make(costs=costs), costs).makespan
    blind = schedules.simulate(make(costs=averaged(costs)), costs).makespan
    return blind / aware


# --- what each part brings ------------------------------------------------------------------------


def parts_of_the_gain(args: argparse.Namespace) -> dict[str, Any]:
    rows = {}
    for p, m, limit in ((8, 32, 0.375), (8, 32, 0.5), (8, 32, 1.0), (16, 64, 0.5), (16, 64, 1.0)):
        costs = _costs(p, (1.0, 1.2, 0.8, 0.05))
        freeing = schedules.Costs.of_slices(
            pipeline_size=p,
            forward=[1.0] * p,
            backward=[1.2] * p,
            weight=[0.8] * p,
            p2p=0.05,
            held_for_weight=[0.6] * p,
        )
        two = v_shape(p)
        make = partial(
            schedules.build, "auto", pipeline_size=p, num_microbatches=m, memory_limit=limit
        )
        published = make(costs=costs, placement=two)
        rows[f"p={p} m={m} limit={limit:g}"] = {
            "V, two chunks": _bubble(published, costs),
            "any placement": _bubble(make(costs=costs), costs),
            "B frees 40 %": _bubble(make(costs=freeing), freeing),
            "share of BW": round(_share_of_bw(published), 3),
        }
    table = Table(title="bubble % of auto with and without; share of backwards left whole")
    table.add_column("cell")
    for heading in next(iter(rows.values())):
        table.add_column(heading, justify="right")
    for name, values in rows.items():
        table.add_row(name, *map(str, values.values()))
    Console().print(table)
    return rows


def _bubble(schedule: schedules.Schedule, costs: schedules.Costs) -> float:
    return round(100 * schedules.simulate(schedule, costs).bubble_rate, 2)


def _share_of_bw(schedule: schedules.Schedule) -> float:
    passes = [p for rank in schedule.ranks for p in rank]
    whole = sum(p.kind is schedules.PassKind.BW for p in passes)
    return whole / (schedule.placement.num_stages * schedule.num_microbatches)


# --- states of activations ------------------------------------------------------------------------


@dataclass(frozen=True)
class StateCell(Request):
    """A cell with the makespans of `auto` where all is kept, and where states are chosen."""

    kept: float
    chosen: float
    dropped: int
    moved: int
    seconds: float


def states(args: argparse.Namespace) -> dict[str, Any]:
    kept = json.loads(args.kept.read_text(encoding="utf-8"))["grid"]["cells"]
    makespans = {Cell(**{**c, "costs": tuple(c["costs"])}).request: c["makespan"] for c in kept}
    cells = _asked_for(args)
    cells.sort(key=lambda cell: cell.pipeline_size * cell.num_microbatches)
    solve = partial(_with_states, seconds=args.state_seconds)
    known = [makespans[cell.request] for cell in cells]
    with ProcessPoolExecutor(args.processes) as pool:
        found = pool.map(solve, cells, known)
        done = list(track(found, "states", total=len(cells), transient=True))
    _print_states(done)
    slower = sum(c.chosen > c.kept * (1 + SAME) for c in done)
    faster = sum(c.chosen < c.kept * (1 - SAME) for c in done)
    summary = {
        "cells": len(done),
        "slower than all kept": slower,
        "faster than all kept": faster,
        "seconds of the search for drops": args.state_seconds,
    }
    _print_dictionary("states", summary)
    return {"summary": summary, "cells": [asdict(cell) for cell in done]}


def _with_states(cell: Cell, kept: float, seconds: float) -> StateCell:
    costs = _costs(cell.pipeline_size, cell.costs).having(Recomputation(kept_input=KEPT_INPUT))
    costs = costs.having(Offload(seconds=COPY * sum(cell.costs[:3])))
    start = time.perf_counter()
    with patch.object(recomputation, "SECONDS", seconds):
        found = schedules.build(
            "auto",
            pipeline_size=cell.pipeline_size,
            num_microbatches=cell.num_microbatches,
            costs=costs,
            memory_limit=cell.memory_limit,
        )
    took = time.perf_counter() - start
    timeline = schedules.simulate(found.validate(), costs)
    assert max(timeline.peak_memory) <= cell.memory_limit * cell.pipeline_size * (1 + 1e-6)
    counts = (len(found.recomputed), len(found.offloaded))
    return StateCell(*cell.request, kept, timeline.makespan, *counts, took)


def _print_states(cells: list[StateCell]) -> None:
    table = Table(title="auto with states beside auto without, by memory limit")
    for heading in ("limit", "cells", "slower", "faster", "median gain %", "largest %"):
        table.add_column(heading, justify="right")
    for limit in sorted({c.memory_limit for c in cells}):
        gains = [c.kept / c.chosen for c in cells if c.memory_limit == limit]
        slower, faster = sum(g < 1 - SAME for g in gains), sum(g > 1 + SAME for g in gains)
        counts = map(str, (len(gains), slower, faster))
        table.add_row(f"{limit:g}", *counts, _middle(gains), _highest(gains))
    Console().print(table)


# --- generation time ------------------------------------------------------------------------------


def generation_time(args: argparse.Namespace) -> dict[str, float]:
    """Seconds in a warm process on one core; the kernels have been compiled before."""
    _generate("v-half", 8, 32)
    named = [name for name in schedules.names() if name != "auto"]
    seconds = {f"{name} p=32 m=128": _generate(name, 32, 128) for name in named}
    seconds["auto p=32 m=128"] = _generate("auto", 32, 128)
    seconds["auto p=32 m=128 limit 0.5"] = _generate("auto", 32, 128, 0.5)
    for name in ("zb-h1", "v-half", "v-min", "v-zb"):
        seconds[f"{name} p=64 m=512"] = _generate(name, 64, 512)
    _print_dictionary("seconds to generate and lower", seconds)
    return seconds


def large(args: argparse.Namespace) -> list[list[float]]:
    """Return p, m, the limit, the gap in percent and the seconds of processor of each search."""
    found = []
    for p, m in ((16, 32), (16, 64), (32, 128)):
        for limit in (1.0, 0.625, 0.5):
            start = time.process_time()
            built = schedules.build(
                "auto",
                pipeline_size=p,
                num_microbatches=m,
                costs=_costs(p, (1.0, 1.2, 0.8, 0.05)),
                memory_limit=limit,
            )
            seconds = round(time.process_time() - start, 1)
            assert built.report is not None
            found.append([p, m, limit, round(100 * built.report.gap, 2), seconds])
    rows = {
        f"p = {p:g}, m = {m:g}, limit {limit:g}": f"{gap} %, {seconds} s"
        for p, m, limit, gap, seconds in found
    }
    _print_dictionary("auto at many ranks: gap, seconds", rows)
    return found


def _generate(name: str, p: int, m: int, limit: float | None = None) -> float:
    start = time.perf_counter()
    costs = _costs(p, (1.0, 1.2, 0.8, 0.05))
    built = schedules.build(
        name, pipeline_size=p, num_microbatches=m, costs=costs, memory_limit=limit
    )
    schedules.lower(built)
    return round(time.perf_counter() - start, 2)


if __name__ == "__main__":
    main()
