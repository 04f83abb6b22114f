#!/usr/bin/env python3
"""Does anything grow in a long run? Trains a tiny GPT on CPU ranks, and looks at all of them.

First with Megatron's own 1F1B, for its losses; then under a schedule that is built anew from what
the run measures, with a watchdog and with evaluations. From time to time every rank notes

  resident   its resident set: what the system has given it
  malloc     what malloc has handed out of that: a leak grows here, too, fragmentation does not
  tensors    the bytes of all tensors that are alive
  objects    how many objects Python's collector knows: a queue that grows shows here
  handles    its open files and connections, /proc/self/fd
  threads    of the process, /proc/self/task

What counts is the last quarter of the steps against the second; the first warms up. Bars: resident,
malloc, tensors and objects change by at most 1 % (upwards), handles and threads not at all, and all
losses are those of the first run, bit for bit.

  python benchmarks/long_run.py                          # 2000 steps on 4 ranks
  python benchmarks/long_run.py --steps 400 --ranks 2 --schedule v-zb

Prints a table and, last, one JSON line. Ends with 0 when all bars are met, 1 when one is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_zb.train.watched_run import NewRecords, Record, RunFailed, run

ROOT = Path(__file__).resolve().parents[1]
LOOKS = 80
"""Times that a rank looks at itself in a run."""
MOST_GROWTH = 0.01
GROWING = ("resident", "malloc", "tensors", "objects")
COUNTED = ("handles", "threads")
AS_RANK = "--as-rank"
MODEL = """
--cpu --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
--lr 0.001 --clip-grad 0 --eval-iters 1 --split 80,20,0
""".split()


def main() -> int:
    if sys.argv[1:2] == [AS_RANK]:
        train_and_look(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        try:
            upstream = _train(args, Path(folder), None)
            own = _train(args, Path(folder), args.schedule)
        except RunFailed as error:
            print(f"long_run: failed: {error}", file=sys.stderr)
            return 1
        ranks = [_looks(Path(folder), rank) for rank in range(args.ranks)]
    compared = [compare(looks, args.steps) for looks in ranks]
    differing = differences(upstream, own)
    missed = [f"rank {r}: {what}" for r, c in enumerate(compared) for what in missing(c)]
    missed += [f"{len(differing)} losses differ, the first in {differing[0]}"] if differing else []
    _report(args, compared, differing, missed)
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help="of each run (default 2000)")
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks (default 4)")
    parser.add_argument("--schedule", default="v-half", metavar="NAME", help="default v-half")
    parser.add_argument(
        "--replan-every", type=int, default=100, metavar="N", help="steps (default 100)"
    )
    parser.add_argument(
        "--eval-interval", type=int, default=50, metavar="N", help="steps (default 50)"
    )
    args = parser.parse_args()
    if args.steps < LOOKS:
        parser.error(
            f"--steps {args.steps}: a quarter of it tells too little, give {LOOKS} or more"
        )
    return args


# --- a rank


def train_and_look(folder: Path, every: int, arguments: list[str]) -> None:
    """Train, and note after every so many iterations what this rank has; ends the process."""
    from megatron_zb.train.launch import launch
    from megatron_zb.train.log import RunLog

    iteration = RunLog.iteration
    with (folder / f"looks-{os.environ['RANK']}.jsonl").open("w", encoding="utf-8") as file:

        def look(self: RunLog, record: dict[str, Any]) -> None:
            iteration(self, record)
            if record["iteration"] % every == 0:
                file.write(json.dumps({"step": record["iteration"], **what_there_is()}) + "\n")
                file.flush()

        with mock.patch.object(RunLog, "iteration", look):  # a run has no hook for benchmarks
            launch(arguments)


def what_there_is() -> dict[str, int]:
    """What this process has now, after Python's collector has gone through it."""
    gc.collect()
    objects = gc.get_objects()
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    resident = next(line for line in status if line.startswith("VmRSS:"))
    return {
        "resident": int(resident.split()[1]) * 1024,
        "malloc": _malloc_bytes(),
        "tensors": _tensor_bytes(objects),
        "objects": len(objects),
        "handles": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def _tensor_bytes(objects: Iterable[Any]) -> int:
    """Of the storages of all tensors, each once."""
    import torch

    storages = {}
    for thing in objects:
        if issubclass(type(thing), torch.Tensor):  # a proxy may claim to be one
            with suppress(RuntimeError, NotImplementedError):  # sparse and faked: no storage
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _malloc_bytes() -> int:
    """Handed out and not given back: from arenas and as mappings of their own."""
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _MallInfo
    info = function()
    return int(info.uordblks + info.hblkhd)


# --- all of them


def _train(args: argparse.Namespace, folder: Path, schedule: str | None) -> list[Record]:
    name = schedule or "Megatron's own"
    log = folder / f"{'schedule' if schedule else 'upstream'}.jsonl"
    every = str(args.steps // LOOKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(args.ranks), __file__, AS_RANK, str(folder), every, *MODEL]
    command += ["--pipeline-model-parallel-size", str(args.ranks)]
    command += ["--num-layers", str(2 * args.ranks), "--global-batch-size", str(args.ranks)]
    command += ["--train-iters", str(args.steps), "--eval-interval", str(args.eval_interval)]
    command += ["--data-path", _corpus(folder), "--log-file", str(log)]
    if schedule is not None:
        command += ["--pipeline-schedule", schedule]
        command += ["--pipeline-replan-every", str(args.replan_every)]
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{name}, {args.ranks} ranks", total=args.steps)

        def show(record: Record) -> None:
            if "lm_loss" in record:
                bar.update(task, completed=record["iteration"])

        run(command, printed=log.with_suffix(".log"), records=log, show=show)
    return NewRecords(log)()


def _corpus(folder: Path) -> str:
    prefix = folder / "text"
    if not prefix.with_suffix(".idx").exists():
        prepare = [sys.executable, str(ROOT / "scripts/prepare_text.py"), "--max-bytes", "400000"]
        subprocess.run([*prepare, "--output-prefix", str(prefix)], check=True, capture_output=True)
    return str(prefix)


def _looks(folder: Path, rank: int) -> list[dict[str, int]]:
    """What a rank has noted in the run that came last."""
    text = (folder / f"looks-{rank}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def compare(looks: list[dict[str, int]], steps: int) -> dict[str, list[float]]:
    """What there was in the second quarter of the steps, and in the last: means, or most."""
    second = [look for look in looks if steps / 4 < look["step"] <= steps / 2]
    last = [look for look in looks if look["step"] > 3 * steps / 4]
    found = {
        name: [mean(look[name] for look in part) for part in (second, last)] for name in GROWING
    }
    return found | {
        name: [max(look[name] for look in part) for part in (second, last)] for name in COUNTED
    }


def missing(compared: dict[str, list[float]]) -> list[str]:
    """The bars that a rank misses."""
    said = []
    for name, (second, last) in compared.items():
        most = second * (1 + MOST_GROWTH) if name in GROWING else second
        if last > most:
            said.append(f"{name} grew from {second:.0f} to {last:.0f}")
    return said


def differences(upstream: list[Record], own: list[Record]) -> list[str]:
    """Where the losses of two runs are not the same numbers."""

    def losses(records: list[Record]) -> dict[str, float]:
        found = {}
        for record in records:
            for key, said in (("lm_loss", "step"), ("eval_loss", "the evaluation after step")):
                if key in record:
                    found[f"{said} {record['iteration']}"] = record[key]
        return found

    first, second = losses(upstream), losses(own)
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


def _report(
    args: argparse.Namespace,
    compared: list[dict[str, list[float]]],
    differing: list[str],
    missed: list[str],
) -> None:
    title = (
        f"{args.schedule}, {args.steps} steps: the last quarter (and how it differs), sizes in MiB"
    )
    table = Table(title=title)
    for heading in ("rank", *GROWING, *COUNTED):
        table.add_column(heading, justify="right")
    for rank, found in enumerate(compared):
        table.add_row(str(rank), *(_cell(name, *found[name]) for name in (*GROWING, *COUNTED)))
    console = Console()
    console.print(table)
    console.print(f"losses that differ from Megatron's own schedule: {len(differing)}")
    for line in missed:
        console.print(f"missed: {line}", style="red")
    summary = {
        "schedule": args.schedule,
        "steps": args.steps,
        "ranks": args.ranks,
        "replan_every": args.replan_every,
        "eval_interval": args.eval_interval,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "second_and_last_quarter": compared,
        "losses_that_differ": len(differing),
        "missed": missed,
    }
    print(json.dumps(summary))


def _cell(name: str, second: float, last: float) -> str:
    """The last quarter, and how it differs from the second."""
    if name in COUNTED:
        return f"{last:.0f} ({last - second:+.0f})"
    shown = f"{last:.0f}" if name == "objects" else f"{last / 2**20:.2f}"
    return f"{shown} ({100 * (last / second - 1):+.2f} %)"


if __name__ == "__main__":
    sys.exit(main())
