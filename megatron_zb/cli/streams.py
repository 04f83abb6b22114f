"""Standard streams that a command can write to, whatever shell and terminal have given to it."""

from __future__ import annotations

import codecs
import io
import os
import shutil
import sys

_ERRORS = "megatron_zb"
_NARROWEST = 40  # columns of a table or a drawing; a narrower terminal wraps its lines
# Letters of drawings and tables, for a terminal without them.
_PLAIN = dict(zip("▁▂▃▄▅▆▇█·•◀▶●○×–—‘’“”…", ".,:-=+*#.*<>*ox--''\"\".", strict=True))
_LINES = {"─": "-", "━": "-", "╌": "-", "═": "-", "│": "|", "┃": "|", "║": "|"}


def prepare() -> None:
    """Prepare the streams of this process: closed ones, encodings, and a width of 0.

    Writing to a closed standard output fails as it does on a full disk; letters that an encoding
    lacks are written as similar ones of ASCII.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # else the next file that is opened would become this stream
            os.open(os.devnull, os.O_RDONLY)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    codecs.register_error(_ERRORS, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors=_ERRORS)
    if not os.environ.get("LINES", "").strip("0"):
        os.environ.pop("LINES", None)
    columns = shutil.get_terminal_size().columns
    if columns < _NARROWEST or not os.environ.get("COLUMNS", "1").strip("0"):
        os.environ["COLUMNS"] = str(max(columns, _NARROWEST))


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return what is written in place of the first letter that cannot be encoded."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter, end = error.object[error.start], error.start + 1
    if "\udc80" <= letter <= "\udcff":  # a byte of a file's name
        return bytes([ord(letter) - 0xDC00]), end
    box = "+" if "\u2500" <= letter <= "\u257f" else "?"
    return _PLAIN.get(letter) or _LINES.get(letter) or box, end
