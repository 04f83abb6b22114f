#!/usr/bin/env python3
"""Run the benchmarks of a GPU machine, each with a time limit; write what they found to one file.

The file is written anew after each. What hangs is killed with all its processes, and the next one
begins; what no time is left for is "not measured". scripts/gpu_check.sh and, for one GPU,
benchmarks/gpu/run_all.sh start it with the packages it needs; see there. The file has no names of
hosts or folders in it.
"""

from __future__ import annotations

import argparse
import ctypes
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
from collections.abc import Iterator, Mapping, Sequence
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
AT_ONCE = 4  # measurements that share a GPU


@dataclass(frozen=True)
class Measurement:
    """One run of a benchmark, in an environment with these variables set.

    Without the module ``needs`` and the version ``needs_nccl`` there is nothing to measure.
    ``gpus`` are the GPUs that it takes; a CPU has as many as it likes. torchrun starts more
    ``processes`` than one. What is timed or takes much memory runs ``alone``.
    """

    name: str
    script: str
    arguments: str
    limit_seconds: float
    tiny_arguments: str
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str | None = None
    needs_nccl: tuple[int, int] = (2, 0)
    gpus: int = 1
    processes: int = 1
    alone: bool = False


def _queues(connections: int, loading: str) -> Measurement:
    return Measurement(
        f"queues_{connections}_{loading.lower()}",
        "gpu/queues.py",
        "",
        40,
        "",
        {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections), "CUDA_MODULE_LOADING": loading},
        alone=True,
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
        f"{_TINY_TRAINING} {_TINY_STEPS} {tiny}",
        {"CUDA_MODULE_LOADING": loading},
    )


def _over_nccl(name: str, arguments: str, tiny: str = "", **more: Any) -> Measurement:
    """Training whose ranks share the GPU over NCCL."""
    return Measurement(
        f"one_gpu_training_nccl_{name}",
        "gpu/one_gpu_training.py",
        f"--nccl --seconds 90 {arguments}",
        240,
        f"{_TINY_TRAINING} {_TINY_STEPS} --ranks 2 --schedules v-half {tiny}",
        needs_nccl=(2, 31),
        **more,
    )


def _sliced(name: str, arguments: str, tiny: str, **more: Any) -> Measurement:
    """Training on token slices, over NCCL."""
    return Measurement(
        f"one_gpu_training_slices_{name}",
        "gpu/one_gpu_training.py",
        f"--nccl --seconds 90 {arguments}",
        240,
        f"{_TINY_TRAINING} {_TINY_STEPS} --ranks 2 --schedules {tiny}",
        needs_nccl=(2, 31),
        **more,
    )


_TINY_TRAINING = f"--vocabulary 64 --seconds 100 {TINY_LAYER}"
_TINY_STEPS = "--layers 4 --microbatches 4 --steps 2"
_DROPOUT = "--dropout 0.1 --schedules v-half+dropped v-half+moved"
_TINY_SLICES = f"--implementation local --ranks 2 --layers-per-rank 2 --timed {TINY_LAYER}"
_TINY_RANKS = f"--ranks 4 --microbatches 8 --layers-per-rank 2 --schedules v-half {TINY_LAYER}"
_WAITING_RECEIVE = Measurement("waiting_receive", "gpu/waiting_receive.py", "", 70, "", alone=True)
_QUANTIZED = Measurement(
    "quantized_gradients", "gpu/quantized_gradients.py", "", 60, "", needs="transformer_engine"
)
_SPLIT_BACKWARD = Measurement(
    "split_backward", "split_backward.py", "", 90, f"--repetitions 3 {TINY_LAYER}", alone=True
)
_TE_MEMORY = Measurement(
    "rank_memory_transformer_engine",
    "rank_memory.py",
    "--implementation transformer-engine",
    120,
    _TINY_RANKS,
    needs="transformer_engine",
    alone=True,
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
    "--total-seconds 320",
    360,
    f"{_TINY_TRAINING} --steps 2 --microbatches 4 --layers-per-rank 4 --total-seconds 320",
    gpus=2,
    alone=True,
)

# What decides how a program is lowered comes first, what is only slow last.
ONE_GPU = [
    _queues(1, "LAZY"),
    _queues(8, "EAGER"),
    _WAITING_RECEIVE,
    _training(
        "LAZY",
        "--ranks 4 --schedules v-half v-zb 1f1b --seconds 60",
        300,
        "--ranks 2 --schedules v-half --host-memory",
    ),
    _training(
        "EAGER",
        "--ranks 4 --schedules v-half+moved --seconds 60",
        200,
        "--ranks 2 --schedules v-half+moved",
    ),
    _over_nccl("lengths", "--ranks 2 --schedules v-half v-zb 1f1b --unequal", "--unequal"),
    _over_nccl("four_ranks", "--ranks 4 --schedules v-half v-zb+moved zb-h1"),
    _over_nccl(
        "one_queue",  # as tensor parallelism wants it before Blackwell
        "--ranks 2 --schedules v-half v-zb 1f1b",
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    ),
    _over_nccl(
        "te",
        "--ranks 2 --schedules v-half v-half+dropped --implementation transformer-engine "
        "--dtype bf16",
        needs="transformer_engine",
    ),
    _sliced("fp32", "--ranks 2 4 --schedules 1f1b+4slices v-half+4slices", "v-half+2slices"),
    _sliced(
        "equal",
        "--ranks 2 --reference 1f1b+4slices --schedules v-half+4slices zb-h1+4slices "
        "--implementation transformer-engine --dtype bf16",
        "v-half+2slices --reference 1f1b+2slices",
        needs="transformer_engine",
    ),
    _sliced(
        "te",
        "--ranks 2 --schedules v-half+4slices v-zb+2slices --implementation transformer-engine "
        "--dtype bf16",
        "zb-h1+2slices",
        needs="transformer_engine",
    ),
    Measurement(
        "distillation",
        "gpu/distillation.py",
        "",
        240,
        "--hidden 64 --seq-length 32",
        needs_nccl=(2, 31),
    ),
    Measurement(
        "distillation_fp8",
        "gpu/distillation.py",
        "--bf16 --teacher-fp8 tensorwise",
        240,
        "--hidden 64 --seq-length 32 --bf16",
        needs="transformer_engine",
        needs_nccl=(2, 31),
    ),
    Measurement(
        "one_gpu_training_dropout",
        "gpu/one_gpu_training.py",
        f"--ranks 2 --reference v-half {_DROPOUT} --seconds 60",
        120,
        f"{_TINY_TRAINING} {_TINY_STEPS} --ranks 2 --reference v-half {_DROPOUT}",
    ),
    _te_training("te", "--schedules v-half+moved v-half+dropped"),
    _te_training("te_fp8", "--schedules v-half --fp8 delayed"),
    _te_training("te_experts", "--schedules v-half --experts 4 --fp8 tensorwise"),
    _graphs("--precision bf16"),
    _graphs("--precision delayed"),
    Measurement("random_states", "gpu/random_states.py", "", 40, ""),
    _QUANTIZED,
    Measurement(
        "rank_memory_of_slices",
        "rank_memory.py",
        "--implementation transformer-engine --ranks 4 --microbatches 4 --layers-per-rank 2 "
        "--seq-length 16384 --timed --schedules 1f1b+4slices v-half v-half+4slices v-half+8slices "
        "v-half+16slices",
        120,
        f"{_TINY_SLICES} --schedules v-half+2slices",
        needs="transformer_engine",
        alone=True,
    ),
    _SPLIT_BACKWARD,
    Measurement("rank_memory", "rank_memory.py", "", 100, _TINY_RANKS, alone=True),
    _TE_MEMORY,
    Measurement(
        "rank_memory_of_a_whole_model",
        "rank_memory.py",
        "--vocabulary 32000",
        120,
        f"{_TINY_RANKS} --vocabulary 512",
        alone=True,
    ),
]
CHECK = [
    _queues(8, "LAZY"),
    _WAITING_RECEIVE,
    _TRAINING_ON_EACH,
    _STEP_TIMES,
    _training(
        "LAZY",
        "--ranks 2 --schedules v-half v-zb zb-h1 --seconds 40",
        150,
        "--ranks 2 --schedules v-half v-zb zb-h1 --host-memory",
    ),
    _SPLIT_BACKWARD,
    Measurement("rank_memory", "rank_memory.py", "--schedules v-zb v-half v-min", 120, _TINY_RANKS),
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
    answers: dict[str, Any] = {}
    for name, found in _answers(PARTS[args.parts], args.device, begin + TOTAL_SECONDS):
        answers[name] = without_places(found)
        order = (m.name for m in PARTS[args.parts])
        results["measurements"] = {name: answers[name] for name in order if name in answers}
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
    for line in report.to_paste(results):
        print(line)


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
        flag = "--cpu" if args.called == "gpu_check.sh" else "--device cpu"
        return f"torch {torch.__version__} sees no GPU here: {flag} tries it out without one"
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
        machine["nccl"] = "{}.{}".format(*_nccl_version())
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
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < gpus:
            return {"not_measured": f"it takes {gpus} GPUs"}
        if _nccl_version() < measurement.needs_nccl:
            return {"not_measured": "NCCL lets ranks share a GPU from 2.31 on; this one is older"}
    if needs is None or (device == "cuda" and _is_there(needs)):
        return None
    reason = f"{needs} is not installed" if device == "cuda" else f"{needs} needs a GPU"
    return {"not_measured": reason}


def _answers(
    measurements: Sequence[Measurement], device: str, deadline: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run measurements, several at once where that changes no answer; yield each one's answer.

    On a CPU, everything runs alone.
    """
    at_once = AT_ONCE if device == "cuda" else 1
    waiting, running = list(measurements), list[_Run]()
    try:
        while waiting or running:
            while (measurement := _next(waiting, running, at_once)) is not None:
                waiting.remove(measurement)
                left = deadline - time.monotonic()
                missing = _missing(measurement, device)
                if missing is None and left <= LEAST_SECONDS:
                    missing = _NO_TIME
                print(f"==> {measurement.name}", flush=True)
                if missing is None:
                    running.append(_Run(measurement, device, left))
                else:
                    yield measurement.name, missing
            for run in [run for run in running if run.is_over()]:
                running.remove(run)
                yield run.measurement.name, run.answer()
            time.sleep(0.02)
    finally:
        for run in running:
            run.kill()


def _next(
    waiting: Sequence[Measurement], running: Sequence[_Run], at_once: int
) -> Measurement | None:
    """Return the first measurement that may begin now."""
    if not running:
        return waiting[0] if waiting else None
    if len(running) == at_once or any(run.measurement.alone for run in running):
        return None
    return next((measurement for measurement in waiting if not measurement.alone), None)


_NO_TIME = {"not_measured": "no time was left"}


def _nccl_version() -> tuple[int, int]:
    """The NCCL that is loaded: torch tells the one that it was compiled with."""
    found = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return (0, 0)
    return found.value // 10_000, found.value // 100 % 100


class _Run:
    """One benchmark that is running, with what it writes.

    It writes to files: a pipe would stay open with any process that it leaves behind.
    """

    def __init__(self, measurement: Measurement, device: str, left: float) -> None:
        self.measurement = measurement
        self._limit = min(measurement.limit_seconds, left)
        arguments = measurement.tiny_arguments if device == "cpu" else measurement.arguments
        script = str(BENCHMARKS / measurement.script)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115, closed by answer()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, *_launcher(measurement)]
        self._begin = time.monotonic()
        self._status: int | None = None
        self._process = subprocess.Popen(
            [*command, script, "--device", device, *arguments.split()],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            env={**os.environ, **measurement.environment},
            start_new_session=True,
        )

    def is_over(self) -> bool:
        """Whether it has ended; ends it when its time is over."""
        self._status = self._process.poll()
        if self._status is None and time.monotonic() - self._begin < self._limit:
            return False
        self.kill()
        return True

    def kill(self) -> None:
        """End it and all that it has started, also when it has ended itself."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED_WITHIN)

    def answer(self) -> dict[str, Any]:
        """Return its last JSON line, and how it failed and the last line it wrote, if it did.

        A benchmark with many answers writes a line after each: those before a failure are kept.
        """
        seconds = {"wall_seconds": round(time.monotonic() - self._begin, 1)}
        with self._output, self._errors:
            output, errors = _content(self._output), _content(self._errors)
        print(output, flush=True)
        found = _last_json(output)
        kept = {} if found is None else {"found": found}
        if self._status is None and self._limit < self.measurement.limit_seconds:
            return {**_NO_TIME, **seconds, **kept}
        reason = None
        if self._status is None:
            reason = f"it took more than {self._limit:.0f} s"
        elif self._status:
            reason = f"with exit status {self._status}"
        elif found is None:
            reason = "its last line is not JSON"
        if reason is None:
            return {**(found or {}), **seconds}
        last = _last_line(errors or output)
        return {"failed": reason, "last_line": last, **seconds, **kept}


def _launcher(measurement: Measurement) -> list[str]:
    if measurement.processes == 1:
        return []
    number = str(measurement.processes)
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", number]


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
    """The last line that is no figures in JSON, which are kept elsewhere."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("{")]
    return lines[-1].strip() if lines else ""


if __name__ == "__main__":
    sys.exit(main())
