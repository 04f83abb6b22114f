"""Text as a data set that Megatron trains on, one token per byte."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_zb.cli.ending import ended
from megatron_zb.errors import UsageError
from megatron_zb.parsing import Parser

END_OF_DOCUMENT = 256  # after the 256 bytes
MOST_BYTES = 8_000_000  # of text, unless another number is given
DESCRIPTION = """\
Turn text into a data set in Megatron's format: OUTPUT.bin holds the tokens and OUTPUT.idx says
where documents begin. Each file becomes one document, each byte one token (0 to 255), and token
256 ends the document, so the vocabulary has 257 tokens and no tokenizer has to be downloaded.

Without INPUT the corpus is the source code of this Python's standard library, without its tests:
real text that every machine already has.

  python scripts/prepare_text.py --output-prefix data/corpus_text
  python scripts/prepare_text.py --output-prefix data/notes ~/notes README.md

Then train with  --data-path data/corpus_text
"""


def main() -> int:
    """Run the command; return 0 if the data set is written, 2 after a UsageError."""
    return ended("prepare_text", _run)


def _run() -> None:
    args = _arguments(sys.argv[1:])
    print(_write(Path(args.output_prefix), _files(args), args.max_bytes))


def prepare_library(prefix: Path) -> str:
    """Write the source code of Python's standard library as a data set; return a line about it.

    Raises:
        UsageError: it cannot be written.
    """
    return _write(prefix, _library_files(), MOST_BYTES)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "input",
        nargs="*",
        type=Path,
        metavar="INPUT",
        help="text files, and directories in which every file named like --pattern is taken",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="OUTPUT", help="path without .bin and .idx"
    )
    parser.add_argument(
        "--pattern",
        action="append",
        metavar="GLOB",
        help="files to take from directories, may be repeated; default: *.txt *.md *.rst *.py",
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=MOST_BYTES,
        metavar="N",
        help="stop after N bytes of text; default: %(default)s",
    )
    args = parser.parse_args(argv)
    if args.max_bytes <= 0:
        raise UsageError(f"--max-bytes {args.max_bytes} leaves nothing: it must be greater than 0")
    if args.output_prefix.endswith((".bin", ".idx")):
        raise UsageError(
            f"--output-prefix {args.output_prefix} ends in a suffix that is added by itself: "
            f"give {args.output_prefix[:-4]}"
        )
    return args


def _files(args: argparse.Namespace) -> list[Path]:
    if not args.input:
        return _library_files()
    patterns = args.pattern or ["*.txt", "*.md", "*.rst", "*.py"]
    files: list[Path] = []
    for place in args.input:
        if place.is_dir():
            files += sorted({file for glob in patterns for file in place.rglob(glob)})
        elif place.is_file():
            files.append(place)
        else:
            raise UsageError(f"{place} is neither a file nor a directory: check the path")
    files = [file for file in files if file.is_file()]
    if not files:
        raise UsageError(
            f"no files named {' or '.join(patterns)} were found in "
            f"{', '.join(map(str, args.input))}: give another directory or --pattern"
        )
    return files


def _library_files() -> list[Path]:
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


def _write(prefix: Path, files: Sequence[Path], max_bytes: int) -> str:
    """Write a data set and return a line about it; no half data set is ever under its name."""
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
    for text in _with_progress(_documents(files, max_bytes), max_bytes, files):
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


def _with_progress(
    documents: Iterator[bytes], max_bytes: int, files: Sequence[Path]
) -> Iterator[bytes]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    total = min(max_bytes, sum(file.stat().st_size for file in files))
    columns: tuple[Any, ...] = (TextColumn("reading text"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("reading", total=total)
        for text in documents:
            yield text
            progress.advance(task, len(text))
