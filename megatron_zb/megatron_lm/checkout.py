"""A Megatron-LM checkout on disk: its root and its version.

Nothing here imports Megatron or runs anything of the checkout.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_zb import files
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.versions import warning_of

_VERSION_FILE = Path("megatron/core/package_info.py")
_TRAINING = Path("megatron/training/training.py")


@dataclass(frozen=True)
class Checkout:
    """The folder that holds `megatron/`, and the version of its megatron-core."""

    root: Path
    version: tuple[int, int, int]

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))


def checkout_at(root: Path) -> Checkout:
    """Return the checkout in a folder.

    Raises:
        UsageError: there is none, or its version is older than all that are known.
    """
    if not root.is_dir():
        raise UsageError(f"there is no folder '{root}': give the path of a Megatron-LM checkout")
    if not (root / _VERSION_FILE).is_file() or not (root / _TRAINING).is_file():
        raise UsageError(
            f"'{root}' is not a Megatron-LM checkout: it has no {_VERSION_FILE} or no {_TRAINING}"
        )
    checkout = Checkout(root, _version(root / _VERSION_FILE))
    warning_of(checkout.version, f"the Megatron-LM in '{root}'")
    return checkout


def checkout_of(script: Path) -> Checkout:
    """Return the checkout that contains a pretrain script, at any depth.

    Raises:
        UsageError: the file is missing, is no pretrain script, or is in no known checkout.
    """
    if not script.is_file():
        raise UsageError(
            f"there is no file '{script}': give the path of a pretrain script, such as "
            "Megatron-LM/pretrain_gpt.py"
        )
    check_pretrain_script(script)
    for folder in script.resolve().parents:
        if (folder / _VERSION_FILE).is_file() and (folder / _TRAINING).is_file():
            return checkout_at(folder)
    raise UsageError(
        f"'{script}' does not lie in a Megatron-LM checkout: no folder above it has {_TRAINING}"
    )


def check_pretrain_script(script: Path) -> None:
    """Check that a file calls Megatron's `pretrain`, or runs one beside it; it is read, not run.

    Raises:
        UsageError: it does not, or is not Python.
    """
    tree = _parsed(script)
    if not any(map(_imports_pretrain, [tree, *map(_parsed, _run_beside(script, tree))])):
        raise UsageError(
            f"'{script}' is not a pretrain script: it does not import pretrain from "
            "megatron.training, as Megatron-LM's pretrain_gpt.py does"
        )


def _parsed(script: Path) -> ast.Module:
    try:
        return ast.parse(files.read_text(script))
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"'{script}' cannot be read as Python: {error}") from error


def _imports_pretrain(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and f"{node.module}.".startswith("megatron.training.")
        and any(name.name == "pretrain" for name in node.names)
        for node in ast.walk(tree)
    )


def _run_beside(script: Path, tree: ast.Module) -> Iterator[Path]:
    """Yield the scripts that a wrapper runs by `runpy`, as pretrain_mamba.py does from 0.18 on."""
    nodes = list(ast.walk(tree))
    if any(isinstance(n, ast.Import) and n.names[0].name == "runpy" for n in nodes):
        for node in nodes:
            if isinstance(node, ast.Constant) and str(node.value).endswith(".py"):
                beside = script.resolve().parent / str(node.value)
                if beside.is_file():
                    yield beside


def _version(file: Path) -> tuple[int, int, int]:
    """Read MAJOR, MINOR and PATCH without running the file."""
    numbers: dict[str, int] = {}
    try:
        tree = ast.parse(files.read_text(file))
    except (OSError, SyntaxError, ValueError):
        tree = ast.Module(body=[], type_ignores=[])
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(target := node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, int)
        ):
            numbers[target.id] = node.value.value
    try:
        return numbers["MAJOR"], numbers["MINOR"], numbers["PATCH"]
    except KeyError:
        raise UsageError(f"'{file}' does not say which version of megatron-core it is") from None
