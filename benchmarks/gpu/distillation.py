#!/usr/bin/env python3
"""Does blockwise distillation on ranks that share one GPU learn what one rank learns?

A small teacher is trained for a few steps. Its blocks are distilled on one rank, on two that have
half of the blocks each, and on two that share all blocks. Losses of every block in every iteration
must be equal to the last digit on the first two, and near on the third, whose gradients are summed
over ranks, or by kernels that sum in any order (--bf16). A library of two candidates for each block
is trained on two ranks, too, and with --teacher-fp8 students of a teacher in fp8. Ranks of one GPU
need NCCL 2.31 or newer, which LD_PRELOAD can put before torch's; --device cpu takes CPU ranks.

Prints a JSON line after every job, each with all results so far, and ends with exit status 1 when
one failed or came to other losses.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import one_device
from launched_ranks import reason_of, run_ranks, started_ranks

TOLERANCE = 1e-3  # of losses, as a share, where gradients are summed in another order
IN_FP8 = 0.1  # the same, of students of a teacher in fp8
TEACHER = """--mock-data --vocab-size 256 --num-layers 4 --hidden-size {hidden}
--num-attention-heads 4 --seq-length {length} --micro-batch-size 2 --global-batch-size 8
--lr 1e-3 --train-iters 4
--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --save {folder}/teacher"""
STUDENT = """--teacher-load {folder}/teacher --mock-data --micro-batch-size 2 --global-batch-size 8
--lr 1e-3 --train-iters 6 --log-interval 1"""
CANDIDATES = """name: two candidates
candidates:
  - {name: half, mlp: {ffn_fraction: 0.5}}
  - {name: thin, attention: {query_groups: 2}, mlp: {ffn_fraction: 0.25}}
"""
JOBS = {
    "one rank": (1, "--student-config {folder}/first.yaml --distribution 0-3:1"),
    "blocks apart": (2, "--student-config {folder}/first.yaml --distribution 0-1:1,2-3:1"),
    "blocks shared": (2, "--student-config {folder}/first.yaml --distribution 0-3:2"),
    "library": (
        2,
        "--student-config {folder}/all.yaml --save-library {folder}/library --eval-iters 2",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--hidden", type=one_device.at_least_one, default=512, metavar="N")
    parser.add_argument("--seq-length", type=one_device.at_least_one, default=512, metavar="N")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--teacher-fp8", metavar="RECIPE", help="of Megatron, such as tensorwise")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="N", help="of one job")
    args = parser.parse_args()
    device = one_device.choose(args.device)
    line: dict[str, Any] = {
        "benchmark": "distillation",
        "machine": one_device.describe(device),
        "dtype": "bf16" if args.bf16 else "fp32",
        "results": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        first = CANDIDATES.rpartition("  - ")[0]
        (Path(folder) / "first.yaml").write_text(first, encoding="utf-8")
        (Path(folder) / "all.yaml").write_text(CANDIDATES, encoding="utf-8")
        run = Runs(args, folder, device.type == "cpu")
        problem = run.of(2, "megatron_zb.train", TEACHER)
        if problem:
            line["results"]["teacher"] = {"failed": problem}
        jobs = {} if problem else dict(JOBS)
        if jobs and args.teacher_fp8:
            apart, words = jobs["blocks apart"]
            jobs["teacher in fp8"] = apart, f"{words} --teacher-fp8 {args.teacher_fp8}"
        for name, (ranks, words) in jobs.items():
            log = f"--log-file {{folder}}/{name.replace(' ', '-')}.jsonl"
            failed = run.of(ranks, "megatron_zb.distill", f"{STUDENT} {words} {log}")
            line["results"][name] = {"failed": failed} if failed else run.compared(name)
            print(json.dumps(line), flush=True)
    problems = [
        f"{name}: {result.get('failed') or 'other losses'}"
        for name, result in line["results"].items()
        if "failed" in result or not result["right"]
    ]
    line["problems"] = problems
    print(json.dumps(line), flush=True)
    if problems:
        print("; ".join(problems), file=sys.stderr)
    return 1 if problems else 0


class Runs:
    """Jobs in one folder, and the losses that they logged."""

    def __init__(self, args: argparse.Namespace, folder: str, on_cpu: bool) -> None:
        self._args, self._folder, self._on_cpu = args, folder, on_cpu
        self._expected: list[dict[str, Any]] = []

    def of(self, ranks: int, module: str, words: str) -> str:
        """Run a job; return what went wrong, with the end of what its ranks wrote."""
        text = words.format(
            folder=self._folder, hidden=self._args.hidden, length=self._args.seq_length
        )
        text += " --bf16" * self._args.bf16 + " --cpu" * self._on_cpu
        starts = started_ranks(ranks, share_gpu=not self._on_cpu)
        problem, printed = run_ranks(starts, ["-m", module, *text.split()], self._args.seconds)
        return f"{problem}: {reason_of(printed) or printed[-800:]}" if problem else ""

    def compared(self, name: str) -> dict[str, Any]:
        """Return a job's losses by iteration and block, beside those on one rank."""
        file = Path(self._folder) / f"{name.replace(' ', '-')}.jsonl"
        records = [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
        losses = [record["losses"] for record in records if "losses" in record]
        if name == "library":
            return {"losses": losses, "right": bool(losses)}
        self._expected = self._expected or losses
        most = max(
            abs(ours / theirs - 1)
            for step, of in zip(losses, self._expected, strict=True)
            for ours, theirs in zip(_numbers(step), _numbers(of), strict=True)
        )
        bound = TOLERANCE if name == "blocks shared" or self._args.bf16 else 0.0
        bound = IN_FP8 if name == "teacher in fp8" else bound
        return {"losses": losses, "largest_difference": most, "right": most <= bound}


def _numbers(losses: Any) -> list[float]:
    """Return all losses of an iteration, by block and candidate."""
    if isinstance(losses, dict):
        losses = list(losses.values())
    return [x for each in losses for x in _numbers(each)] if isinstance(losses, list) else [losses]


if __name__ == "__main__":
    sys.exit(main())
