#!/usr/bin/env python3
"""Write megatron_zb/megatron_lm/arguments.csv: the arguments of every supported Megatron-LM.

  python docs/make_arguments.py CHECKOUT CHECKOUT ...

One checkout of each version. Its parser is imported, on a CPU, by the Python that runs this. What
the arguments do together with a schedule is said in verdicts.yaml, beside that file.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "megatron_zb" / "megatron_lm" / "arguments.csv"
COLUMNS = ("name", "flags", "values", "default", "versions")

# Prints what there is to know of each argument of a checkout's parser, and the version.
READ = """
import argparse, json, sys
sys.path.insert(0, sys.argv[1])
from megatron_zb.megatron_core.cpu import run_on_cpu
run_on_cpu(training_loop=True)
from megatron.core.package_info import MAJOR, MINOR
from megatron.training.arguments import add_megatron_arguments
SWITCHES = {"_StoreTrueAction": "true", "_StoreFalseAction": "false",
            "BooleanOptionalAction": "switch"}
LISTS = {None: "", "+": " ...", "*": " ..."}
PLAIN = (str, int, float, bool, list, type(None))
rows = []
for action in add_megatron_arguments(argparse.ArgumentParser())._actions:
    if action.dest == "help":
        continue
    values = SWITCHES.get(type(action).__name__)
    if values is None:
        word = {int: "number", float: "real"}.get(action.type, "text")
        values = word + LISTS.get(action.nargs, " ...")
    default = action.default if isinstance(action.default, PLAIN) else None
    rows.append([action.dest, " ".join(action.option_strings), values, json.dumps(default)])
print(json.dumps([f"{MAJOR}.{MINOR}", rows]))
"""


def read(checkout: str) -> tuple[str, list[list[str]]]:
    """Return the version of a checkout, and name, flags, values and default of its arguments."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", READ, checkout]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    version, rows = json.loads(done.stdout.splitlines()[-1])
    return version, rows


def merged(parsers: list[tuple[str, list[list[str]]]]) -> list[list[str]]:
    """Return one row for each argument, with its versions; the newest default counts.

    An argument whose flags or kind of values have changed has a row for each.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    defaults: dict[tuple[str, ...], str] = {}
    for version, rows in sorted(parsers, key=lambda parser: _number(parser[0])):
        for name, flags, values, default in rows:
            found.setdefault((name, flags, values), []).append(version)
            defaults[name, flags, values] = default
    return [[*key, defaults[key], " ".join(versions)] for key, versions in sorted(found.items())]


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def main() -> None:
    rows: Any = merged([read(checkout) for checkout in sys.argv[1:]])
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    print(f"{len(rows)} rows in {TABLE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
