"""Record which tests run which blocks of the package, in all processes that they start.

Every block of a function (its body, and the bodies of its branches and loops) gets a first line
that notes the running test. That happens in a copy of the checkout, whose tests then run as always.
Each process appends its notes to a file at once: ranks are killed, and would write no summary.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from mutants import PACKAGE, Mutant, sources_of

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "build", "*.egg-info", "runs", "site")
FOLDER = "TESTS_REACHED"
"""In the environment: where processes write their notes."""
SECONDS = "seconds.xml"
_COMPILED = ("inner_loops.py", "pair_loops.py")
"""Compiled by numba, which cannot call the notebook."""

_NOTEBOOK = '''
import functools, os, sys
_data, _key = os.environ._data, os.environ.encodekey("PYTEST_CURRENT_TEST")
_seen, _last, _file, _out = set(), None, None, None

def _forked():
    global _out
    _seen.clear()
    _out = None
os.register_at_fork(after_in_child=_forked)

def _note_reached(place):
    if _data.get(_key) is not _last:
        _turn()
    if place not in _seen:
        _note(place)

def _turn():
    global _last, _file
    _seen.clear()
    _last = _data.get(_key)
    name = os.environ.get("PYTEST_CURRENT_TEST", "")
    file = name.partition("::")[0]
    _forget(PACKAGE if file != _file else "tests")
    _file = file
    _write("=" + name + "\\n")

def _forget(whose):
    """Empty caches of functions: of tests before each test, of the package before each file."""
    for name, module in list(sys.modules.items()):
        ours = name.startswith("megatron_zb")
        if ours if whose == PACKAGE else "/tests/" in (getattr(module, "__file__", "") or ""):
            for function in list(vars(module).values()):
                if isinstance(function, functools._lru_cache_wrapper) and name != "ranks":
                    function.cache_clear()

def _note(place):
    _seen.add(place)
    _write(place + "\\n")

def _write(text):
    global _out
    folder = os.environ.get("TESTS_REACHED")
    if folder is None:
        return
    if _out is None:
        path = os.path.join(folder, str(os.getpid()))
        _out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        text = "=" + os.environ.get("PYTEST_CURRENT_TEST", "") + "\\n" + text
    os.write(_out, text.encode())
'''.replace("PACKAGE", f'"{PACKAGE}"')


@dataclass(frozen=True)
class Block:
    """Statements that run one after another; named by the line of the first of them."""

    statements: list[ast.stmt]
    header: int | None
    """The line of the function's def, for its body."""

    @property
    def line(self) -> int:
        first = self.statements[0]
        decorators = getattr(first, "decorator_list", [])
        return min([first.lineno, *(d.lineno for d in decorators)])


def blocks(node: ast.AST, source: list[str], within: bool = False) -> Iterator[Block]:
    """Yield the blocks of all functions; a chained elif belongs to the block around it."""
    within = within or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for _, value in ast.iter_fields(node):
        if not isinstance(value, list):
            value = [value]
        elif within and value and isinstance(value[0], ast.stmt):
            statements = value[1:] if _is_docstring(value[0]) else value
            if statements and not source[statements[0].lineno - 1].lstrip().startswith("elif "):
                defines = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                yield Block(statements, getattr(node, "lineno", None) if defines else None)
        for each in value:
            if isinstance(each, ast.AST):
                inside = within and not isinstance(node, ast.ClassDef)
                yield from blocks(each, source, inside)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def instrumented(text: str, name: str) -> str:
    """The source with a note at the start of each block."""
    lines = text.splitlines()
    tree = ast.parse(text)
    notes = {}
    for block in blocks(tree, lines):
        indent = " " * block.statements[0].col_offset
        notes[block.line] = f"{indent}_note_reached('{name}:{block.line}')"
    after = [
        n.end_lineno
        for n in tree.body
        if isinstance(n, ast.ImportFrom) and n.module == "__future__"
    ]
    start = after[0] if after else 0
    made = []
    for number, line in enumerate(lines, 1):
        made += [notes[number]] if number in notes else []
        made.append(line)
        if number == start:
            made.append(f"from {PACKAGE}._reached import _note_reached")
    return "\n".join(made) + "\n"


def record(copy: Path, notes: Path, words: Sequence[str]) -> None:
    """Run the ordinary tests in an instrumented copy; what they reach goes into the folder."""
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    for path in sources_of(copy):
        text = path.read_text(encoding="utf-8")
        if path.name not in _COMPILED and "from __future__" in text:
            name = path.relative_to(copy).as_posix()
            path.write_text(instrumented(text, name), encoding="utf-8")
    (copy / PACKAGE / "_reached.py").write_text(_NOTEBOOK, encoding="utf-8")
    notes.mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": str(copy), FOLDER: str(notes)}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
    command += [f"--junitxml={notes / SECONDS}", *words]
    subprocess.run(command, cwd=copy, env=environment, check=False)


class Reached:
    """Which tests run which block, and how long each takes.

    What a fixture runs counts for every test of its file: the fixture may be shared. Tests that
    fail before anything is broken are left out, such as those that read the instrumented source.
    """

    def __init__(self, notes: Path, root: Path) -> None:
        self._root = root
        self._seconds = _seconds_of_tests(notes / SECONDS)
        self._of_block: dict[str, set[str]] = defaultdict(set)
        shared: dict[str, set[str]] = defaultdict(set)
        for block, test, phase in _notes(notes):
            (self._of_block if phase == "call" else shared)[block].add(
                test if phase == "call" else test.split("::")[0]
            )
        of_file: dict[str, list[str]] = defaultdict(list)
        for test in self._seconds:
            of_file[test.split("::")[0]].append(test)
        for block, files in shared.items():
            self._of_block[block].update(test for file in files for test in of_file[file])
        self._breadth = Counter(
            file
            for tests in self._of_block.values()
            for file in {test.split("::")[0] for test in tests}
        )

    @classmethod
    def of(cls, root: Path) -> Reached:
        """Read what has been recorded for the code as it is, or record it now."""
        notes = root / "build" / "reached" / _state(root)
        if not (notes / SECONDS).exists():
            print("==> recording what each test reaches: all tests run once", flush=True)
            shutil.rmtree(notes.parent, ignore_errors=True)
            with tempfile.TemporaryDirectory() as folder:
                words = ["-n", "auto", "--maxprocesses", "8", "--dist", "loadfile"]
                record(Path(folder) / "copy", notes, words)
        return cls(notes, root)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that can reach a mutant: quick ones first, then those of few blocks."""
        block = self._block(mutant)
        tests = self._of_block.get(block, set()) if block else self._tests_of_module(mutant.file)
        stem = Path(mutant.file).stem

        def rank(test: str) -> tuple[bool, bool, int, str, float]:
            file, seconds = test.split("::")[0], self._seconds[test]
            return seconds > 2, stem not in file, self._breadth[file], file, seconds

        return sorted((test for test in tests if test in self._seconds), key=rank)

    def _block(self, mutant: Mutant) -> str | None:
        """Return the smallest block around a mutant; around a default, the function's body."""
        text = (self._root / mutant.file).read_text(encoding="utf-8")
        if Path(mutant.file).name in _COMPILED or "from __future__" not in text:
            return None
        found = [
            block
            for block in blocks(ast.parse(text), text.splitlines())
            if block.line <= mutant.line <= (block.statements[-1].end_lineno or 0)
            or (block.header is not None and block.header <= mutant.line < block.line)
        ]
        smallest = max(found, key=lambda block: block.line, default=None)
        return f"{mutant.file}:{smallest.line}" if smallest else None

    def _tests_of_module(self, file: str) -> set[str]:
        """Return the tests that run anything of a module, or of one that imports it."""
        users = {file, *_importers(self._root, file)}
        return {
            test
            for block, tests in self._of_block.items()
            if block.rpartition(":")[0] in users
            for test in tests
        }


class Nearby:
    """Test files that name a module, of those that lie beside it in ``tests``; nothing is recorded.

    After the first two come those that compare whole results, of the folder and of the commands.
    Not all that can reach a mutant: enough for a few drawn ones, in seconds.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the files, the smallest first."""
        module = Path(mutant.file)
        folder = module.parts[1] if len(module.parts) > 2 else "."
        beside = sorted((self._root / "tests" / folder).glob("test_*.py"), key=_size)
        names = re.compile(rf"\b{module.stem}\b")
        naming = [file for file in beside if names.search(file.read_text(encoding="utf-8"))]
        whole = [
            file
            for folder in dict.fromkeys([folder, "cli"])
            for file in sorted((self._root / "tests" / folder).glob("test_recorded_*.py"))
        ]
        own = naming or beside
        found = dict.fromkeys([*own[:_FIRST], *whole, *own[_FIRST:]])
        return self._named(found)

    def wider_tests_of(self, mutant: Mutant) -> list[str]:
        """Return all other files of the folders whose tests use a mutant's package, small first."""
        near, folder = set(self.tests_of(mutant)), Path(mutant.file).parts[1]
        users = (folder, *_USED_BY.get(folder, ("cli",)))
        found = [f for each in users for f in (self._root / "tests" / each).glob("test_*.py")]
        return [name for name in self._named(sorted(found, key=_size)) if name not in near]

    def _named(self, files: Iterable[Path]) -> list[str]:
        return [file.relative_to(self._root).as_posix() for file in files]


_USED_BY = {
    "bridge": (),
    "distill": ("cli",),
    "job": ("megatron_lm", "cli"),
    "measured": ("plan", "cli", "drawing"),
    "megatron_core": ("bridge", "megatron_lm"),
    "megatron_lm": ("cli",),
    "plan": ("cli", "drawing", "distill"),
    "runtime": ("megatron_core",),
    "schedules": ("cli", "drawing", "plan"),
    "train": ("benchmarks",),
}
"""Folders of tests beside a package's own that use it."""


_FIRST = 2


def _size(file: Path) -> int:
    return file.stat().st_size


def _notes(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each block with the test that has run it, and in which phase."""
    for path in folder.glob("[0-9]*"):
        test = phase = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("="):
                test, _, phase = line[1:].rstrip(")").rpartition(" (")
            elif test:
                yield line, test, phase


def _seconds_of_tests(path: Path) -> dict[str, float]:
    """Read the seconds of each test that passed, from pytest's report."""
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        if len(case) == 0:
            file = case.attrib["classname"].replace(".", "/") + ".py"
            found[f"{file}::{case.attrib['name']}"] = float(case.attrib["time"])
    return found


def _importers(root: Path, file: str) -> Iterator[str]:
    """Yield the files of the package that import a module by its name."""
    package, name = (part.replace("/", ".") for part in file.removesuffix(".py").rsplit("/", 1))
    written = re.compile(
        rf"^\s*from {re.escape(package)}(\.{name} import | import (\(|.*\b{name}\b))", re.M
    )
    for path in sources_of(root):
        if written.search(path.read_text(encoding="utf-8")):
            yield path.relative_to(root).as_posix()


def _state(root: Path) -> str:
    """Return a name for the code of the package and its tests as they are."""
    state = hashlib.sha256()
    for path in [*sources_of(root), *sorted((root / "tests").rglob("*.py"))]:
        state.update(path.read_bytes())
    return state.hexdigest()[:16]
