#!/usr/bin/env python3
"""Seconds of a training step with a frozen teacher: beside it, and before it as Megatron runs it.

A GPT learns from the logits of another one on CPU ranks, with real megatron-core. *Before* is
Megatron's own order: the whole forward of the teacher for all microbatches by its 1F1B, and then
the step of the student. *Beside* is one step with the passes of both. Both give the same losses,
which is checked. Turns alternate, so that a machine that gets slower slows both; the first step of
each is left out.

  python benchmarks/teacher_beside.py --ranks 2 --schedules 1f1b v-half

Each rank has one thread: a quiet machine with a core for each is needed for figures that count. The
times of the passes that the schedules are built for are measured first: of all stages alike, by the
student alone. Prints a table and, last, one JSON line with all seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import provenance
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from small_gpt import SmallGPT, add_sizes

from megatron_zb.train.synthetic_steps import join

BEFORE, BESIDE = "before", "beside"


def main() -> int:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(args, folder), nprocs=args.ranks)
        rows = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    table = Table(title=f"{args.ranks} ranks, {args.microbatches} microbatches: s of a step")
    for title in ("schedule", "teacher before", "teacher beside", "ratio", "simulated", "bound"):
        table.add_column(title, justify="left" if title == "schedule" else "right")
    for name, row in rows.items():
        row["ratio"] = median(row[BESIDE]) / median(row[BEFORE])
        cells = _spread(row[BEFORE]), _spread(row[BESIDE]), f"{row['ratio']:.3f}"
        table.add_row(name, *cells, f"{row['simulated_ratio']:.3f}", f"{row['gap']:.1%}")
    Console().print(table, "bound: how far the simulated step is from the lower bound")
    print(json.dumps({**provenance.of_this_run(), "arguments": vars(args), "rows": rows}))
    return 0


def _spread(values: list[float]) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    from megatron_zb.cpu_ranks import run_on_cpu

    run_on_cpu()
    join(rank, args.ranks, f"{folder}/meeting")
    share = 0.0
    rows = {}
    for name in args.schedules:
        share = share or _share(args)
        rows[name] = _measured(args, name, share)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _measured(args: argparse.Namespace, name: str, share: float) -> dict[str, Any]:
    """Seconds of the steps of both orders, and what the simulator expects."""
    ways = {BEFORE: _Training(args, name, None), BESIDE: _Training(args, name, share)}
    found: dict[str, Any] = {way: [] for way in ways}
    losses: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.turns):
        for way, training in ways.items():
            training.enter()
            training.step()
            for _ in range(args.steps):
                dist.barrier()
                start = time.perf_counter()
                losses[way] += training.step()
                taken = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                found[way].append(taken.item())
    if losses[BEFORE] != losses[BESIDE]:
        sys.exit(f"{name}: losses beside and before the step differ")
    report = ways[BESIDE].adapter.schedule.report
    alone = ways[BEFORE].adapter.schedule.report
    p, m = args.ranks, args.microbatches
    assert report is not None
    assert alone is not None
    before = alone.makespan + share * (m + p - 1)  # in the F of a rank, as the schedule
    gap = report.makespan / report.lower_bound - 1
    return {**found, "share": share, "simulated_ratio": report.makespan / before, "gap": gap}


def _share(args: argparse.Namespace) -> float:
    """Measure what F of the teacher takes, as a share of the mean of the student's F, B and W.

    Schedules are built for equal F, B and W.
    """
    training = _Training(args, "1f1b", None)
    training.enter()
    times = {}
    for what, run in (("step", training.train_alone), ("teacher", training.teach)):
        run()
        taken = []
        for _ in range(args.steps):
            dist.barrier()
            start = time.process_time()
            run()
            taken.append(time.process_time() - start)
        times[what] = median(taken)
    share = torch.tensor(3 * times["teacher"] / times["step"])
    dist.all_reduce(share)
    return float(share) / args.ranks


class _Training:
    """A student and its teacher on this rank, in one of the orders.

    Args:
        args: sizes.
        name: of the schedule.
        share: F of the teacher, as a share of that of the student; None for the teacher before.
    """

    def __init__(self, args: argparse.Namespace, name: str, share: float | None) -> None:
        from megatron_zb.megatron_core.frozen_model import FrozenModel
        from megatron_zb.schedules.features.second_model import SecondModel, SecondRole

        self._args = args
        second = None if share is None else SecondModel(SecondRole.TEACHER, share)
        self._gpt = SmallGPT(args, name, sizes={"second_model": second})
        self.adapter, self.enter = self._gpt.adapter, self._gpt.enter
        self._teacher = self._teacher_chunk()
        self._of_step: Callable[[], torch.Tensor | None]
        if second is not None:
            teacher = self.adapter.teach_with(FrozenModel(self._teacher, self._hidden_or_logits))
            self._of_step = lambda: teacher.output
        self._beside = second is not None

    def _teacher_chunk(self) -> Any:
        rank = dist.get_rank()
        chunk = self._gpt.model(
            self._gpt.config(self._args.teacher_layers),
            pre_process=rank == 0,
            post_process=rank == self._args.ranks - 1,
        )
        return chunk.requires_grad_(False).eval()

    # --- a step

    def step(self) -> list[float]:
        """Run a step with the teacher; return its losses, which one rank has."""
        for chunk in self._gpt.chunks:
            chunk.zero_grad(set_to_none=True)
        if not self._beside:
            kept = iter(self.teach())
            self._of_step = partial(next, kept, None)
        return self._train()

    def train_alone(self) -> None:
        """Run a step in which the student learns from itself, so that nobody teaches."""
        for chunk in self._gpt.chunks:
            chunk.zero_grad(set_to_none=True)
        logits = torch.zeros(1, self._args.sequence, self._args.vocabulary)
        self._of_step = lambda: logits
        self._train()

    def _train(self) -> list[float]:
        return self._gpt.run(self._student)

    def _student(self, iterator: Iterator[None], model: Any) -> tuple[torch.Tensor, Any]:
        next(iterator)
        return model(self._gpt.tokens, self._gpt.positions, self._gpt.causal), self._divergence

    def _divergence(self, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        teacher = self._of_step()
        assert teacher is not None
        loss = torch.nn.functional.kl_div(
            logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum"
        )
        return loss, {"loss": loss.detach()}

    def _hidden_or_logits(self, iterator: Iterator[None], chunk: Any) -> torch.Tensor:
        next(iterator)
        output: torch.Tensor = chunk(self._gpt.tokens, self._gpt.positions, self._gpt.causal)
        return output

    def teach(self) -> list[torch.Tensor]:
        """Run all forwards of the teacher as Megatron does; return its logits on the last rank."""
        from megatron.core.pipeline_parallel.schedules import (
            forward_backward_pipelining_without_interleaving,
        )

        kept: list[torch.Tensor] = []

        def keep(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            kept.append(output)
            return torch.zeros(()), {}

        def step(iterator: Iterator[None], chunk: Any) -> tuple[torch.Tensor, Any]:
            return self._hidden_or_logits(iterator, chunk), keep

        with torch.no_grad():
            forward_backward_pipelining_without_interleaving(
                forward_step_func=step,
                data_iterator=repeat(None),
                model=self._teacher,
                num_microbatches=self._args.microbatches,
                seq_length=self._args.sequence,
                micro_batch_size=1,
                forward_only=True,
            )
        return kept


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "v-half"], metavar="NAME")
    add_sizes(parser)
    parser.add_argument("--teacher-layers", type=int, default=8, help="of the teacher (default 8)")
    parser.add_argument("--steps", type=int, default=4, help="of a turn (default 4)")
    parser.add_argument("--turns", type=int, default=3, help="of both orders (default 3)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
