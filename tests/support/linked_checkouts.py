"""Checkouts of Megatron-LM with a script of a user beside those that they have."""

from __future__ import annotations

import shutil
from pathlib import Path

EXTERNAL_DATA = "external_data.py"
"""A script that checkouts do not have."""


def with_script(checkout: Path, script: str, folder: Path) -> Path:
    """Return a folder with links to all of a checkout and a copy of a script of tests/support."""
    linked = folder / "checkout"
    if not linked.exists():
        linked.mkdir()
        for entry in checkout.iterdir():
            (linked / entry.name).symlink_to(entry)
        shutil.copy(Path(__file__).with_name(script), linked)
    return linked
