#!/usr/bin/env python3
"""Do ranks train to the losses of Megatron without a pipeline, to the end, on one GPU or several?

A small GPT is trained for a few steps by Megatron's own schedule on one rank, and by this package's
on several, which are processes of one device. With --reference, a schedule of this package takes
the place of Megatron's, as dropout needs: Megatron's masks depend on the order of forwards. All
losses and all weights must be equal to the last bit; with token slices, losses up to rounding,
unless the reference has the same slices. NCCL refuses two ranks on one device, so the
ranks meet over gloo and messages go through the host's memory; what computes is real: the adapter,
streams and events, and kernels that are loaded when they are first launched. NCCL
2.31 and newer can be asked to take them: --nccl sends messages over it (LD_PRELOAD puts a newer
libnccl.so.2 before torch's). With --device-each, every rank has a GPU,
and messages go over NCCL. On a CPU, they go over gloo. Every training has processes of its own,
which start cold, and a time limit; one that does not end tells where its ranks stand.

Prints a JSON line after every training, each with all results so far, and ends with exit status 1
when a training failed or came to other losses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import layer_sizes
import one_device
from one_device import DTYPES
from training_rank import Job

from megatron_zb.errors import UsageError

RANK = Path(__file__).with_name("training_rank.py")
SIZES = layer_sizes.LayerSizes(
    hidden=1024, heads=16, ffn_hidden=2752, seq_length=512, micro_batch_size=1
)
SHOWN_LINES = 25
MEGATRON = "Megatron's own schedule on one rank"
TOLERANCES = {"fp32": 5e-5, "bf16": 2e-3}  # of losses of token slices, about 8.5


@dataclass(frozen=True)
class Trained:
    """What the ranks of one training found together."""

    losses: list[list[float]]
    weights: dict[str, str]
    step_seconds: list[float]
    peak_bytes: int | None = None
    slices: int | None = None
    bubbles: tuple[float, ...] = ()
    """Of the timed steps: the share of the pipeline's time in which a rank runs no pass."""


class Failed(Exception):
    """A training that did not come to its end; ``printed`` is the end of what its ranks wrote."""

    def __init__(self, reason: str, printed: dict[str, list[str]]) -> None:
        super().__init__(reason)
        self.printed = printed


def main() -> int:
    args = _arguments()
    job = _job(args)
    missing = layer_sizes.missing(args.implementation, one_device.choose(args.device))
    if missing is not None:
        raise UsageError(f"--implementation {args.implementation}: {missing}")
    line: dict[str, Any] = {
        "benchmark": "one_gpu_training",
        "machine": one_device.describe(one_device.choose(args.device)),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("CUDA_")},
        "job": {k: v for k, v in asdict(job).items() if k not in ("ranks", "schedule")},
        "results": [],
    }
    of = job
    if args.reference is not None:
        of = replace(job, ranks=args.ranks[0], schedule=args.reference)
    line["reference"] = {"schedule": of.schedule, "ranks": of.ranks}
    try:
        expected = replace(train(of, args.seconds), slices=of.slices)
    except Failed as failure:
        line["reference"] |= {"failed": str(failure), "printed": failure.printed}
        return _end(line, [f"the reference, {args.reference or MEGATRON}: {failure}"])
    line["reference"] |= {"losses": expected.losses, "step_seconds": expected.step_seconds}
    line["reference"]["peak_bytes"] = expected.peak_bytes
    for ranks in args.ranks:
        for schedule in args.schedules:
            ours = replace(job, ranks=ranks, schedule=schedule)
            result = _compare(ours, expected, args.seconds)
            line["results"].append(result)
            print(json.dumps(line), flush=True)
    return _end(line, [problem for r in line["results"] if (problem := _problem(r))])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    positive = one_device.at_least_one
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--ranks", type=positive, nargs="+", default=[2, 4], metavar="N", help="(default 2 4)"
    )
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=["v-half", "v-zb", "1f1b"],
        metavar="NAME",
        help="v-half+moved offloads activations to the host, v-half+dropped recomputes them, "
        "v-half+4slices has token slices (default v-half v-zb 1f1b)",
    )
    parser.add_argument(
        "--reference", metavar="NAME", help="the schedule to compare with, on the first --ranks"
    )
    parser.add_argument(
        "--implementation",
        choices=layer_sizes.IMPLEMENTATIONS,
        default=layer_sizes.LOCAL,
        help="of the layers (default local)",
    )
    parser.add_argument("--fp8", metavar="RECIPE", help="Megatron's --fp8-recipe, in hybrid format")
    parser.add_argument(
        "--experts", type=positive, metavar="N", help="in every MLP (default: no experts)"
    )
    parser.add_argument(
        "--dropout", type=float, default=0.0, metavar="P", help="needs --reference (default 0)"
    )
    parser.add_argument("--layers", type=positive, default=8, metavar="N", help="(default 8)")
    parser.add_argument("--microbatches", type=positive, default=8, metavar="N", help="(default 8)")
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="(default 3)")
    parser.add_argument("--vocabulary", type=positive, default=4096, metavar="N")
    layer_sizes.add_options(parser, SIZES, SIZES)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="(default fp32)")
    parser.add_argument(
        "--seconds", type=positive, default=30, metavar="N", help="of one training (default 30)"
    )
    parser.add_argument("--device-each", action="store_true", help="a GPU for each rank, and NCCL")
    parser.add_argument("--nccl", action="store_true", help="NCCL also where ranks share a GPU")
    parser.add_argument("--unequal", action="store_true", help="microbatches of unequal lengths")
    parser.add_argument(
        "--host-memory",
        action="store_true",
        help="on a CPU, too, send messages as ranks of one GPU must, with streams that do nothing",
    )
    return parser.parse_args()


def _job(args: argparse.Namespace) -> Job:
    device = one_device.choose(args.device)
    nccl = (args.nccl or args.device_each) and device.type == "cuda"
    return Job(
        ranks=1,
        schedule=None,
        layers=args.layers,
        microbatches=args.microbatches,
        steps=args.steps,
        dtype=args.dtype,
        device=device.type,
        host_memory=args.host_memory or (device.type == "cuda" and not nccl),
        stacks_after_seconds=0.8 * args.seconds,
        sizes=layer_sizes.chosen(args, device, SIZES, SIZES),
        device_each=args.device_each,
        implementation=args.implementation,
        dropout=args.dropout,
        fp8=args.fp8,
        experts=args.experts,
        nccl=nccl,
        unequal=args.unequal,
    )


def _compare(job: Job, expected: Trained, seconds: float) -> dict[str, Any]:
    result: dict[str, Any] = {"ranks": job.ranks, "schedule": job.schedule}
    try:
        found = train(job, seconds)
    except Failed as failure:
        return {**result, "failed": str(failure), "printed": failure.printed}
    pairs = [
        (ours, theirs)
        for step in zip(found.losses, expected.losses, strict=True)
        for ours, theirs in zip(*step, strict=True)
    ]
    differing = [name for name, w in expected.weights.items() if found.weights.get(name) != w]
    largest = max(abs(ours - theirs) for ours, theirs in pairs)
    rounds = job.slices not in (None, expected.slices)
    return {
        **result,
        "equal_losses": found.losses == expected.losses,
        "largest_loss_difference": largest,
        "tolerance": TOLERANCES[job.dtype] if rounds else 0.0,
        "differing_weights": differing,
        "weights": len(expected.weights),
        "step_seconds": found.step_seconds,
        "peak_bytes": found.peak_bytes,
    }


def _problem(result: dict[str, Any]) -> str | None:
    """What is wrong with a result, in one sentence."""
    name = f"{result['schedule']} on {result['ranks']} ranks"
    if "failed" in result:
        return f"{name}: {result['failed']}"
    if result["tolerance"] and result["largest_loss_difference"] <= result["tolerance"]:
        return None
    if not result["equal_losses"]:
        return f"{name}: losses differ by up to {result['largest_loss_difference']:g}"
    if result["differing_weights"]:
        return f"{name}: {len(result['differing_weights'])} of {result['weights']} weights differ"
    return None


def _end(line: dict[str, Any], problems: list[str]) -> int:
    line["problems"] = problems
    print(json.dumps(line), flush=True)
    if problems:
        print("; ".join(problems), file=sys.stderr, flush=True)
    return 1 if problems else 0


def train(job: Job, seconds: float) -> Trained:
    """Run all ranks of a training.

    Raises:
        Failed: a rank ended with an error, or not all had ended after so many seconds.
    """
    with tempfile.TemporaryDirectory(prefix="one-gpu-") as name:
        folder = Path(name)
        processes = [_started(job, rank, folder) for rank in range(job.ranks)]
        try:
            reason = _wait(processes, seconds)
        finally:
            for process in processes:
                process.kill()
        if reason is not None:
            raise Failed(reason, _printed(job, folder))
        files = [folder / f"rank{rank}.json" for rank in range(job.ranks)]
        return _together([json.loads(file.read_text(encoding="utf-8")) for file in files])


def _started(job: Job, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        "GLOO_SOCKET_IFNAME": "lo",
        **({} if job.timed else one_device.REPEATABLE),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        **os.environ,
        "PYTHONWARNINGS": "ignore",
    }
    with (folder / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(RANK), json.dumps(asdict(job)), str(rank), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> str | None:
    """Wait for all ranks; the reason why not all have done their work, or None."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        statuses = [process.poll() for process in processes]
        failed = [rank for rank, status in enumerate(statuses) if status]
        if failed:
            return f"rank {failed[0]} ended with exit status {statuses[failed[0]]}"
        if all(status == 0 for status in statuses):
            return None
        time.sleep(0.05)
    open_ranks = [str(rank) for rank, process in enumerate(processes) if process.poll() is None]
    return f"not done after {seconds:g} s on rank {', '.join(open_ranks)}"


def _printed(job: Job, folder: Path) -> dict[str, list[str]]:
    """The last lines of every rank: an error, or where its threads were near the time limit."""
    printed = {}
    for rank in range(job.ranks):
        text = (folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
        printed[f"rank {rank}"] = text.splitlines()[-SHOWN_LINES:]
    return printed


def _together(found: list[dict[str, Any]]) -> Trained:
    """Losses of the rank that has them, weights of all, the most seconds, and the most bytes."""
    return Trained(
        losses=next((f["losses"] for f in found if any(f["losses"])), []),
        weights={name: digest for f in found for name, digest in f["weights"].items()},
        step_seconds=[max(s) for s in zip(*(f["step_seconds"] for f in found), strict=True)],
        peak_bytes=max((f["peak_bytes"] for f in found if f["peak_bytes"]), default=None),
        bubbles=_bubbles(found),
    )


def _bubbles(found: list[dict[str, Any]]) -> tuple[float, ...]:
    """The bubble of every timed step, which all ranks begin at once."""
    if "busy_seconds" not in found[0]:
        return ()
    busy = zip(*(f["busy_seconds"] for f in found), strict=True)
    whole = zip(*(f["pipeline_seconds"] for f in found), strict=True)
    return tuple(1 - sum(b) / len(b) / max(w) for b, w in zip(busy, whole, strict=True))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
