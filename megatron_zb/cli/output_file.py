"""Check of whether a file can be written, made before the work whose result it will hold."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_zb.errors import UsageError


def check(path: Path) -> None:
    """Check that a file can be written; folders that are missing will be made.

    Raises:
        UsageError: it is a folder, or lies where nothing can be written.
    """
    try:
        if path.is_dir():
            raise UsageError(f"cannot write '{path}': it is a folder: give the name of a file")
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        is_folder = folder.is_dir()
    except OSError as error:
        raise UsageError(f"cannot write '{path}': {error.strerror}") from error
    if not is_folder:
        raise UsageError(f"cannot write '{path}': '{folder}' is a file and no folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        absent = "" if folder == path.absolute().parent else f"'{path.parent}' is not there, and "
        raise UsageError(
            f"cannot write '{path}': {absent}in '{folder}' nothing may be written: give another "
            "folder"
        )
