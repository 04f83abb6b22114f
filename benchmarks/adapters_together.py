#!/usr/bin/env python3
"""Time of several LoRA adapters in one pipeline, beside one after another: real jobs on CPU ranks.

Every job is a real pretrain_gpt.py with --pipeline-adapters, on a base that is made first. Adapters
are equal, so the time of one after another is that of one, times their number. Turns rotate, so
that a machine that gets slower slows both. A time is the median of the steps of all turns, without
the first ones of each.

  python benchmarks/adapters_together.py --checkout /path/to/Megatron-LM --adapters 4

With --at-once 4 the pipeline is filled for 4 steps of each adapter.

Each rank has one thread; a quiet machine with a core for each is needed for figures that count. The
bound is what no order can be faster than, for the time of one adapter: its steps have
(p - 1) / (m + p - 1) of idle time under 1F1B, and together there is none. Prints a table and, last,
one JSON line with the milliseconds and the ratio together over one after another, for each schedule
and beside 1F1B's one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

import provenance
from rich.console import Console
from rich.table import Table

BASELINE = "1f1b"
_STEP = re.compile(r"adapter a0 \| iteration +(\d+)/.*elapsed time per iteration \(ms\): ([0-9.]+)")


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        _run(args, f"--train-iters 1 --global-batch-size 1 --save {base} --save-interval 1")
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(args.turns):
            for schedule in args.schedules:
                for count in (1, args.adapters):
                    file = _written(args, Path(folder), count)
                    flags = (
                        f"--load {base} --pipeline-schedule {schedule} --pipeline-adapters {file} "
                        f"--pipeline-adapter-steps {args.at_once if count > 1 else 1}"
                    )
                    output = _run(args, flags)
                    times = [
                        float(ms) for step, ms in _STEP.findall(output) if int(step) > args.warm_up
                    ]
                    found.setdefault((schedule, count), []).extend(times)
    _report(args, found)


def _report(args: argparse.Namespace, found: dict[tuple[str, int], list[float]]) -> None:
    k, m, p = args.adapters, args.microbatches, args.ranks
    table = Table(title=f"{k} adapters of {m} microbatches on {p} ranks: ms of a step of each")
    for title in ("schedule", "one after another", "together", "ratio", "to 1f1b in turn"):
        table.add_column(title)
    apart = k * median(found[BASELINE, 1])
    rows = {}
    for schedule in args.schedules:
        one, all_ = found[schedule, 1], found[schedule, k]
        rows[schedule] = {
            "one_ms": one,
            "together_ms": all_,
            "ratio": median(all_) / (k * median(one)),
            "ratio_to_1f1b": median(all_) / apart,
        }
        ratio, beside = rows[schedule]["ratio"], rows[schedule]["ratio_to_1f1b"]
        table.add_row(schedule, _spread(one, k), _spread(all_, 1), f"{ratio:.3f}", f"{beside:.3f}")
    bound = k * m / (k * (m + p - 1))
    Console().print(table, f"bound for 1f1b without any idle time together: {bound:.3f}")
    said = {name: value for name, value in vars(args).items() if name != "checkout"}
    print(json.dumps({**provenance.of_this_run(), "arguments": said, "bound": bound, "rows": rows}))


def _spread(values: Sequence[float], times: int) -> str:
    low, middle, high = (times * value for value in quantiles(values, n=4))
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def _written(args: argparse.Namespace, folder: Path, count: int) -> Path:
    path = folder / f"{count}.yaml"
    each = f"batch: {args.microbatches}, steps: {args.steps}, learning_rate: 1e-4, rank: 16"
    lines = [f"  - {{name: a{i}, seed: {i}, {each}}}" for i in range(count)]
    path.write_text("\n".join(["adapters:", *lines, ""]))
    return path


def _run(args: argparse.Namespace, flags: str) -> str:
    """Run a job to its end and return what it printed; another end ends the benchmark."""
    heads = max(1, args.hidden // 64)
    model = f"""
    --mock-data --tokenizer-type NullTokenizer --vocab-size {args.vocabulary} --split 90,5,5
    --untie-embeddings-and-output-weights --num-layers {args.layers} --hidden-size {args.hidden}
    --num-attention-heads {heads} --seq-length {args.sequence}
    --max-position-embeddings {args.sequence} --micro-batch-size 1 --attention-dropout 0
    --hidden-dropout 0 --lr 1e-4 --eval-iters 0 --eval-interval 1000 --log-interval 1
    --ckpt-format torch_dist --pipeline-model-parallel-size {args.ranks} {flags}
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={args.ranks}", "-m", "megatron_zb.launch"),
        *(str(args.checkout / "pretrain_gpt.py"), "--cpu", *model.split()),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tempfile.gettempdir(),
    )
    if done.returncode:
        said = done.stdout[-2000:] + done.stderr[-2000:]
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = os.environ.get("MEGATRON_LM_PATH")
    parser.add_argument("--checkout", type=Path, default=default, help="of Megatron-LM")
    parser.add_argument("--schedules", nargs="+", default=[BASELINE, "v-zb"], metavar="NAME")
    parser.add_argument("--adapters", type=int, default=4, help="that share (default 4)")
    parser.add_argument("--microbatches", type=int, default=4, help="of each (default 4)")
    parser.add_argument("--ranks", type=int, default=2, help="pipeline ranks (default 2)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default 256)")
    parser.add_argument("--sequence", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--vocabulary", type=int, default=1024, help="words (default 1024)")
    parser.add_argument("--steps", type=int, default=10, help="of a turn (default 10)")
    parser.add_argument(
        "--at-once", type=int, default=1, help="steps of each that fill the pipeline (default 1)"
    )
    parser.add_argument("--warm-up", type=int, default=3, help="steps left out (default 3)")
    parser.add_argument("--turns", type=int, default=2, help="of all jobs (default 2)")
    args = parser.parse_args()
    if args.checkout is None:
        parser.error("give --checkout, or set MEGATRON_LM_PATH")
    if args.steps < args.warm_up + 2:
        parser.error(f"--steps {args.steps} leaves fewer than two: give more than --warm-up")
    if BASELINE not in args.schedules:
        args.schedules = [BASELINE, *args.schedules]
    return args


if __name__ == "__main__":
    main()
