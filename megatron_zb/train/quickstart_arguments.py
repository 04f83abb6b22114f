"""The arguments of ``megatron-zb quickstart``; nothing here takes long to import."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_zb.parsing import positive

TRAIN_ITERATIONS = 36


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``quickstart``."""
    parser.add_argument(
        "--data-path",
        metavar="PREFIX",
        help="PREFIX.bin and PREFIX.idx, as scripts/prepare_text.py writes them (default: the "
        "source code of Python's standard library, written as DIR/text)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/quickstart"),
        metavar="DIR",
        help="where logs, pictures and summary.json go (default: %(default)s)",
    )
    parser.add_argument(
        "--train-iters",
        type=positive,
        default=TRAIN_ITERATIONS,
        metavar="N",
        help="iterations of each run (default: %(default)s)",
    )
