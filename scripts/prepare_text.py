#!/usr/bin/env python3
"""Turn text into a data set that Megatron trains on, one token per byte."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_zb.cli.ending import ended
from megatron_zb.errors import UsageError
from megatron_zb.parsing import Parser
from megatron_zb.train.corpus import MOST_BYTES, library_files, write_corpus

PATTERNS = ("*.txt", "*.md", "*.rst", "*.py")
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
    args = _arguments()
    print(write_corpus(Path(args.output_prefix), _files(args), args.max_bytes))


def _arguments() -> argparse.Namespace:
    parser = Parser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "input",
        nargs="*",
        type=Path,
        metavar="INPUT",
        help="text files, and directories, of which every *.txt, *.md, *.rst and *.py is taken",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="OUTPUT", help="path without .bin and .idx"
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=MOST_BYTES,
        metavar="N",
        help="stop after N bytes of text; default: %(default)s",
    )
    args = parser.parse_args()
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
        return library_files()
    files: list[Path] = []
    for place in args.input:
        if place.is_dir():
            files += sorted({file for glob in PATTERNS for file in place.rglob(glob)})
        elif place.is_file():
            files.append(place)
        else:
            raise UsageError(f"{place} is neither a file nor a directory: check the path")
    files = [file for file in files if file.is_file()]
    if not files:
        raise UsageError(
            f"no files named {' or '.join(PATTERNS)} were found in "
            f"{', '.join(map(str, args.input))}: give another directory, or files by their names"
        )
    return files


if __name__ == "__main__":
    sys.exit(main())
