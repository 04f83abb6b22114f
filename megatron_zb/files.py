"""Files that a user names: read up to a size, checked before work, and written whole or not."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_zb.errors import UsageError

MOST_TEXT = 16 * 2**20
"""Bytes of a script, a list of paths or a table of settings; more is something else."""

_MOST_TRACKER = 1000


def read_bytes(path: Path, most: int) -> bytes:
    """Read a whole file.

    Args:
        path: a regular file; devices and pipes may have no end.
        most: largest number of bytes.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger; ``strerror`` has the reason.
    """
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # a null byte
        raise OSError(errno.EINVAL, "it is no path") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    with path.open("rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise OSError(errno.EFBIG, f"it is larger than {_size(most)}")
    return raw


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """Read a file as UTF-8, like :func:`read_bytes`.

    Raises:
        OSError: as :func:`read_bytes`.
        UnicodeDecodeError: it is no text in UTF-8.
    """
    return read_bytes(path, most).decode("utf-8")


def read_tracker(tracker: Path) -> str:
    """Read the text of a checkpoint's tracker file, an iteration in digits or ``release``.

    Raises:
        UsageError: it cannot be read, or is too large to be one.
    """
    try:
        return read_text(tracker, _MOST_TRACKER).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise UsageError(
            f"{tracker} cannot be read: {reason}; write the iteration to load into it"
        ) from error


def _size(most: int) -> str:
    return f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"


def check_writable(path: Path) -> None:
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


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, like :func:`replace`.

    Raises:
        UsageError: it cannot be written.
    """
    replace(path, lambda new: new.write_text(text, encoding="utf-8", newline=""))


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let a function write a new file beside ``path``, and rename it to ``path``.

    Readers, and those who look after a failure, find the whole older file or the whole new one. The
    folder is made if need be. A link leads where it did, a device or a pipe is written directly.

    Raises:
        UsageError: it cannot be written.
    """
    new = path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            write(path)
            return
        new = target.with_name(f".{secrets.token_hex(4)}.unfinished{target.suffix}")
        write(new)
        _keep(new, target)
    except (OSError, RuntimeError) as error:  # the latter is torch.save's
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UsageError(f"cannot write '{path}': {reason}") from error
    finally:
        if new != path:
            with suppress(OSError):  # it is not there where all went well
                new.unlink()


def _keep(new: Path, target: Path) -> None:
    """Rename a finished file once it is on the disk, with the mode of the older file."""
    with new.open("rb") as file:
        os.fsync(file.fileno())
    if target.exists():
        new.chmod(stat.S_IMODE(target.stat().st_mode))
    new.replace(target)
