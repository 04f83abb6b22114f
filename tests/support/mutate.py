"""Break the code on purpose, one place at a time, and see whether the tests nearest to it notice.

``tests/mutants.yaml`` lists the places: a file, what stands there and what is put in its place, and
the tests that are to fail. Each mutant lives in a copy of the checkout. A mutant that survives is a
hole in the tests, unless its ``equal`` says why nothing can tell it from the original. Ends with
exit status 1 if fewer than the asked share of the others is killed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "mutants.yaml"
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "build", "*.egg-info", "runs")
_PASSED, _FAILED = 0, 1  # exit codes of pytest
KILLED, SURVIVED = "killed", "survived"
NO_ANSWER = "gave no answer in time"
"""It may hang, which would be noticed, or its tests are slow: not counted as killed."""


@dataclass(frozen=True)
class Mutant:
    """``old`` of a file becomes ``new``; ``equal`` says why no test can tell, if none can."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equal: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()} -> {self.new.strip()}"


def read(path: Path = LIST) -> list[Mutant]:
    """The mutants of a list.

    Raises:
        ValueError: what stands at a place is not there, or is there more than once.
    """
    found = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        text = (ROOT / entry["file"]).read_text(encoding="utf-8")
        for each in entry["mutants"]:
            tests = tuple(each.get("tests", entry["tests"]))
            mutant = Mutant(entry["file"], each["old"], each["new"], tests, each.get("equal", ""))
            if text.count(mutant.old) != 1:
                raise ValueError(f"{mutant}: found {text.count(mutant.old)} times, not once")
            found.append(mutant)
    return found


def tried(mutant: Mutant, copy: Path, seconds: float) -> str:
    """Whether the tests of a mutant fail once it is in a copy: KILLED, SURVIVED or NO_ANSWER."""
    path = copy / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return _verdict(copy, mutant.tests, seconds)
    finally:
        path.write_text(text, encoding="utf-8")


def _verdict(copy: Path, tests: tuple[str, ...], seconds: float) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return NO_ANSWER
    if done.returncode not in (_PASSED, _FAILED):
        raise RuntimeError(f"pytest could not run {' '.join(tests)}: {done.stdout.decode()[-800:]}")
    return KILLED if done.returncode == _FAILED else SURVIVED


def verdicts(
    mutants: list[Mutant], seconds: float, processes: int
) -> Iterator[tuple[Mutant, str, float]]:
    """Yield each mutant, what became of it, and the seconds that took, as they end."""
    copies: Queue[Path] = Queue()

    def timed(mutant: Mutant) -> tuple[Mutant, str, float]:
        copy, begin = copies.get(), time.monotonic()
        try:
            return mutant, tried(mutant, copy, seconds), time.monotonic() - begin
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        for number in range(processes):
            copies.put(Path(folder) / str(number))
            shutil.copytree(ROOT, Path(folder) / str(number), ignore=_LEFT_OUT)
        for done in as_completed([pool.submit(timed, mutant) for mutant in mutants]):
            yield done.result()


def _commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/mutate.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="mutants that contain this")
    parser.add_argument(
        "--share", type=float, default=0.95, metavar="X", help="to be killed (default 0.95)"
    )
    parser.add_argument(
        "--seconds", type=float, default=300, metavar="N", help="of a mutant's tests (default 300)"
    )
    parser.add_argument(
        "--draw", type=int, metavar="N", help="only N of them, others for each commit"
    )
    parser.add_argument(
        "--processes", type=int, default=2, metavar="N", help="at the same time (default 2)"
    )
    return parser


def main() -> int:
    arguments = parser().parse_args()
    mutants = [m for m in read() if arguments.only in str(m)]
    if arguments.draw is not None:
        mutants = random.Random(_commit()).sample(mutants, min(arguments.draw, len(mutants)))
    begin = time.monotonic()
    alive: list[Mutant] = []
    found = verdicts(mutants, arguments.seconds, arguments.processes)
    for number, (mutant, verdict, seconds) in enumerate(found, 1):
        print(f"{number}/{len(mutants)} {verdict} ({seconds:.0f} s) {mutant}", flush=True)
        alive += [mutant] if verdict != KILLED else []
    table = Table("not killed", "why no test can tell")
    for mutant in alive:
        table.add_row(str(mutant), mutant.equal or "A HOLE")
    if alive:
        Console().print(table)
    counted = [mutant for mutant in mutants if not mutant.equal]
    holes = [mutant for mutant in alive if not mutant.equal]
    share = 1 - len(holes) / len(counted) if counted else 1.0
    took = f"{time.monotonic() - begin:.0f} s"
    print(f"{len(counted) - len(holes)} of {len(counted)} mutants killed ({share:.1%}) in {took}")
    return 0 if share >= arguments.share else 1


if __name__ == "__main__":
    sys.exit(main())
