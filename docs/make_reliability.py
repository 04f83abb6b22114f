#!/usr/bin/env python3
"""Make the tables of docs/reliability.md from what has been seen, and keep that in docs/results.

scripts/test.sh --faults
python benchmarks/long_run.py | tail -n 1 > long_run.json
python docs/make_reliability.py faults.jsonl --long-run long_run.json

Both are optional: a table is made of what is kept of the last run where there is no newer one.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "reliability.md"
RESULTS = PAGE.parent / "results"
FAULTS, LONG_RUN = RESULTS / "faults.json", RESULTS / "long_run.json"
_MIB = ("resident", "malloc", "tensors")
_QUANTITIES = {
    "resident": "resident memory",
    "malloc": "memory from malloc",
    "objects": "Python objects",
    "handles": "open files and connections",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="?", help="faults.jsonl")
    parser.add_argument("--long-run", type=Path, metavar="JSON", help="the benchmark's last line")
    args = parser.parse_args()
    if args.results is not None:
        lines = args.results.read_text(encoding="utf-8").splitlines()
        seen = sorted((json.loads(line) for line in lines), key=lambda s: (s["fault"], s["rank"]))
        _keep(FAULTS, seen)
    if args.long_run is not None:
        _keep(LONG_RUN, json.loads(args.long_run.read_text(encoding="utf-8")))
    text = with_table(PAGE.read_text(encoding="utf-8"), "faults", fault_rows(_kept(FAULTS)))
    text = with_table(text, "long run", long_run_rows(_kept(LONG_RUN)))
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE)


def _keep(path: Path, what: Any) -> None:
    path.write_text(json.dumps(what, indent=1) + "\n", encoding="utf-8")


def _kept(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def fault_rows(seen: Iterable[dict[str, Any]]) -> list[str]:
    """Lines of a table: what became of each kind of fault, wherever it has struck.

    Only where a run has not resumed to equal losses does its line have the number that have.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for one in seen:
        kinds.setdefault(one["fault"], []).append(one)
    return [
        "| fault | strikes in | runs | seconds until the end |",
        "|---|---|---:|---:|",
        *(_fault_row(fault, found) for fault, found in kinds.items()),
    ]


def _fault_row(fault: str, found: list[dict[str, Any]]) -> str:
    def each(name: str) -> list[str]:
        return list(dict.fromkeys(one[name] for one in found))

    seconds = [one["seconds"] for one in found]
    range_ = f"{min(seconds)}-{max(seconds)}" if len(set(seconds)) > 1 else f"{seconds[0]}"
    equal = sum(one["resume"] == "equal" for one in found)
    unequal = "" if equal == len(found) else f", equal in {equal} of {len(found)}"
    return f"| {fault} | {', '.join(each('phase'))} | {len(found)} | {range_}{unequal} |"


def long_run_rows(run: dict[str, Any]) -> list[str]:
    """A line for each quantity: the last quarter of the steps, and how it differs from the second.

    Both from the least to the most of all ranks.
    """
    ranks = run["second_and_last_quarter"]
    rows = []
    for name in ranks[0]:
        counts = name in ("handles", "threads")
        scale, digits = (2**20, 1) if name in _MIB else (1, 0)
        last = [found[name][1] / scale for found in ranks]
        changes = [
            last - second if counts else 100 * (last / second - 1)
            for second, last in (found[name] for found in ranks)
        ]
        shown = _range(f"{value:.{digits}f}" for value in (min(last), max(last)))
        change = _range(
            f"{value:+.0f}" if counts else f"{value:+.2f}%"
            for value in (min(changes), max(changes))
        )
        quantity = f"{_QUANTITIES.get(name, name)}{', MiB' if name in _MIB else ''}"
        rows.append(f"| {quantity} | {shown} | {change} |")
    heads = f"| of one process | last quarter, ranks 0 to {len(ranks) - 1} | change |"
    return [heads, "|---|---:|---:|", *rows]


def _range(ends: Iterable[str]) -> str:
    return " to ".join(dict.fromkeys(ends))


def with_table(text: str, name: str, rows: list[str]) -> str:
    """The page with a table between its markers."""
    start, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    body = "\n".join([start, "", *rows, "", end])
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    return pattern.sub(lambda match: body, text)


if __name__ == "__main__":
    main()
