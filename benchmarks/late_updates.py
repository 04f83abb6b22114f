#!/usr/bin/env python3
"""Seconds of a training step whose update comes late, beside one that waits for it.

A GPT is trained with Megatron's optimizer on CPU ranks, with real megatron-core. Every schedule
runs twice: *flushed*, as always, and *late*, with updates one step late, whose pipeline is never
drained. Turns alternate, so that a machine that gets slower slows both; the first steps of each
turn are left out. Nothing waits between the steps of a turn. Both begin with the same loss, which
is checked; later ones differ, as a late update changes the training.

  python benchmarks/late_updates.py --ranks 2 --schedules 1f1b v-zb

Each rank has one thread: a quiet machine with a core for each is needed for figures that count.
Prints a table and, last, one JSON line with all seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import provenance
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from small_gpt import SmallGPT, add_sizes

from megatron_zb.train.synthetic_steps import join

FLUSHED, LATE = "flushed", "late"


def main() -> int:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(args, folder), nprocs=args.ranks)
        rows = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    table = Table(title=f"{args.ranks} ranks, {args.microbatches} microbatches: s of a step")
    for title in ("schedule", FLUSHED, LATE, "ratio", "simulated"):
        table.add_column(title, justify="left" if title == "schedule" else "right")
    for name, row in rows.items():
        row["ratio"] = median(row[LATE]) / median(row[FLUSHED])
        cells = (f"{median(row[way]):.3f}" for way in (FLUSHED, LATE))
        table.add_row(name, *cells, f"{row['ratio']:.3f}", f"{row['simulated_ratio']:.3f}")
    Console().print(table)
    print(json.dumps({**provenance.of_this_run(), "arguments": vars(args), "rows": rows}))
    return 0


def _rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    from megatron_zb.cpu_ranks import run_on_cpu

    run_on_cpu()
    join(rank, args.ranks, f"{folder}/meeting")
    rows = {name: _measured(args, name) for name in args.schedules}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _measured(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Seconds of a step of both ways, in every turn, and what the simulator expects."""
    ways = {FLUSHED: _Training(args, name, delay=0), LATE: _Training(args, name, delay=1)}
    found: dict[str, Any] = {way: [] for way in ways}
    losses: dict[str, list[float]] = {}
    for _ in range(args.turns):
        for way, training in ways.items():
            training.gpt.enter()
            first = training.step()
            losses.setdefault(way, first)
            training.step()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(args.steps):
                training.step()
            taken = torch.tensor((time.perf_counter() - start) / args.steps)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            found[way].append(taken.item())
            training.drain()
    if losses[FLUSHED] != losses[LATE]:
        sys.exit(f"{name}: the losses of the first step differ")
    reports = {way: training.gpt.adapter.schedule.report for way, training in ways.items()}
    late, flushed = reports[LATE], reports[FLUSHED]
    assert late is not None
    assert flushed is not None
    assert late.period is not None
    return {**found, "simulated_ratio": late.period / flushed.makespan}


class _Training:
    """A training on this rank.

    Args:
        args: sizes.
        name: of the schedule.
        delay: steps by which updates come late.
    """

    def __init__(self, args: argparse.Namespace, name: str, *, delay: int) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.gpt = SmallGPT(args, name, settings={"pipeline_update_delay": delay})
        plain = DistributedDataParallelConfig()
        wrapped = [DistributedDataParallel(it.config, plain, it) for it in self.gpt.chunks]
        self.gpt.chunks = wrapped
        for chunk in wrapped:
            chunk.config.finalize_model_grads_func = finalize_model_grads
        config = OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0)
        self._optimizer = get_megatron_optimizer(config, wrapped, use_gloo_process_groups=False)
        self._part = None
        if delay:
            self._part = self.gpt.adapter.delay_updates(self._optimizer, None, wrapped)

    def step(self) -> list[float]:
        """Run a step in the way of Megatron's loop; return its losses, which one rank has."""
        for chunk in self.gpt.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = self.gpt.run(self._forward)
        self._optimizer.step()
        return losses

    def drain(self) -> None:
        """End what has begun, before steps of the other way."""
        if self._part is not None:
            self._part.drain()

    def _forward(self, iterator: Iterator[None], model: Any) -> tuple[torch.Tensor, Any]:
        next(iterator)
        return model(self.gpt.tokens, self.gpt.positions, self.gpt.causal), self._loss

    def _loss(self, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        words = logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(words, self.gpt.tokens.flatten())
        return loss, {"loss": loss.detach()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "v-zb"], metavar="NAME")
    add_sizes(parser)
    parser.add_argument("--steps", type=int, default=6, help="of a turn (default 6)")
    parser.add_argument("--turns", type=int, default=5, help="of both ways (default 5)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
