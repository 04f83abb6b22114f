"""The command ``megatron-zb quickstart``; nothing here takes long to import."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_zb.cli.extensions import Commands, add_command
from megatron_zb.parsing import positive

HELP = """\
Train a small GPT over 4 pipeline ranks on the CPU, first with Megatron's own schedule and then with
v-half, v-min, v-zb and zb-h1, and compare losses, gradient norms and activation memory. Then time
steps of the same schedules whose stages sleep. It takes some 10 minutes and needs no GPU.

exit code: 0 if each schedule had the losses of Megatron's own, bit for bit, and its gradient norms
but for rounding, v-half and v-min held the memory that they promise, and the loss has fallen by 1;
1 if not; 2 if an argument is wrong."""
TRAIN_ITERATIONS = 36


def add_commands(commands: Commands) -> None:
    """Add ``quickstart``."""
    summary = "train a small GPT on 4 CPU ranks, and compare schedules with Megatron's own"
    parser = add_command(commands, "quickstart", _run, summary, HELP)
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


def _run(arguments: argparse.Namespace) -> int:
    from megatron_zb.train.quickstart import run_quickstart

    return run_quickstart(arguments)
