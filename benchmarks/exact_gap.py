#!/usr/bin/env python3
"""How far from the shortest possible our schedules are: against exact optima of small problems.

For every size, memory limit and cost profile, the optimum of the V placement is found by CP-SAT
(see exact.py) and compared with what the catalog has within the same memory. ``auto`` may choose
another placement than the V and then go below the V's optimum; the gaps count the V alone. Prints a
table and, last, one JSON line: how many optima were proven, and the gaps of each name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import exact
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron_zb import schedules
from megatron_zb.schedules.bounds import lower_bound

# F, B, W of one chunk and a transfer, in the smallest unit that makes them whole numbers.
PROFILES = {
    "equal": (1, 1, 1, 0),
    "layers": (10, 12, 8, 1),
    "cheap W": (10, 11, 5, 1),
    "slow links": (10, 12, 8, 5),
}
LIMITS = (0.375, 0.5, 0.625, 0.75, 1.0)


@dataclass(frozen=True)
class Row:
    """One problem: what is proven of it, and the makespan of each of our schedules."""

    profile: str
    problem: exact.Problem
    lower_bound: float
    optimum: exact.Optimum
    ours: dict[str, float]
    off_the_v: frozenset[str]


@dataclass
class Gaps:
    """Excess of each name, where it is on the V, over the proven optima as a share of them."""

    of_name: dict[str, list[float]] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        if row.optimum.proven:
            for name in row.ours.keys() - row.off_the_v:
                gap = row.ours[name] / row.optimum.makespan - 1
                self.of_name.setdefault(name, []).append(gap)


def main() -> None:
    args = _arguments()
    problems = list(_problems(args))
    rows = [
        _solve(profile, problem, args)
        for profile, problem in track(
            problems, "solving", console=Console(stderr=True), disable=not sys.stderr.isatty()
        )
    ]
    _report(rows, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], metavar="P")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 6], metavar="M")
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES), choices=PROFILES)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for each optimum and its proof (default 60)"
    )
    parser.add_argument("--workers", type=int, default=2, help="threads of the solver (default 2)")
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=["auto", "v-zb"],
        choices=schedules.names(),
        metavar="NAME",
        help="names that use all the memory of the limit (default auto v-zb)",
    )
    return parser.parse_args()


def _problems(args: argparse.Namespace) -> Iterator[tuple[str, exact.Problem]]:
    for p in args.ranks:
        slots = sorted({max(2, int(2 * limit * p)) for limit in LIMITS})
        for m in args.microbatches:
            for count in slots:
                for profile in args.profiles:
                    yield profile, exact.Problem(p, m, *PROFILES[profile], slots=count)


def _solve(profile: str, problem: exact.Problem, args: argparse.Namespace) -> Row:
    found = exact.ours(problem, args.schedules, any_placement=True)
    makespans = {
        name: schedules.simulate(schedule, problem.costs).makespan
        for name, schedule in found.items()
    }
    off_the_v = frozenset(name for name in found if found[name].placement != problem.placement)
    known = min(found.keys() - off_the_v, key=makespans.__getitem__, default=None)
    bound = _lower_bound(problem)
    optimum = exact.optimum(
        problem,
        known=None if known is None else found[known],
        seconds=args.seconds,
        workers=args.workers,
    )
    return Row(profile, problem, bound, optimum, makespans, off_the_v)


def _lower_bound(problem: exact.Problem) -> float:
    """The package's own bound; the solver does not rely on it, so that it is checked as well."""
    costs = problem.costs.for_placement(problem.placement)
    limit = [problem.slots / 2] * problem.pipeline_size
    return lower_bound(problem.placement, problem.num_microbatches, costs, limit)


def _report(rows: list[Row], args: argparse.Namespace) -> None:
    table = Table(
        title="makespans against the optimum of the V (gap in %; ? not proven; * not a V)"
    )
    headings = ("p", "m", "slots", "costs", "bound", "optimum", "proven", *args.schedules)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "costs" else "right")
    gaps = Gaps()
    for row in rows:
        gaps.add(row)
        problem, optimum = row.problem, row.optimum
        table.add_row(
            *map(str, (problem.pipeline_size, problem.num_microbatches, problem.slots)),
            row.profile,
            f"{row.lower_bound:.6g}",
            f"{optimum.makespan}",
            "yes" if optimum.proven else f"> {optimum.bound - 1}",
            *(_cell(row, name) for name in args.schedules),
        )
    console = Console(width=max(100, 50 + 16 * len(args.schedules)))
    console.print(table)
    print(json.dumps(_summary(rows, gaps)))


def _cell(row: Row, name: str) -> str:
    makespan = row.ours.get(name)
    if makespan is None:
        return "-"
    gap = 100 * (makespan / row.optimum.makespan - 1)
    mark = "*" if name in row.off_the_v else "" if row.optimum.proven else "?"
    return f"{makespan:.6g} ({gap:.1f}{mark})"


def _summary(rows: list[Row], gaps: Gaps) -> dict[str, object]:
    over = [row for row in rows if row.lower_bound > row.optimum.makespan + 1e-6]
    return {
        "problems": len(rows),
        "proven": sum(row.optimum.proven for row in rows),
        "bounds_above_a_schedule": len(over),
        "bound_is_optimum": sum(
            abs(row.lower_bound - row.optimum.makespan) < 1e-6 for row in rows if row.optimum.proven
        ),
        "off_the_v": Counter(name for row in rows for name in row.off_the_v),
        "gap": {
            name: {
                "problems": len(found),
                "optimal": sum(gap < 1e-9 for gap in found),
                "median": round(statistics.median(found), 4),
                "largest": round(max(found), 4),
            }
            for name, found in sorted(gaps.of_name.items())
        },
    }


if __name__ == "__main__":
    main()
