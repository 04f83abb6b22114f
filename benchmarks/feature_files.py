"""Count the files of the package that know each feature, and those that name kinds of passes.

Run it with:

  python benchmarks/feature_files.py            # a table
  python benchmarks/feature_files.py --files    # with the files of each feature

Two counts of each feature. *Identifiers* are names, attributes, arguments, keywords and imports in
the syntax tree that a pattern matches: comments, docstrings and texts do not count. Patterns also
match other things of that name, such as ``islice``, ``seq_length``, ``sharded_state_dict``, or two
values that are called a pair. *Rooms and doors* are the files of the feature and those that import
one of them: what a change of the feature can reach. A feature that stands in few files is easy to
find and to change.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_zb"
FEATURES = {
    "slices": r"(?i)slic",
    "vocabulary": r"(?i)vocabulary|shard",
    "recomputation": r"(?i)recompu(te|ta)",
    "offload": r"(?i)offload",
    "pairs": r"(?i)(?<!re)pair(s|ed|_|$)|all_to_all",
    "lengths": r"(?i)length|unequal",
    "multi-token prediction": r"(?i)multi_token|predicts",
}
OWN = {
    "slices": r"(schedules|plan)/features/slices|megatron_core/slice",
    "vocabulary": r"(schedules|plan)/features/vocabulary|(megatron_core|runtime)/vocabulary",
    "recomputation": r"(schedules|plan)/features/recompu(te|ta)",
    "offload": r"(schedules|plan)/features/offload",
    "pairs": r"(schedules|plan)/features/pairs|megatron_core/experts",
    "lengths": r"schedules/step_plan|core/planned_steps|plan/features/lengths|plan/unequal",
}
"""Files of each feature. Multi-token prediction is part of other files."""
TABLE = ("schedules/kinds.py", "schedules/passes.py", "schedules/features/")


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield all names of a syntax tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a syntax tree imports, and what may be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def rooms_and_doors(trees: dict[str, ast.Module], own: str) -> list[str]:
    """Return the files that a pattern matches, and those that import one of them."""
    rooms = {file for file in trees if re.search(own, file)}
    modules = {f"megatron_zb.{file.removesuffix('.py').replace('/', '.')}" for file in rooms}
    doors = {file for file, tree in trees.items() if not modules.isdisjoint(imported(tree))}
    return sorted(rooms | doors)


def names_kinds(tree: ast.AST) -> bool:
    """Return whether code names a kind of pass, as ``PassKind.F`` or ``PassKind("F")``."""
    uses = ("PassKind.add", "PassKind.all")
    found = (
        ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Call)
    )
    return any(re.match(r"PassKind(\.\w+$|\(.[A-Z]+.\)$)", it) and it not in uses for it in found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true", help="name the files of each feature")
    arguments = parser.parse_args()
    trees = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    names = {file: set(identifiers(tree)) for file, tree in trees.items()}
    found = {
        feature: [file for file, of in names.items() if any(re.search(pattern, it) for it in of)]
        for feature, pattern in FEATURES.items()
    }
    found["kinds outside the table and the features"] = [
        file for file, tree in trees.items() if names_kinds(tree) and not file.startswith(TABLE)
    ]
    table = Table(title=f"files that know a feature, of {len(trees)}")
    table.add_column("feature")
    table.add_column("identifiers", justify="right")
    table.add_column("rooms and doors", justify="right")
    if arguments.files:
        table.add_column("with identifiers")
        table.add_column("rooms and doors")
    for feature, files in found.items():
        known = rooms_and_doors(trees, OWN[feature]) if feature in OWN else []
        names_of = [", ".join(files), ", ".join(known)] if arguments.files else []
        table.add_row(feature, str(len(files)), str(len(known) or "-"), *names_of)
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
