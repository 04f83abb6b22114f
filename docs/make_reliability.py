#!/usr/bin/env python3
"""Make the table of docs/reliability.md from what `scripts/test.sh --faults` has seen.

scripts/test.sh --faults
python docs/make_reliability.py faults.jsonl
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "reliability.md"
KEPT = Path(__file__).resolve().parent / "results" / "faults.json"
START, END = "<!-- generated: faults -->", "<!-- end: faults -->"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="faults.jsonl")
    lines = parser.parse_args().results.read_text(encoding="utf-8").splitlines()
    seen = sorted((json.loads(line) for line in lines), key=lambda s: (s["fault"], s["rank"]))
    KEPT.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_table(text, seen), encoding="utf-8")
    print(PAGE)


def with_table(text: str, seen: Iterable[dict[str, Any]]) -> str:
    """The page with the table between its markers."""
    rows = [
        "| fault | phase | rank | what is printed | seconds to the end | losses after resuming |"
    ]
    rows.append("| --- | --- | ---: | --- | ---: | --- |")
    rows += [
        f"| {s['fault']} | {s['phase']} | {s['rank']} | `{s['seen']}` | {s['seconds']} | "
        f"{s['resume']} |"
        for s in seen
    ]
    body = "\n".join([START, "", *rows, "", END])
    pattern = re.compile(f"{re.escape(START)}.*?{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda match: body, text)


if __name__ == "__main__":
    main()
