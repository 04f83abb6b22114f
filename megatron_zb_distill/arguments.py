"""The arguments of `megatron_zb.distill_gpt`, checked before anything starts.

Nothing here imports torch or Megatron, so that a mistake is reported at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.parsing import flag_of
from megatron_zb_distill.flags import BEST, FIRST, parser
from megatron_zb_distill.shapes import BlockShape
from megatron_zb_train import arguments, flags

_POSITIVE = ("train_iters", "micro_batch_size", "global_batch_size", "log_interval")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line; the model's arguments are not known yet.

    Raises:
        UsageError: something is missing or contradictory.
    """
    args = parser().parse_args(argv)
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Check parsed arguments, as :func:`parse` does.

    Raises:
        UsageError: something is missing or contradictory.
    """
    for name in _POSITIVE:
        if getattr(args, name) <= 0:
            raise UsageError(f"{flag_of(name)} is {getattr(args, name)}: it must be greater than 0")
    if args.run_ahead < 1:
        raise UsageError(f"--run-ahead is {args.run_ahead}: it must be 1 or greater")
    if not Path(args.teacher_load).is_dir():
        raise UsageError(
            f"--teacher-load {args.teacher_load}: there is no such directory; give the one that "
            "was given to --save when the teacher was trained"
        )


def complete(args: argparse.Namespace, model: Mapping[str, Any]) -> argparse.Namespace:
    """Return all arguments for building and training a GPT, with those of the teacher's model.

    Args:
        args: the result of :func:`parse`.
        model: the model's arguments by the names of megatron_zb.pretrain_gpt.

    Raises:
        UsageError: something does not fit the model.
    """
    seq_length = args.seq_length or model["seq_length"] or model["max_position_embeddings"]
    if seq_length > model["max_position_embeddings"]:
        raise UsageError(
            f"--seq-length {seq_length} is more than the {model['max_position_embeddings']} "
            "positions of the teacher: give fewer"
        )
    known = {name: value for name, value in model.items() if value is not None}
    # how many of its tokens a tokenizer uses is not always stored with a model
    known["vocab_size"] = model["padded_vocab_size"]
    given = vars(args) | {"seq_length": seq_length}
    whole = argparse.Namespace(**(flags.parser().defaults() | known | given))
    arguments.complete(whole, world_size=1)
    whole.padded_vocab_size = model["padded_vocab_size"]
    return whole


def check_candidate(args: argparse.Namespace, library: Sequence[Sequence[BlockShape]]) -> None:
    """Check that --candidate names a candidate of every block.

    Raises:
        UsageError: it does not.
    """
    if args.candidate in (FIRST, BEST):
        return
    for block, candidates in enumerate(library):
        names = [candidate.name for candidate in candidates]
        if args.candidate not in names:
            raise UsageError(
                f"--candidate {args.candidate}: block {block} has no such candidate; give one of "
                f"{', '.join((FIRST, BEST, *names))}"
            )
