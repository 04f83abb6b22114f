#!/usr/bin/env python3
"""auto against every named schedule on a job whose output layer is heavy, under the same limit.

1. Trains a small GPT with a vocabulary of 32 hidden sizes under v-half and --pipeline-profile, on
   CPU ranks: its figures are the measured costs.
2. Builds every schedule for these costs, on evenly spread layers, within --memory-limit, as
   `--pipeline-schedule NAME --pipeline-replan-every N` would. auto stays on the placement that it
   chooses before anything is measured, as in a run.
3. Runs each on ranks that sleep for the measured times (scaled to --milliseconds of work for a
   microbatch on the busiest rank), through the executor and channels that train.

Prints a table and, last, one JSON line. Exits with 1 when a named schedule is faster than auto, in
the simulator or, by more than --tolerance, on the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.measured.balance import costs_of, counted
from megatron_zb.measured.fit import Fit
from megatron_zb.measured.profile import read_profile
from megatron_zb.schedules.costs import times
from megatron_zb.schedules.layout import Layers, spread
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.train.synthetic_steps import SyntheticSteps, join

_HIDDEN = 64
_VOCABULARY = 32 * _HIDDEN
_SEQUENCE = 128
_CHUNKS = {"interleaved": 2, "wave": 4}

Built = dict[str, tuple[schedules.Schedule, schedules.Costs]]


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        fit = Fit.of(read_profile(args.profile or _profiled(args, Path(folder))))
    built, missing = _build(args, fit)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        mp.spawn(_rank, args=(args, built, str(results)), nprocs=args.ranks)
        measured = json.loads(results.read_text(encoding="utf-8"))
    predicted = {name: schedules.simulate(*pair).makespan for name, pair in built.items()}
    _report(args, fit, predicted, measured, missing)
    sys.exit(_slower(args, predicted, measured))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks (default 4)")
    parser.add_argument("--microbatches", type=int, default=16, help="of a step (default 16)")
    parser.add_argument("--layers", type=int, default=16, help="of the model (default 16)")
    parser.add_argument(
        "--memory-limit",
        type=float,
        default=1.0,
        metavar="X",
        help="activation memory as a fraction of 1F1B's (default 1)",
    )
    parser.add_argument(
        "--milliseconds", type=float, default=100, help="see above (default 100)", metavar="MS"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="steps measured (default 5)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.01,
        help="by how much a clock may differ between two runs of the same (default 0.01)",
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="of --pipeline-profile, instead of training"
    )
    return parser.parse_args()


def _profiled(args: argparse.Namespace, folder: Path) -> Path:
    root = Path(__file__).parents[1]
    prepare = [sys.executable, str(root / "scripts/prepare_text.py"), "--max-bytes", "400000"]
    text, profile = folder / "text", folder / "profile.yaml"
    subprocess.run([*prepare, "--output-prefix", str(text)], check=True, capture_output=True)
    flags = {
        "--data-path": text,
        "--pipeline-model-parallel-size": args.ranks,
        "--num-layers": args.layers,
        "--hidden-size": _HIDDEN,
        "--vocab-size": _VOCABULARY,
        "--num-attention-heads": 4,
        "--seq-length": _SEQUENCE,
        "--micro-batch-size": 2,
        "--global-batch-size": 2 * args.microbatches,
        "--train-iters": 10,
        "--lr": 1e-3,
        "--pipeline-schedule": "v-half",
        "--pipeline-profile": profile,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)]
    command += ["-m", "megatron_zb.train", "--cpu"]
    command += [str(word) for pair in flags.items() for word in pair]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the run that was to be profiled failed:\n{done.stderr[-2000:]}")
    return profile


def _build(args: argparse.Namespace, fit: Fit) -> tuple[Built, dict[str, str]]:
    built: Built = {}
    missing = {}
    for name in schedules.names():
        sizes = {"pipeline_size": args.ranks, "num_microbatches": args.microbatches}
        limit = {"memory_limit": args.memory_limit, "chunks": _CHUNKS.get(name)}
        try:
            first = schedules.build(
                name, **sizes, **limit, costs=_at_start(args), num_layers=args.layers
            )
            costs = _costs(args, fit, first.placement)
            on = first.placement if name == "auto" else None
            built[name] = schedules.build(name, **sizes, **limit, costs=costs, placement=on), costs
        except UsageError as error:
            missing[name] = str(error)
    return built, missing


def _at_start(args: argparse.Namespace) -> schedules.Costs:
    """What auto chooses its placement by: counted, as nothing is measured yet."""
    layer = 2.0 * _HIDDEN * (12 * _HIDDEN + _SEQUENCE)
    return costs_of(args.layers, args.ranks, counted(layer, 2.0 * _HIDDEN * _VOCABULARY))


def _costs(args: argparse.Namespace, fit: Fit, placement: Placement) -> schedules.Costs:
    counts = spread(Layers(args.layers), placement)
    costs = fit.costs(placement, counts)
    kinds = PassKind.F, PassKind.B, PassKind.W
    work = [sum(of_slice) for of_slice in zip(*(costs.seconds[k] for k in kinds), strict=True)]
    busiest = max(sum(work[s] for s in held) for held in placement.stages_of)
    scale = args.milliseconds / 1000 / busiest
    return replace(
        costs,
        seconds={kind: times(table, scale) for kind, table in costs.seconds.items()},
        p2p=tuple(tuple(0.0 for _ in row) for row in costs.p2p),
        slowdown=(1.0,) * args.ranks,  # of a machine with fewer cores than ranks
    )


def _rank(rank: int, args: argparse.Namespace, built: Built, results: str) -> None:
    join(rank, args.ranks, f"{results}.meeting")
    steps = {name: SyntheticSteps(rank, *pair) for name, pair in built.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.repetitions):  # in turn, so that a load meets all alike
        for name, step in steps.items():
            seconds[name].append(step.seconds())
    if rank == 0:
        Path(results).write_text(json.dumps(seconds), encoding="utf-8")
    dist.destroy_process_group()


def _slower(
    args: argparse.Namespace, predicted: dict[str, float], measured: dict[str, list[float]]
) -> int:
    best = min(predicted.values())
    fastest = min(map(statistics.median, measured.values()))
    ours = statistics.median(measured["auto"])
    return int(predicted["auto"] > best * (1 + 1e-9) or ours > fastest * (1 + args.tolerance))


def _report(
    args: argparse.Namespace,
    fit: Fit,
    predicted: dict[str, float],
    measured: dict[str, list[float]],
    missing: dict[str, str],
) -> None:
    embedding, output = fit.in_layers()
    table = Table(
        title=f"{args.ranks} ranks, {args.microbatches} microbatches, {args.layers} layers, "
        f"vocabulary {_VOCABULARY // _HIDDEN} times the hidden size: measured, the output layer "
        f"counts for {output:.2f} layers and the embedding for {embedding:.2f}; activation memory "
        f"at most {args.memory_limit:g} of 1F1B's"
    )
    for heading in ("schedule", "simulated ms", "measured ms (median)", "ratio", "against auto"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    medians = {name: statistics.median(seconds) for name, seconds in measured.items()}
    for name in sorted(predicted, key=predicted.__getitem__):
        table.add_row(
            name,
            f"{1000 * predicted[name]:.1f}",
            f"{1000 * medians[name]:.1f}",
            f"{medians[name] / predicted[name]:.4f}",
            f"{medians[name] / medians['auto'] - 1:+.2%}",
        )
    console = Console(width=100)
    console.print(table)
    for name, why in missing.items():
        console.print(f"{name} is not there: {why}", highlight=False)
    print(json.dumps({"simulated": predicted, "measured": medians}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
