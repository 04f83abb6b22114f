"""Descriptions of models and devices that come with the package, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megatron_zb.errors import UsageError

_PACKAGE = Path(__file__).resolve().parents[1]

Kind = Literal["models", "devices", "students"]


def folder(kind: Kind) -> Path:
    """Return their folder: in the package once it is installed, beside it in its source."""
    installed = _PACKAGE / "configs" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / "configs" / kind


def path_of(flag: str, kind: Kind, value: Path) -> Path:
    """Return a path as it is, or the path of the file that a name such as ``gpt_28b`` stands for.

    Raises:
        UsageError: it is a name, and unknown.
    """
    if value.suffix or value.name != str(value) or value.exists():
        return value
    found = folder(kind) / f"{value}.yaml"
    if not found.is_file():
        known = ", ".join(sorted(path.stem for path in folder(kind).glob("*.yaml")))
        raise UsageError(f"{flag} '{value}' is unknown: give a file, or one of {known}")
    return found
