"""The command ``megatron-zb quickstart``."""

from __future__ import annotations

import argparse

from megatron_zb.cli.extensions import Commands, add_command
from megatron_zb.train.quickstart_arguments import add_arguments

HELP = """\
Train a small GPT over 4 pipeline ranks on the CPU, first with Megatron's own schedule and then with
v-half, v-min, v-zb and zb-h1, and compare losses, gradient norms and activation memory. Then time
steps of the same schedules whose stages sleep. It takes some 10 minutes and needs no GPU.

exit code: 0 if each schedule had the losses of Megatron's own, bit for bit, and its gradient norms
but for rounding, v-half and v-min held the memory that they promise, and the loss has fallen by 1;
1 if not; 2 if an argument is wrong."""


def add_commands(commands: Commands) -> None:
    """Add ``quickstart``."""
    summary = "train a small GPT on 4 CPU ranks, and compare schedules with Megatron's own"
    add_arguments(add_command(commands, "quickstart", _run, summary, HELP))


def _run(arguments: argparse.Namespace) -> int:
    from megatron_zb.train.quickstart import run_quickstart

    return run_quickstart(arguments)
