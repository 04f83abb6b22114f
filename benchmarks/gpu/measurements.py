#!/usr/bin/env python3
"""Run the benchmarks of a GPU machine, each with a time limit; write what they found to one file.

The file is written anew after each. What hangs is killed with all its processes, and the next one
begins; what no time is left for is "not measured". scripts/gpu_check.sh and, for one GPU,
benchmarks/gpu/run_all.sh start it with the packages it needs; see there. The file has no names of
hosts or folders in it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
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
TOTAL_SECONDS = 570.0  # of all measurements: with what is around them, less than 10 minutes
LEAST_SECONDS = 5.0  # in which nothing can be measured
KILLED_WITHIN = 5.0  # seconds; a process that waits for a driver may never end


@dataclass(frozen=True)
class Measurement:
    """One run of a benchmark, in an environment with these variables set.

    ``needs`` is a module without which there is nothing to measure, ``gpus`` are the GPUs that it
    takes; a CPU has as many as it likes. torchrun starts more ``processes`` than one.
    """

    name: str
    script: str
    arguments: str
    limit_seconds: float
    tiny_arguments: str
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str | None = None
    gpus: int = 1
    processes: int = 1


def _queues(connections: int, loading: str) -> Measurement:
    return Measurement(
        f"queues_{connections}_{loading.lower()}",
        "gpu/queues.py",
        "",
        40,
        "",
        {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections), "CUDA_MODULE_LOADING": loading},
    )


def _te_training(name: str, arguments: str) -> Measurement:
    return Measurement(
        f"one_gpu_training_{name}",
        "gpu/one_gpu_training.py",
        f"--implementation transformer-engine --dtype bf16 --ranks 2 --seconds 60 {arguments}",
        120,
        "",
        needs="transformer_engine",
    )


def _graphs(precision: str) -> Measurement:
    arguments = f"--graphs transformer_engine --share-device --schedules v-half {precision}"
    return Measurement(
        f"graphs_{precision.split()[-1]}",
        "gpu/graphs.py",
        f"{arguments} --layers 8",
        60,
        "",
        needs="transformer_engine",
        processes=2,
    )


def _training(loading: str, arguments: str, limit_seconds: float, tiny: str) -> Measurement:
    return Measurement(
        f"one_gpu_training_{loading.lower()}",
        "gpu/one_gpu_training.py",
        arguments,
        limit_seconds,
        f"{_TINY_TRAINING} --layers 4 --microbatches 4 --steps 2 {tiny}",
        {"CUDA_MODULE_LOADING": loading},
    )


_TINY_TRAINING = f"--vocabulary 64 --seconds 100 {TINY_LAYER}"
_DROPOUT = "--dropout 0.1 --schedules v-half+dropped v-half+moved"
_TINY_RANKS = f"--ranks 4 --microbatches 8 --layers-per-rank 2 --schedules v-half {TINY_LAYER}"
_WAITING_RECEIVE = Measurement("waiting_receive", "gpu/waiting_receive.py", "", 70, "")
_QUANTIZED = Measurement(
    "quantized_gradients", "gpu/quantized_gradients.py", "", 60, "", needs="transformer_engine"
)
_SPLIT_BACKWARD = Measurement(
    "split_backward", "split_backward.py", "", 90, f"--repetitions 3 {TINY_LAYER}"
)
_TE_MEMORY = Measurement(
    "rank_memory_transformer_engine",
    "rank_memory.py",
    "--implementation transformer-engine",
    120,
    _TINY_RANKS,
    needs="transformer_engine",
)
_TRAINING_ON_EACH = Measurement(
    "training_on_several_gpus",
    "gpu/one_gpu_training.py",
    "--device-each --ranks 2 --schedules v-half v-zb zb-h1 --seconds 40",
    150,
    f"{_TINY_TRAINING} --device-each --layers 4 --microbatches 4 --steps 2 --ranks 2 "
    "--schedules v-half v-zb zb-h1",
    gpus=2,
)
_STEP_TIMES = Measurement(
    "step_times",
    "gpu/step_times.py",
    "",
    220,
    f"{_TINY_TRAINING} --steps 2 --microbatches 4",
    gpus=2,
)

# What decides how a program is lowered comes first, what is only slow last.
ONE_GPU = [
    _queues(1, "LAZY"),
    _queues(8, "EAGER"),
    _WAITING_RECEIVE,
    _training(
        "LAZY",
        "--ranks 4 --schedules v-half v-zb 1f1b --seconds 30",
        150,
        "--ranks 2 --schedules v-half --host-memory",
    ),
    _training(
        "EAGER",
        "--ranks 4 --schedules v-half+moved --seconds 60",
        100,
        "--ranks 2 --schedules v-half+moved",
    ),
    Measurement(
        "one_gpu_training_dropout",
        "gpu/one_gpu_training.py",
        f"--ranks 2 --reference v-half {_DROPOUT} --seconds 60",
        120,
        f"{_TINY_TRAINING} --layers 4 --microbatches 4 --steps 2 --ranks 2 --reference v-half "
        f"{_DROPOUT}",
    ),
    _te_training("te", "--schedules v-half+moved v-half+dropped"),
    _te_training("te_fp8", "--schedules v-half --fp8 delayed"),
    _te_training("te_experts", "--schedules v-half --experts 4 --fp8 tensorwise"),
    _graphs("--precision bf16"),
    _graphs("--precision delayed"),
    Measurement("random_states", "gpu/random_states.py", "", 40, ""),
    _QUANTIZED,
    _SPLIT_BACKWARD,
    Measurement("rank_memory", "rank_memory.py", "", 100, _TINY_RANKS),
    _TE_MEMORY,
    Measurement(
        "rank_memory_of_a_whole_model",
        "rank_memory.py",
        "--vocabulary 32000",
        120,
        f"{_TINY_RANKS} --vocabulary 512",
    ),
]
CHECK = [
    _queues(8, "LAZY"),
    _WAITING_RECEIVE,
    _TRAINING_ON_EACH,
    _training(
        "LAZY",
        "--ranks 2 --schedules v-half v-zb zb-h1 --seconds 40",
        150,
        "--ranks 2 --schedules v-half v-zb zb-h1 --host-memory",
    ),
    _SPLIT_BACKWARD,
    Measurement("rank_memory", "rank_memory.py", "--schedules v-zb v-half v-min", 120, _TINY_RANKS),
    _STEP_TIMES,
    _QUANTIZED,
    _TE_MEMORY,
]
PARTS = {"one-gpu": ONE_GPU, "check": CHECK}


def main() -> int:
    args = _arguments()
    problem = _problem(args)
    if problem is not None:
        print(f"{args.called}: error: {problem}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # kills what runs
    begin = time.monotonic()
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    results: dict[str, Any] = {"machine": _machine(args.device), "commit": _commit(), "date": date}
    results["measurements"] = {}
    for measurement in PARTS[args.parts]:
        print(f"==> {measurement.name}", flush=True)
        left = TOTAL_SECONDS - (time.monotonic() - begin)
        found = _missing(measurement, args.device) or _run(measurement, args.device, left)
        results["measurements"][measurement.name] = without_places(found)
        results["seconds"] = round(time.monotonic() - begin, 1)
        args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    _print_table(results)
    failed = [name for name, found in results["measurements"].items() if "failed" in found]
    for name in failed:
        found = results["measurements"][name]
        print(f"==> {name} failed, {found['failed']}: {found['last_line']}", file=sys.stderr)
    print(f"==> {args.output} is written, after {results['seconds']} s", flush=True)
    return 1 if failed else 0


def _print_table(results: dict[str, Any]) -> None:
    import report
    from rich.console import Console
    from rich.table import Table

    table = Table("part", "what", "measured")
    for row in report.rows(results):
        table.add_row(*row)
    Console(width=110).print(table)


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
    parser.add_argument(
        "--parts", choices=list(PARTS), default="one-gpu", help="which benchmarks (default one-gpu)"
    )
    parser.add_argument("--called", default="measurements.py", help=argparse.SUPPRESS)
    return parser.parse_args()


def _problem(args: argparse.Namespace) -> str | None:
    """What keeps every benchmark from running, in one sentence."""
    if not args.output.parent.is_dir():
        return f"--output {args.output}: there is no folder {args.output.parent}"
    problem = _not_importable()
    if problem is not None:
        return (
            f"this Python cannot import what is needed ({problem}): pack with run_all.sh --pack "
            "where there is a network and give --carried FOLDER, or name another one with --python"
        )
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here: --device cpu tries it out without one"
    return None


def _not_importable() -> str | None:
    """Why a process cannot import what all benchmarks do: wheels may be of another Python."""
    program = f"import {', '.join(NEEDED)}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else _last_line(done.stderr)


def _is_there(module: str) -> bool:
    return find_spec(module) is not None


def _machine(device: str) -> dict[str, Any]:
    """What is measured on, as torch and the driver name it."""
    import torch

    machine: dict[str, Any] = {"device": device, "torch": torch.__version__}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        machine["gpu"] = properties.name
        machine["gpus"] = torch.cuda.device_count()
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


_FOLDERS = re.compile(r"(?<![\w./])(?:/[\w.+@~-]+)+/")


def without_places(value: Any) -> Any:
    """Return a JSON value without the folders and the host's name that its texts have."""
    if isinstance(value, dict):
        return {key: without_places(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_places(each) for each in value]
    if not isinstance(value, str):
        return value
    return _FOLDERS.sub("", value).replace(platform.node() or "\0", "HOST")


def _output_of(command: str, *arguments: str) -> str | None:
    if shutil.which(command) is None:
        return None
    done = subprocess.run(
        [command, *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout.strip() or None if done.returncode == 0 else None


def _missing(measurement: Measurement, device: str) -> dict[str, Any] | None:
    """Why there is nothing to measure, or None."""
    needs, gpus = measurement.needs, measurement.gpus
    if device == "cuda" and gpus > 1:
        import torch

        if torch.cuda.device_count() < gpus:
            return {"not_measured": f"it takes {gpus} GPUs"}
    if needs is None or (device == "cuda" and _is_there(needs)):
        return None
    reason = f"{needs} is not installed" if device == "cuda" else f"{needs} needs a GPU"
    return {"not_measured": reason}


def _run(measurement: Measurement, device: str, left: float) -> dict[str, Any]:
    """A benchmark's last JSON line, and how it failed and the last line it wrote, if it did.

    A benchmark with many answers writes a line after each: those before a failure are kept.
    """
    limit = min(measurement.limit_seconds, left)
    if left <= LEAST_SECONDS:
        return {"not_measured": "no time was left"}
    arguments = measurement.tiny_arguments if device == "cpu" else measurement.arguments
    script = str(BENCHMARKS / measurement.script)
    begin = time.monotonic()
    status, output, errors = _finished(
        [sys.executable, *_launcher(measurement), script, "--device", device, *arguments.split()],
        {**os.environ, **measurement.environment},
        limit,
    )
    seconds = {"wall_seconds": round(time.monotonic() - begin, 1)}
    print(output, flush=True)
    found = _last_json(output)
    reason = None
    if status is None and limit < measurement.limit_seconds:
        return {
            "not_measured": "no time was left",
            **seconds,
            **({"found": found} if found else {}),
        }
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


def _launcher(measurement: Measurement) -> list[str]:
    if measurement.processes == 1:
        return []
    number = str(measurement.processes)
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", number]


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
