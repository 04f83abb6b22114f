#!/usr/bin/env python3
"""Make the tables of docs/pipe_bd_appendix.md from docs/results/pipe_bd.json.

python benchmarks/pipe_bd.py --output docs/results/pipe_bd.json
python docs/make_pipe_bd.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from make_schedules import replaced, table

PAGE = Path(__file__).resolve().parent / "pipe_bd_appendix.md"
RESULTS = PAGE.parent / "results" / "pipe_bd.json"
BASE = "block by block"


def main() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    text = replaced(text, "sleeping", sleeping_table(results["sleeping"]))
    computing = [*computing_table(results["real"]), "", *batches_table(results["batches"])]
    text = replaced(text, "computing", computing)
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE)


def sleeping_table(cells: Iterable[dict[str, Any]]) -> list[str]:
    """How many times as fast as block by block a way is, from the fewest blocks to the most."""
    groups: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["student_ms"], cell["times"]), []).append(cell)
    first = next(iter(groups.values()))
    counts = sorted(cell["blocks"] for cell in first)
    ways = _ways(first[0])
    rows = []
    for (student_ms, times), found in groups.items():
        gains = [[_gain(cell, way, "seconds") for cell in found] for way in ways]
        rows.append(
            [f"{student_ms:g}", times, *(f"{min(each):.2f}-{max(each):.2f}" for each in gains)]
        )
    blocks = f"{counts[0]}-{counts[-1]} blocks"
    heads = ["ms of a student", f"times of the {blocks}", *map(_named, ways)]
    return table(heads, rows)


def computing_table(cells: Iterable[dict[str, Any]]) -> list[str]:
    """The same for blocks that compute, by the clock, and how much processor times differ."""
    cells = list(cells)
    ways = _ways(cells[0])
    gains = [[_gain(cell, way, "seconds") for way in ways] for cell in cells]
    off = [
        abs(_gain(cell, way, "busiest") - _gain(cell, way, "seconds"))
        for cell in cells
        for way in ways
    ]
    rows = [
        [cell["blocks"], f"{cell['ways'][BASE]['seconds']:.3f}", *(f"{gain:.2f}" for gain in of)]
        for cell, of in zip(cells, gains, strict=True)
    ]
    return [
        f"Speedups by processor time differ from these by at most {max(off):.2f}.",
        "",
        *table(["blocks", f"{BASE}, seconds", *map(_named, ways)], rows),
    ]


def batches_table(cells: Iterable[dict[str, Any]]) -> list[str]:
    """The same by processor time, for an equal batch in a step and samples of several lengths."""
    cells = list(cells)
    rows = [
        [_named(way), *(f"{_gain(cell, way, 'busiest'):.2f}" for cell in cells)]
        for way in _ways(cells[0])
    ]
    batch, blocks = cells[0]["batch"], cells[0]["blocks"]
    return [
        f"This table has steps of {batch} samples and {blocks} blocks, and speedups by processor "
        "time.",
        f"A microbatch of pipe-bd has all {batch} samples, and one of the others {batch // 2}.",
        "",
        *table(["tokens of a sample", *(cell["tokens"] for cell in cells)], rows),
    ]


def _ways(cell: dict[str, Any]) -> list[str]:
    return [way for way in cell["ways"] if way != BASE]


def _named(way: str) -> str:
    return way.replace("- ", "without ", 1) if way.startswith("- ") else way


def _gain(cell: dict[str, Any], way: str, key: str) -> float:
    return float(cell["ways"][BASE][key] / cell["ways"][way][key])


if __name__ == "__main__":
    main()
