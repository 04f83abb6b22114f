#!/usr/bin/env python3
"""Runs the benchmarks of one GPU, each with a time limit, and writes what they found to one file.

The file is written anew after each. What hangs is killed with all its processes, and the next one
begins. benchmarks/gpu/run_all.sh starts it with the packages it needs; see there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

BENCHMARKS = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "numpy", "rich", "megatron.core", "megatron_zb")


TINY_LAYER = "--hidden 64 --heads 4 --ffn-hidden 96 --seq-length 32"
TOTAL_SECONDS = 465.0  # of all measurements; less than 8 minutes with what is around them
KILLED_WITHIN = 5.0  # seconds; a process that waits for a driver may never end


@dataclass(frozen=True)
class Measurement:
    """One run of a benchmark, in an environment with these variables set.

    ``needs`` is a module without which there is nothing to measure.
    """

    name: str
    script: str
    arguments: str
    limit_seconds: float
    tiny_arguments: str
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str | None = None


def _queues(connections: int, loading: str) -> Measurement:
    return Measurement(
        f"queues_{connections}_{loading.lower()}",
        "gpu/queues.py",
        "",
        40,
        "",
        {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections), "CUDA_MODULE_LOADING": loading},
    )


def _training(loading: str, arguments: str, limit_seconds: float, tiny: str) -> Measurement:
    return Measurement(
        f"one_gpu_training_{loading.lower()}",
        "gpu/one_gpu_training.py",
        arguments,
        limit_seconds,
        f"--vocabulary 64 --layers 4 --microbatches 4 --steps 2 --seconds 100 {tiny} {TINY_LAYER}",
        {"CUDA_MODULE_LOADING": loading},
    )


_TINY_RANKS = f"--ranks 4 --microbatches 8 --layers-per-rank 2 --schedules v-half {TINY_LAYER}"
# What decides how a program is lowered comes first, what is only slow last.
MEASUREMENTS = [
    *(_queues(connections, loading) for loading in ("LAZY", "EAGER") for connections in (1, 8)),
    _training("LAZY", "--seconds 25", 150, "--ranks 2 --schedules v-half --host-memory"),
    _training(
        "EAGER",
        "--ranks 4 --schedules v-half v-half+moved --seconds 30",
        80,
        "--ranks 2 --schedules v-half+moved",
    ),
    Measurement(
        "quantized_gradients", "gpu/quantized_gradients.py", "", 60, "", needs="transformer_engine"
    ),
    Measurement("split_backward", "split_backward.py", "", 90, f"--repetitions 3 {TINY_LAYER}"),
    Measurement("rank_memory", "rank_memory.py", "", 150, _TINY_RANKS),
    Measurement(
        "rank_memory_transformer_engine",
        "rank_memory.py",
        "--implementation transformer-engine",
        120,
        _TINY_RANKS,
        needs="transformer_engine",
    ),
    Measurement(
        "split_backward_fp32",
        "split_backward.py",
        "--dtypes fp32",
        80,
        f"--dtypes fp32 --repetitions 3 {TINY_LAYER}",
    ),
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # kills what runs
    begin = time.monotonic()
    results: dict[str, Any] = {"machine": _machine(args.device), "commit": _commit()}
    results["measurements"] = {}
    for measurement in MEASUREMENTS:
        print(f"==> {measurement.name}", flush=True)
        left = TOTAL_SECONDS - (time.monotonic() - begin)
        found = _missing(measurement, args.device) or _run(measurement, args.device, left)
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


def _missing(measurement: Measurement, device: str) -> dict[str, Any] | None:
    """Why there is nothing to measure, or None."""
    needs = measurement.needs
    if needs is None or (device == "cuda" and _is_there(needs)):
        return None
    reason = f"{needs} is not installed" if device == "cuda" else f"{needs} needs a GPU"
    return {"not_measured": reason}


def _run(measurement: Measurement, device: str, left: float) -> dict[str, Any]:
    """A benchmark's last JSON line, and how it failed and the last line it wrote, if it did.

    A benchmark with many answers writes a line after each: those before a failure are kept.
    """
    limit = min(measurement.limit_seconds, left)
    if limit <= 0:
        return {"failed": f"the {TOTAL_SECONDS:g} s of all were over", "last_line": ""}
    arguments = measurement.tiny_arguments if device == "cpu" else measurement.arguments
    script = str(BENCHMARKS / measurement.script)
    begin = time.monotonic()
    status, output, errors = _finished(
        [sys.executable, script, "--device", device, *arguments.split()],
        {**os.environ, **measurement.environment},
        limit,
    )
    seconds = {"wall_seconds": round(time.monotonic() - begin, 1)}
    print(output, flush=True)
    found = _last_json(output)
    reason = None
    if status is None:
        reason = f"it took more than {limit:.0f} s"
    elif status:
        reason = f"with exit status {status}"
    elif found is None:
        reason = "its last line is not JSON"
    if reason is None:
        return {**(found or {}), **seconds}
    failure: dict[str, Any] = {"failed": reason, "last_line": _last_line(errors or output)}
    return {**failure, **seconds, **({} if found is None else {"found": found})}


def _finished(
    command: list[str], environment: dict[str, str], limit: float
) -> tuple[int | None, str, str]:
    """The exit status of a command, None where it was killed; what it wrote, and its errors.

    It writes to files: a pipe would stay open with any process that it leaves behind.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        status = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
        finally:
            _kill(process)
        return status, _content(output), _content(errors)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, also when it has ended itself."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_WITHIN)


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _last_json(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object: a program that was killed may have written more."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return None


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


if __name__ == "__main__":
    sys.exit(main())
