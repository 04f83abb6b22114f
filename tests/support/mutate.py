"""Break the package on purpose, one drawn place at a time, and see which check notices.

Each mutant lives in a copy of the checkout of its own. What scripts/test.sh runs is run there: ruff
and mypy, then the tests that can reach the mutant, the most specific ones first, until one fails; a
mutant survives when all of them have passed. Which test reaches what is recorded in a run of all
tests, once for each state of the code, into build/reached.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import TypeAlias

import mutants
import yaml
from mutants import Mutant
from reaching_tests import LEFT_OUT, ROOT, Nearby, Reached

EQUIVALENT = ROOT / "tests" / "equivalent_mutants.yaml"
CHECKERS = {"ruff": ("check", "--quiet", "--select", "F"), "mypy": ("--no-error-summary",)}
"""What scripts/test.sh runs before the tests; of ruff the rules of names alone, as how a mutant is
written is nothing that anybody would write."""
TestsOf: TypeAlias = Callable[[Mutant], Sequence[str]]
_PASSED, _NOT_FOUND = 0, 4  # exit statuses of pytest
KILLED, SURVIVED = "killed", "survived"
NO_ANSWER = "gave no answer in time"
"""It may hang, which would be noticed, or its tests are slow: not counted as killed."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant, and the checker or test that noticed it, if one did."""

    mutant: Mutant
    word: str
    by: str
    tests: int
    seconds: float


def equivalent(path: Path = EQUIVALENT) -> dict[tuple[str, ...], str]:
    """Read the anchors of mutants that no test can tell from the original, and why."""
    listed = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    return {(e["at"], e["kind"], str(e["old"]), str(e["new"])): e["why"] for e in listed}


def tried(mutant: Mutant, copy: Path, tests: Sequence[str], seconds: float) -> Verdict:
    """Run the checkers and tests in a new copy of the checkout that has the mutant in it."""
    begin = time.monotonic()
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    path = copy / mutant.file
    path.write_bytes(mutant.applied(path.read_bytes()))
    word, by = KILLED, checker_of(copy, mutant.file)
    if not by:
        word, by = verdict_of(copy, tests, seconds) if tests else (SURVIVED, "no test reaches it")
    return Verdict(mutant, word, by, len(tests), time.monotonic() - begin)


def checker_of(copy: Path, file: str) -> str:
    """Return the checker that refuses a file of a copy, ruff or mypy, or an empty text."""
    for name, words in CHECKERS.items():
        command = [sys.executable, "-m", name, *words, *([file] if name == "ruff" else [])]
        if subprocess.run(command, cwd=copy, capture_output=True, check=False).returncode:
            return name
    return ""


def verdict_of(copy: Path, tests: Sequence[str], seconds: float) -> tuple[str, str]:
    """Run tests in a folder until one fails: whether one did, and which."""
    code, printed = _pytest(copy, tests, seconds)
    if code == _NOT_FOUND and "ERROR: not found:" in printed:  # the mutant changes a test's name
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        code, printed = _pytest(copy, list(files), seconds)
    if code is None:
        return NO_ANSWER, ""
    if code == _PASSED:
        return SURVIVED, ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.M)
    if failed is not None:
        return KILLED, failed[1]
    if code == _NOT_FOUND and "ImportError while loading conftest" in printed:
        return KILLED, "it cannot be imported"
    if code == _NOT_FOUND:
        raise RuntimeError(f"pytest has not found its tests: {printed[-800:]}")
    return KILLED, f"the end of pytest with exit status {code}"  # of its process, or before tests


def _pytest(copy: Path, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Run pytest until a test fails; its exit status, None if it took too long, and its output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    path = os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")]))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed, tempfile.TemporaryFile() as out:
        listed.write("\n".join(tests))
        listed.flush()
        process = subprocess.Popen(
            [*command, f"@{listed.name}"],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        return code, out.read().decode(errors="replace")


def verdicts(
    drawn: Sequence[Mutant], tests_of: TestsOf, seconds: float, processes: int
) -> Iterator[Verdict]:
    """Yield what became of each mutant, as it ends."""
    copies: Queue[Path] = Queue()

    def one(mutant: Mutant) -> Verdict:
        copy = copies.get()
        try:
            return tried(mutant, copy, tests_of(mutant), seconds)
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        for number in range(processes):
            copies.put(Path(folder) / str(number))
        for done in as_completed([pool.submit(one, mutant) for mutant in drawn]):
            yield done.result()


def with_wider_tests(
    found: Iterator[Verdict], nearby: Nearby, seconds: float, processes: int
) -> Iterator[Verdict]:
    """Yield verdicts, those of survivors after the wider tests have run, too."""
    left = []
    for verdict in found:
        if verdict.word == KILLED:
            yield verdict
        else:
            left.append(verdict.mutant)
    yield from verdicts(left, nearby.wider_tests_of, seconds, processes)


def _commit() -> str:
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/mutate.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--draw", type=int, default=4, metavar="N", help="mutants (default 4)")
    parser.add_argument("--seed", metavar="S", help="of the draw (default: the commit)")
    parser.add_argument("--only", metavar="TEXT", default="", help="those whose line contains this")
    parser.add_argument(
        "--share", type=float, default=0.0, metavar="X", help="to be killed, or exit status 1"
    )
    parser.add_argument(
        "--seconds", type=float, default=900, metavar="N", help="of a mutant's tests (default 900)"
    )
    parser.add_argument(
        "--nearby",
        action="store_true",
        help="run the test files that name a mutant's module and lie beside it, not all that reach "
        "it: nothing is recorded first",
    )
    parser.add_argument(
        "--wider",
        action="store_true",
        help="with --nearby: then, on survivors, all other test files of that folder and of those "
        "that use the package",
    )
    parser.add_argument(
        "--processes", type=int, default=2, metavar="N", help="at the same time (default 2)"
    )
    return parser


def main() -> int:
    arguments = parser().parse_args()
    if arguments.wider and not arguments.nearby:
        sys.exit("mutate.py: error: --wider needs --nearby: without it all tests are tried")
    seed = arguments.seed or _commit()
    known = equivalent()
    drawn = mutants.draw(ROOT, arguments.draw, seed)
    same = [mutant for mutant in drawn if mutant.anchor in known]
    drawn = [m for m in drawn if m not in same and arguments.only in str(m)]
    for mutant in same:
        print(f"equivalent: {mutant}: {known[mutant.anchor]}", flush=True)
    for name, words in CHECKERS.items():  # which fills mypy's cache, too, that each copy takes
        subprocess.run([sys.executable, "-m", name, *words], cwd=ROOT, check=True)
    by_checkers = holes = 0
    nearby = Nearby(ROOT)
    tests_of = nearby.tests_of if arguments.nearby else Reached.of(ROOT).tests_of
    limits = arguments.seconds, arguments.processes
    found = verdicts(drawn, tests_of, *limits)
    if arguments.wider:
        found = with_wider_tests(found, nearby, *limits)
    for number, verdict in enumerate(found, 1):
        holes += verdict.word != KILLED
        by_checkers += verdict.by in CHECKERS
        by = f" by {verdict.by}" if verdict.word == KILLED else f" {verdict.by}".rstrip()
        took = f"{verdict.tests} tests, {verdict.seconds:.0f} s"
        print(f"\n{number}/{len(drawn)} {verdict.word}{by} ({took}): {verdict.mutant}")
        print(verdict.mutant.diff(ROOT), flush=True)
    share = 1 - holes / len(drawn) if drawn else 1.0
    killed = f"{len(drawn) - holes} of {len(drawn)} mutants killed ({share:.1%})"
    print(f"\nseed {seed}: {killed}, {by_checkers} of them by {' and '.join(CHECKERS)}")
    return 0 if share >= arguments.share else 1


if __name__ == "__main__":
    sys.exit(main())
