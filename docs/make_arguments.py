#!/usr/bin/env python3
"""Write megatron_zb/megatron_lm/arguments.csv: the arguments of every supported Megatron-LM.

  python docs/make_arguments.py CHECKOUT CHECKOUT ...

One checkout of each version. Its parser is imported, on a CPU, by the Python that runs this. What
the arguments do together with a schedule is said in verdicts.yaml, beside that file.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_zb.megatron_lm.own_process import OwnParser, read_parser  # noqa: E402

TABLE = ROOT / "megatron_zb" / "megatron_lm" / "arguments.csv"
COLUMNS = ("name", "flags", "values", "default", "versions")


def merged(parsers: list[OwnParser]) -> list[list[str]]:
    """Return one row for each argument, with its versions.

    An argument whose flags, kind of values or default have changed has a row for each.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for parser in sorted(parsers, key=lambda parser: _number(parser.version)):
        for row in parser.rows:
            found.setdefault(tuple(row), []).append(parser.version)
    return [[*row, " ".join(versions)] for row, versions in sorted(found.items())]


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", metavar="CHECKOUT", nargs="+", type=Path)
    rows: Any = merged([read_parser(checkout) for checkout in parser.parse_args().checkouts])
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    print(f"{len(rows)} rows in {TABLE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
