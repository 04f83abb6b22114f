#!/usr/bin/env python3
"""Plans of long samples with token slices, and without: tokens per second and memory.

A model of 70 billion weights on 64 and 256 GPUs, with samples of 128k tokens in batches of 4M, and
of 512k in batches of 8M. Each case is one `megatron-zb plan`, whose tensor parallelism is a node's.
Printed and written are the best row with slices, the best without, and Megatron's 1F1B with full
recomputation. Nothing is run: costs are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import provenance

from megatron_zb.cli import main as cli
from megatron_zb.parsing import GIB

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "slices_plan.json"
TOKENS = {131072: 2**22, 524288: 2**23}  # of a sample, and of a batch
SCHEDULES = "1f1b,interleaved,zb-h1,v-min,v-half,v-zb,auto"
KEPT = (
    "schedule runs chunks tensor pipeline data context slices slice_tokens num_microbatches "
    "recompute tokens_per_second_per_gpu mfu bubble memory flags"
).split()


def words_of(gpus: int, sequence: int, args: argparse.Namespace) -> list[str]:
    """The command line of a plan."""
    return [
        *("plan", "--config", args.config, "--gpus", str(gpus), "--device", args.device),
        *("--seq-length", str(sequence), "--global-batch-size", str(TOKENS[sequence] // sequence)),
        *("--tensor", "8", "--micro-batch-size", "1", "--recompute", "none,mlp,full"),
        *("--slices", "auto", "--schedules", args.schedules, "--tries", str(args.tries)),
        *("--format", "json"),
    ]


def planned(words: list[str]) -> dict[str, Any]:
    """What a plan prints, or its error."""
    out, errors, begin = io.StringIO(), io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = cli.main(words)
    found: dict[str, Any] = {"command": " ".join(["megatron-zb", *words])}
    if code:
        return {**found, "error": errors.getvalue().strip().splitlines()[-1]}
    plan = json.loads(out.getvalue())
    rows = [{name: row[name] for name in KEPT} for row in plan["ranked"]]
    for name, chosen in (
        ("sliced", [row for row in rows if row["slices"] > 1]),
        ("whole", [row for row in rows if row["slices"] == 1]),
        ("megatron_full", [r for r in rows if r["schedule"] == "Megatron 1F1B, full recompute"]),
        ("megatron_context", [r for r in rows if r["schedule"].endswith("context parallel")]),
    ):
        found[name] = max(chosen, key=lambda r: r["tokens_per_second_per_gpu"], default=None)
    return {**found, "seconds": time.monotonic() - begin, "not_possible": plan["not_possible"]}


def in_words(row: dict[str, Any] | None) -> str:
    if row is None:
        return "nothing fits"
    sizes = f"TP{row['tensor']} CP{row['context']} PP{row['pipeline']} DP{row['data']}"
    return (
        f"{row['tokens_per_second_per_gpu']:6.0f} tokens/s/GPU in "
        f"{row['memory']['total'] / GIB:4.1f} GiB, bubble {row['bubble']:5.1%}: {row['schedule']} "
        f"({row['runs']}) {sizes} n={row['slices']} recompute {row['recompute']}"
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="llama3_70b", help="the model (default llama3_70b)")
    parser.add_argument("--device", default="h100_sxm", help="the GPU (default h100_sxm)")
    parser.add_argument("--gpus", type=int, nargs="*", default=[64, 256], metavar="N")
    parser.add_argument(
        "--tokens", type=int, nargs="*", choices=TOKENS, default=[*TOKENS], help="of a sample"
    )
    parser.add_argument("--schedules", default=SCHEDULES, metavar="NAMES", help=SCHEDULES)
    parser.add_argument("--tries", type=int, default=2, help="as for plan (default 2)")
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"(default {RESULTS.name})")
    return parser


def main() -> int:
    args = parser().parse_args()
    cases = []
    for sequence in args.tokens:
        for gpus in args.gpus:
            found = planned(words_of(gpus, sequence, args))
            cases.append({"tokens": sequence, "gpus": gpus, **found, **provenance.of_this_run()})
            print(f"{gpus} GPUs, {sequence} tokens", found.get("error", ""))
            for name in ("sliced", "whole", "megatron_full", "megatron_context"):
                print(f"  {name:16} {in_words(found.get(name))}", flush=True)
            text = json.dumps({"cases": cases}, indent=1)
            args.output.write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
