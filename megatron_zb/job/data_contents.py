"""Records of a run's data by its contents, to detect hosts, or resumed runs, with other data.

Reads a bounded part of large files: sizes count, and blocks that are spread over the file. Imports
neither torch nor Megatron.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_zb.errors import UsageError

ALLOW_OTHER_FLAG = "--pipeline-allow-other-data"
RECORD = "pipeline_data_contents"
"""Attribute of the arguments, which every checkpoint holds, that contains the record."""

_WHOLE = 64 * 2**20  # bytes: an index of three million documents
_WHOLE_IN_FOLDER = 2**20
_BLOCK = 2**16
_BLOCKS = 16
_MOST_FILES = 100  # of a tokenizer's folder

Record = dict[str, list[list[str]]]


def of_prefix(prefix: str) -> str | None:
    """Describe a data set in Megatron's format, or a single file; None if it is not there.

    Args:
        prefix: the path without ``.bin`` and ``.idx``.
    """
    data, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    if not index.is_file() or not data.is_file():
        return of_file(Path(prefix))
    size = data.stat().st_size
    return f"{size} bytes ({_sampled(data, size)}), index {_digest(index)}"


def of_file(path: Path) -> str | None:
    """Describe a file, or the files of a folder, such as a tokenizer; None if it is not there."""
    try:
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.is_file())[:_MOST_FILES]
            each = "".join(f"{file.name} {_digest(file, _WHOLE_IN_FOLDER)} " for file in files)
            return f"{len(files)} files ({_short(each.encode())})"
        return f"{path.stat().st_size} bytes ({_digest(path)})" if path.is_file() else None
    except OSError:
        return None


def _digest(path: Path, whole: int = _WHOLE) -> str:
    """Return a digest of the file; above ``whole`` bytes, only of its size and sixteen blocks."""
    size = path.stat().st_size
    return _short(path.read_bytes()) if size <= whole else _sampled(path, size)


def _sampled(path: Path, size: int) -> str:
    """Return a digest of the file's size and of blocks from its beginning to its end."""
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for block in range(_BLOCKS):
            file.seek(max(size - _BLOCK, 0) * block // (_BLOCKS - 1))
            found.update(file.read(_BLOCK))
    return found.hexdigest()[:16]


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def blend_entries(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each data set of a blend: its weight, empty where there is none, and its prefix."""
    weighted = len(words) > 1 and len(words) % 2 == 0 and all(map(_is_number, words[::2]))
    if weighted:
        yield from zip(words[::2], words[1::2], strict=True)
    else:
        yield from (("", word) for word in words)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def record(
    blends: Mapping[str, Sequence[str]],
    files: Mapping[str, str | None],
    settings: Mapping[str, Any],
) -> Record:
    """Describe the data that a run trains on, as a checkpoint keeps it.

    Args:
        blends: the words of each flag that names data sets, with or without weights.
        files: the file or folder of each flag that names one, such as a tokenizer's.
        settings: the values of other flags that decide which samples there are.

    Returns:
        For each flag, an entry per data set: weight, path and contents; a setting has its value in
        the place of the contents.
    """
    found: Record = {}
    for flag, words in blends.items():
        found[flag] = [
            [weight, prefix, of_prefix(prefix) or ""] for weight, prefix in blend_entries(words)
        ]
    for flag, path in files.items():
        if path:
            found[flag] = [["", str(path), of_file(Path(path)) or ""]]
    found |= {flag: [["", "", str(value)]] for flag, value in settings.items()}
    return found


def to_agree_on(found: Record) -> dict[str, str]:
    """Return the contents of every file by the names that a message uses."""
    entries: Iterable[tuple[str, list[str]]] = ((f, e) for f in found for e in found[f])
    return {
        f"the contents of {flag} {path}:": contents or "nothing"
        for flag, (_, path, contents) in entries
        if path
    }


def check_resume(stored: Any, mine: Record, checkpoint: str) -> None:
    """Refuse to resume from a checkpoint of other data; accept one without a record.

    The paths of the same contents may differ.

    Raises:
        UsageError: names the difference, and the flag that allows it.
    """
    if not isinstance(stored, dict):
        return
    for flag in {**stored, **mine}:
        before, now = stored.get(flag) or [], mine.get(flag) or []
        if list(map(_meant, before)) == list(map(_meant, now)):
            continue
        pairs = [(b, n) for b, n in zip(before, now, strict=False) if _meant(b) != _meant(n)]
        theirs, ours = ([pairs[0][0]], [pairs[0][1]]) if pairs else (before, now)
        raise UsageError(
            f"the checkpoint {checkpoint} was trained with {_describe(flag, theirs)}, but this run "
            f"has {_describe(flag, ours)}: give what it was trained with, or {ALLOW_OTHER_FLAG} to "
            "go on with other data"
        )


def _meant(entry: Sequence[str]) -> tuple[str, str]:
    """Return weight and contents; the path where the contents cannot be read here."""
    weight, path, contents = entry
    return weight, contents or path


def _describe(flag: str, entries: Sequence[Sequence[str]]) -> str:
    if not entries:
        return f"no {flag}"
    each = (
        " ".join(filter(None, (weight, path, f"({contents})" if path and contents else contents)))
        for weight, path, contents in entries
    )
    return f"{flag} {' '.join(each)}"
