"""Check of whether a file can be written, made before the work whose result it will hold."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_zb.errors import UsageError


def check(path: Path) -> None:
    """Check that a file can be written.

    Raises:
        UsageError: it is a folder, its folder is missing, or nothing can be written there.
    """
    try:
        if path.is_dir():
            raise UsageError(f"cannot write '{path}': it is a folder: give the name of a file")
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        is_folder = nearest.is_dir()
    except OSError as error:
        raise UsageError(f"cannot write '{path}': {error.strerror}") from error
    if not is_folder:
        raise UsageError(f"cannot write '{path}': '{nearest}' is a file and no folder")
    if nearest != path.absolute().parent:
        raise UsageError(
            f"cannot write '{path}': there is no folder '{path.parent}': make it first"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(
            f"cannot write '{path}': in '{nearest}' nothing may be written: give another folder"
        )
