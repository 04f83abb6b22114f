#!/usr/bin/env python3
"""The first step of a training whose first passes take longer, with and without a warm-up.

  python benchmarks/first_step.py | tail -n 1 > docs/results/first_step.cpu.json

A small GPT of Megatron's layers trains on CPU ranks, under Megatron's own 1F1B and under each of
--schedules, without and with `--pipeline-warm-up on`. The first F, the first B and the first W of a
rank sleep for --seconds each, in place of the compilation and tuning of its kernels. A whole
backward is the first B and the first W. Ranks that sleep need no cores.

A contender trains without sleeping and with it, --repetitions times each. The difference between
the medians of its first steps, from a barrier to the last rank's end, is divided by the sleep of
one rank. Bar: at most 1.3 with a warm-up. Prints a table and, last, one JSON line; ends with 1 when
the bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import provenance
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layer_sizes import LayerSizes
from rich.console import Console
from rich.table import Table
from vocabulary_training import (
    UPSTREAM,
    Contender,
    Job,
    adapter_of,
    batches,
    model_of,
    optimizer_of,
    run_step,
)

from megatron_zb.parsing import positive, seconds
from megatron_zb.runtime.autograd_stage import WeightGradQueue
from megatron_zb.train.synthetic_steps import join

MOST = 1.3
KINDS = "FBW"
SIZES = LayerSizes(
    hidden=32, heads=2, ffn_hidden=64, seq_length=16, micro_batch_size=1, vocabulary=256
)


@dataclass(frozen=True)
class Way:
    """A schedule, None for Megatron's own, and whether there is a warm-up."""

    schedule: str | None
    warms: bool = False

    def __str__(self) -> str:
        if self.schedule is None:
            return UPSTREAM
        return f"{self.schedule}, {'warm-up' if self.warms else 'no warm-up'}"


def main() -> None:
    args = _arguments()
    job = Job(SIZES, args.ranks, 2 * args.ranks, args.microbatches, steps=2)
    ways = [Way(None), *(Way(name, on) for name in args.schedules for on in (False, True))]
    found = {str(way): _trained(job, way, args) for way in ways}
    own = len(KINDS) * args.seconds
    rows = {}
    for name, (plain, slept) in found.items():
        first, without = (median(each["first"] for each in runs) for runs in (slept, plain))
        rows[name] = {
            "first_seconds": first,
            "without_sleep_seconds": without,
            "second_seconds": median(each["second"] for each in slept),
            "of_one_rank": (first - without) / own,
        }
    _report(job, args.seconds, rows)
    sizes = {"job": asdict(job), "sleep_seconds": args.seconds, "repetitions": args.repetitions}
    line = {**sizes, "results": rows}
    print(json.dumps({**provenance.of_this_run(), **line}))
    missed = [str(w) for w in ways if w.warms and rows[str(w)]["of_one_rank"] > MOST]
    for name in missed:
        print(f"missed: the first step of {name} sleeps longer than {MOST:g}", file=sys.stderr)
    sys.exit(bool(missed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["zb-h1", "v-half", "v-zb"]
    parser.add_argument("--ranks", type=positive, default=8, metavar="N", help="(default 8)")
    parser.add_argument(
        "--microbatches", type=positive, default=8, metavar="N", help="of a step (default 8)"
    )
    parser.add_argument(
        "--repetitions", type=positive, default=3, metavar="N", help="of a training (default 3)"
    )
    parser.add_argument(
        "--seconds", type=seconds, default=1.0, help="that each first pass sleeps (default 1)"
    )
    parser.add_argument("--schedules", nargs="+", default=names, metavar="NAME")
    return parser.parse_args()


def _trained(job: Job, way: Way, args: argparse.Namespace) -> list[list[dict[str, float]]]:
    """Train in new processes: groups of ranks keep their threads, which slow down what follows."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(job, way, args, folder), nprocs=job.ranks)
        text = (Path(folder) / "found.json").read_text(encoding="utf-8")
    found: list[list[dict[str, float]]] = json.loads(text)
    return found


# --- a rank


def _rank(rank: int, job: Job, way: Way, args: argparse.Namespace, folder: str) -> None:
    from megatron_zb.cpu_ranks import run_on_cpu

    run_on_cpu()
    join(rank, job.ranks, f"{folder}/meeting")
    _first_steps(job, way, FirstPasses(0.0))  # what the process itself does only once
    found = [
        [_first_steps(job, way, FirstPasses(sleep)) for _ in range(args.repetitions)]
        for sleep in (0.0, args.seconds)
    ]
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


class FirstPasses:
    """Passes of a rank, of which the first of each kind sleeps.

    As compilers do, ``run`` remembers kinds where no model has its state.
    """

    def __init__(self, sleep: float) -> None:
        self._queues: list[WeightGradQueue] = []
        self.run = cache(lambda kind: time.sleep(sleep))

    @contextmanager
    def of(self, chunks: list[Any], adapter: Any) -> Iterator[None]:
        """Let the passes of chunks count, under a schedule and under Megatron's own."""
        self._queues = [split.queue for split in adapter._splits] if adapter else []
        for chunk in chunks:
            chunk.module.decoder.layers[0].register_forward_hook(self._forward)
        patched: Any = WeightGradQueue
        usual = patched.run

        def run(queue: WeightGradQueue, microbatch: int) -> None:
            self.run("W")
            usual(queue, microbatch)

        patched.run = run
        try:
            yield
        finally:
            patched.run = usual

    def _forward(self, layer: Any, inputs: Any, outputs: Any) -> None:
        self.run("F")
        hidden = outputs[0] if isinstance(outputs, tuple) else outputs
        if hidden.requires_grad:
            hidden.register_hook(self._backward)

    def _backward(self, gradient: torch.Tensor) -> None:
        self.run("B")
        if not any(queue.deferring for queue in self._queues):  # then it is a whole one
            self.run("W")


def _first_steps(job: Job, way: Way, passes: FirstPasses) -> dict[str, float]:
    """Train two steps on this rank; return the seconds of each, of the rank that ends last."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    adapter = adapter_of(job, Contender(way.schedule))
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=job.ranks,
        virtual_pipeline_model_parallel_size=adapter.virtual_pipeline_size if adapter else None,
        get_embedding_ranks=adapter.embedding_ranks if adapter else None,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)
    chunks = model_of(job, adapter)
    optimizer = optimizer_of(job, chunks)
    if way.warms:
        adapter.warm_up(always=True)
    function = adapter.forward_backward_func if adapter else get_forward_backward_func()
    found = {}
    with passes.of(chunks, adapter):
        for number, name in enumerate(("first", "second")):
            data = list(batches(job, number))
            dist.barrier()
            start = time.perf_counter()
            run_step(job, function, chunks, optimizer, data)
            elapsed = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            found[name] = float(elapsed)
    if adapter is not None:
        adapter.forward_backward_func.close()
    parallel_state.destroy_model_parallel()
    return found


def _report(job: Job, sleep: float, rows: dict[str, dict[str, float]]) -> None:
    table = Table(
        title=f"{job.ranks} ranks, {job.microbatches} microbatches; the first F, B and W of a rank "
        f"sleep {sleep:g} s each"
    )
    table.add_column("contender")
    headings = ("first step, s", "without sleep, s", "second step, s", "of one rank's sleep")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
