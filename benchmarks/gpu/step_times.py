#!/usr/bin/env python3
"""Speed, memory and bubble of schedules on several GPUs, beside Megatron's own and the plan's.

A GPT is trained on as many ranks as given, each with a GPU and NCCL, with Adam, in bf16, on layers
of Transformer-Engine where it is installed. Its width is the largest that fits under Megatron's own
1F1B, first by the count of ``megatron-zb plan``, then by trial. On a CPU it is tiny and trains over
gloo, which says whether all this works, and nothing about time.

"megatron" and "megatron-interleaved" are Megatron's own functions; the latter is tried with 2, 4,
... chunks that divide the layers of a rank, and the fastest counts. "auto" has the memory of 1F1B
and builds its schedule anew for what its first steps have measured. Figures are medians of the
timed steps: tokens per second of the slowest rank; the bubble, the share of the ranks' time in
which no pass runs, from the recorded passes; and the most bytes that a rank allocates. Beside each
is what ``megatron-zb plan`` predicts for the same model and GPU.

Prints a JSON line after every schedule, each with all results so far.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import layer_sizes
import one_device
import torch
from one_device import DTYPES
from one_gpu_training import Failed, train
from planned import PlannedTraining, chunk_counts, device_of, largest_first
from training_rank import INTERLEAVED, Job

BASE = "megatron"
SCHEDULES = (BASE, "v-half", "v-zb", INTERLEAVED, "zb-h1", "auto")
SIZES = layer_sizes.LayerSizes(
    hidden=2048, heads=16, ffn_hidden=5504, seq_length=4096, micro_batch_size=1
)
SIZES_TRIED = 3  # a training that runs out of memory takes half a minute


def main() -> None:
    args = _arguments()
    device = one_device.choose(args.device)
    ranks = args.ranks or (2 if device.type == "cpu" else torch.cuda.device_count())
    ranks = min(ranks, 8)
    if ranks < 2 or (device.type == "cuda" and ranks > torch.cuda.device_count()):
        print(json.dumps({"benchmark": "step_times", "not_measured": "there are too few GPUs"}))
        return
    check = Check(args, _job(args, device, ranks))
    for line in check.lines(one_device.describe(device)):
        print(json.dumps(line), flush=True)


class Check:
    """The trainings of one call, until its time is over."""

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        self._args = args
        self._schedules = list(dict.fromkeys([BASE, *args.schedules]))  # all are beside 1F1B
        self._deadline = time.monotonic() + args.total_seconds
        self._job = job
        gpu, memory = None, None
        if job.device == "cuda":
            properties = torch.cuda.get_device_properties(0)
            gpu, memory = properties.name, properties.total_memory
        self._device = device_of(gpu, memory)
        counted = self._device or device_of(None, memory)  # bytes are those of any GPU
        assert counted is not None
        self._counted = counted

    def lines(self, machine: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Train with one schedule after the other, and yield all results after each."""
        results: dict[str, Any] = {}
        results[BASE] = self._first()
        plans = _Plans(self._training, self._names())
        if self._device is not None:
            plans.start()
        line: dict[str, Any] = {
            "benchmark": "step_times",
            "machine": machine,
            "ranks": self._job.ranks,
            "microbatches": self._job.microbatches,
            "layers": self._job.layers,
            "implementation": self._job.implementation,
            "sizes": vars(self._job.sizes),
            "tokens": self._tokens,
            "peak_counts": "allocated" if self._job.device == "cuda" else "saved for the backward",
            "planned_for": None if self._device is None else self._device.name,
            "results": results,
        }
        yield line
        for name in self._schedules[1:]:
            results[name] = self._interleaved() if name == INTERLEAVED else self._of(name)
            yield _with_ratios(line)
        if self._device is not None:
            plans.join(max(0.0, self._deadline - time.monotonic()))
        for name in self._schedules:
            results[name]["plan"] = self._planned(name, results[name], plans)
        yield _with_ratios(line)

    def _first(self) -> dict[str, Any]:
        """Train with Megatron's own 1F1B, in the largest size that has room."""
        if self._args.hidden or self._job.device == "cpu":
            return self._of(BASE)
        found: dict[str, Any] = {}
        for _, sizes in zip(range(SIZES_TRIED), largest_first(self._training), strict=False):
            self._job = replace(self._job, sizes=sizes)
            found = self._of(BASE)
            if not found.get("out_of_memory"):
                break
        return found

    def _of(self, schedule: str) -> dict[str, Any]:
        left = self._deadline - time.monotonic()
        if left < self._args.seconds / 4:
            return {"not_measured": "no time was left"}
        job = replace(self._job, schedule=schedule)
        found = measure(job, min(left, self._args.seconds))
        if "failed" in found and time.monotonic() >= self._deadline:
            return {"not_measured": "no time was left"}
        if "step_seconds" in found:
            found["tokens_per_second"] = self._tokens / found["step_seconds"]
        return found

    def _interleaved(self) -> dict[str, Any]:
        """Return the fastest of Megatron's interleaved schedules, with the steps of all."""
        counts = self._counts
        found = {count: self._of(f"{INTERLEAVED}+{count}chunks") for count in counts}
        tried = {count: _outcome(each) for count, each in found.items()}
        timed = [count for count in counts if "step_seconds" in found[count]]
        if not timed:
            return {**(found[counts[0]] if counts else {"not_measured": "1 layer on a rank"})}
        best = min(timed, key=lambda count: float(found[count]["step_seconds"]))
        return {**found[best], "chunks": best, "tried": tried}

    def _planned(self, schedule: str, result: dict[str, Any], plans: _Plans) -> dict[str, Any]:
        if self._device is None:
            return {"not_predicted": "configs/devices has no description of this GPU"}
        chunks = f"+{result['chunks']}chunks" if "chunks" in result else ""
        if schedule == INTERLEAVED and not chunks:
            return {"not_predicted": "no number of chunks was measured"}
        missing = {"not_predicted": "no time was left"}
        return plans.found.get(f"{schedule}{chunks}", missing)

    @property
    def _counts(self) -> list[int]:
        """Chunks per rank to try for Megatron's interleaved schedule."""
        return chunk_counts(self._job.layers // self._job.ranks)

    def _names(self) -> Iterator[str]:
        """Yield all that is trained, by the name that a prediction takes."""
        for name in self._schedules:
            counts = self._counts if name == INTERLEAVED else []
            yield from [f"{name}+{count}chunks" for count in counts] or [name]

    @property
    def _training(self) -> PlannedTraining:
        job = self._job
        return PlannedTraining(job.sizes, job.layers, job.ranks, job.microbatches, self._counted)

    @property
    def _tokens(self) -> int:
        """Tokens of a step."""
        sizes = self._job.sizes
        return self._job.microbatches * sizes.micro_batch_size * sizes.seq_length


class _Plans(threading.Thread):
    """Predicts beside the trainings, on a core of the host that their ranks leave free."""

    def __init__(self, training: PlannedTraining, names: Iterable[str]) -> None:
        super().__init__(daemon=True)
        self._training, self._names = training, list(names)
        self.found: dict[str, dict[str, Any]] = {}
        """Predictions by the names of what is trained."""

    def run(self) -> None:
        for name in self._names:
            self.found[name] = self._training.predicted(name)


def measure(job: Job, seconds: float) -> dict[str, Any]:
    """Return medians of the timed steps, and the peak of the rank that allocates most."""
    try:
        found = train(job, seconds)
    except Failed as failure:
        printed = "\n".join(line for lines in failure.printed.values() for line in lines)
        return {
            "failed": str(failure),
            "printed": failure.printed,
            "out_of_memory": "OutOfMemoryError" in printed,
        }
    return {
        "step_seconds": statistics.median(found.step_seconds),
        "bubble": statistics.median(found.bubbles),
        "steps": len(found.step_seconds),
        "peak_bytes": found.peak_bytes,
    }


def _outcome(result: dict[str, Any]) -> float | str:
    """The seconds of a step, or why there are none."""
    if "step_seconds" in result:
        return float(result["step_seconds"])
    reason = result.get("not_measured") or result["failed"]
    return "out of memory" if result.get("out_of_memory") else str(reason)


def _with_ratios(line: dict[str, Any]) -> dict[str, Any]:
    """Add the share of 1F1B's time, for the run and for the plan."""
    for part in ("run", "plan"):
        of = {n: r if part == "run" else r.get("plan", {}) for n, r in line["results"].items()}
        base = of.get(BASE, {}).get("step_seconds")
        for result in of.values():
            if base and "step_seconds" in result:
                result["of_megatron"] = result["step_seconds"] / base
    return line


def _implementation(device: torch.device) -> str:
    if device.type == "cpu":
        return layer_sizes.LOCAL
    engine = layer_sizes.TRANSFORMER_ENGINE
    return engine if layer_sizes.missing(engine, device) is None else layer_sizes.LOCAL_FLASH


def _job(args: argparse.Namespace, device: torch.device, ranks: int) -> Job:
    return Job(
        ranks=ranks,
        schedule=None,
        layers=args.layers_per_rank * ranks,
        microbatches=args.microbatches or 4 * ranks,
        steps=args.steps,
        dtype=args.dtype,
        device=device.type,
        host_memory=False,
        stacks_after_seconds=0.8 * args.seconds,
        sizes=layer_sizes.chosen(args, device, SIZES, SIZES),
        device_each=True,
        implementation=_implementation(device),
        nccl=device.type == "cuda",
        timed=True,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    positive = one_device.at_least_one
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--ranks", type=positive, metavar="N", help="(default: all GPUs, up to 8)")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), metavar="NAME")
    parser.add_argument("--layers-per-rank", type=positive, default=8, metavar="N")
    parser.add_argument("--microbatches", type=positive, metavar="N", help="(default 4 per rank)")
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="(default 3)")
    parser.add_argument("--vocabulary", type=positive, default=32000, metavar="N")
    layer_sizes.add_options(parser, SIZES, SIZES)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="(default bf16)")
    parser.add_argument(
        "--seconds", type=positive, default=80, metavar="N", help="of one training (default 80)"
    )
    parser.add_argument(
        "--total-seconds", type=positive, default=360, metavar="N", help="of all (default 360)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    one_device.run(main)
