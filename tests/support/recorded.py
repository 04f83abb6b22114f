"""Compare a result with the one that has been recorded, line by line.

Searches, counts and texts follow from their input alone. A change that was not meant shows here,
and one that was is recorded anew: ``MEGATRON_ZB_RECORD=1 pytest FILE``, then read the difference.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

RECORD = "MEGATRON_ZB_RECORD"
DIGITS = 7
_MOST_LINES = 12
OF_PYTHON = pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="recorded with Python 3.11: from 3.12 on sum() rounds floats otherwise, and a search "
    "may choose another order of the same length",
)
"""Mark of the results of searches, which a last digit may turn."""


def assert_as_recorded(text: str, file: Path) -> None:
    """Fail with the lines that differ from those of a file; or write it, if that is asked for."""
    text = text.rstrip("\n") + "\n"
    if os.environ.get(RECORD) == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return
    recorded = file.read_text(encoding="utf-8")
    if text != recorded:
        pair = recorded.splitlines(), text.splitlines()
        differing = difflib.unified_diff(*pair, "recorded", "now", lineterm="", n=0)
        lines = [line[:200] for line in differing][2:]
        more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
        shown = "\n".join([*lines[:_MOST_LINES], *more])
        raise AssertionError(f"{file.name} differs; {RECORD}=1 records what it is now:\n{shown}")


def rounded(value: Any) -> Any:
    """Return a value of JSON whose numbers have a few digits, the same on every machine."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return value


def lines_of(value: Any) -> str:
    """Return a value of JSON as lines: a path and what stands there, so that a diff names it."""
    lines: list[str] = []

    def walk(path: str, each: Any) -> None:
        if isinstance(each, dict) and each:
            for key, inner in each.items():
                walk(f"{path}.{key}" if path else str(key), inner)
        elif isinstance(each, list) and any(isinstance(inner, dict | list) for inner in each):
            for number, inner in enumerate(each):
                walk(f"{path}[{number}]", inner)
        else:
            lines.append(f"{path}: {json.dumps(each, ensure_ascii=False)}")

    walk("", rounded(value))
    return "\n".join(lines)
