"""Text as a data set that Megatron trains on, one token per byte."""

from __future__ import annotations

import contextlib
import os
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_zb.errors import UsageError

END_OF_DOCUMENT = 256  # after the 256 bytes
MOST_BYTES = 8_000_000
"""Bytes of text, unless another number is given."""


def library_files() -> list[Path]:
    """Return the source files of Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    return [
        file
        for file in sorted(root.rglob("*.py"))
        if left_out.isdisjoint(file.relative_to(root).parts)
    ]


def _documents(files: Sequence[Path], max_bytes: int) -> Iterator[bytes]:
    """Yield the text of the files, `max_bytes` in all, without empty files."""
    for file in files:
        try:
            text = file.read_bytes()[:max_bytes]
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from error
        if text:
            yield text
        max_bytes -= len(text)
        if max_bytes <= 0:
            return


def write_corpus(prefix: Path, files: Sequence[Path], max_bytes: int) -> str:
    """Write files as a data set, and return a line about it.

    Each file becomes a document, each byte a token from 0 to 255, and token 256 ends a document.
    No half data set is ever under its name.

    Args:
        prefix: the path without ``.bin`` and ``.idx``.
        files: texts, in this order.
        max_bytes: the end of the text, in all.

    Raises:
        UsageError: it cannot be written, or there is no text.
    """
    finished = {suffix: prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")}
    unfinished = {
        suffix: prefix.with_name(f".{prefix.name}.{os.getpid()}{suffix}") for suffix in finished
    }
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        documents, tokens = _build(unfinished, files, max_bytes)
        for suffix, path in unfinished.items():
            path.replace(finished[suffix])
    except OSError as error:
        raise UsageError(f"--output-prefix {prefix} cannot be written: {error.strerror}") from error
    finally:
        for path in unfinished.values():
            with contextlib.suppress(OSError):  # it was never there
                path.unlink()
    return f"{prefix}.bin and {prefix}.idx: {documents} documents, {tokens} tokens, vocabulary 257"


def _build(paths: dict[str, Path], files: Sequence[Path], max_bytes: int) -> tuple[int, int]:
    """Write the two files; return the number of documents and of tokens in them."""
    open(paths[".bin"], "wb").close()  # find out before the slow imports
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Transformer Engine and Apex are not needed here
        import numpy
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    builder = IndexedDatasetBuilder(str(paths[".bin"]), dtype=numpy.uint16)
    documents = tokens = 0
    for text in _documents(files, max_bytes):
        numbers = numpy.append(
            numpy.frombuffer(text, dtype=numpy.uint8).astype(numpy.uint16), END_OF_DOCUMENT
        )
        builder.add_document(numbers, [len(numbers)])
        documents += 1
        tokens += len(numbers)
    if not documents:
        builder.data_file.close()
        raise UsageError("the corpus is empty: give files with text in them")
    builder.finalize(str(paths[".idx"]))
    return documents, tokens
