#!/usr/bin/env python3
"""Whether ``auto`` is ever behind a named schedule, and how long ``plan`` takes.

For every model of configs/models, every device of configs/devices and several numbers of GPUs,
asks ``plan`` for everything, and compares the row of ``auto`` with those of all other schedules
that have a pipeline. Then the model's recommendation in its file is compared with what ``plan``
says for the GPUs that are written there. Prints a table and, last, one JSON line; ``--out`` writes
it with the rows and where they were measured. Ends with exit status 1 if ``auto`` is behind
anywhere, or a recommendation is another.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import provenance
from rich.console import Console
from rich.table import Table

from megatron_zb.errors import UsageError
from megatron_zb.measured.config import builtin_folder
from megatron_zb.plan.device import read_device
from megatron_zb.plan.model import ModelConfig, read_model
from megatron_zb.plan.reasons import recommended
from megatron_zb.plan.search import Plan, search
from megatron_zb.plan.settings import PlanJob
from megatron_zb.plan.strategy import candidates_of

_LEVEL = 1e-9  # rounding


@dataclass(frozen=True)
class Row:
    """One plan: where ``auto`` stands to the best of the others, None where nothing fits."""

    model: str
    device: str
    gpus: int
    seconds: float
    lead: float | None
    best: str


def plan_of(model: ModelConfig, device: Path, gpus: int) -> Plan:
    """What ``megatron-zb plan`` finds with its defaults."""
    gpu = read_device(device)
    batch, sequence = model.global_batch_size, model.sequence_length
    job = PlanJob(model, gpu, gpus, gpu.memory_bytes, batch, sequence)
    return search(job, candidates_of(None))


def row_of(model: Path, device: Path, gpus: int) -> Row:
    """Compare ``auto`` with all others that have a pipeline; seconds of the processor."""
    begin = time.process_time()
    try:
        plan = plan_of(read_model(model), device, gpus)
    except UsageError as error:
        return Row(model.stem, device.stem, gpus, time.process_time() - begin, None, str(error))
    seconds = time.process_time() - begin
    rates = {row.candidate: row.tokens_per_gpu for row in plan.ranked}
    rates.pop("no pipeline", None)
    auto = rates.pop("auto", 0.0)
    if not rates:
        return Row(model.stem, device.stem, gpus, seconds, None, "no pipeline fits")
    best = max(rates, key=lambda name: rates[name])
    return Row(model.stem, device.stem, gpus, seconds, auto / rates[best] - 1, best)


def wrong_recommendation(path: Path) -> str | None:
    """What is wrong with the recommendation of a model's file.

    None if it is what plan says, or the file does not say for which GPUs it is.
    """
    model = read_model(path)
    written = model.recommended
    if written is None or written.gpus is None or written.device is None:
        return None
    plan = plan_of(model, builtin_folder("devices") / f"{written.device}.yaml", written.gpus)
    found = recommended(plan) or "none"
    cuts = found != "none" and plan.ranked[0].runs.vocabulary_parallel
    if (found, cuts) == (written.schedule, written.vocabulary_parallel):
        return None
    found += " with vocabulary parallelism" if cuts else ""
    return f"{path.stem} recommends {written.schedule}, and plan says {found}"


def says_for_what(path: Path) -> bool:
    """Whether a model's file names the GPUs that its recommendation is for."""
    written = read_model(path).recommended
    return written is not None and written.gpus is not None and written.device is not None


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", help="of configs/models")
    parser.add_argument("--devices", nargs="+", metavar="NAME", help="of configs/devices")
    parser.add_argument("--gpus", nargs="+", type=int, default=[16, 64, 256], metavar="N")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--only-recommendations", action="store_true", help="compare those of the files alone"
    )
    what.add_argument(
        "--only-auto", action="store_true", help="compare auto alone, and no recommendation"
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="side by side")
    parser.add_argument("--out", type=Path, metavar="JSON", help="also write all rows here")
    return parser


def main() -> int:
    arguments = parser().parse_args()
    models = chosen(builtin_folder("models"), arguments.models)
    devices = chosen(builtin_folder("devices"), arguments.devices)
    rows: list[Row] = []
    if not arguments.only_recommendations:
        for row in compared(models, devices, arguments.gpus, arguments.processes):
            rows.append(row)
            print(*cells_of(row), sep="  ", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: (row.model, row.device, row.gpus))
    table = Table("model", "device", "GPUs", "s", "auto leads by", "the best of the others")
    for row in rows:
        table.add_row(*cells_of(row))
    console = Console()
    console.print(table)
    asked = [] if arguments.only_auto else models
    wrong = [said for model in asked if (said := wrong_recommendation(model))]
    for said in wrong:
        console.print(said, highlight=False)
    behind = [row for row in rows if row.lead is not None and row.lead < -_LEVEL]
    result = {
        "plans": len(rows),
        "compared": sum(row.lead is not None for row in rows),
        "behind": len(behind),
        "longest_seconds": max((row.seconds for row in rows), default=0.0),
        "recommendations": sum(map(says_for_what, asked)),
        "wrong_recommendations": wrong,
        **provenance.of_this_run(),
    }
    if arguments.out is not None:
        whole = {**result, "rows": [asdict(row) for row in rows]}
        arguments.out.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(result))
    return 1 if behind or wrong else 0


def compared(
    models: list[Path], devices: list[Path], gpus: list[int], processes: int
) -> Iterator[Row]:
    """The row of every combination, as each is found."""
    with ProcessPoolExecutor(processes) as pool:
        asked = [pool.submit(row_of, *each) for each in product(models, devices, gpus)]
        for found in as_completed(asked):
            yield found.result()


def cells_of(row: Row) -> list[str]:
    """A row of the table."""
    lead = "-" if row.lead is None else f"{row.lead:.2%}"
    return [row.model, row.device, str(row.gpus), f"{row.seconds:.1f}", lead, row.best[:60]]


def chosen(place: Path, names: list[str] | None) -> list[Path]:
    """The files of a folder, or those that are named."""
    if names is None:
        return sorted(place.glob("*.yaml"))
    return [place / f"{name}.yaml" for name in names]


if __name__ == "__main__":
    sys.exit(main())
