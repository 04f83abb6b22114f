#!/usr/bin/env python3
"""List what a wheel has in it, and end with exit status 1 where it has what no user needs.

scripts/check_wheel.py dist/megatron_zb-0.1.0-py3-none-any.whl
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "megatron_zb"
SUBPACKAGES = {
    "bridge",
    "cli",
    "configs",
    "cpu_ranks",
    "distill",
    "drawing",
    "job",
    "lora",
    "measured",
    "megatron_core",
    "megatron_lm",
    "plan",
    "runtime",
    "schedules",
    "train",
}
_UNWANTED = {
    r"(^|/)(tests?|docs|benchmarks)/|(^|/)(test_\w+|conftest)\.py$": "a test or a page",
    r"\.(png|svg|jpe?g|gif|ipynb)$": "a picture",
    r"(^|/)(__pycache__|\.\w+)/|\.(pyc|so|o)$|\.tmp$|~$": "a cache",
    r"^/|(^|/)\.\.(/|$)|\\": "a path out of the wheel",
}
_HOME = re.compile(rb"/(?:home|root|Users|tmp)/[\w.-]+|[A-Z]:\\\\Users\b")


def main() -> int:
    """Print size, contents and problems; return 1 if there are any, 2 without a wheel."""
    if len(sys.argv) != 2 or not zipfile.is_zipfile(sys.argv[1]):
        print("check_wheel.py: error: give one wheel, such as dist/*.whl", file=sys.stderr)
        return 2
    path = Path(sys.argv[1])
    with zipfile.ZipFile(path) as wheel:
        entries = wheel.infolist()
        for entry in sorted(entries, key=lambda entry: entry.filename):
            print(f"{entry.file_size:>9}  {entry.filename}")
        found = [*problems(wheel)]
    whole = sum(entry.file_size for entry in entries)
    print(f"{path.name}: {path.stat().st_size} bytes, {len(entries)} files of {whole} bytes")
    for problem in found:
        print(f"check_wheel.py: error: {path.name} has {problem}", file=sys.stderr)
    return 1 if found else 0


def problems(wheel: zipfile.ZipFile) -> Iterator[str]:
    """Yield what should not be in the wheel, and the subpackages that it lacks."""
    for name in wheel.namelist():
        for pattern, what in _UNWANTED.items():
            if re.search(pattern, name):
                yield f"{what}: {name}"
        top = name.split("/")[0]
        if top != PACKAGE and not top.endswith(".dist-info"):
            yield f"a file of no package: {name}"
        if (hit := _HOME.search(wheel.read(name))) is not None:
            yield f"an absolute path, {hit[0].decode()}: {name}"
    there = {name.split("/")[1] for name in wheel.namelist() if name.startswith(f"{PACKAGE}/")}
    yield from (f"no package {PACKAGE}.{name}" for name in sorted(SUBPACKAGES - there))


if __name__ == "__main__":
    sys.exit(main())
