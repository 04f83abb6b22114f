"""Sizes that Megatron-LM derives from other arguments when it validates them.

A schedule is chosen before that, since what it places is validated, too.
"""

from __future__ import annotations

import argparse
import copy

from megatron_zb.errors import UsageError
from megatron_zb.megatron_lm import hybrid_pattern
from megatron_zb.schedules.hybrid_pattern import kinds


def with_derived(args: argparse.Namespace) -> argparse.Namespace:
    """Return a copy of the arguments with sizes that stand for one another filled in."""
    filled = copy.copy(args)
    filled.num_layers = num_layers(args)
    if getattr(args, "seq_length", None) is None:
        filled.seq_length = getattr(args, "encoder_seq_length", None)
    hidden, gated = getattr(args, "hidden_size", None), getattr(args, "swiglu", False)
    if getattr(args, "ffn_hidden_size", None) is None and hidden is not None and gated:
        filled.ffn_hidden_size = int((4 * hidden * 2 / 3) / 64) * 64
    return filled


def num_layers(args: argparse.Namespace) -> int:
    """Return the number of layers that a schedule places.

    Raises:
        UsageError: no argument tells it.
    """
    pattern = hybrid_pattern.of_arguments(args)
    if pattern:
        return len(kinds(pattern))
    names = ("num_layers", "decoder_num_layers", "encoder_num_layers")
    number = next((n for name in names if (n := getattr(args, name, None)) is not None), None)
    if number is None:
        raise UsageError("--num-layers is missing: a schedule places layers on stages")
    return int(number)
