"""Imports between packages and subpackages run one way, and none runs in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_zb"

# What each subpackage may import, besides itself and what all may: CONTRIBUTING.md draws it.
EVERY = {"children", "errors", "files", "parsing", "tables"}
SUBPACKAGES: dict[str, set[str]] = {
    "schedules": set(),
    "job": {"schedules"},
    "measured": {"schedules", "job"},
    "runtime": {"schedules"},
    "megatron_core": {"schedules", "job", "measured", "runtime"},
    "cpu_ranks": {"megatron_core"},
    "lora": {"measured", "runtime", "megatron_core"},
    "megatron_lm": {
        "schedules",
        "job",
        "measured",
        "runtime",
        "megatron_core",
        "cpu_ranks",
        "lora",
    },
    "bridge": {"schedules", "job", "megatron_core", "megatron_lm", "lora"},
    "drawing": {"schedules", "measured"},
    "cli": {
        "schedules",
        "job",
        "measured",
        "runtime",
        "megatron_core",
        "megatron_lm",
        "drawing",
    },
    "plan": {
        "lora",
        "schedules",
        "job",
        "measured",
        "megatron_core",
        "megatron_lm",
        "drawing",
        "cli",
    },
    "train": {
        "schedules",
        "job",
        "measured",
        "runtime",
        "megatron_core",
        "cpu_ranks",
        "drawing",
        "cli",
    },
    "distill": {
        "schedules",
        "job",
        "measured",
        "runtime",
        "megatron_core",
        "cpu_ranks",
        "drawing",
        "cli",
        "plan",
        "train",
    },
}
ENTRANCES = {"__init__", "launch"}
# Subpackages that need no torch, and so must not reach it by any import at their top level.
WITHOUT_TORCH = ("schedules", "measured", "drawing", "plan")


def modules() -> dict[str, Path]:
    """Return every module by its name without ``megatron_zb.``."""
    found = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = _short(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        found[name] = path
    return found


def _short(name: str) -> str:
    return "__init__" if name == PACKAGE else name.removeprefix(f"{PACKAGE}.")


MODULES = modules()


def imports(name: str) -> Iterator[str]:
    """The modules of the package that one imports, in functions and for types, too."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_zb"):
            assert node.module is not None
            for alias in node.names:
                inner = _short(f"{node.module}.{alias.name}")
                yield inner if inner in MODULES else _short(node.module)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield _short(alias.name)


def _at_top(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, ast.If | ast.Try | ast.With) and not is_for_types:
            yield from node.body
        else:
            yield node


def subpackage(name: str) -> str:
    return name.split(".")[0]


def test_every_module_is_in_a_room() -> None:
    assert {subpackage(name) for name in MODULES} == {*SUBPACKAGES, *EVERY, *ENTRANCES}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_arrows_run_one_way(name: str) -> None:
    home = subpackage(name)
    if home in ENTRANCES:
        return
    allowed = EVERY | ({home, *SUBPACKAGES[home]} if home in SUBPACKAGES else set())
    wrong = [
        found for found in imports(name) if found != "__init__" and subpackage(found) not in allowed
    ]
    assert wrong == [], f"{name} imports from a subpackage that its own must not use"


def test_rooms_have_an_order() -> None:
    placed: list[str] = []
    while len(placed) < len(SUBPACKAGES):
        ready = [
            name for name in SUBPACKAGES if name not in placed and SUBPACKAGES[name] <= set(placed)
        ]
        assert ready, f"{sorted(set(SUBPACKAGES) - set(placed))} depend on one another in a circle"
        placed += ready


def test_no_module_is_in_a_circle() -> None:
    arrows = {name: sorted({*imports(name)} - {name}) for name in MODULES}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, "a circle of imports: " + " -> ".join(
            (*way[way.index(name) :], name)
        )
        if name in done:
            return
        for found in arrows[name]:
            if found not in ("__init__", *(name.rpartition(".")[0],)):
                visit(found, (*way, name))
        done.add(name)

    for name in sorted(MODULES):
        visit(name, ())


@pytest.mark.parametrize("home", WITHOUT_TORCH)
def test_what_needs_no_torch_imports_none(home: str) -> None:
    for name, path in MODULES.items():
        if subpackage(name) != home:
            continue
        for node in _at_top(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                text = ast.unparse(node)
                assert not text.startswith(("import torch", "from torch")), name
                assert not text.startswith(("import megatron.", "from megatron.")), name


def test_no_test_imports_another() -> None:
    """What tests share is in tests/support."""
    wrong = []
    for path in sorted(ROOT.glob("tests/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            wrong += [f"{path}: {n}" for n in names if n.split(".")[-1].startswith("test_")]
    assert wrong == []


def classes() -> Iterator[tuple[str, Path]]:
    """The classes of the package, each with its file."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield node.name, path


def test_no_two_classes_have_one_name() -> None:
    files: dict[str, list[str]] = {}
    for name, path in classes():
        files.setdefault(name, []).append(path.name)
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
    assert "TaskGraph" in files


def test_functions_and_calls_are_short() -> None:
    """At most 100 lines of a function, and 8 arguments of a call without their names."""
    long = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > 100:
                    long.append(f"{path.name}: {node.name} has {lines} lines")
            elif isinstance(node, ast.Call) and len(node.args) > 8:
                long.append(f"{path.name}:{node.lineno}: {len(node.args)} arguments")
    assert long == []
