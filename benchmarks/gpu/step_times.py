#!/usr/bin/env python3
"""Step times and allocated peaks of schedules on several GPUs, beside Megatron's own.

A small GPT is trained on as many ranks as given, each with a GPU and NCCL; on a CPU, over gloo,
which says whether all this works. "megatron" and "megatron-interleaved" are Megatron's own
functions. A schedule's time is the median of its steps on the slowest rank, without the first one.

Prints a JSON line after every schedule, each with all results so far.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import layer_sizes
import one_device
import torch
from one_device import DTYPES
from one_gpu_training import Failed, train
from training_rank import Job

BASE = "megatron"
SCHEDULES = (BASE, "megatron-interleaved", "zb-h1", "v-zb", "v-half")
SIZES = layer_sizes.LayerSizes(
    hidden=2048, heads=16, ffn_hidden=5504, seq_length=2048, micro_batch_size=1
)


def main() -> None:
    args = _arguments()
    device = one_device.choose(args.device)
    ranks = args.ranks or (2 if device.type == "cpu" else torch.cuda.device_count())
    ranks = min(ranks, 8)
    if ranks < 2 or (device.type == "cuda" and ranks > torch.cuda.device_count()):
        print(json.dumps({"benchmark": "step_times", "not_measured": "there are too few GPUs"}))
        return
    job = _job(args, device, ranks)
    line: dict[str, Any] = {
        "benchmark": "step_times",
        "machine": one_device.describe(device),
        "ranks": ranks,
        "microbatches": job.microbatches,
        "results": {},
    }
    for name in args.schedules:
        line["results"][name] = measure(replace(job, schedule=name), args.seconds)
        print(json.dumps(_with_ratios(line)), flush=True)


def measure(job: Job, seconds: float) -> dict[str, Any]:
    """Return the median seconds of a step and the peak of the rank that allocates most."""
    try:
        found = train(job, seconds)
    except Failed as failure:
        return {"failed": str(failure), "printed": failure.printed}
    return {
        "step_seconds": statistics.median(found.step_seconds[1:]),
        "steps": len(found.step_seconds) - 1,
        "peak_bytes": found.peak_bytes,
    }


def _with_ratios(line: dict[str, Any]) -> dict[str, Any]:
    base = line["results"].get(BASE, {}).get("step_seconds")
    for result in line["results"].values():
        if base and "step_seconds" in result:
            result["of_megatron"] = result["step_seconds"] / base
    return line


def _job(args: argparse.Namespace, device: torch.device, ranks: int) -> Job:
    return Job(
        ranks=ranks,
        schedule=None,
        layers=args.layers_per_rank * ranks,
        microbatches=args.microbatches or 4 * ranks,
        steps=args.steps + 1,
        dtype=args.dtype,
        device=device.type,
        host_memory=False,
        stacks_after_seconds=0.8 * args.seconds,
        sizes=layer_sizes.chosen(args, device, SIZES, SIZES),
        device_each=True,
        nccl=device.type == "cuda",
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    positive = one_device.at_least_one
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--ranks", type=positive, metavar="N", help="(default: all GPUs, up to 8)")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), metavar="NAME")
    parser.add_argument("--layers-per-rank", type=positive, default=4, metavar="N")
    parser.add_argument("--microbatches", type=positive, metavar="N", help="(default 4 per rank)")
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="(default 5)")
    parser.add_argument("--vocabulary", type=positive, default=32000, metavar="N")
    layer_sizes.add_options(parser, SIZES, SIZES)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="(default bf16)")
    parser.add_argument(
        "--seconds", type=positive, default=40, metavar="N", help="of one training (default 40)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    one_device.run(main)
