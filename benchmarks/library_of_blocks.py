#!/usr/bin/env python3
"""Speedup of distilling all candidates of a library at once, each with its own ranks.

Ranks sleep for the times of blocks, so any machine does. The same steps run in three ways:

  one after the other  pipe-bd once for each candidate, on its own best distribution
  whole blocks         pipe-bd with all candidates; those of a block are on the same ranks
  candidates           the same, but the candidates of a block may be on different ranks, each of
                       which runs the teacher's block for its own

Times are those of benchmarks/pipe_bd.py: 4 ms for the teacher's forward, 12 ms for a student of its
size. The first library has a half MLP, a quarter, a half without attention, and no MLP, in layers
with the shares of Llama 3 8B: 60, 40, 40 and 19 % of the weights.

Prints tables and, last, one JSON line; --output writes that into a file as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import provenance
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distilled_blocks import SleepingBlocks
from rich.console import Console
from rich.table import Table
from ways_to_distil import pipelined

from megatron_zb.distill.schedule.candidates import CandidateCosts
from megatron_zb.distill.schedule.distribution import (
    BlockCosts,
    Distribution,
    RelayCosts,
    distribute,
)
from megatron_zb.distill.schedule.pipe_bd import pipe_bd
from megatron_zb.schedules import simulate

TEACHER, STUDENT, UPDATE, REDUCE = 0.004, 0.012, 0.002, 0.016  # seconds, of a whole layer
LIBRARIES = {
    "60, 40, 40, 19 %": (0.6, 0.4, 0.4, 0.19),
    "33 % each": (1 / 3,) * 4,
    "100 % each": (1.0,) * 4,
}
RUN_AHEAD = 1


class SleepingCandidates(SleepingBlocks):
    """Candidates that sleep; the first that a rank has of a block runs the teacher."""

    def __init__(self, costs: CandidateCosts, distribution: Distribution) -> None:
        super().__init__(costs)
        self._block_of = costs.block_of
        self._starts = {held.start for held, _ in distribution.ranges}

    def teach(self, block: int, given: torch.Tensor) -> torch.Tensor:
        is_first = block in self._starts or self._block_of[block] != self._block_of[block - 1]
        return super().teach(block, given) if is_first else given


def costs_of(shares: Sequence[float], blocks: int) -> CandidateCosts:
    """Costs of a library of these candidates in every block."""
    whole = list(shares) * blocks
    return CandidateCosts(
        teacher=(TEACHER,) * len(whole),
        student=tuple(STUDENT * share for share in whole),
        update=tuple(UPDATE * share for share in whole),
        relay=(0.0,) * len(whole),
        reduce=tuple(REDUCE * share for share in whole),
        memory=(0.0,) * len(whole),
        block_of=tuple(block for block in range(blocks) for _ in shares),
    )


def whole_blocks(shares: Sequence[float], blocks: int) -> BlockCosts:
    """Costs of blocks that keep these candidates together."""
    total = sum(shares)
    return BlockCosts.of(
        teacher=[TEACHER] * blocks,
        student=[STUDENT * total] * blocks,
        update=UPDATE * total,
        reduce=REDUCE * total,
    )


def predicted(costs: BlockCosts, best: Distribution, microbatches: int, steps: int) -> float:
    """Simulated seconds of a step."""
    schedule = pipe_bd(best, microbatches, steps, RUN_AHEAD)
    return simulate(schedule, RelayCosts(costs, best)).makespan / steps


class _Way:
    """Blocks on their best distribution: seconds that steps should take, and that they take."""

    def __init__(self, costs: BlockCosts, args: argparse.Namespace) -> None:
        m, self._steps = args.microbatches, args.steps
        best = distribute(costs, dist.get_world_size(), m)
        self.predicted = predicted(costs, best, m, self._steps)
        blocks = SleepingBlocks(costs)
        if isinstance(costs, CandidateCosts):
            blocks = SleepingCandidates(costs, best)
        self._run, self.close = pipelined(blocks, best, m, RUN_AHEAD)
        self.distribution = best.spec

    def measured(self) -> float:
        dist.barrier()
        began = time.perf_counter()
        self._run(self._steps)
        taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return taken.item() / self._steps


def _case(shares: Sequence[float], args: argparse.Namespace) -> dict[str, Any]:
    blocks = args.blocks
    ways = {
        "one after the other": [_Way(whole_blocks([share], blocks), args) for share in shares],
        "whole blocks": [_Way(whole_blocks(shares, blocks), args)],
        "candidates": [_Way(costs_of(shares, blocks), args)],
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repetitions):
        for name, runs in ways.items():
            taken[name].append(sum(way.measured() for way in runs))
    for runs in ways.values():
        for way in runs:
            way.close()
    return {
        name: {
            "seconds": round(statistics.median(taken[name]), 5),
            "predicted": round(sum(way.predicted for way in runs), 5),
            "distributions": [way.distribution for way in runs],
        }
        for name, runs in ways.items()
    }


def _rank(rank: int, ranks: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    cases = {name: _case(shares, args) for name, shares in LIBRARIES.items()}
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(cases))
    dist.barrier()
    dist.destroy_process_group()


def _on_ranks(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (ranks, args, folder), ranks, start_method="fork")
        cases = json.loads((Path(folder) / "result.json").read_text())
    return {"ranks": ranks, "blocks": args.blocks, "cases": cases}


def _table(found: dict[str, Any]) -> Table:
    table = Table(title=f"{found['blocks']} blocks on {found['ranks']} ranks that sleep")
    for title in ("candidates", "way", "ms a step", "predicted", "speedup", "predicted"):
        table.add_column(title)
    for library, ways in found["cases"].items():
        first = ways["one after the other"]
        for name, way in ways.items():
            figures = [f"{1000 * way[what]:.1f}" for what in ("seconds", "predicted")]
            gains = [f"{first[what] / way[what]:.2f}" for what in ("seconds", "predicted")]
            table.add_row(library, name, *figures, *gains)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 6], help="(default 4 6)")
    parser.add_argument("--blocks", type=int, default=8, help="(default 8)")
    parser.add_argument("--microbatches", type=int, default=8, help="per step (default 8)")
    parser.add_argument("--steps", type=int, default=8, help="in a row (default 8)")
    parser.add_argument("--repetitions", type=int, default=3, help="of all that (default 3)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there, too")
    args = parser.parse_args()
    result = provenance.of_this_run() | {"load": [round(os.getloadavg()[0], 2)]}
    result["results"] = [_on_ranks(ranks, args) for ranks in args.ranks]
    result["load"].append(round(os.getloadavg()[0], 2))
    for found in result["results"]:
        Console().print(_table(found))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
