#!/usr/bin/env python3
"""Write what has passed with a commit of Megatron-LM's main branch, for docs/make_support.py.

It goes into docs/results/main.csv, a line for each folder of tests, and
docs/results/main_features.csv, a line for each row of the feature matrix.

  scripts/test.sh --megatron-main CHECKOUT --junitxml=build/main.xml
  python docs/make_main.py d98e8a64 build/main.xml

Of a test that several reports have, the last one counts.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "tests" / "support"))

import torch  # noqa: E402
from feature_matrix import ROWS, Row  # noqa: E402

RUNS = DOCS / "results" / "main.csv"
FEATURES = DOCS / "results" / "main_features.csv"
OF_A_ROW = "test_a_feature_gives_what_megatron_gives"


def main(commit: str, reports: Iterable[str]) -> None:
    """Write both files; end with a sentence where a test of the reports has failed."""
    try:
        roots = [ElementTree.parse(report) for report in reports]
    except (OSError, ElementTree.ParseError) as error:
        sys.exit(f"make_main.py: error: a report of pytest's --junitxml cannot be read: {error}")
    suites = [suite for root in roots for suite in root.iter("testsuite")]
    outcomes = {_name(case): case for suite in suites for case in suite.iter("testcase")}
    cases = list(outcomes.values())
    failed = [case.get("name") for case in cases if _has(case, "failure", "error")]
    if failed:
        sys.exit(f"make_main.py: error: {len(failed)} tests have failed, the first is {failed[0]}")
    passed = [case for case in cases if not _has(case, "skipped")]
    date = max(suite.get("timestamp", "")[:10] for suite in suites)
    python = "{}.{}".format(*sys.version_info)
    with RUNS.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(("megatron", "python", "torch", "tests", "passed", "date"))
        for folder in ("tests/megatron_core", "tests/real_megatron_lm"):
            count = sum(_module(case).startswith(folder) for case in passed)
            torch_version = torch.__version__.split("+")[0]
            if count:
                lines.writerow((f"main {commit}", python, torch_version, folder, count, date))
    names = [case.get("name", "") for case in passed]
    with FEATURES.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(("feature", "passed"))
        for row in ROWS:
            if count := _passed(row, names):
                lines.writerow((row.feature, count))


def _name(case: ElementTree.Element) -> tuple[str, str]:
    """The name by which a later report replaces a test that has run again."""
    return case.get("classname", ""), case.get("name", "")


def _has(case: ElementTree.Element, *outcomes: str) -> bool:
    return any(case.find(outcome) is not None for outcome in outcomes)


def _module(case: ElementTree.Element) -> str:
    return case.get("classname", "").replace(".", "/")


def _passed(row: Row, names: Iterable[str]) -> int:
    """The number of tests of a row that have passed."""
    test, cases = row.test, {f"{OF_A_ROW}[{row.feature}-{name}]" for name in row.schedules}
    if test is None:
        return sum(name in cases for name in names)
    return sum(name.partition("[")[0] == test for name in names)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit", help="of the checkout, such as d98e8a64")
    parser.add_argument("reports", nargs="+", help="what pytest has written with --junitxml")
    main(**vars(parser.parse_args()))
