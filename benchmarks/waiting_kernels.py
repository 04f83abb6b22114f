#!/usr/bin/env python3
"""How many NCCL kernels wait for a message while a rank computes: a replay, without a GPU.

A forward takes 1, an input gradient 1.2 and a weight gradient 0.8; with vocabulary parallelism the
passes of an output layer's shard take 0.5 and 0.25. Prints, for each schedule, the mean number of
waiting kernels over ranks, that of the worst rank and the most at once: for receives that the GPU
starts when the host posts them, as early as the pass that makes the message begins, and for
receives as this package posts them. The end of the last pass must be the same, to 0.3 %.
"""

from __future__ import annotations

import argparse
import sys

from megatron_zb import schedules
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.waiting_kernels import Waiting, waiting_kernels

ROWS = [(name, 8, 32, False) for name in ("1f1b", "zb-h1", "v-half", "v-zb")]
WITH_VOCABULARY = [("v-half", 8, 32, True), ("v-half", 16, 64, True)]


def replayed(
    name: str, p: int, m: int, with_vocabulary: bool
) -> tuple[list[Waiting], list[Waiting]]:
    """Return what waits on each rank: with receives as early as can be, and as they are."""
    costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.2, weight=0.8)
    if with_vocabulary:
        costs = costs.having(Vocabulary(output=0.5, weight=0.25, lookup=0.02))
    schedule = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs)
    timeline = schedules.simulate(schedule, costs)
    early = schedules.lower(schedule, timeline, captured=True)
    usual = schedules.lower(schedule, timeline)
    return (
        waiting_kernels(early, timeline.costs, gated=False),
        waiting_kernels(usual, timeline.costs),
    )


def in_words(ranks: list[Waiting]) -> str:
    mean = sum(rank.mean for rank in ranks) / len(ranks)
    worst, peak = max(rank.mean for rank in ranks), max(rank.peak for rank in ranks)
    return f"{mean:.2f} / {worst:.2f} / {peak}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="leave 16 ranks out")
    quick = parser.parse_args().quick
    print("| schedule | ranks | microbatches | vocabulary parallel | early | as posted |")
    print("|---|---|---|---|---|---|")
    is_slower = False
    for name, p, m, with_vocabulary in [*ROWS, *WITH_VOCABULARY[: 1 if quick else 2]]:
        early, usual = replayed(name, p, m, with_vocabulary)
        ends = [max(rank.end for rank in ranks) for ranks in (early, usual)]
        is_slower |= ends[1] > 1.003 * ends[0]
        vocabulary = "yes" if with_vocabulary else "no"
        print(f"| {name} | {p} | {m} | {vocabulary} | {in_words(early)} | {in_words(usual)} |")
    return int(is_slower)


if __name__ == "__main__":
    sys.exit(main())
