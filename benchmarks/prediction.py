#!/usr/bin/env python3
"""How well one profile predicts every schedule: real compute of a small GPT on CPU ranks.

Trains with zb-h1 and --pipeline-profile, predicts the time of every schedule from that one file as
`megatron-zb plan --profile` does, then trains with each schedule and compares with the median time
of the pipeline's part of an iteration. The layers are spread evenly in all of them. Every rank
computes with one thread, so that a core for each rank is needed: this is for as many ranks as the
machine has idle cores.

Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_zb import schedules
from megatron_zb.planner.contender import Contender
from megatron_zb.planner.fit import Fit
from megatron_zb.planner.profile import read_profile
from megatron_zb.schedules import catalog
from megatron_zb.schedules.layout import Layers, spread

_PROFILED = "zb-h1"
_SKIPPED = 9  # iterations: the first, and those in which auto measures itself


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        _prepare_text(Path(folder))
        path = Path(folder) / "profile.yaml"
        _train(args, _PROFILED, Path(folder), ["--pipeline-profile", str(path)])
        fit = Fit.of(read_profile(path))
        rows = {}
        for name in args.schedules:
            measured, worst = _measured(_train(args, name, Path(folder), []))
            predicted = _predicted(args, fit, name)
            rows[name] = {"predicted": predicted, "measured": measured, "slowest": worst}
            print(f"{name}: {rows[name]}", file=sys.stderr)
    _report(args, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="pipeline ranks (default 2)")
    parser.add_argument("--microbatches", type=int, default=8, help="of an iteration (default 8)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--hidden-size", type=int, default=256, help="default 256")
    parser.add_argument("--seq-length", type=int, default=256, help="default 256")
    parser.add_argument("--iterations", type=int, default=20, help="of each run (default 20)")
    known = [name for name in schedules.names() if name != "auto"]
    parser.add_argument("--schedules", nargs="*", default=known, metavar="NAME")
    return parser.parse_args()


def _prepare_text(folder: Path) -> None:
    script = Path(__file__).parents[1] / "scripts/prepare_text.py"
    command = [sys.executable, str(script), "--output-prefix", str(folder / "text")]
    subprocess.run([*command, "--max-bytes", "1000000"], check=True, capture_output=True)


def _train(
    args: argparse.Namespace, schedule: str, folder: Path, more: Sequence[str]
) -> list[dict[str, Any]]:
    """The log of a run."""
    log = folder / f"{schedule}.jsonl"
    flags = {
        "--pipeline-model-parallel-size": args.ranks,
        "--num-layers": args.layers,
        "--hidden-size": args.hidden_size,
        "--num-attention-heads": 4,
        "--seq-length": args.seq_length,
        "--micro-batch-size": 1,
        "--global-batch-size": args.microbatches,
        "--train-iters": args.iterations,
        "--data-path": folder / "text",
        "--lr": 1e-4,
        "--eval-interval": 10 * args.iterations,
        "--pipeline-schedule": schedule,
        "--log-file": log,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)]
    command += ["-m", "megatron_zb.pretrain_gpt", "--cpu", *more]
    command += [str(part) for pair in flags.items() for part in pair]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{schedule} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def _measured(records: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Median and largest seconds of the pipeline's part."""
    seconds = [r["pipeline_seconds"] for r in records if "pipeline_seconds" in r][_SKIPPED:]
    return statistics.median(seconds), max(seconds)


def _predicted(args: argparse.Namespace, fit: Fit, name: str) -> float:
    family = catalog.family(name)
    chunks = {"interleaved": 2, "wave": 4}.get(name)
    placement = Contender(name, family.name, family.takes_chunks).placement(args.ranks, chunks)
    counts = spread(Layers(args.layers), placement)
    costs = fit.costs(placement, counts)
    schedule = schedules.build(
        name, pipeline_size=args.ranks, num_microbatches=args.microbatches, chunks=chunks
    )  # for equal costs, as it trains
    return schedules.simulate(schedule, costs).makespan


def _report(args: argparse.Namespace, rows: dict[str, dict[str, float]]) -> None:
    table = Table(
        title=f"{args.ranks} ranks, {args.microbatches} microbatches, {args.layers} layers, hidden "
        f"size {args.hidden_size}: predicted from one profile of {_PROFILED}"
    )
    for heading in ("schedule", "predicted ms", "measured ms (median)", "slowest", "off by"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    off = {name: row["predicted"] / row["measured"] - 1 for name, row in rows.items()}
    for name, row in rows.items():
        milliseconds = (f"{1000 * row[key]:.1f}" for key in ("predicted", "measured", "slowest"))
        table.add_row(name, *milliseconds, f"{off[name]:+.1%}")
    Console(width=100).print(table)
    print(json.dumps({"off_by": {name: round(value, 4) for name, value in off.items()}}))


if __name__ == "__main__":
    main()
