#!/usr/bin/env python3
"""Runs the benchmarks of one GPU, each with a time limit, and writes what they found to one file.

benchmarks/gpu/run_all.sh starts it with the packages it needs; see there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "numpy", "rich", "megatron.core", "megatron_zb")
TINY_LAYER = "--hidden 64 --heads 4 --ffn-hidden 96 --seq-length 32".split()


@dataclass(frozen=True)
class Measurement:
    """One run of a benchmark; limits add up to less than 8 minutes."""

    name: str
    script: str
    arguments: str
    limit_seconds: int
    tiny_arguments: str


_TINY_RANKS = "--ranks 4 --microbatches 8 --layers-per-rank 2 --schedules v-half"
MEASUREMENTS = [
    Measurement("split_backward", "split_backward.py", "", 110, "--repetitions 3"),
    Measurement(
        "split_backward_fp32",
        "split_backward.py",
        "--dtypes fp32",
        80,
        "--dtypes fp32 --repetitions 3",
    ),
    Measurement("rank_memory", "rank_memory.py", "", 150, _TINY_RANKS),
    Measurement(
        "rank_memory_of_a_whole_model",
        "rank_memory.py",
        "--vocabulary 32000",
        120,
        f"{_TINY_RANKS} --vocabulary 512",
    ),
]


def main() -> int:
    args = _arguments()
    problem = _problem(args)
    if problem is not None:
        print(f"run_all.sh: error: {problem}", file=sys.stderr)
        return 2
    begin = time.monotonic()
    results: dict[str, Any] = {"machine": _machine(args.device), "commit": _commit()}
    results["measurements"] = {}
    for measurement in MEASUREMENTS:
        print(f"==> {measurement.name}", flush=True)
        found = _run(measurement, args.device)
        results["measurements"][measurement.name] = found
        results["seconds"] = round(time.monotonic() - begin, 1)
        args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, found in results["measurements"].items() if "failed" in found]
    for name in failed:
        found = results["measurements"][name]
        print(f"==> {name} failed, {found['failed']}: {found['last_line']}", file=sys.stderr)
    print(f"==> {args.output} is written, after {results['seconds']} s", flush=True)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu: tiny sizes, to try it out (default cuda)",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    return parser.parse_args()


def _problem(args: argparse.Namespace) -> str | None:
    """What keeps every benchmark from running, in one sentence."""
    if not args.output.parent.is_dir():
        return f"--output {args.output}: there is no folder {args.output.parent}"
    missing = [name for name in NEEDED if not _is_there(name)]
    if missing:
        return (
            f"this Python has no {' and no '.join(missing)}: pack with --pack where there is a "
            "network and give --carried FOLDER, or name another Python with --python"
        )
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here: --device cpu tries it out without one"
    return None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _machine(device: str) -> dict[str, Any]:
    """What is measured on, as torch and the driver name it."""
    import torch

    machine: dict[str, Any] = {"device": device, "torch": torch.__version__}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        machine["gpu"] = properties.name
        machine["gpu_bytes"] = properties.total_memory
        machine["cuda"] = torch.version.cuda
        machine["driver"] = _output_of(
            "nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"
        )
    return machine


def _commit() -> str | None:
    """The commit that is checked out, and whether files differ from it; None without git."""
    commit = _output_of("git", "-C", str(BENCHMARKS), "rev-parse", "HEAD")
    changed = _output_of("git", "-C", str(BENCHMARKS), "status", "--porcelain")
    return f"{commit} with changes" if commit and changed else commit


def _output_of(command: str, *arguments: str) -> str | None:
    if shutil.which(command) is None:
        return None
    done = subprocess.run(
        [command, *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout.strip() or None if done.returncode == 0 else None


def _run(measurement: Measurement, device: str) -> dict[str, Any]:
    """A benchmark's JSON line, or how it failed and the last line that it printed."""
    arguments = measurement.arguments.split()
    if device == "cpu":
        arguments = [*measurement.tiny_arguments.split(), *TINY_LAYER]
    script = str(BENCHMARKS / measurement.script)
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, script, "--device", device, *arguments],
            capture_output=True,
            text=True,
            timeout=measurement.limit_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        reason = f"it took more than {measurement.limit_seconds} s"
        return _failure(reason, _text(expired.stdout), _text(expired.stderr))
    print(done.stdout, flush=True)
    if done.returncode:
        return _failure(f"with exit status {done.returncode}", done.stdout, done.stderr)
    try:
        found: dict[str, Any] = json.loads(_last_line(done.stdout))
    except ValueError:
        return _failure("its last line is not JSON", done.stdout, "")
    return {**found, "wall_seconds": round(time.monotonic() - begin, 1)}


def _failure(reason: str, output: str, errors: str) -> dict[str, Any]:
    return {"failed": reason, "last_line": _last_line(errors) or _last_line(output)}


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _text(output: str | bytes | None) -> str:
    """What a program that was stopped had printed: bytes, whatever was asked for."""
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


if __name__ == "__main__":
    sys.exit(main())
