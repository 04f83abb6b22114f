"""Ways to distil with an equal batch in a step, each with microbatches as large as it can take.

A data-parallel rank has its share of the batch, in one go. A pipelined rank has the whole batch, as
decoupled updates let steps overlap; "pipe-bd, shares" has the data-parallel ranks' microbatches,
so that the gain of larger ones can be seen.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch.distributed as dist
from distilled_blocks import RealBlocks, Sizes, measured_costs, milliseconds, reading_time
from timed_ways import Way, every_block_at_once, in_a_pipeline, one_block_at_a_time, timed

from megatron_zb.distill.schedule.distribution import BlockCosts, distribute

BASELINE = "block by block"
RUN_AHEAD = 4
_STEPS = 4
"""Factor of ``--steps``: steps of one microbatch are shorter, so more of them are timed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("blocks that compute, with an equal batch in a step")
    group.add_argument("--skip-batches", action="store_true")
    group.add_argument("--batch", type=int, default=8, help="samples of a step (default 8)")
    group.add_argument("--batch-blocks", type=int, nargs="+", default=[6], help="(default 6)")
    group.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[16, 32, 64, 128],
        help="of a sample (default 16 32 64 128)",
    )


def of_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all sizes on this rank. Collective."""
    return [
        {"blocks": number, "tokens": tokens, "batch": args.batch} | _case(number, tokens, args)
        for number in args.batch_blocks
        for tokens in args.tokens
    ]


def _case(number: int, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    ranks = dist.get_world_size()
    size = partial(Sizes, args.hidden, args.heads, tokens)
    small, whole = size(args.batch // ranks), size(args.batch)
    costs = {sizes: measured_costs(RealBlocks(number, sizes), number) for sizes in (small, whole)}

    def new(sizes: Sizes) -> tuple[BlockCosts, RealBlocks]:
        """Blocks whose learning rate makes a sum of means that of one microbatch."""
        return costs[sizes], RealBlocks(number, sizes, costs[sizes], sizes.micro_batch / args.batch)

    def piped(sizes: Sizes) -> Way:
        microbatches = args.batch // sizes.micro_batch
        return in_a_pipeline(
            *new(sizes),
            distribute(costs[sizes], ranks, microbatches),
            microbatches=microbatches,
            steps=_STEPS * args.steps,
            run_ahead=RUN_AHEAD,
        )

    ways = {
        BASELINE: one_block_at_a_time(*new(small), ranks),
        "all blocks at once": every_block_at_once(*new(small), ranks),
        "pipe-bd": piped(whole),
        "pipe-bd, shares": piped(small),
    }
    return {
        "reading_ms": milliseconds(
            [reading_time(RealBlocks(1, sizes)) for sizes in (small, whole)]
        ),
        "teacher_ms": milliseconds([max(costs[sizes].teacher) for sizes in (small, whole)]),
    } | timed(ways, RealBlocks(number, small), _STEPS * args.steps, args.repetitions)
