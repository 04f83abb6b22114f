"""Paths of checkpoints, as Megatron's: DIR/iter_0000010, DIR/latest_checkpointed_iteration.txt.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from pathlib import Path

from megatron_zb.errors import UsageError
from megatron_zb.files import read_tracker, write_text

TRACKER = "latest_checkpointed_iteration.txt"


def checkpoint_path(directory: Path, iteration: int) -> Path:
    """Return the directory of one checkpoint."""
    return directory / f"iter_{iteration:07d}"


def latest_checkpoint(directory: Path) -> tuple[int, Path]:
    """Return the iteration and the directory of the newest complete checkpoint.

    Raises:
        UsageError: there is none.
    """
    tracker = directory / TRACKER
    if not tracker.is_file():
        raise UsageError(
            f"--load {directory}: there is no checkpoint, {tracker} is missing; give the "
            "directory that was given to --save"
        )
    text = read_tracker(tracker)
    if not text.isdecimal():
        raise UsageError(f"--load {directory}: {tracker} says '{text}', not an iteration number")
    path = checkpoint_path(directory, int(text))
    if not path.is_dir():
        raise UsageError(f"--load {directory}: {tracker} names {path}, which is missing")
    return int(text), path


def set_latest(directory: Path, iteration: int) -> None:
    """Name the newest checkpoint, atomically: readers see the old name or the new one.

    Raises:
        UsageError: the file cannot be written.
    """
    write_text(directory / TRACKER, f"{iteration}\n")
